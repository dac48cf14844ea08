"""Plan the loops over the elements of a region on a CPU: grid items, and cuts of the innermost loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from aotc.ir.dims.algebra import Dim, bounds, product, static
from aotc.ir.loop.access import loads_and_indices, scalars_in, statement_scalars
from aotc.ir.loop.ir import Apply, For, Let, Load, Stmt, Store, walk
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.opset import COMPARISONS, FREE
from aotc.ir.opset.dim_attributes import dims_of
from aotc.lowering.analysis.anchors import single_axis
from aotc.lowering.analysis.index_maps import Index, linearize
from aotc.lowering.cost_model.work import scalar_work_of_op
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.nests import (
    Emit,
    NestAxis,
    axis_coefficient,
    make_axes,
    merged_loops,
    split_grid,
    substitute_loops,
)
from aotc.lowering.plans.cpu_transpose import TransposedLoopPlan, plan_transposed_blocks
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.plans.thresholds import CHUNK, ITEM_ELEMENTS, SEGMENTS
from aotc.lowering.threshold import BlockSize, Limit
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class LoopPlan(RegionPlan):
    """Plan with one loop nest over the elements.

    Attributes
    ----------
    axes : tuple of tuple of int
        The axes of each loop, the outermost first; empty for a region with one element.
    inner : int
        The number of last loops that are inside of a grid item.
    chunk : int
        Iterations of the last loop in a grid item; 0: all.
    rows : int
        Iterations of the last grid loop in an item; 0: one, without a loop.
    is_across : bool
        Are neighbouring items neighbours along the last but one grid loop, because their reads are nearer?
    cuts : tuple of int
        Indices between which the tests of the innermost loop do not change, ends included; empty: one loop.
    """

    axes: tuple[tuple[int, ...], ...]
    inner: int = 0
    chunk: int = 0
    rows: int = 0
    is_across: bool = False
    cuts: tuple[int, ...] = ()


TURNED_ROWS = BlockSize(
    16,
    "result rows per grid item of a transposing copy: reads are strided along a row, contiguous across rows",
    "Zen 5, one core, f32 1024 x 1024 and 2048 x 2048, us: 1 row 4070 and 28700, 8 rows 400 and 3230, 16 rows 350 and "
    "1620, 32 rows 690 and 3260, 64 rows 800 and 28200; 16 rows are one cache line of the operand, and each is a page "
    "of the result",
)
ACROSS_ELEMENTS = BlockSize(
    256,
    "elements per grid item that copies pieces of rows, where the reads of the next item are adjacent",
    "Zen 5, f32 1024 x 1024 into panels of 32 columns, rows not aligned to cache lines, us: one panel per item 220, "
    "256 elements 88, 1024 elements 162",
)
WHOLE_AXIS = Limit(2 * CHUNK.value - 1, "elements of an axis that is not split into chunks", "fewer than two chunks")


def plan_cpu_loops(b: RegionBuilder, emit: Emit) -> LoopPlan | TransposedLoopPlan:
    """Return the loops of a region for a CPU: grid items with enough elements, and a vectorizable innermost loop.

    ``emit(block, index)`` adds the statements of one element.
    """
    trial: list[Stmt] = []
    # The statements of one element at symbolic indices show which buffers the loops read, and with which strides.
    emit(trial, b.anchors.space)
    groups = merged_loops(b.anchors.space, b.shape, trial)
    if not groups:
        return LoopPlan(())
    groups = _with_contiguous_reads_inside(b, groups, trial)
    outer, inner = split_grid(make_axes(b.shape, groups), ITEM_ELEMENTS.value)
    last = inner[-1]
    is_copy = _is_transposing_copy(b, outer, inner, trial)
    if blocks := plan_transposed_blocks(b, outer, inner, trial, is_copy):
        return blocks
    chunk = 0
    if len(inner) == 1 and not WHOLE_AXIS.holds(last.extent):
        chunk = _elements_per_item(last.extent, b.target.vector_bytes // size_of("f32"))
    is_across = not chunk and _reads_nearer_across_rows(b, outer, trial)
    rows = (
        0
        if chunk
        else _last_axis_iterations_per_item(b, outer, inner, (ACROSS_ELEMENTS if is_across else ITEM_ELEMENTS).value)
    )
    if not chunk and is_copy and rows < TURNED_ROWS.value:
        rows = _rows_per_transposing_item(outer[-1].extent)
    cuts = _loop_split_points(b.anchors.space, last, trial)
    if chunk and not SEGMENTS.holds(len(cuts)):
        cuts = []
    if cuts:
        space = b.anchors.space
        cuts = _loop_boundaries(
            _cut_loop(last, cuts, lambda inside, i: emit(inside, substitute_loops(space, b.shape, [last], [i])))
        )
    return LoopPlan(groups, len(inner), chunk, rows, is_across and bool(rows), tuple(cuts))


FEW_ACROSS = Limit(
    3,
    "elements of the innermost loop, at most, of a copy that permutes axes without changing the order of its loops",
    "f32 [n, 30, 31, m] to [m, 30, 31, n], new order in the time of the old for m = 4, 16 and 48: n = 2 1.1, 1.1, 1.1; "
    "n = 3 1.7, 1.1, 1.0; n = 4 1.0, 0.35, 0.32; n = 8 0.64, 0.28, 0.23",
)


def _with_contiguous_reads_inside(
    b: RegionBuilder, groups: tuple[tuple[int, ...], ...], trial: Sequence[Stmt]
) -> tuple[tuple[int, ...], ...]:
    """Return the loops of a copy that permutes axes, with the loop of contiguous reads just outside the innermost one.

    The innermost loop writes contiguously and reads one element of each cache line. The loop along these lines is next,
    so that their other elements are read while they are cached. ``x.transpose(4, 3, 2, 1, 0)`` of 8 x 8 x 8 x 8 x 8::

        for i0, i1, i2, i3, i4: o[i0, i1, i2, i3, i4] = x[i4, i3, i2, i1, i0]
        ->
        for i1, i2, i3, i0, i4: o[i0, i1, i2, i3, i4] = x[i4, i3, i2, i1, i0]
    """
    match trial:
        case [Store(reduce="", value=Load(buffer=buffer, index=index))] if len(groups) > 2:
            flat = linearize(index, buffer.shape)
        case _:
            return groups
    axes = [single_axis(b.anchors.space[members[-1]]) for members in groups]
    steps = [None if axis is None else axis_coefficient(flat, axis) for axis in axes]
    short = FEW_ACROSS.holds(product(b.shape[k] for k in groups[-1]))
    if short or 1 not in steps[:-2] or not isinstance(steps[-1], int) or steps[-1] < 2:
        return groups
    along = steps.index(1)
    return (*groups[:along], *groups[along + 1 : -1], groups[along], groups[-1])


def _loop_boundaries(loops: Sequence[For]) -> list[int]:
    """Return the indices at which each of several adjacent loops begins and the last one ends; empty for one loop."""
    return [static(loops[0].begin), *(static(loop.end) for loop in loops)] if len(loops) > 1 else []


MANY_SEGMENTS = Limit(
    129,
    "ends of the segments into which the tests of a loop cut it, if it does little more than copy",
    "Zen 5, one core, f32 [256, 400] concatenated from 9 to 80 parts, time relative to XLA: cut everywhere 0.2 to "
    "0.5; 9 segments, with the remaining tests in the last one, 8 to 24",
)
SEGMENT_OPERATIONS = Limit(
    256,
    "operations, without tests, of all segments together of a loop cut into more than SEGMENTS allows",
    "about the code size of a loop with one exponential",
)


def _cut_loop(axis: NestAxis, cuts: Sequence[int], emit: Callable[[list[Stmt], Dim], None]) -> list[For]:
    """Return the loop over ``axis``, split at the indices where padding and bounds tests change their results.

    It is split at all ``cuts`` if the body is small (:data:`SEGMENT_OPERATIONS`), else into :data:`SEGMENTS` parts.
    """
    loops = _segments_of(axis, cuts, emit, MANY_SEGMENTS)
    if SEGMENTS.holds(len(loops) + 1) or SEGMENT_OPERATIONS.holds(_scalar_operations_of_loops(loops)):
        return loops
    return _segments_of(axis, cuts if SEGMENTS.holds(len(cuts)) else (), emit, SEGMENTS)


def _segments_of(
    axis: NestAxis, cuts: Sequence[int], emit: Callable[[list[Stmt], Dim], None], most: Limit
) -> list[For]:
    """Split a loop at ``cuts`` into segments in which padding and bounds tests have constant results."""
    loops: list[For] = []
    ends = len(cuts)
    pending: list[tuple[int, Dim]] = [] if cuts else [(0, axis.extent)]
    pending += reversed([*pairwise(cuts)])
    while pending:
        lo, hi = pending.pop()
        inside: list[Stmt] = []
        i = axis.symbol(lo, hi)
        emit(inside, i)
        more = _test_changes(i, inside) if cuts else []  # one test may hide another
        if more and most.holds(ends + len(more)):
            ends += len(more)
            pending += [*zip([lo, *more], [*more, hi], strict=True)][::-1]
        else:
            loops.append(For(axis.name, lo, hi, tuple(inside)))
    return loops


def _scalar_operations_of_loops(loops: Sequence[For]) -> int:
    """Return the number of scalar operations of the loops, tests not counted."""
    scalars = scalars_in(s.value for s in walk(tuple(loops)) if isinstance(s, Let | Store))
    return sum(isinstance(s, Apply) and s.fn not in COMPARISONS and s.fn != "select" for s in scalars)


def _elements_per_item(extent: Dim, lanes: int) -> int:
    """Return the elements per item: equal parts in whole vectors if some have half a chunk or more.

    LLVM then knows each trip count, and generates no code for partial vectors.
    """
    most = CHUNK.value
    if isinstance(extent, int):
        for items in range(-(-extent // most), 2 * extent // most + 1):
            if extent % (items * lanes) == 0:
                return extent // items
    return most


SHORT_ITEM = Limit(
    512,
    "scalar operations of one grid step, up to which a grid item takes several steps",
    "half of ITEM_ELEMENTS, so that at least two steps fit",
)


def _last_axis_iterations_per_item(
    b: RegionBuilder, outer: list[NestAxis], inner: list[NestAxis], elements: int
) -> int:
    """Return the iterations of the last grid axis per item, if a single one is little work; else 0."""
    work = product(a.extent for a in inner) * _work_of_element(b)
    if not outer or outer[-1].extent == 1 or not isinstance(work, int) or work == 0:
        return 0
    return max(elements // work, 1) if SHORT_ITEM.holds(work) else 0


def _reads_nearer_across_rows(b: RegionBuilder, outer: list[NestAxis], trial: list[Stmt]) -> bool:
    """Return True if neighbours along the last but one grid axis read nearer memory than along the last.

    An example are pieces of rows that become rows, as in panels. Cache lines that two pieces share, and lines that the
    hardware prefetched, are then used at once.
    """
    if len(outer) < 2:
        return False
    before, rows = (single_axis(b.anchors.space[axis.members[-1]]) for axis in outer[-2:])
    if before is None or rows is None:
        return False
    read = [x for s in walk(tuple(trial)) for x in loads_and_indices(statement_scalars(s)) if isinstance(x, Load)]
    places = [linearize(x.index, x.buffer.shape) for x in read]
    steps = [(axis_coefficient(e, before), axis_coefficient(e, rows)) for e in places]
    moving = [(near, far) for near, far in steps if (near, far) != (0, 0)]
    ordered = [isinstance(near, int) and isinstance(far, int) and 0 < near < far for near, far in moving]
    return bool(ordered) and all(ordered)


def _is_transposing_copy(b: RegionBuilder, outer: list[NestAxis], inner: list[NestAxis], trial: list[Stmt]) -> bool:
    """Return True for a transposing copy: reads are contiguous along the last grid axis, strided along the loop."""
    match trial:
        case [Store(value=Load(index=index, buffer=buffer))] if outer and len(inner) == 1:
            along, across = (single_axis(b.anchors.space[axis.members[-1]]) for axis in (outer[-1], inner[-1]))
            at = linearize(index, buffer.shape)
            return (
                along is not None
                and across is not None
                and axis_coefficient(at, along) == 1 != axis_coefficient(at, across)
            )
    return False


def _rows_per_transposing_item(extent: Dim) -> int:
    """Return the rows per item of a transposing copy: equal parts if there are some of half the block size or more."""
    most = TURNED_ROWS.value
    parts = (n for n in range(most, most // 2 - 1, -1) if isinstance(extent, int) and extent % n == 0)
    return next(parts, most)


def _work_of_element(b: RegionBuilder) -> Dim:
    """Return a rough count of scalar operations of one element."""
    work: Dim = max(sum(scalar_work_of_op(op) for op in b.function.body.ops if op.name not in FREE), 1)
    for op in b.function.body.ops:
        if op.name == "reduce_window":
            work = work * product(dims_of(op.attrs, "window"))
    return work


def _loop_split_points(space: Index, axis: NestAxis, trial: list[Stmt]) -> list[int]:
    """Return the indices at which tests on the innermost loop change, ends included; empty if there are none."""
    if len(axis.members) != 1 or not isinstance(axis.extent, int):
        return []
    changes = _test_changes(space[axis.members[0]], trial)
    return [0, *changes, axis.extent] if changes and MANY_SEGMENTS.holds(len(changes) + 2) else []


def _test_changes(index: Dim, block: list[Stmt]) -> list[int]:
    """Return the sorted index values at which a test in ``block`` changes its result."""
    low, high = bounds(index)
    changes: set[int] = set()
    for s in scalars_in(s.value for s in walk(tuple(block)) if isinstance(s, Let | Store)):
        match s:
            case Apply(fn="ge" | "lt", args=(IndexScalar(expr=left, dtype="i64"), IndexScalar(expr=right))):
                change = index - (left - right)
                if isinstance(change, int) and low is not None and high is not None and low < change <= high:
                    changes.add(change)
    return sorted(changes)
