"""Remove unused ops, results of ``case``, carried values of ``while`` and arrays of variadic ops.

Before::

    %0, %1, %2 = sort %k, %v, %w (by %k)     // only %1 is read
After::

    %0, %1 = sort %k, %v (by %k)             // %0 is given no memory: see ``outline``
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from aotc.ir.opset import EFFECTS, VARIADIC
from aotc.ir.tensor.ir import Module, Op, Region, Value, captured_values, walk
from aotc.options import Options

_ACTING = EFFECTS | {"custom_call"}


def dce(module: Module, options: Options) -> Module:
    """Return ``module`` without ops whose results are unused; ops with an effect stay."""
    return module.with_functions({n: f.with_body(_without_dead_ops(f.body)) for n, f in module.functions.items()})


def has_effect(op: Op) -> bool:
    """Return True if ``op`` must run even if its results are unused."""
    return _has_own_effect(op) or any(map(_region_has_effects, op.regions))


def _region_has_effects(region: Region) -> bool:
    return not region.names.isdisjoint(_ACTING) and any(map(_has_own_effect, walk(region)))


def _has_own_effect(op: Op) -> bool:
    if op.name == "custom_call":
        return bool(op.attrs.get("has_side_effect", False))
    return op.name in EFFECTS


def _without_dead_ops(region: Region) -> Region:
    """Return ``region`` without ops whose results are unused, its nested regions trimmed likewise."""
    live = set(region.results)
    ops: list[Op] = []
    for op in reversed(region.ops):
        if not (has_effect(op) or any(v in live for v in op.results)):
            continue
        if op.name == "case":
            op = _trim_case(op, live)
        elif op.name == "while":
            op = _trim_while(op, live)
        elif op.name in VARIADIC:
            op = _trim_variadic(op, live)
        if op.regions:
            op = op.on(op.operands, tuple(map(_without_dead_ops, op.regions)))
        ops.append(op)
        _mark_operands_live(op, live)
    return region.with_ops(ops[::-1], region.results)


def _mark_operands_live(op: Op, live: set[Value]) -> None:
    live.update(op.operands)
    for region in op.regions:
        live.update(captured_values(region))


def _trim_case(op: Op, live: Collection[Value]) -> Op:
    """Return a ``case`` without its unused results."""
    keep = [i for i, v in enumerate(op.results) if v in live]
    if len(keep) == len(op.results):
        return op
    regions = tuple(replace(r, results=tuple(r.results[i] for i in keep)) for r in op.regions)
    return replace(op, results=tuple(op.results[i] for i in keep), regions=regions)


def _trim_while(op: Op, live: Collection[Value]) -> Op:
    """Return a loop without the carried values that neither its results nor its condition need."""
    condition, body = op.regions
    needed = {i for i, v in enumerate(op.results) if v in live}
    needed |= _params_read(condition, condition.results)
    while True:
        grown = needed | _params_read(body, [body.results[i] for i in sorted(needed)])
        if grown == needed:
            break
        needed = grown
    keep = sorted(needed)
    if len(keep) == len(op.results):
        return op

    def needed_values(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(values[i] for i in keep)

    regions = (
        Region(needed_values(condition.params), condition.ops, condition.results),
        _without_dead_ops(Region(needed_values(body.params), body.ops, needed_values(body.results))),
    )
    return replace(op, operands=needed_values(op.operands), results=needed_values(op.results), regions=regions)


def _trim_variadic(op: Op, live: Collection[Value]) -> Op:
    """Return a variadic op without the arrays whose results are unused, except those its region needs for others."""
    count, (region,) = len(op.results), op.regions
    if all(v in live for v in op.results):
        return op
    orders = len(op.operands) == count  # a sort: its region has one result, and two parameters of each array
    places = [n // 2 if orders else n % count for n in range(len(region.params))]
    needed = {i for i, v in enumerate(op.results) if v in live}
    while True:
        roots = region.results if orders else [region.results[i] for i in sorted(needed)]
        grown = needed | {places[n] for n in _params_read(region, roots)}
        if grown == needed:
            break
        needed = grown
    if len(needed) == count:
        return op
    keep = sorted(needed)
    shared = op.operands[count : max(len(op.operands) - count, count)]
    behind = op.operands[count + len(shared) :]
    operands = (*(op.operands[i] for i in keep), *shared, *(behind[i] for i in keep if behind))
    params = tuple(p for n, p in enumerate(region.params) if places[n] in needed)
    results = region.results if orders else tuple(region.results[i] for i in keep)
    attrs = {**op.attrs, "inputs": len(keep)} if "inputs" in op.attrs else op.attrs
    values = tuple(op.results[i] for i in keep)
    return replace(op, operands=operands, results=values, attrs=attrs, regions=(Region(params, region.ops, results),))


def _params_read(region: Region, values: Collection[Value]) -> set[int]:
    """Return the numbers of the parameters on which ``values`` and effects in ``region`` depend."""
    live = set(values)
    for op in reversed(region.ops):
        if has_effect(op) or any(v in live for v in op.results):
            _mark_operands_live(op, live)
    return {i for i, p in enumerate(region.params) if p in live}
