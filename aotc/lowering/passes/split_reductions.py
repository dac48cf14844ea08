"""Split reductions that would leave cores idle into two steps.

Before::

    %1 = reduce %x {dims = (0, 1, 2)} (add) : f32[64]        // %x: f32[32, 28, 28, 64]
After::

    %2 = reduce %x {dims = (1, 2)} (add) : f32[32, 64]
    %1 = reduce %2 {dims = (0,)} (add) : f32[64]

The split is part of the program, the same at any number of threads, so results
do not depend on how many there are.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from aotc.ir.dims import product, static
from aotc.ir.opset import CONTROL_FLOW
from aotc.ir.tensor_ir import Module, Op, Region, TensorType, Value, walk
from aotc.lowering.analysis.scan_windows import neutral_value
from aotc.options import Options

MIN_ELEMENTS = 1 << 16
ENOUGH_RESULTS = 1 << 12
WANTED_PARTS = 64


def split_reductions(module: Module, options: Options) -> Module:
    """Split large single reductions with few results in every function."""
    changed = {}
    for function in module.functions.values():
        taken = {v.name for op in walk(function.body) for v in op.results}
        changed[function.name] = replace(function, body=_region(function.body, taken, count()))
    return replace(module, functions=changed)


def _region(region: Region, taken: set[str], numbers: count) -> Region:
    ops: list[Op] = []
    for op in region.ops:
        if op.name in CONTROL_FLOW:
            op = replace(op, regions=tuple(_region(r, taken, numbers) for r in op.regions))
        if op.name == "reduce" and _wanted(op):
            ops += _split(op, taken, numbers)
        else:
            ops.append(op)
    return Region(region.params, tuple(ops), region.results)


def _wanted(op: Op) -> bool:
    if len(op.results) != 1 or len(op.regions[0].ops) != 1:
        return False
    if neutral_value(op.regions[0].ops[0].name, op.result.type.dtype) is None:
        return False
    shape = op.operands[0].type.shape
    size, left = product(shape), product(op.result.type.shape)
    if not isinstance(size, int) or not isinstance(left, int):
        return False
    return size >= MIN_ELEMENTS and left < ENOUGH_RESULTS and size // max(left, 1) >= 256


def _split(op: Op, taken: set[str], numbers: count) -> list[Op]:
    """Reduce all but the first large axis, or a divisor of it, in the first step."""
    x, init = op.operands
    dims = [d for d in sorted(op.attrs["dims"]) if x.type.shape[d] != 1]
    first = dims[0]
    extent = static(x.type.shape[first])
    trailing = first == 0 or len(dims) > 1 or dims[-1] != x.type.rank - 1
    parts = max((p for p in range(1, WANTED_PARTS + 1) if extent % p == 0), default=1)
    if not trailing and static(product(op.result.type.shape)) >= 8:
        return [op]
    if len(dims) > 1 and extent <= 4 * WANTED_PARTS:
        return _two_steps(op, x, init, tuple(d for d in op.attrs["dims"] if d != first), [], taken, numbers)
    if parts < 4:
        return [op]
    shape = (*x.type.shape[:first], parts, extent // parts, *x.type.shape[first + 1 :])
    split = _fresh("part", TensorType(x.type.dtype, shape), taken, numbers)
    dims_after = tuple(d if d < first else d + 1 for d in op.attrs["dims"])
    reshape = Op("reshape", (x,), (split,), {}, (), op.loc)
    return _two_steps(op, split, init, dims_after, [reshape], taken, numbers)


def _two_steps(
    op: Op, x: Value, init: Value, dims: tuple[int, ...], before: list[Op], taken: set[str], numbers: count
) -> list[Op]:
    kept = tuple(e for d, e in enumerate(x.type.shape) if d not in dims)
    partial = _fresh("partial", TensorType(x.type.dtype, kept), taken, numbers)
    rest = _axis_left(x, dims, op)
    neutral = _neutral(op, init, taken, numbers)
    one = Op("reduce", (x, neutral.result), (partial,), {"dims": dims}, (_copy(op.regions[0], taken, numbers),), op.loc)
    two = Op("reduce", (partial, init), op.results, {"dims": (rest,)}, op.regions, op.loc)
    return [*before, neutral, one, two]


def _axis_left(x: Value, dims: tuple[int, ...], op: Op) -> int:
    """Return where in the partial result the axis that is still to be reduced stands."""
    kept = [d for d in range(x.type.rank) if d not in dims]
    final = list(op.result.type.shape)
    for n, d in enumerate(kept):
        if [x.type.shape[k] for k in kept if k != d] == final:
            original = sorted(op.attrs["dims"])[0] if x.type.rank == op.operands[0].type.rank else None
            if original is None or d == original or n == len(kept) - 1:
                return n
    return 0


def _neutral(op: Op, init: Value, taken: set[str], numbers: count) -> Op:
    """Return a constant that the first step can start from without changing the answer."""
    dtype = init.type.dtype
    array = neutral_value(op.regions[0].ops[0].name, dtype)
    return Op("constant", (), (_fresh("neutral", TensorType(dtype), taken, numbers),), {"value": array}, (), op.loc)


def _copy(region: Region, taken: set[str], numbers: count) -> Region:
    """Return the one-op combiner with fresh values."""
    (inner,) = region.ops
    names = {v: _fresh("c", v.type, taken, numbers) for v in (*region.params, *inner.results)}
    op = replace(
        inner, operands=tuple(names[v] for v in inner.operands), results=tuple(names[v] for v in inner.results)
    )
    return Region(tuple(names[p] for p in region.params), (op,), op.results)


def _fresh(stem: str, type_: TensorType, taken: set[str], numbers: count) -> Value:
    name = f"{stem}{next(numbers)}"
    while name in taken:
        name = f"{stem}{next(numbers)}"
    taken.add(name)
    return Value(name, type_)
