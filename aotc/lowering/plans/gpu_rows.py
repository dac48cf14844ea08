"""Choose how the threads of a GPU share the rows of a region with reductions.

The threads of a group process adjacent vectors of one row, in rounds. A group of at most a warp reduces by shuffles;
several such groups form a block, so that short rows fill it. A longer row has a block of its own. If the part of a
thread is known to fit, it stays in registers from one loop over the row to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, product
from aotc.ir.loop.ir import WARP
from aotc.ir.loop.scratch import shared_array_bytes
from aotc.lowering.cost_model.row_stages import RowStages
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.plans.thresholds import (
    BLOCK_THREADS,
    KEPT_REGISTERS_LONG,
    LANE_BYTES,
    LANE_THREADS,
    LONG_ROW_THREADS,
    ROW_REGISTERS,
)
from aotc.lowering.threshold import BlockSize, Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class RowGroup(RegionPlan):
    """Threads of a region with reductions along its last axes.

    Attributes
    ----------
    group : int
        The threads that share a row, a power of two; 1: each thread loops over a row of its own.
    rows : int
        The rows of a block.
    width : int
        The adjacent elements that a thread loads at once.
    steps : int
        The loads of a thread if its part of a row stays in registers, else 0.
    """

    group: int
    rows: int
    width: int
    steps: int

    @property
    def threads(self) -> int:
        """Return the number of threads per block."""
        return self.group * self.rows


ALONE = RowGroup(1, 1, 1, 0)
"""One thread reduces a row alone, one element after the other."""


def row_group(stages: RowStages, target: Target) -> RowGroup:
    """Choose the number of GPU threads that share a row: one for tiny or strided rows."""
    anchors = stages.anchors
    reduced = anchors.reduced or frozenset()
    free = [k for k, s in enumerate(anchors.space) if s != 0 and k not in reduced]
    shape = anchors.anchor.type.shape
    work, rows = product(shape[k] for k in sorted(reduced)), product(shape[k] for k in free)
    last = max(reduced, default=-1)
    if last < max(free, default=-1) or is_small_row_reduction(work, rows):
        return ALONE
    if isinstance(work, int):
        size = _element_size(stages)
        width, words = _row_vector_width(size, shape[last]), max(size // 4, 1)
        group = _threads_per_row(work, rows, width, words)
        steps = -(-work // (group * width))
        kept_steps = steps if steps * width * words <= ROW_REGISTERS.value else 0
        plan = RowGroup(group, max(BLOCK_THREADS.value // 2 // group, 1), width, kept_steps)
    else:
        plan = RowGroup(BLOCK_THREADS.value, 1, 1, 0)
    return plan if shared_bytes(plan, stages) <= target.shared else ALONE


def shared_bytes(plan: RowGroup, stages: RowStages) -> int:
    """Return the bytes of a block's shared memory: one partial result per warp, if several warps share a row."""
    if plan.group <= WARP:
        return 0
    sizes = (size_of(v.type.dtype) for loop in stages.loops for op in loop.ops for v in op.results)
    return sum(shared_array_bytes(plan.threads // WARP * size) for size in sizes)


KEPT_REGISTERS = BlockSize(
    96,
    "registers per thread, at most, for its parts of all arrays of a row",
    "a thread has at most 255 registers, one of a block of 512 threads 128",
)


def registers_for_row_values(plan: RowGroup) -> int:
    """Return the registers of a thread that may hold values of its row from one loop to the next."""
    most = KEPT_REGISTERS_LONG if plan.threads == LONG_ROW_THREADS.value else KEPT_REGISTERS
    return most.value


SMALL_REDUCTION = Limit(
    1 << 12,
    "elements of a whole reduction, at most, that single threads compute",
    "the work takes no longer than the launch of the kernel",
)
THREAD_ROW = Limit(
    95,
    "elements of a row, at most, that one GPU thread reduces alone",
    "most threads of a block would have nothing to do",
)


def is_small_row_reduction(work: Dim, rows: Dim) -> bool:
    """Return True if rows are so short and few that one thread reduces each, as a loop in one kernel may need."""
    whole = work * rows
    return work == 0 or (THREAD_ROW.holds(work) and isinstance(whole, int) and SMALL_REDUCTION.holds(whole))


def _element_size(stages: RowStages) -> int:
    """Return the bytes of the widest element of the arrays that the region reads or writes whole."""
    anchor = stages.anchors.anchor
    whole = product(anchor.type.shape)
    read = [u for loop in stages.loops for v in loop.cone for u in stages.ops[v].operands if u not in stages.ops]
    touched = [*read, *(v for loop in stages.loops for v in loop.stores)]
    sizes = [size_of(v.type.dtype) for v in touched if product(v.type.shape) == whole]
    return max(sizes, default=size_of(anchor.type.dtype))


def _row_vector_width(size: int, extent: Dim) -> int:
    """Return the elements of the widest vector that divides the rows into whole vectors."""
    width = max(LANE_BYTES.value // size, 1)
    while width > 1 and (not isinstance(extent, int) or extent % width):
        width //= 2
    return width


ROW_ELEMENTS = BlockSize(
    16,
    "elements per thread of a row that at most one warp shares; twice as many if several warps share it",
    "on an H200, one warp per row of 1024 f32 reaches 80 % of the speed of a copy and more",
)


def _threads_per_row(work: int, rows: Dim, width: int, words: int) -> int:
    """Return the number of threads that share a row of ``work`` elements.

    Each thread has a few vectors of the row, fewer if there are too few rows to fill the GPU.
    """
    most = LONG_ROW_THREADS.value
    each = max(ROW_ELEMENTS.value // words, width)
    group = 1
    while group < most and group * (each if group < WARP else 2 * each) < work:
        group *= 2
    while group < most and isinstance(rows, int) and LANE_THREADS.holds(group * rows) and group * width < work:
        group *= 2
    return group
