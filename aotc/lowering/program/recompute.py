"""Values that are made a second time where they are read again, because memory does not hold them until then.

Before::

    y = exp(x); big = f(x); z = g(big); w = y + z
After::

    big = f(x); z = g(big); y2 = exp(x); w = y2 + z       // y too, if somebody read it before big
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from aotc.ir.tensor_ir import Function, Op, Region, Value, captured
from aotc.lowering.analysis.costs.model import Costs
from aotc.lowering.analysis.limits import RECOMPUTED
from aotc.lowering.program.order_ops import Alive, Functions, Kernels, SpaceOf, acts, updates


def recomputed(
    function: Function, functions: Functions, kernels: Kernels, finder: Callable[[Function], SpaceOf], costs: Costs
) -> Iterator[Function]:
    """Yield ``function`` with one more value made again where that lowers its peak, until none does.

    ``finder`` returns what tells the memory of each value of a function.
    """
    for count in range(RECOMPUTED):
        model = Alive(function.body, functions, kernels, finder(function))
        before = model.peak(function.body.ops)
        for candidate in _candidates(function.body, model, costs):
            made = replace(function, body=_again(model, candidate, f"_again{count}"))
            if Alive(made.body, functions, kernels, finder(made)).peak(made.body.ops) < before:
                function = made
                yield function
                break
        else:
            return


@dataclass(frozen=True, slots=True)
class _Candidate:
    """``op`` is to run again before place ``at``, for the readers of ``values`` from there on."""

    price: float
    op: Op
    values: tuple[Value, ...]
    at: int


def _candidates(region: Region, model: Alive, costs: Costs) -> list[_Candidate]:
    """Return what may be made again of what is alive at the worst moment and read only later.

    Those come first that save most bytes for the time that they take.
    """
    worst = model.worst(region.ops)
    readers: dict[Value, list[int]] = {}
    for n, op in enumerate(region.ops):
        for v in model.reads[op]:
            readers.setdefault(v, []).append(n)
    found = []
    for op in region.ops[:worst]:
        if op.name != "dispatch" or acts(op, model.functions) or updates(op, model.functions):
            continue
        values = tuple(v for v in op.results if _waits(v, worst, readers.get(v, []), region, model))
        saved = sum(model.sizes[v] for v in values)
        at = min((n for v in values for n in readers[v] if n > worst), default=0)
        if saved and all(not model.sizes.get(v) or max(readers[v]) >= at for v in model.reads[op]):
            found.append(_Candidate(costs.of(model.kernels[op.attrs["callee"]]).ns / saved, op, values, at))
    return sorted(found, key=lambda c: c.price)


def _waits(value: Value, worst: int, readers: Sequence[int], region: Region, model: Alive) -> bool:
    """Is ``value`` in memory at place ``worst`` for readers that come later, all of which could read a copy?"""
    later = [region.ops[n] for n in readers if n > worst]
    plain = all(not op.regions for op in later)
    return bool(later) and plain and worst not in readers and bool(model.sizes.get(value))


def _again(model: Alive, c: _Candidate, suffix: str) -> Region:
    """Return the region of ``model`` with what a candidate says made again, and looked at as before."""
    region = model.region
    again = {v: Value(f"{v.name}{suffix}", v.type) for v in c.op.results}
    new = {v: again[v] for v in c.values}
    copies = [replace(c.op, results=tuple(again.values()))]
    for op in region.ops[: c.at]:
        if model.is_view(op) and op.operands[0] in new:
            view = new[op.result] = Value(f"{op.result.name}{suffix}", op.result.type)
            copies.append(replace(op, operands=(new[op.operands[0]],), results=(view,)))
    behind = [
        replace(op, operands=tuple(new.get(v, v) for v in op.operands)) if new.keys() & set(op.operands) else op
        for op in region.ops[c.at :]
    ]
    read = set(region.results)
    ops: list[Op] = []
    for op in reversed((*region.ops[: c.at], *copies, *behind)):
        if not ((op is c.op or model.is_view(op)) and read.isdisjoint(op.results)):
            ops.append(op)
            read.update(op.operands, *(captured(r) for r in op.regions))
    return replace(region, ops=tuple(reversed(ops)))
