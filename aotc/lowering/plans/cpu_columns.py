"""Plan reductions over leading axes (of columns) on a CPU: columns per grid item, and terms added at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, Expr, product, static
from aotc.ir.tensor.ir import Op
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.operand_reuse import ReductionReads, is_light_reduction
from aotc.lowering.plans.row_values import ReductionPlan
from aotc.lowering.plans.thresholds import COLUMN_ITEMS, COLUMN_TERMS
from aotc.lowering.threshold import BlockSize, Limit
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class ColumnPlan(ReductionPlan):
    """Plan in which a block of columns, along the last of ``kept`` axes, accumulates while rows stream by.

    Attributes
    ----------
    together : tuple of int
        Kept axes along which an item has all indices.
    width, terms : int
        Columns of an item, and terms added at a time.
    streams : tuple of int
        Numbers of the operands that are prefetched.
    """

    together: tuple[int, ...]
    width: int
    terms: int
    streams: tuple[int, ...] = ()


REDUCED_COLUMNS = BlockSize(
    128,
    "columns that a grid item reduces at once; wider items have a multiple of it",
    "8 vectors of 16 f32, which stay in registers",
)
NARROW_CPU_COLUMNS = Limit(
    128,
    "columns of a grid item to which one row is added at a time",
    "their accumulators stay in registers",
)


def plan_columns(b: RegionBuilder, free: Sequence[int], reduced: Sequence[int]) -> ColumnPlan:
    """Return the plan of a region with reductions over axes before the last of ``free``."""
    ops = [op for loop in b.row_stages().loops for op in loop.ops]
    reads = ReductionReads(b, ops)
    light = is_light_reduction(b, ops)
    together = reads.short_constant_axes(free[:-1], [*reduced, free[-1]]) if light else ()
    rows = static(product(b.shape[k] for k in together))
    width = _columns_per_item(b, ops, free, rows, together) if light else _narrow_column_width(b.shape[free[-1]])
    terms = _terms_added_at_once(b, rows, len(ops), b.shape[reduced[-1]])
    if not light or (rows == 1 and NARROW_CPU_COLUMNS.holds(width)):
        terms = 1
    streams = tuple(b.inputs.index(x) for x in reads.prefetched_buffers([*reduced, free[-1]])) if terms > 1 else ()
    return ColumnPlan(tuple(free), tuple(reduced), together, width, terms, streams)


def _terms_added_at_once(b: RegionBuilder, rows: int, ops: int, extent: Dim) -> int:
    """Return the number of terms to add at a time; if possible a divisor of ``extent``."""
    room = COLUMN_TERMS.value * min(b.target.registers, 32) // 32
    sums = rows * ops
    terms = max(min(room // 3, room // sums), room // 6) if sums > 1 else room // 6
    even = (t for t in range(terms, terms // 2, -1) if isinstance(extent, int) and extent % t == 0)
    return next(even, terms)


ACCUMULATOR_PERCENT = BlockSize(
    75,
    "percent of the L1 cache for the accumulators of a grid item's columns, at most",
    "Zen 5, one core, 1 row x 4096 x 4096 of f32, GB/s: 128 columns 28, 512 columns 38, 1024 columns 53, all columns "
    "51",
)
COLUMN_ITEM_ELEMENTS = BlockSize(
    1 << 14,
    "elements per grid item of columns, at least",
    "some microseconds of one core",
)
UNKNOWN_COLUMNS = BlockSize(
    512,
    "columns per grid item, at most, where only a call knows their number",
    "long contiguous reads, and still items for several cores",
)


def _narrow_column_width(extent: Dim) -> int:
    return min(extent, REDUCED_COLUMNS.value) if isinstance(extent, int) else REDUCED_COLUMNS.value


def _columns_per_item(
    b: RegionBuilder, ops: Sequence[Op], free: Sequence[int], rows: int, together: Sequence[int]
) -> int:
    """Return the columns per grid item: long contiguous pieces, but enough items for all cores."""
    extent, elements = b.shape[free[-1]], product(b.shape)
    others = product(b.shape[k] for k in free[:-1] if k not in together)
    each = rows * sum(size_of(v.type.dtype) for op in ops for v in op.results)
    most = b.target.l1 * ACCUMULATOR_PERCENT.value // 100 // each // REDUCED_COLUMNS.value
    most = max(most, 1) * REDUCED_COLUMNS.value
    if not isinstance(extent, int):
        return min(most, UNKNOWN_COLUMNS.value)
    if most == REDUCED_COLUMNS.value:
        return min(extent, most)
    items = COLUMN_ITEMS.value if isinstance(others, Expr) else -(-COLUMN_ITEMS.value // max(others, 1))
    if isinstance(elements, int) and isinstance(others, int):
        items = min(items, elements // max(others, 1) // COLUMN_ITEM_ELEMENTS.value)
    chunks = max(-(-extent // most), min(items, extent // REDUCED_COLUMNS.value), 1)
    step = REDUCED_COLUMNS.value // 2
    return min(extent, -(-extent // chunks // step) * step)
