"""Values that are made a second time where they are read again, because memory does not hold them until then.

Before::

    y = exp(x); big = f(x); z = g(big); w = y + z
After::

    big = f(x); z = g(big); y2 = exp(x); w = y2 + z       // y too, if somebody read it before big
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from aotc.ir.tensor_ir import Function, Op, Region, Value
from aotc.lowering.analysis.cost_work import nanoseconds
from aotc.lowering.analysis.limits import RECOMPUTED
from aotc.lowering.program.order_ops import Alive, Functions, Kernels, acts, updates


def recomputed(function: Function, functions: Functions, kernels: Kernels) -> Iterator[Function]:
    """Yield ``function`` with one more value made again where that lowers its peak, until none does."""
    for count in range(RECOMPUTED):
        model = Alive(function.body, functions, kernels)
        before = model.peak(function.body.ops)
        for row in _candidates(function.body, model):
            body = _again(function.body, *row, f"_again{count}")
            if Alive(body, functions, kernels).peak(body.ops) < before:
                function = replace(function, body=body)
                yield function
                break
        else:
            return


def _candidates(region: Region, model: Alive) -> list[tuple[Op, int]]:
    """Return who makes what is alive at the worst moment and read only later, and the first reader's place.

    Those come first that save most bytes for the time that they take.
    """
    at = model.worst(region.ops)
    position = {op: n for n, op in enumerate(region.ops)}
    last: dict[Value, int] = {}
    readers: dict[Value, list[Op]] = {}
    for op in region.ops:
        for v in model.reads[op]:
            last[v] = position[op]
            readers.setdefault(v, []).append(op)
    viewed = {*model.roots.values(), *region.results}
    rows = []
    for op in region.ops[:at]:
        if op.name != "dispatch" or len(op.results) != 1 or acts(op, model.functions) or updates(op, model.functions):
            continue
        v = op.result
        later = [r for r in readers.get(v, ()) if position[r] > at]
        now = region.ops[at] in readers.get(v, ())
        if v in viewed or now or not later or not model.sizes.get(v) or any(v not in r.operands for r in later):
            continue
        if any(r.regions for r in later) or any(_gone(x, op, position[later[0]], last, model) for x in model.reads[op]):
            continue
        price = nanoseconds(model.kernels[op.attrs["callee"]]) / model.sizes[v]
        rows.append((price, position[op], op, position[later[0]]))
    return [(op, first) for _, _, op, first in sorted(rows, key=lambda row: row[:2])]


def _gone(value: Value, reader: Op, at: int, last: dict[Value, int], model: Alive) -> bool:
    """Is an operand no longer there at a place? Arguments and constants are, and what lives until then."""
    return bool(model.sizes.get(value)) and last[value] < at


def _again(region: Region, op: Op, at: int, suffix: str) -> Region:
    """Return ``region`` with a copy of ``op`` before place ``at``, for all that read its result from there on."""
    old = op.result
    new = Value(f"{old.name}{suffix}", old.type)
    copy = replace(op, results=(new,))
    behind: Sequence[Op] = [
        replace(r, operands=tuple(new if v is old else v for v in r.operands)) if old in r.operands else r
        for r in region.ops[at:]
    ]
    kept = [o for o in region.ops[:at] if o is not op or any(old in r.operands for r in region.ops[:at])]
    return replace(region, ops=(*kept, copy, *behind))
