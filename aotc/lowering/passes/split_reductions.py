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

from collections.abc import Sequence
from dataclasses import replace

from aotc.ir.dims import product, static
from aotc.ir.tensor_ir import Module, Op, TensorType, Value
from aotc.lowering.analysis.cost import (
    ENOUGH_RESULTS,
    FEW_PARTS,
    FEW_ROWS,
    REDUCED_ELEMENTS,
    REDUCED_TERMS,
    REDUCTION_EXTENT,
    REDUCTION_PARTS,
)
from aotc.lowering.analysis.scan_windows import combiner, neutral_value
from aotc.lowering.passes.rewrite import Builder, copy_region, rewrite_module
from aotc.options import Options


def split_reductions(module: Module, options: Options) -> Module:
    """Split large single reductions with few results in every function."""
    return rewrite_module(module, _rule)


def _rule(op: Op, b: Builder) -> Sequence[Value] | None:
    return _split(op, b) if op.name == "reduce" and _leaves_cores_idle(op) else None


def _leaves_cores_idle(op: Op) -> bool:
    name = combiner(op)
    if name is None or neutral_value(name, op.result.type.dtype) is None:
        return False
    shape = op.operands[0].type.shape
    size, left = product(shape), product(op.result.type.shape)
    if not isinstance(size, int) or not isinstance(left, int):
        return False
    large = not REDUCED_ELEMENTS.holds(size) and ENOUGH_RESULTS.holds(left)
    return large and not REDUCED_TERMS.holds(size // max(left, 1))


def _split(op: Op, b: Builder) -> Sequence[Value] | None:
    """Reduce all but the first large axis, or a divisor of it, in the first step."""
    x = op.operands[0]
    dims = [d for d in sorted(op.attrs["dims"]) if x.type.shape[d] != 1]
    first = dims[0]
    extent = static(x.type.shape[first])
    trailing = first == 0 or len(dims) > 1 or dims[-1] != x.type.rank - 1
    parts = max((p for p in range(1, REDUCTION_PARTS.value + 1) if extent % p == 0), default=1)
    if not trailing and not FEW_ROWS.holds(product(op.result.type.shape)):
        return None
    if len(dims) > 1 and REDUCTION_EXTENT.holds(extent):
        return _two_steps(op, x, tuple(d for d in op.attrs["dims"] if d != first), b)
    if FEW_PARTS.holds(parts):
        return None
    split = b.reshape(x, (*x.type.shape[:first], parts, extent // parts, *x.type.shape[first + 1 :]))
    return _two_steps(op, split, tuple(d if d < first else d + 1 for d in op.attrs["dims"]), b)


def _two_steps(op: Op, x: Value, dims: tuple[int, ...], b: Builder) -> Sequence[Value]:
    """Reduce ``x`` over ``dims`` from a value that changes nothing, then over the axis that is left."""
    init, region = op.operands[1], op.regions[0]
    neutral = neutral_value(region.ops[0].name, init.type.dtype)
    assert neutral is not None
    start = b.constant(neutral, TensorType(init.type.dtype))
    partial = b.reduce(x, start, dims, copy_region(region, b.names))
    return b.append(replace(op, operands=(partial, init), attrs={"dims": (_axis_left(x, dims, op),)}))


def _axis_left(x: Value, dims: tuple[int, ...], op: Op) -> int:
    """Return where in the partial result the axis that is still to be reduced stands."""
    rest = [d for d in range(x.type.rank) if d not in dims]
    final = list(op.result.type.shape)
    for n, d in enumerate(rest):
        if [x.type.shape[k] for k in rest if k != d] == final:
            original = sorted(op.attrs["dims"])[0] if x.type.rank == op.operands[0].type.rank else None
            if original is None or d == original or n == len(rest) - 1:
                return n
    return 0
