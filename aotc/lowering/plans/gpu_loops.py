"""Plan the loops over the elements of a region on a GPU: elements per thread, or tiles through shared memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, Expr, Sym, mod, product, sym
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.access import Access, accesses
from aotc.ir.loop.ir import Buffer, Let, Stmt, Store
from aotc.ir.loop.scratch import shared_array_bytes
from aotc.lowering.analysis.index_maps import Index, delinearize, linearize
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.nests import Emit, NestAxis, axis_coefficient, make_axes, merged_loops, substitute_loops
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.plans.thresholds import LANE_BYTES, LANE_THREADS
from aotc.lowering.threshold import BlockSize, Limit
from aotc.vmfb.dtypes import size_of

Touched = tuple[Buffer, Index, bool]  # an access to global memory: array, index, is it a write?


@dataclass(frozen=True, slots=True)
class ThreadLoopPlan(RegionPlan):
    """Plan in which each thread computes one element, or several.

    Attributes
    ----------
    axes : tuple of tuple of int
        The axes of each loop; empty for a region with one element.
    lanes : int
        Elements of a thread.
    order : str
        The elements of a thread: ``neighbours`` along the last axis, ``outermost`` (at a distance along the first axis
            only), or ``apart`` (at a distance of the number of threads).
    """

    axes: tuple[tuple[int, ...], ...]
    lanes: int = 1
    order: str = "neighbours"


@dataclass(frozen=True, slots=True)
class GpuTransposePlan(RegionPlan):
    """Plan for arrays that are contiguous along another axis than the results: tiles pass through shared memory.

    Attributes
    ----------
    axes : tuple of tuple of int
        The axes of each loop.
    rows, columns : int
        Numbers of the loops along which the transposed arrays are contiguous, and the others.
    row_edge, column_edge : int
        Elements of a tile along the loops ``rows`` and ``columns``.
    width : int
        Adjacent elements of a thread, where an axis consists of whole vectors.
    """

    axes: tuple[tuple[int, ...], ...]
    rows: int
    columns: int
    row_edge: int
    column_edge: int
    width: int


def plan_gpu_loops(b: RegionBuilder, emit: Emit) -> ThreadLoopPlan | GpuTransposePlan:
    """Return the loops of a region for a GPU; ``emit(block, index)`` adds the statements of one element."""
    trial: list[Stmt] = []
    emit(trial, b.anchors.space)
    groups = merged_loops(b.anchors.space, b.shape, trial)
    if not groups or not _has_flat_statements(trial):
        return ThreadLoopPlan(groups)
    merged = make_axes(b.shape, groups)
    tiles = _plan_transposing_tiles(b, merged, emit)
    if tiles is not None:
        return tiles
    count = _elements_per_thread(product(a.extent for a in merged), trial)
    return ThreadLoopPlan(groups, count, _thread_order_of_axes(b, merged, emit, count) if count > 1 else "neighbours")


LANE_ELEMENTS = BlockSize(
    4,
    "independent elements per GPU thread, at least, while enough threads remain; at most in a transpose",
    "on an H200, a copy with one scalar per thread reaches 2770 GB/s, with four 4285 GB/s",
)
LANE_STATEMENTS = Limit(
    512,
    "statements of a thread that computes several elements",
    "bounds registers and compile time",
)


def _elements_per_thread(elements: Dim, body: Sequence[Stmt]) -> int:
    """Return the elements per thread: enough to fill a vector, few enough to keep a GPU busy."""
    sizes = [size_of(a.buffer.dtype) for a in accesses(tuple(body)) if a.buffer.space == "global"]
    count = max(LANE_BYTES.value // max(sizes, default=1), LANE_ELEMENTS.value)
    while count > 1 and not (
        LANE_STATEMENTS.holds(count * len(body))
        and (not isinstance(elements, int) or not LANE_THREADS.holds(elements // count))
    ):
        count //= 2
    return count


def _has_flat_statements(body: Sequence[Stmt]) -> bool:
    return all(isinstance(s, Let | Store) for s in body)


# --- which element is that of lane u? ---


def lane_to_element_indices(
    order: str, thread: Dim, extents: Sequence[Dim], lanes: int, items: Dim
) -> Callable[[Dim], Index]:
    """Return the function from a lane of a thread to the indices of its element."""
    match order:
        case "neighbours":
            return lambda u: delinearize(thread * lanes + u, extents)
        case "outermost":  # elements that differ along the first axis only; the other indices are the same in all lanes
            first = extents[0] // lanes
            at = delinearize(thread, [first, *extents[1:]])
            return lambda u: (at[0] + u * first, *at[1:])
        case _:
            return lambda u: delinearize(thread + u * items, extents)


def _thread_order_of_axes(b: RegionBuilder, merged: Sequence[NestAxis], emit: Emit, lanes: int) -> str:
    """Return the order of a thread's elements: ``neighbours`` for vector accesses, else ``outermost`` or ``apart``."""
    extents = [a.extent for a in merged]
    items = -(-product(extents) // lanes)
    lane = sym("u", 0, lanes)
    body: list[Stmt] = []
    at = lane_to_element_indices("neighbours", sym("p", 0, items), extents, lanes, items)(lane)
    emit(body, substitute_loops(b.anchors.space, b.shape, merged, at))
    if _are_vector_accesses(body, lane, lanes):
        return "neighbours"
    return "outermost" if mod(extents[0], lanes) == 0 else "apart"


def _are_vector_accesses(body: Sequence[Stmt], u: Dim, lanes: int) -> bool:
    """Return True if a thread's lanes access adjacent, aligned elements of every array (vector accesses)."""
    ((((lane,), _),),) = (u.terms,)  # type: ignore[union-attr]
    assert isinstance(lane, Sym)
    for a in accesses(tuple(body)):
        if a.buffer.space != "global" or a.index is None:
            continue
        flat = linearize(a.index, a.buffer.shape)
        step = axis_coefficient(flat, lane)
        if step != 0 and (step != 1 or not is_multiple_index(flat - u, lanes)):
            return False
    return True


def is_multiple_index(flat: Dim, of: int) -> bool:
    """Return True if each term of ``flat`` is a multiple of ``of``."""
    if isinstance(flat, Expr):
        return flat.const % of == 0 and all(c % of == 0 for _, c in flat.terms)
    return flat % of == 0


# --- tiles in shared memory ---

PADDED_ELEMENTS = 1
"""Elements by which a row of a tile is longer, so that threads that read a column access different banks."""

TURNED_EXTENT = Limit(
    15,
    "extent of an axis that is too short for tiles in shared memory",
    "the cache keeps the lines that so few rows read",
)


def _plan_transposing_tiles(b: RegionBuilder, merged: list[NestAxis], emit: Emit) -> GpuTransposePlan | None:
    """Return the tiles of a region that moves the last axis, or None if they are not worth it."""
    touched = contiguous_accesses(b, merged, emit)
    columns = next((k for (_, _, write), k in touched.items() if write and k is not None), None)
    if columns is None:
        return None
    strided = transposed_accesses(touched, merged, columns)
    rows = next(iter(strided.values()), None)
    if rows is None or any(TURNED_EXTENT.holds(merged[k].extent) for k in (rows, columns)):
        return None
    sizes = [size_of(buffer.dtype) for (buffer, _, _), k in strided.items() if k == rows]
    row_edge, column_edge = (_tile_edge(merged[k].extent, max(sizes)) for k in (rows, columns))
    tile = column_edge * (row_edge + PADDED_ELEMENTS)
    if sum(shared_array_bytes(tile * size) for size in sizes) > b.target.shared:
        return None
    width = min(LANE_ELEMENTS.value, max(LANE_BYTES.value // max(sizes), 1))
    return GpuTransposePlan(tuple(a.members for a in merged), rows, columns, row_edge, column_edge, width)


def contiguous_accesses(b: RegionBuilder, merged: Sequence[NestAxis], emit: Emit) -> dict[Touched, int | None]:
    """Return the accesses of an element to global memory, with the loop along which each is contiguous, or None."""
    block: list[Stmt] = []
    emit(block, substitute_loops(b.anchors.space, b.shape, merged, [a.symbol() for a in merged]))
    lets = {s.var.name for s in block if isinstance(s, Let)}
    names = [Sym(a.name, 0, a.extent) for a in merged]
    touched: dict[Touched, int | None] = {}
    for a in accesses(tuple(block)):
        if a.buffer.space == "global" and a.index is not None:
            touched[a.buffer, a.index, a.write] = _contiguous_axis_of_access(a, names, lets)
    return touched


def transposed_accesses(
    touched: Mapping[Touched, int | None], merged: Sequence[NestAxis], columns: int
) -> dict[Touched, int]:
    """Return the accesses that vary along the loop ``columns``, and the other loop along which each is contiguous."""
    axis = Sym(merged[columns].name, 0, merged[columns].extent)
    return {key: k for key, k in touched.items() if k is not None and k != columns and _varies_along_axis(key, axis)}


def _varies_along_axis(touched: Touched, axis: Sym) -> bool:
    """Return True if the accessed element varies along the axis."""
    buffer, index, _ = touched
    return axis_coefficient(linearize(index, buffer.shape), axis) != 0


def _contiguous_axis_of_access(a: Access, names: list[Sym], lets: set[str]) -> int | None:
    """Return the axis along which the access is contiguous, or None."""
    assert a.index is not None
    flat = linearize(a.index, a.buffer.shape)
    if not lets.isdisjoint(s.name for s in symbols(flat)):
        return None
    return next((k for k, name in enumerate(names) if axis_coefficient(flat, name) == 1), None)


TURNED_EDGE = BlockSize(
    64,
    "elements of an edge of a tile transposed in shared memory, at most",
    "NVIDIA H200: 64 with vector accesses reach 93 % of the speed of a copy, 32 without them 85 %",
)
TURNED_BYTES = BlockSize(
    16 << 10,
    "bytes of a tile transposed in shared memory, at most",
    "three or more blocks of 256 threads fit a multiprocessor",
)


def _tile_edge(extent: Dim, size: int) -> int:
    """Return the edge of a tile along an axis of ``extent`` elements: a power of two, at most ``size``."""
    most = TURNED_EDGE.value
    while most * most * size > TURNED_BYTES.value:
        most //= 2
    while isinstance(extent, int) and most // 2 >= extent:
        most //= 2
    return most
