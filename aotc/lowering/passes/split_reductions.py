"""Split reductions that would leave cores idle into two steps.

Before::

    %1 = reduce %x {dims = (0, 1, 2)} (add) : f32[64]        // %x: f32[32, 28, 28, 64]
After::

    %2 = reduce %x {dims = (1, 2)} (add) : f32[32, 64]
    %1 = reduce %2 {dims = (0,)} (add) : f32[64]

The split is part of the program, so results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aotc.ir.dims.algebra import is_static, product, static
from aotc.ir.opset import ELEMENTWISE, EXPENSIVE
from aotc.ir.tensor.copies import copy_region
from aotc.ir.tensor.ir import Module, Op, TensorType, Value
from aotc.lowering.analysis.prefix_scans import combiner_op_name, neutral_value
from aotc.lowering.passes.fuse.absorb import fusion_target
from aotc.lowering.passes.rewrite import Builder, Rule, rewrite_module
from aotc.lowering.plans.thresholds import (
    COLUMN_THREADS,
    FEW_ROWS,
    GPU_IDLE_ROWS,
    LONG_ROW_THREADS,
    NARROW_ELEMENTS,
    REDUCED_ELEMENTS,
    ROW_REGISTERS,
    SHARED_ROWS,
)
from aotc.lowering.threshold import BlockSize, Limit
from aotc.options import Options

REDUCED_TERMS = Limit(
    255,
    "elements per result of a reduction done in one step",
    "with fewer, the partial results are a large part of the work",
)
REDUCTION_PARTS = BlockSize(64, "parts of a split reduction, at most", "several for each of 16 cores")
FEW_PARTS = Limit(3, "parts, up to which a reduction is not split", "the second step costs a dispatch")


def split_reductions(module: Module, options: Options) -> Module:
    """Return ``module`` with large reductions that have few results split into two steps."""
    split = _split_gpu_reduction if fusion_target(options).kind == "cuda" else _split_cpu_reduction
    rule: Rule = lambda op, b: split(op, b) if op.name == "reduce" and _can_split_reduction(op) else None
    return rewrite_module(module, rule, ("reduce",))


LONG_PIECES = Limit(
    (1 << 13) - 1,
    "columns of a reduction that is split by terms, not into blocks of columns",
    "8192 columns are 8 items of 1024, whose rows of 4 KiB memory delivers as fast as whole ones: see "
    "ACCUMULATOR_PERCENT",
)
PART_ELEMENTS = BlockSize(
    1 << 14,
    "elements per part of a split reduction over leading axes, at least",
    "some microseconds of one core",
)
COLUMN_PART_TERMS = BlockSize(
    32,
    "terms per part of a split reduction of columns, for each row reduced with them, at least",
    "Zen 5, one core, ms with 32 and 64 terms: 1 row x 4096 x 4096 2.02 and 2.04; 8 rows 3.64 and 3.56; 8 x 1024 x "
    "1024 0.11 and 0.13",
)
RESTED_ROWS = Limit(
    1,
    "rows of a column reduction split into parts and a remainder, if the number of terms has no divisor",
    "one core of a busy Zen 5, times 4099 x 4097, time relative to blocks of columns: 1 row 0.92, 4 rows 1.08, 8 rows "
    "1.09",
)
ENOUGH_RESULTS = Limit(
    (1 << 12) - 1,
    "results of a reduction that are too few for all cores",
    "4096 columns are 32 grid items (REDUCED_COLUMNS)",
)


def _split_cpu_reduction(op: Op, b: Builder) -> Sequence[Value] | None:
    """Split a CPU reduction in two steps if it has too few results to occupy all threads; else return None."""
    shape = op.operands[0].type.shape
    size, left = static(product(shape)), max(static(product(op.result.type.shape)), 1)
    if REDUCED_ELEMENTS.holds(size) or REDUCED_TERMS.holds(size // left):
        return None
    columns = static(product(shape[max(op.attrs["dims"]) + 1 :]))
    rows = left // columns if columns > 1 else 1
    pieces = columns > 1 and SHARED_ROWS.holds(rows) and LONG_PIECES.holds(columns)
    if not ENOUGH_RESULTS.holds(left) and not pieces:
        return None
    parts = REDUCTION_PARTS.value
    if columns > 1:
        parts = min(parts, size // PART_ELEMENTS.value, size // left // (COLUMN_PART_TERMS.value * rows))
    return _split_reduction(op, b, max(parts, 1), FEW_ROWS, rest=columns > 1 and RESTED_ROWS.holds(rows))


NARROW_COLUMNS = BlockSize(
    8,
    "columns per block of a GPU column reduction, at least",
    "by construction: NARROW_BYTES of f32",
)
NARROW_BLOCKS = Limit(
    47,
    "such blocks, up to which a GPU is so idle that the columns are split",
    "a third of the 132 multiprocessors of an NVIDIA H200",
)
GPU_BLOCKS = BlockSize(
    1056,
    "blocks of a split reduction on a GPU, at most",
    "eight for each of the 132 multiprocessors of an NVIDIA H200",
)
GPU_BLOCK_COLUMNS = BlockSize(
    4 * COLUMN_THREADS.value,
    "columns that a GPU block reduces",
    "by construction: COLUMN_THREADS vectors of f32",
)
GPU_PART_TERMS = BlockSize(
    256,
    "elements per part of a split reduction on a GPU, at least",
    "less than one vector for each thread of a small block",
)


def _split_gpu_reduction(op: Op, b: Builder) -> Sequence[Value] | None:
    """Split a GPU reduction in two steps if it would fill fewer thread blocks than the GPU runs at once."""
    shape = op.operands[0].type.shape
    dims = [d for d in op.attrs["dims"] if shape[d] != 1]
    size, left = static(product(shape)), max(static(product(op.result.type.shape)), 1)
    if not dims or REDUCED_ELEMENTS.holds(size) or REDUCED_TERMS.holds(size // left):
        return None
    columns = max(static(product(shape[max(dims) + 1 :])), 1)
    if columns == 1 and (size // left <= LONG_ROW_THREADS.value * ROW_REGISTERS.value or not GPU_IDLE_ROWS.holds(left)):
        return None  # a block holds a row, and fuses its other readers; or each multiprocessor has a row
    if columns > 1 and NARROW_ELEMENTS.holds(size) and not NARROW_BLOCKS.holds(left // NARROW_COLUMNS.value):
        return None  # blocks take fewer columns each
    blocks = left // columns * -(-columns // GPU_BLOCK_COLUMNS.value)
    parts = min(GPU_BLOCKS.value // blocks, size // left // GPU_PART_TERMS.value)
    return None if FEW_PARTS.holds(parts) else _split_reduction(op, b, parts, None)


def _can_split_reduction(op: Op) -> bool:
    """Return True if the combiner has a neutral value and the operand's shape is static."""
    name = combiner_op_name(op)
    has_neutral = name is not None and neutral_value(name, op.result.type.dtype) is not None
    return has_neutral and is_static(op.operands[0].type.shape)


REDUCTION_EXTENT = Limit(
    4 * REDUCTION_PARTS.value,
    "extent of the first reduced dim, up to which each of its indices is a part",
    "four times REDUCTION_PARTS; a longer dim is cut by one of its divisors",
)


def _split_reduction(
    op: Op, b: Builder, most: int, few_rows: Limit | None, rest: bool = False
) -> Sequence[Value] | None:
    """Return a reduction in two steps, the first one over parts of an axis; None if it cannot be split.

    Rows are split only if there are few (``few_rows``). With ``rest``, an extent without a suitable divisor may be
    split into equal parts and a shorter remainder.
    """
    x = op.operands[0]
    dims = [d for d in sorted(op.attrs["dims"]) if x.type.shape[d] != 1]
    first = dims[0]
    extent = static(x.type.shape[first])
    rows = first > 0 and dims == [d for d in range(first, x.type.rank) if x.type.shape[d] != 1]
    parts = max((p for p in range(1, most + 1) if extent % p == 0), default=1)
    if rows and few_rows and not few_rows.holds(product(op.result.type.shape)):
        return None
    if len(dims) > 1 and REDUCTION_EXTENT.holds(extent):
        return _reduce_in_two_steps(op, x, tuple(d for d in op.attrs["dims"] if d != first), first, b)
    if FEW_PARTS.holds(parts):
        return (
            _split_with_remainder(op, b, first, most) if rest and len(dims) == 1 and not FEW_PARTS.holds(most) else None
        )
    split = b.reshape(x, (*x.type.shape[:first], parts, extent // parts, *x.type.shape[first + 1 :]))
    return _reduce_in_two_steps(op, split, tuple(d if d < first else d + 1 for d in op.attrs["dims"]), first, b)


def _split_with_remainder(op: Op, b: Builder, first: int, parts: int) -> Sequence[Value]:
    """Return a reduction of equal parts plus a remainder, combined at the end."""
    x = op.operands[0]
    extent = static(x.type.shape[first])
    whole = extent - extent % parts
    shape = (*x.type.shape[:first], parts, whole // parts, *x.type.shape[first + 1 :])
    split = b.reshape(_slice_behind_cheap_ops(x, b, first, 0, whole), shape)
    dims = tuple(d if d < first else d + 1 for d in op.attrs["dims"])
    (sums,) = _reduce_in_two_steps(op, split, dims, first, b)
    rest = _slice_behind_cheap_ops(x, b, first, whole, extent)
    left = b.reduce(rest, _neutral_of_reduction(op, b), op.attrs["dims"], copy_region(op.regions[0], b.names))
    return (b.make(op.regions[0].ops[0].name, (sums, left)),)


def _slice_behind_cheap_ops(x: Value, b: Builder, dim: int, start: int, limit: int) -> Value:
    """Return a slice of ``x``; cheap ops are moved behind the slice, so that ``x`` need not be stored."""
    op = b.definitions.get(x)
    if op is None or op.name not in ELEMENTWISE or op.name in EXPENSIVE or len(op.results) != 1:
        return b.slice_dim(x, dim, start, limit)
    operands = [
        _slice_behind_cheap_ops(v, b, dim, start, limit) if v.type.shape == x.type.shape else v for v in op.operands
    ]
    shape = (*x.type.shape[:dim], limit - start, *x.type.shape[dim + 1 :])
    return b.make(op.name, operands, op.attrs, TensorType(x.type.dtype, shape))


def _reduce_in_two_steps(op: Op, x: Value, dims: tuple[int, ...], left: int, b: Builder) -> Sequence[Value]:
    """Return ``x`` reduced over ``dims`` from the neutral value, and then over the axis ``left``."""
    init, region = op.operands[1], op.regions[0]
    partial = b.reduce(x, _neutral_of_reduction(op, b), dims, copy_region(region, b.names))
    return b.append(replace(op, operands=(partial, init), attrs={"dims": (left - sum(d < left for d in dims),)}))


def _neutral_of_reduction(op: Op, b: Builder) -> Value:
    """Return the neutral value of the reduction."""
    dtype = op.operands[1].type.dtype
    neutral = neutral_value(op.regions[0].ops[0].name, dtype)
    assert neutral is not None
    return b.constant(neutral, TensorType(dtype))
