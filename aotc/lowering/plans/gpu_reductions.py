"""Plan reductions on a GPU: a group of threads per row, blocks of columns, or one thread per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, mod, product
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.access import loads_and_indices, statement_scalars
from aotc.ir.loop.ir import Const, Load, Stmt, walk
from aotc.ir.loop.scratch import shared_array_bytes
from aotc.ir.opset import ACCUMULATED
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.analysis.prefix_scans import combiner_op_name
from aotc.lowering.cost_model.row_stages import RowStages
from aotc.lowering.elements.builder import RegionBuilder, join_transposed
from aotc.lowering.elements.elements import provide_scalar
from aotc.lowering.plans.gpu_rows import ALONE, RowGroup, is_small_row_reduction, registers_for_row_values, row_group
from aotc.lowering.plans.region_work import values_between_loops
from aotc.lowering.plans.row_values import (
    ReductionPlan,
    RowLoopsPlan,
    StoredValue,
    merged_axes,
    row_trial,
    row_value_records,
)
from aotc.lowering.plans.thresholds import BLOCK_THREADS, COLUMN_THREADS, GPU_IDLE_ROWS, LANE_BYTES, NARROW_ELEMENTS
from aotc.lowering.threshold import BlockSize
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class GroupRowPlan(RowLoopsPlan):
    """Plan in which a group of threads shares each row.

    Attributes
    ----------
    threads : RowGroup
        The threads of a row and of a block.
    held : tuple of int
        Numbers, in :func:`row_reads`, of the elements of operands that stay in registers from one loop to the next.
    """

    threads: RowGroup
    held: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ThreadRowPlan(RowLoopsPlan):
    """Plan in which each thread reduces a row alone."""


@dataclass(frozen=True, slots=True)
class GpuColumnPlan(ReductionPlan):
    """Plan in which a block of threads reduces some columns, whose rows are distributed round-robin to its threads.

    Attributes
    ----------
    width : int
        Adjacent columns that a thread loads at once.
    across : int
        Threads of a block along columns.
    rows : int
        Rows that a thread has in flight.
    """

    width: int
    across: int
    rows: int


def plan_gpu_reduction(b: RegionBuilder) -> GroupRowPlan | ThreadRowPlan | GpuColumnPlan:
    """Choose thread groups per row, blocks of columns, or a thread per row for a GPU reduction."""
    reduced = sorted(b.anchors.reduced or ())
    free = [k for k, s in enumerate(b.anchors.space) if s != 0 and k not in reduced]
    stages = b.row_stages()
    group = row_group(stages, b.target)
    if group is not ALONE:
        return _plan_group_rows(b, free, reduced, group)
    work, rows = (product(b.shape[k] for k in axes) for axes in (reduced, free))
    columns = None
    if (
        b.function.attrs["kind"] == "reduce"
        and free
        and free[-1] > max(reduced)
        and not is_small_row_reduction(work, rows)
    ):
        columns = _plan_gpu_column_reduction(b, free, reduced)
    if columns is not None:
        return columns
    inner = merged_axes(b, reduced, row_trial(b, stages))
    stored = row_value_records(b, stages, values_between_loops(stages, b.target), in_results=False)
    return ThreadRowPlan(tuple(free), tuple(reduced), inner, stored)


# --- a group of threads per row ---


def _plan_group_rows(b: RegionBuilder, free: list[int], reduced: list[int], group: RowGroup) -> GroupRowPlan:
    """Return the plan of a group of threads per row; expensive or repeatedly read values stay in registers."""
    stages = b.row_stages()
    inner = merged_axes(b, reduced, row_trial(b, stages))
    axes, values = (tuple(free), tuple(reduced)), values_between_loops(stages, b.target)
    if not group.steps:
        return GroupRowPlan(*axes, inner, tuple(StoredValue(v.name) for v in values), group)
    each, most = group.steps * group.width, registers_for_row_values(group)
    live = [0] * len(stages.loops)
    stored: list[Value] = []
    for v in values:
        loops = [n for n, loop in enumerate(stages.loops) if v in loop.cone]
        if _reserve_row_registers(live, loops, _registers_of_dtype(v.type.dtype) * each, most):
            stored.append(v)
    in_registers = []
    for n, ((value, _), loops) in enumerate(row_reads(b, stages, reduced, stored).items()):
        again = len(loops) > 1 or (loops == [0] and not all(map(_is_reorderable_reduction, stages.loops[0].ops)))
        if again and _reserve_row_registers(live, loops, _registers_of_dtype(value.type.dtype) * each, most):
            in_registers.append(n)
    return GroupRowPlan(*axes, inner, tuple(StoredValue(v.name) for v in stored), group, tuple(in_registers))


def row_reads(
    b: RegionBuilder, stages: RowStages, reduced: Sequence[int], stored: Sequence[Value]
) -> dict[tuple[Value, Index], list[int]]:
    """Return the inputs that vary along a row, with the numbers of the loops that read each."""
    e = b.trial_elements()
    values = {buffer.name: v for v, buffer in b.buffers.items()}
    names = {s.name for k in reduced for s in symbols(b.anchors.space[k])}
    loops_of_reads: dict[tuple[Value, Index], list[int]] = {}
    available: set[Value] = set()
    for n, loop in enumerate(stages.loops):
        trial: list[Stmt] = []
        e.enter(trial)
        join_transposed(b, e, b.anchors.space)
        for op in loop.ops:
            for v in op.inputs:
                e.bind(e.at(v, b.anchors.reads[op]))
        for v in loop.stores:
            e.bind(e.at(v, b.index[v]))
        for leaf in loads_and_indices(x for s in walk(tuple(trial)) for x in statement_scalars(s)):
            if isinstance(leaf, Load) and any(s.name in names for i in leaf.index for s in symbols(i)):
                row = loops_of_reads.setdefault((values[leaf.buffer.name], leaf.index), [])
                row += [n] if n not in row else []
        available.update(v for v in stored if v in loop.cone)
        for v in (*available, *(v for op in loop.ops for v in op.results)):
            e.anchor(v, provide_scalar(Const(0, v.type.dtype)))
    return loops_of_reads


def _is_reorderable_reduction(op: Op) -> bool:
    """Return True if the reduction's elements may be combined in any order, and so in parallel."""
    return combiner_op_name(op) in ACCUMULATED and op.results[0].type.dtype != "i1"


def _registers_of_dtype(dtype: str) -> int:
    return max(size_of(dtype) // 4, 1)


def _reserve_row_registers(live: list[int], loops: Sequence[int], words: int, most: int) -> bool:
    """Reserve ``words`` registers between the first and the last of ``loops``; return False if too few are left."""
    span = range(min(loops), max(loops))
    if any(live[n] + words > most for n in span):
        return False
    for n in span:
        live[n] += words
    return True


# --- columns ---

COLUMN_ROWS = BlockSize(4, "rows that a thread of a column reduction has in flight at once", "as UNROLLED_VECTORS")
NARROW_BYTES = BlockSize(
    32,
    "bytes of adjacent columns per block of a column reduction, at least",
    "one sector, the unit of a memory read",
)
NARROW_ROWS = BlockSize(
    8,
    "rows that a thread of a block with few columns has in flight at once, at most",
    "a multiprocessor has one such block",
)


def _plan_gpu_column_reduction(b: RegionBuilder, free: list[int], reduced: list[int]) -> GpuColumnPlan | None:
    """Return the plan of columns, or None if the partial results do not fit in shared memory."""
    ops = [op for loop in b.row_stages().loops for op in loop.ops]
    size = max(size_of(v.type.dtype) for op in ops for v in op.inputs)
    width = max(LANE_BYTES.value // size, 1)
    while width > 1 and (mod(b.shape[free[-1]], width) != 0 or width * COLUMN_THREADS.value > BLOCK_THREADS.value):
        width //= 2
    outer, work = product(b.shape[k] for k in free if k < max(reduced)), product(b.shape[k] for k in reduced)
    across = _threads_along_columns(outer, work, product(b.shape[k] for k in free if k > max(reduced)), width, size)
    rows = COLUMN_ROWS.value
    if across != COLUMN_THREADS.value and isinstance(work, int):
        rows = max(min(work // (BLOCK_THREADS.value // across), NARROW_ROWS.value), 1)
    partial = BLOCK_THREADS.value // across * across * width
    shared = sum(shared_array_bytes(partial * size_of(v.type.dtype)) for op in ops for v in op.results)
    return GpuColumnPlan(tuple(free), tuple(reduced), width, across, rows) if shared <= b.target.shared else None


def _threads_along_columns(outer: Dim, work: Dim, columns: Dim, width: int, size: int) -> int:
    """Return the threads of a block along columns: fewer if columns or blocks are few."""
    across = COLUMN_THREADS.value
    while isinstance(columns, int) and across > 1 and across // 2 * width >= columns:
        across //= 2
    if not NARROW_ELEMENTS.holds(product((outer, work, columns))):
        return across
    if not isinstance(columns, int) or not isinstance(outer, int):
        return across
    least = max(NARROW_BYTES.value // (width * size), 1)
    while across > least and GPU_IDLE_ROWS.holds(outer * -(-columns // (across * width))):
        across //= 2
    return across
