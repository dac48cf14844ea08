"""Plan reductions on a CPU: row by row, a block of rows or columns at a time, or with some rows transposed first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, Expr, product, static
from aotc.ir.loop.ir import Load
from aotc.ir.opset import ACCUMULATED, SCALARS
from aotc.ir.tensor.ir import Value
from aotc.lowering.analysis.anchors import single_axis
from aotc.lowering.analysis.prefix_scans import combiner_op_name
from aotc.lowering.cost_model.row_stages import RowStages
from aotc.lowering.cost_model.work import UNKNOWN_TERMS, dim_or
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.nests import NestAxis, make_axes, split_grid
from aotc.lowering.plans.cpu_columns import ColumnPlan, plan_columns
from aotc.lowering.plans.cpu_transpose import equal_parts, is_transposed_load, loads_in_body, transposed_line_length
from aotc.lowering.plans.operand_reuse import ReductionReads, is_light_reduction
from aotc.lowering.plans.region_work import values_between_loops
from aotc.lowering.plans.resources import memory_limits
from aotc.lowering.plans.row_values import RowLoopsPlan, merged_axes, results_along_rows, row_trial, row_value_records
from aotc.lowering.plans.thresholds import (
    COLUMN_ITEMS,
    COLUMN_TERMS,
    FETCH_LINE,
    FEW_TURNED,
    ITEM_ELEMENTS,
    TURNED_OPERANDS,
)
from aotc.lowering.threshold import BlockSize, Limit
from aotc.vmfb.dtypes import kind_of, size_of


@dataclass(frozen=True, slots=True)
class RowPlan(RowLoopsPlan):
    """Plan that reduces rows one after the other, or one per vector lane.

    Attributes
    ----------
    item_axes : int
        The last kept axes whose rows are all in one grid item.
    unrolled : bool
        Is the loop along a row written out, so that LLVM vectorises across rows?
    lanes : int
        Rows whose scalars are computed in one vector; 0: each row computes its own.
    """

    item_axes: int
    unrolled: bool = False
    lanes: int = 0


@dataclass(frozen=True, slots=True)
class TransposedRowPlan(RowLoopsPlan):
    """Plan that first transposes some rows to scratch memory.

    Attributes
    ----------
    item_axes : int
        As in :class:`RowPlan`, if the rows of a kept axis are not transposed together.
    adjacent : int
        The axis whose neighbouring rows are transposed together: kept, or the reduced one before the last.
    height : int
        The number of rows that are transposed together.
    rows : int
        Rows of a grid item along ``adjacent``, if it is kept.
    """

    item_axes: int
    adjacent: int
    height: int
    rows: int = 0


@dataclass(frozen=True, slots=True)
class RowBlockPlan(RowLoopsPlan):
    """Plan that reduces several rows at a time, so that the operand that they share is read once.

    Attributes
    ----------
    block : int
        The kept axis of these rows.
    together : tuple of int
        Kept axes along which all indices are computed together with each row.
    at_once, rows : int
        Rows at a time, and rows of a grid item.
    lanes : int
        Elements of a vector.
    streams : tuple of int
        Numbers of the operands that are prefetched.
    ahead : int
        Elements between a prefetch and its read.
    part : int
        Vectors per part, if the rows of an item are reduced in parts; 0: whole rows.
    """

    block: int
    together: tuple[int, ...]
    at_once: int
    rows: int
    lanes: int
    streams: tuple[int, ...] = ()
    ahead: int = 0
    part: int = 0


CpuReductionPlan = ColumnPlan | RowPlan | TransposedRowPlan | RowBlockPlan


def plan_cpu_reduction(b: RegionBuilder) -> CpuReductionPlan:
    """Choose the loop structure of a CPU region with reductions: rows, columns, row blocks or transposed."""
    reduced = sorted(b.anchors.reduced or ())
    free = [k for k, s in enumerate(b.anchors.space) if s != 0 and k not in reduced]
    if any(op.name == "transpose" for op in b.function.body.ops):
        plan = _plan_transposed(b, free, reduced)
        if plan is not None:
            return plan
    if b.function.attrs["kind"] == "reduce" and free and free[-1] > max(reduced):
        return plan_columns(b, free, reduced)
    return _plan_reduction_of_rows(b, free, reduced)


def _plan_transposed(b: RegionBuilder, free: list[int], reduced: list[int]) -> CpuReductionPlan | None:
    """Return a plan that transposes operands first, if they are strided along the reduced axis; else None.

    It reduces along the contiguous axis of the operands, or transposes some rows first.
    """
    near = _contiguous_read_axis(b, free)
    if near in free:
        return plan_columns(b, _move_axis_to_end(near, free), reduced)
    if near is not None:
        return _plan_reduction_of_rows(b, free, _move_axis_to_end(near, reduced))
    if free and free[-1] > max(reduced):
        return None
    return _plan_transposed_rows(b, free, reduced)


def _contiguous_read_axis(b: RegionBuilder, free: Sequence[int]) -> int | None:
    """Return the contiguous axis of the reads, if the region has a single loop over its rows.

    A kept axis also qualifies for reductions without a plain combiner, such as ``argmax``: these go by columns.
    """
    loops = b.row_stages().loops
    near = ReductionReads(b, loops[0].ops).contiguous_load_axis() if len(loops) == 1 and not loops[0].stores else None
    return near if near in free or all(map(combiner_op_name, loops[0].ops)) else None


def _move_axis_to_end(axis: int | None, axes: Sequence[int]) -> list[int]:
    return sorted(axes, key=lambda k: k == axis)


def _plan_reduction_of_rows(b: RegionBuilder, free: list[int], reduced: list[int]) -> RowBlockPlan | RowPlan:
    return _plan_row_blocks(b, free, reduced) or _plan_single_rows(b, free, reduced)


# --- rows in blocks ---


BLOCK_ROWS = BlockSize(
    4,
    "rows reduced at a time with the operand that they share",
    "Zen 5, 4096 x 4096, with 1, 2, 4, 8 rows at a time: times 1 column 2.19, 1.85, 1.73, 1.95 ms; times 4 columns "
    "16, 20, 29 GB/s; bf16 times 1 column 0.92, 1.61, 1.42 ms",
)
FEW_BLOCK_ROWS = Limit(3, "rows that are reduced one by one", "fewer than BLOCK_ROWS")
SHORT_BLOCK_ROW = Limit(
    63,
    "elements of a row, up to which rows are reduced one by one",
    "Zen 5, one core, time in blocks relative to one by one: 1000 rows of 64 to 100 elements times a column 0.64, in "
    "batches 0.74 to 0.97",
)
ROW_BLOCK_ELEMENTS = BlockSize(
    1 << 15,
    "elements of the rows of a grid item that reduces them in blocks",
    "some microseconds of one core",
)
UNFETCHED_COLUMNS = Limit(
    2,
    "columns multiplied with a matrix, up to which its rows are not prefetched",
    "Zen 5, one core, 4096 x 4096, ms without and with prefetch: 1 column (in C) 1.38 and 1.71, 2 columns 1.91 and "
    "1.83, 8 columns 4.3 and 3.7",
)
FETCHED_BYTES = BlockSize(
    2048,
    "prefetch distance in bytes along the rows of a matrix that is multiplied with some columns",
    "Zen 5, one core, 4096 x 4096 times 8 columns, ms: distance 512 3.89, 1024 3.70, 2048 3.73, 4096 3.74, none 4.25",
)
WHOLE_COLUMNS = Limit(
    4,
    "columns multiplied with a matrix, up to which its rows are reduced whole, not in parts",
    "one core of a busy Zen 5, time in parts relative to whole rows: 4096 x 4096 times 3 columns 1.05, 4 columns "
    "1.03, 8 columns 0.81; 2048 x 2048 times 5 columns 0.80",
)
PART_BYTES = BlockSize(
    2048,
    "bytes of a part of a row",
    "Zen 5, one core, in C, 4096 x 4096 times 8 columns, ms: parts of 1024 bytes 1.94, 2048 1.67, 4096 1.86, whole "
    "rows 3.3",
)
PART_ROWS = BlockSize(
    96,
    "rows per grid item, at least, where rows are reduced in parts",
    "as PART_BYTES: 24 rows 1.78 ms, 96 rows 1.67 ms; their sums are 48 KiB with 8 columns",
)


def _plan_row_blocks(b: RegionBuilder, free: list[int], reduced: list[int]) -> RowBlockPlan | None:
    """Return a plan that reduces several rows together because they share an operand; else None."""
    stages, target = b.row_stages(), b.target
    if results_along_rows(b) or len(stages.loops) != 1:
        return None
    ops = stages.loops[0].ops
    length = product(b.shape[k] for k in reduced)
    if SHORT_BLOCK_ROW.holds(length) or not is_light_reduction(b, ops):
        return None
    reads = ReductionReads(b, ops)
    together = reads.short_constant_axes(free, reduced)
    sums = static(product(b.shape[k] for k in together)) * len(ops)
    large = [k for k in free if k not in together and not FEW_BLOCK_ROWS.holds(b.shape[k])]
    block = next((k for k in reversed(large) if reads.can_share_along(k, reduced)), None)
    if block is None or (sums == 1 and reads.size < size_of("f32")):
        return None  # one row of short floats at a time is faster
    at_once = max(min(BLOCK_ROWS.value, COLUMN_TERMS.value * min(target.registers, 32) // 32 // sums), 1)
    inner = merged_axes(b, reduced, row_trial(b, stages))
    lanes = target.vector_bytes // max(size_of(v.type.dtype) for op in ops for v in op.results)
    streams = _prefetched_operands(b, reads, sums, length, (*reduced, block)) if len(inner) == 1 else ()
    part = PART_BYTES.value // reads.size // lanes if streams and not WHOLE_COLUMNS.holds(sums) else 0
    others = product(b.shape[k] for k in free if k not in (*together, block))
    rows = _rows_per_item(length, b.shape[block], others, PART_ROWS.value if part else at_once, at_once)
    ahead = FETCHED_BYTES.value // reads.size if streams else 0
    return RowBlockPlan(
        tuple(free), tuple(reduced), inner, (), block, together, at_once, max(rows // at_once, 1) * at_once, lanes,
        streams, ahead, part,
    )  # fmt: skip


def _prefetched_operands(
    b: RegionBuilder, reads: ReductionReads, sums: int, length: Dim, wide: Sequence[int]
) -> tuple[int, ...]:
    """Return the operands to prefetch during sums along rows, if these can be written as vectors."""
    floats = all(combiner_op_name(op) == "add" and op.result.type.dtype in ("f32", "f64") for op in reads.ops)
    short = isinstance(length, int) and length * reads.size <= FETCHED_BYTES.value
    if UNFETCHED_COLUMNS.holds(sums) or short or not floats:
        return ()
    return tuple(b.inputs.index(x) for x in reads.prefetched_buffers(wide))


def _rows_per_item(length: Dim, extent: Dim, others: Dim, least: int, at_once: int) -> int:
    """Return the rows per item: enough elements, and enough items."""
    rows = max(ROW_BLOCK_ELEMENTS.value // max(dim_or(length, UNKNOWN_TERMS.value), 1), least)
    if isinstance(extent, int) and isinstance(others, int):
        return min(rows, max(extent * others // COLUMN_ITEMS.value, at_once))
    return rows


# --- rows one by one ---


SHORT_ROW = Limit(
    63,
    "elements of a reduced row, up to which a grid item takes several rows",
    "claiming an item would cost more than reducing one row",
)
UNROLLED_ROW = Limit(
    8,
    "elements of a row that is unrolled on a CPU, so that neighbouring rows share vectors",
    "Zen 5, 8192 rows of f32, us in loops and unrolled: sums of 3 4.1 and 0.6, of 8 3.1 and 2.8, of 9 6.4 and 17; "
    "norms of 8 9.0 and 3.0",
)
UNROLLED_LONGER_ROW = Limit(
    14,
    "elements of an unrolled row, if their number is even or expensive functions are applied to them",
    "Zen 5, 8192 rows of f32, us in loops and unrolled: sums of 14 50 and 25, of 16 5 and 29; log-sum-exp of 13 181 "
    "and 59",
)
LIGHT_NUMBERS = Limit(
    8,
    "vector operations on the per-row scalars of a short row, up to which each row computes them alone",
    "Zen 5, 8192 rows of 20 f32, us alone and for 16 rows at once: logistic (work 14) of sums 42 and 22, x / norm "
    "(work 6) 26 and 34",
)


def _plan_single_rows(b: RegionBuilder, free: list[int], reduced: list[int]) -> RowPlan:
    """Return the plan that reduces row by row: stored values, rows per item and rows per vector."""
    stages = b.row_stages()
    unrolled = _is_reduction_unrolled(b, stages)
    inner = merged_axes(b, reduced, row_trial(b, stages))
    stored = row_value_records(b, stages, values_between_loops(stages, b.target), in_results=not unrolled)
    tail = _row_axes_per_item(b, free, inner)
    lanes = 0 if unrolled or stored else _rows_per_scalar_vector(b, stages, tail)
    return RowPlan(tuple(free), tuple(reduced), inner, stored, len(tail), unrolled, lanes)


def _row_axes_per_item(b: RegionBuilder, free: Sequence[int], inner: Sequence[tuple[int, ...]]) -> list[NestAxis]:
    """Return the axes of the rows of one item: several rows if a row is short."""
    work = product(b.shape[k] for group in inner for k in group)
    if free and isinstance(work, int) and SHORT_ROW.holds(work):
        axes = make_axes(b.shape, [(k,) for k in free])
        return split_grid(axes, max(ITEM_ELEMENTS.value // max(work, 1), 1))[1]
    return []


def _is_reduction_unrolled(b: RegionBuilder, stages: RowStages) -> bool:
    """Return True if rows are so short that their reduction is fully unrolled.

    LLVM vectorises odd numbers of cheap elements by itself.
    """
    ops = [op for loop in stages.loops for op in loop.ops]
    n = stages.elements
    if not all(combiner_op_name(op) in ACCUMULATED and kind_of(op.result.type.dtype) == "f" for op in ops):
        return False
    if UNROLLED_ROW.holds(n) or results_along_rows(b):
        return UNROLLED_ROW.holds(n)
    return UNROLLED_LONGER_ROW.holds(n) and (n % 2 == 0 or not is_light_reduction(b, ops))


def _rows_per_scalar_vector(b: RegionBuilder, stages: RowStages, tail: Sequence[NestAxis]) -> int:
    """Return the number of rows whose scalars are computed in one vector; 0 if each row computes its own."""
    numbers = [v for v in b.ops if stages.is_row_scalar(v)]
    work = sum(SCALARS[op.name].vector_work for v in numbers if (op := b.ops[v]).name in SCALARS)
    if not tail or LIGHT_NUMBERS.holds(work):
        return 0
    lanes = b.target.vector_bytes // max(size_of(v.type.dtype) for v in numbers)
    return lanes if isinstance(tail[-1].extent, int) and tail[-1].extent >= lanes else 0


# --- rows transposed first ---


def _plan_transposed_rows(b: RegionBuilder, free: list[int], reduced: list[int]) -> TransposedRowPlan | None:
    """Return the plan that transposes some neighbouring rows first, or None if no operand is strided along rows."""
    stages = b.row_stages()
    trial = row_trial(b, stages)
    inner = merged_axes(b, reduced, trial)
    if not inner:
        return None
    lone = len(stages.loops) == 1 and not results_along_rows(b)
    before = [group[0] for group in inner[-2:-1] if lone and len(group) == 1]
    loads = loads_in_body(trial)
    # Innermost axis first; a reduced axis outside of the innermost one qualifies only in a single loop.
    for k in (*reversed(free), *before):
        strided = _transposed_loads(b, loads, k, inner[-1][-1])
        if strided:
            break
    else:
        return None
    values = values_between_loops(stages, b.target)
    height = _rows_transposed_at_once(b, values, k, product(b.shape[j] for j in inner[-1]), strided)
    if not height:
        return None
    stored = row_value_records(b, stages, values, in_results=True)
    if k not in free:
        tail = len(_row_axes_per_item(b, free, inner))
        return TransposedRowPlan(tuple(free), tuple(reduced), inner, stored, tail, k, height)
    most = ITEM_ELEMENTS.value // static(product(b.shape[j] for j in inner[-1]))
    rows = equal_parts(b.shape[k], height, most)
    return TransposedRowPlan(tuple(free), tuple(reduced), inner, stored, 0, k, height, rows)


def _transposed_loads(b: RegionBuilder, loads: Sequence[Load], k: int, last: int) -> list[Load]:
    """Return the loads that are contiguous along the axis ``k``, and strided along rows."""
    adjacent, along = single_axis(b.anchors.space[k]), single_axis(b.anchors.space[last])
    return [x for x in loads if adjacent and along and is_transposed_load(x, adjacent, along)]


def _rows_transposed_at_once(
    b: RegionBuilder, values: Iterable[Value], k: int, length: Dim, strided: Sequence[Load]
) -> int:
    """Return the number of neighbouring rows to transpose together, 0 for none; ``values`` are stored between loops."""
    extent = b.shape[k]
    if isinstance(extent, Expr) or isinstance(length, Expr) or FEW_TURNED.holds(length):
        return 0
    height = transposed_line_length(extent, FETCH_LINE.value // min(size_of(x.dtype) for x in strided))
    transposed = height * sum(length * size_of(x.dtype) + FETCH_LINE.value for x in dict.fromkeys(strided))
    stored = length * sum(size_of(v.type.dtype) for v in values)
    fits = transposed + stored <= memory_limits(b.target)["scratch"][1]
    return height if fits and TURNED_OPERANDS.holds(len(strided)) else 0
