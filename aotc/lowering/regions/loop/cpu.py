"""Regions of kind loop and window: one pass over the anchor's space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from aotc.ir.dims.algebra import Dim, bounds, maximum, minimum, product
from aotc.ir.loop.access import leaves, operands, scalars_in
from aotc.ir.loop.ir import Alloc, Apply, Buffer, For, Kernel, Let, Load, Scalar, Stmt, Store, walk
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.opset import COMPARISONS, FREE
from aotc.ir.opset.dim_attributes import dims_of, pairs_of
from aotc.ir.tensor.ir import Function, Op
from aotc.lowering.analysis.anchors import axis_of
from aotc.lowering.analysis.index_maps import Index, inside, linearize
from aotc.lowering.cost_model.work import work_of
from aotc.lowering.elements.builder import RegionBuilder, combine, store_results
from aotc.lowering.elements.elements import Elements, provide, test_index
from aotc.lowering.elements.nests import (
    Emit,
    NestAxis,
    addresses,
    coefficient,
    grid_loop,
    make_axes,
    mergeable,
    place,
    serial,
    split_grid,
)
from aotc.lowering.plans.cpu_transpose import turned_blocks
from aotc.lowering.plans.thresholds import CHUNK, ITEM_ELEMENTS, SEGMENTS
from aotc.lowering.regions.loop.cpu_transpose import loops_over_blocks
from aotc.lowering.regions.loop.gpu import threads_over
from aotc.lowering.threshold import BlockSize, Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of

TURNED_ROWS = BlockSize(
    16,
    "result rows per grid item of a transposing copy: reads are strided along a row, contiguous across rows",
    "Zen 5, one core, f32 1024 x 1024 and 2048 x 2048, us: 1 row 4070 and 28700, 8 rows 400 and 3230, 16 rows 350 and "
    "1620, 32 rows 690 and 3260, 64 rows 800 and 28200; 16 rows are one cache line of the operand, and each is a page "
    "of the result",
)
MANY_SEGMENTS = Limit(
    129,
    "ends of the segments into which the tests of a loop cut it, if it does little more than copy",
    "Zen 5, one core, f32 [256, 400] concatenated from 9 to 80 parts, time relative to XLA: cut everywhere 0.2 to "
    "0.5; 9 segments, with the remaining tests in the last one, 8 to 24",
)


def lower_loop(function: Function, target: Target) -> Kernel:
    """Lower to one pass over the anchor's space; windows become inner loops of their element."""
    b = RegionBuilder(function, target)
    e = b.elements()

    def emit(block: list[Stmt], at: Index) -> None:
        e.enter(block)
        _anchor_windows(b, e, at)
        store_results(b, e, at)

    grid, body = loops_over(b, e, emit)
    return b.kernel(grid, body, b.cost())


def loops_over(b: RegionBuilder, e: Elements, emit: Emit) -> tuple[Dim, tuple[Stmt, ...]]:
    """Return the grid and the loops over the region's space, by the function in :data:`_GRIDS` for the target.

    ``emit(block, index)`` adds the statements of one element, by ``e``. The axes that merge, and the cost, follow from
    one trial emission.
    """
    trial: list[Stmt] = []
    emit(trial, b.anchors.space)
    axes = [k for k, s in enumerate(b.anchors.space) if s != 0]
    merged = make_axes(b.shape, mergeable(b.anchors.space, b.shape, axes, addresses(trial)))
    if not merged:
        block: list[Stmt] = []
        emit(block, b.anchors.space)
        return 1, tuple(block)
    return _GRIDS[b.target.kind](b, e, merged, emit, trial)


ACROSS_ELEMENTS = BlockSize(
    256,
    "elements per grid item that copies pieces of rows, where the reads of the next item are adjacent",
    "Zen 5, f32 1024 x 1024 into panels of 32 columns, rows not aligned to cache lines, us: one panel per item 220, "
    "256 elements 88, 1024 elements 162",
)
WHOLE_AXIS = Limit(2 * CHUNK.value - 1, "elements of an axis that is not split into chunks", "fewer than two chunks")


def _items(
    b: RegionBuilder, e: Elements, merged: list[NestAxis], emit: Emit, trial: list[Stmt]
) -> tuple[Dim, tuple[Stmt, ...]]:
    """Return grid items with enough elements to be worth a claim, and an innermost loop that vectorises."""
    outer, inner = split_grid(merged, ITEM_ELEMENTS.value)
    last = inner[-1]
    turns = _turns(b, outer, inner, trial)
    if blocks := turned_blocks(b, outer, inner, trial, turns):
        return loops_over_blocks(b, blocks, emit)
    chunk = None
    if len(inner) == 1 and not WHOLE_AXIS.holds(last.extent):
        chunk = (last, _chunk_of(last.extent, b.target.vector_bytes // size_of("f32")))
    across = chunk is None and _reads_across(b, outer, trial)
    rows = None if chunk else _rows_of_items(b, outer, inner, (ACROSS_ELEMENTS if across else ITEM_ELEMENTS).value)
    if chunk is None and turns and (rows is None or rows[1] < TURNED_ROWS.value):
        rows = outer[-1], _equal_rows(outer[-1].extent)
    cuts = _cuts(b.anchors.space, last, trial)
    if chunk and not SEGMENTS.holds(len(cuts)):
        cuts = []
    tail = inner[:-1]

    def item(block: list[Stmt], symbols_: list[Dim], begin: Dim, end: Dim) -> None:
        inside: list[Stmt] = []
        if chunk:
            for one in _pieces(symbols_):  # an item has a part of each segment; most of these are empty
                first, behind = (maximum(begin, one.begin), minimum(end, one.end)) if cuts else (begin, end)
                block.append(replace(one, begin=first, end=behind))
        elif rows:
            serial(tail, [*symbols_, rows[0].symbol()], _segments, inside)
            block.append(For(rows[0].name, begin, end, tuple(inside)))
        else:
            serial(tail, symbols_, _segments, block)

    def _pieces(syms: list[Dim]) -> list[For]:
        axes = [*outer, *tail, last]
        return _cut_loop(
            last, cuts, lambda inside, i: emit(inside, place(b.anchors.space, b.shape, axes, [*syms, i]))
        )

    def _segments(block: list[Stmt], syms: list[Dim]) -> None:
        block += _pieces(syms)

    return grid_loop(outer[:-1] if rows else outer, rows or chunk, item, 1 if rows and across else 0)


_GRIDS = {"cpu": _items, "cuda": threads_over}


SEGMENT_OPERATIONS = Limit(
    256,
    "operations, without tests, of all segments together of a loop cut into more than SEGMENTS allows",
    "about the code size of a loop with one exponential",
)


def _cut_loop(axis: NestAxis, cuts: Sequence[int], emit: Callable[[list[Stmt], Dim], None]) -> list[For]:
    """Return the loop over ``axis``, split where its tests change: at all these indices, or into few segments."""
    loops = _segments_of(axis, cuts, emit, MANY_SEGMENTS)
    if SEGMENTS.holds(len(loops) + 1) or SEGMENT_OPERATIONS.holds(_operations(loops)):
        return loops
    return _segments_of(axis, cuts if SEGMENTS.holds(len(cuts)) else (), emit, SEGMENTS)


def _segments_of(
    axis: NestAxis, cuts: Sequence[int], emit: Callable[[list[Stmt], Dim], None], most: Limit
) -> list[For]:
    """Return the loops over the segments of ``axis`` between ``cuts``, split again where tests inside still change."""
    loops: list[For] = []
    ends = len(cuts)
    pending: list[tuple[int, Dim]] = [] if cuts else [(0, axis.extent)]
    pending += reversed([*pairwise(cuts)])
    while pending:
        lo, hi = pending.pop()
        inside: list[Stmt] = []
        i = axis.symbol(lo, hi)
        emit(inside, i)
        more = _changes(i, inside) if cuts else []  # one test may hide another
        if more and most.holds(ends + len(more)):
            ends += len(more)
            pending += [*zip([lo, *more], [*more, hi], strict=True)][::-1]
        else:
            loops.append(For(axis.name, lo, hi, tuple(inside)))
    return loops


def _operations(loops: Sequence[For]) -> int:
    """Return the number of scalar operations of the loops, tests not counted."""
    scalars = scalars_in(s.value for s in walk(tuple(loops)) if isinstance(s, Let | Store))
    return sum(isinstance(s, Apply) and s.fn not in COMPARISONS and s.fn != "select" for s in scalars)


def _chunk_of(extent: Dim, lanes: int) -> int:
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


def _rows_of_items(
    b: RegionBuilder, outer: list[NestAxis], inner: list[NestAxis], elements: int
) -> tuple[NestAxis, int] | None:
    """Return the last grid axis and its steps per item, where one step would be little work; else None."""
    work = product(a.extent for a in inner) * _work_of_element(b)
    if not outer or outer[-1].extent == 1 or not isinstance(work, int) or work == 0:
        return None
    return (outer[-1], max(elements // work, 1)) if SHORT_ITEM.holds(work) else None


def _reads_across(b: RegionBuilder, outer: list[NestAxis], trial: list[Stmt]) -> bool:
    """Return True if reads are nearer for neighbours along the last but one grid axis than along the last one.

    This is so when pieces of rows become rows of their own, as in panels. Cache lines that two pieces share, and lines
    prefetched by hardware, are then used at once.
    """
    if len(outer) < 2:
        return False
    before, rows = (axis_of(b.anchors.space[axis.members[-1]]) for axis in outer[-2:])
    if before is None or rows is None:
        return False
    read = [x for s in walk(tuple(trial)) for x in leaves(operands(s)) if isinstance(x, Load)]
    places = [linearize(x.index, x.buffer.shape) for x in read]
    steps = [(coefficient(e, before), coefficient(e, rows)) for e in places]
    moving = [(near, far) for near, far in steps if (near, far) != (0, 0)]
    ordered = [isinstance(near, int) and isinstance(far, int) and 0 < near < far for near, far in moving]
    return bool(ordered) and all(ordered)


def _turns(b: RegionBuilder, outer: list[NestAxis], inner: list[NestAxis], trial: list[Stmt]) -> bool:
    """Return True for a transposing copy: reads are contiguous along the last grid axis, strided along the loop."""
    match trial:
        case [Store(value=Load(index=index, buffer=buffer))] if outer and len(inner) == 1:
            along, beside = (axis_of(b.anchors.space[axis.members[-1]]) for axis in (outer[-1], inner[-1]))
            at = linearize(index, buffer.shape)
            return along is not None and beside is not None and coefficient(at, along) == 1 != coefficient(at, beside)
    return False


def _equal_rows(extent: Dim) -> int:
    """Return the rows per item of a transposing copy: equal parts if there are some of half the block size or more."""
    most = TURNED_ROWS.value
    parts = (n for n in range(most, most // 2 - 1, -1) if isinstance(extent, int) and extent % n == 0)
    return next(parts, most)


def _work_of_element(b: RegionBuilder) -> Dim:
    """Return a rough count of scalar operations of one element."""
    work: Dim = max(sum(work_of(op) for op in b.function.body.ops if op.name not in FREE), 1)
    for op in b.function.body.ops:
        if op.name == "reduce_window":
            work = work * product(dims_of(op.attrs, "window"))
    return work


def _cuts(space: Index, axis: NestAxis, trial: list[Stmt]) -> list[int]:
    """Return the indices at which tests on the innermost loop change, ends included; empty if there are none."""
    if len(axis.members) != 1 or not isinstance(axis.extent, int):
        return []
    changes = _changes(space[axis.members[0]], trial)
    return [0, *changes, axis.extent] if changes and MANY_SEGMENTS.holds(len(changes) + 2) else []


def _changes(index: Dim, block: list[Stmt]) -> list[int]:
    """Return the sorted values of ``index`` within its bounds at which tests in a block change."""
    low, high = bounds(index)
    found: set[int] = set()
    for s in scalars_in(s.value for s in walk(tuple(block)) if isinstance(s, Let | Store)):
        match s:
            case Apply(fn="ge" | "lt", args=(IndexScalar(expr=left, dtype="i64"), IndexScalar(expr=right))):
                change = index - (left - right)
                if isinstance(change, int) and low is not None and high is not None and low < change <= high:
                    found.add(change)
    return sorted(found)


def _anchor_windows(b: RegionBuilder, e: Elements, at: Index) -> None:
    for op in b.function.body.ops:
        if op.name == "reduce_window":
            for v, scalar in zip(op.results, _window(b, e, op, at), strict=True):
                e.anchor(v, provide(scalar))


UNROLLED_WINDOW = Limit(
    8,
    "extent of a window dim that is unrolled",
    "a window over two dims then is at most 64 terms",
)


def _window(b: RegionBuilder, e: Elements, op: Op, at: Index) -> list[Scalar]:
    """Accumulate one window; elements in the padding are skipped, which leaves the initial value."""
    a = op.attrs
    rank = op.results[0].type.rank
    inits = [e.at(v, ()) for v in op.inits]
    accs = [Buffer(b.fresh("acc"), v.type.dtype, (), "private") for v in op.results]
    for acc, init in zip(accs, inits, strict=True):
        e.block += [Alloc(acc), Store(acc, (), init)]
    outer = e.block
    axes = [NestAxis((d,), dims_of(a, "window")[d], b.fresh("w")) for d in range(rank) if dims_of(a, "window")[d] != 1]

    def emit(block: list[Stmt], syms: list[Dim]) -> None:
        e.enter(block)
        w = {axis.members[0]: s for axis, s in zip(axes, syms, strict=True)}
        where: list[Dim] = []
        tests: list[Scalar] = []
        for d in range(rank):
            pos = at[d] * a["strides"][d] + w.get(d, 0) * a["window_dilations"][d] - pairs_of(a)[d][0]
            extent = op.operands[0].type.shape[d]
            where.append(_window_axis(pos, a["base_dilations"][d], extent, tests))
        values = [e.at(v, tuple(where)) for v in op.inputs]
        combine(b, e, op, accs, values, tests)

    serial(axes, [], emit, outer, UNROLLED_WINDOW.value)
    e.enter(outer)
    return [Load(acc, ()) for acc in accs]


def _window_axis(pos: Dim, dilation: int, extent: Dim, tests: list[Scalar]) -> Dim:
    if dilation != 1:
        tests += test_index(pos % dilation, 0, "eq")
        pos = pos // dilation
    tests += test_index(pos, 0, "ge") + test_index(pos, extent, "lt")
    return inside(pos, extent)
