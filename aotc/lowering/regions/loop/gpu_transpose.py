"""Regions of kind loop on a GPU that move the last axis: tiles pass through shared memory.

An array that is contiguous along another axis than the results is read along its own axis, tile by tile. The region is
then computed along the results' axis::

    for t in thread(0, 256): tile[c, r] = x[column + c, row + r]     # neighbouring threads: neighbouring r
    barrier()
    for t in thread(0, 256): y[row + r, column + c] = exp(tile[c, r])    # neighbouring threads: neighbouring c

A result that is contiguous along the rows is written in a third step. A row of a tile is padded by one element, so that
threads that read a column access different banks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aotc.ir.dims.algebra import Dim, product, sym
from aotc.ir.dims.symbols import substitute
from aotc.ir.loop.ir import Alloc, Apply, Barrier, Buffer, For, If, Kernel, Load, Scalar, Stmt, Store
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.tensor.ir import Value
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.elements.builder import RegionBuilder, grid_item
from aotc.lowering.elements.elements import Elements, Provide, conjunction_of_tests
from aotc.lowering.elements.nests import Emit, make_axes, substitute_loops
from aotc.lowering.elements.windows import window_element_emitter
from aotc.lowering.plans.gpu_loops import PADDED_ELEMENTS, GpuTransposePlan, contiguous_accesses, transposed_accesses
from aotc.lowering.plans.thresholds import BLOCK_THREADS


def lower_gpu_transpose(b: RegionBuilder, plan: GpuTransposePlan) -> Kernel:
    """Lower an elementwise region that transposes to tiles that pass through shared memory."""
    e = b.elements()
    grid, body = transposing_tiles_of_plan(b, e, plan, window_element_emitter(b, e))
    return b.kernel(grid, body, b.scalar_operations())


def transposing_tiles_of_plan(
    b: RegionBuilder, e: Elements, plan: GpuTransposePlan, emit: Emit
) -> tuple[Dim, tuple[Stmt, ...]]:
    """Return the grid and tile loops of a transposing GPU plan; ``emit`` adds one element's statements."""
    return _TransposedTiles(b, e, plan, emit).grid_and_loops()


class _TransposedTiles:
    """Emit the tiles of a region that transposes."""

    def __init__(self, b: RegionBuilder, e: Elements, plan: GpuTransposePlan, emit: Emit) -> None:
        """Find the accesses that are transposed, and name a tile in shared memory for each."""
        self.b, self.e, self.emit, self.plan = b, e, emit, plan
        self.merged = make_axes(b.shape, plan.axes)
        touched = contiguous_accesses(b, self.merged, emit)
        strided = transposed_accesses(touched, self.merged, plan.columns)
        moved = [key for key, k in strided.items() if k == plan.rows]
        self.loads = [(buffer, index) for buffer, index, write in moved if not write]
        self.stores = [(buffer, index) for buffer, index, write in moved if write]
        self.rows, self.columns, self.width = plan.row_edge, plan.column_edge, plan.width
        self.tiles = [
            Buffer(b.fresh("tile"), buffer.dtype, (self.columns, self.rows + PADDED_ELEMENTS), "shared")
            for buffer, _ in (*self.loads, *self.stores)
        ]
        self.thread, self.lane = b.fresh("t"), b.fresh("u")

    def grid_and_loops(self) -> tuple[Dim, tuple[Stmt, ...]]:
        """Return the grid size and the loop of a tile: read, barrier, compute, write."""
        t = self.plan
        others = [k for k in range(len(self.merged)) if k not in (t.rows, t.columns)]
        edges = [(t.rows, self.rows), (t.columns, self.columns)]
        extents = [self.merged[k].extent for k in others]
        extents += [(self.merged[k].extent + (edge - 1)) // edge for k, edge in edges]
        grid = product(extents)
        *at, row, column = delinearize(grid_item(grid), extents)
        self.at = dict(zip(others, at, strict=True))
        self.first = (row * self.rows, column * self.columns)
        block: list[Stmt] = [Alloc(tile) for tile in self.tiles]
        if self.loads:
            block += [self._thread_loop(self._read_to_shared_tile, along_rows=True), Barrier()]
        block.append(self._thread_loop(self._compute_tile_element, along_rows=False))
        if self.stores:
            block += [Barrier(), self._thread_loop(self._write_tile_element, along_rows=True)]
        return grid, (For("p", 0, grid, tuple(block), "parallel"),) if grid != 1 else tuple(block)

    # --- a step: what each thread does at (r, c) of the tile ---

    def _thread_loop(self, step: Callable[[Dim, Dim], list[Stmt]], along_rows: bool) -> Stmt:
        """Return a loop over the threads, whose lanes are neighbours along the rows or along the columns."""
        ends = [(f, edge, self.merged[k].extent) for f, edge, k in self._tile_edges()]
        tests = [
            Apply("lt", (IndexScalar(f + (edge - 1)), IndexScalar(extent)), "i1")
            for f, edge, extent in ends
            if not isinstance(extent, int) or extent % edge
        ]
        never = any(isinstance(extent, int) and extent < edge for _, edge, extent in ends)
        body: tuple[Stmt, ...] = (
            () if never else (self._loop_over_lanes(step, along_rows, self._vector_width_along(along_rows)),)
        )
        if tests:
            edge = self._loop_over_lanes(step, along_rows, 1, guarded=True)
            body = (edge,) if never else (If(conjunction_of_tests(tests), body, (edge,)),)
        return For(self.thread, 0, BLOCK_THREADS.value, body, "thread")

    def _tile_edges(self) -> list[tuple[Dim, int, int]]:
        (row, column), t = self.first, self.plan
        return [(row, self.rows, t.rows), (column, self.columns, t.columns)]

    def _vector_width_along(self, along_rows: bool) -> int:
        """Return the adjacent elements per thread: a vector if the axis consists of whole vectors, else 1."""
        axis = self.merged[self.plan.rows if along_rows else self.plan.columns]
        return self.width if isinstance(axis.extent, int) and axis.extent % self.width == 0 else 1

    def _loop_over_lanes(
        self, step: Callable[[Dim, Dim], list[Stmt]], along_rows: bool, width: int, guarded: bool = False
    ) -> Stmt:
        """Return a thread's loop of ``step(r, c)`` over tile elements, neighbours along the rows or columns.

        If ``guarded``, elements beyond the array are skipped.
        """
        threads = BLOCK_THREADS.value
        count = self.rows * self.columns // threads
        width = min(width, count)
        t, u = sym(self.thread, 0, threads), sym(self.lane, 0, count)
        flat = ((u // width) * threads + t) * width + u % width
        along = self.rows if along_rows else self.columns
        far, near = flat // along, flat % along
        r, c = (near, far) if along_rows else (far, near)
        body = tuple(step(r, c))
        if not guarded:
            return For(self.lane, 0, count, body, "lanes")
        for (first, _, k), i in zip(self._tile_edges(), (r, c), strict=True):
            body = (If(Apply("lt", (IndexScalar(first + i), IndexScalar(self.merged[k].extent)), "i1"), body),)
        return For(self.lane, 0, count, body)

    def _tile_element_index(self, r: Dim, c: Dim) -> dict[str, Dim]:
        (row, column), t = self.first, self.plan
        at = {**self.at, t.rows: row + r, t.columns: column + c}
        return {self.merged[k].name: i for k, i in at.items()}

    def _read_to_shared_tile(self, r: Dim, c: Dim) -> list[Stmt]:
        at = self._tile_element_index(r, c)
        loads = zip(self.tiles, self.loads, strict=False)
        return [Store(tile, (c, r), Load(buffer, _index_in_tile(index, at))) for tile, (buffer, index) in loads]

    def _compute_tile_element(self, r: Dim, c: Dim) -> list[Stmt]:
        """Return the statements that compute the region at tile element (r, c) from shared memory."""
        at = self._tile_element_index(r, c)
        elements: dict[Value, dict[Index, Scalar]] = {}
        values = {buffer.name: v for v, buffer in self.b.buffers.items()}
        for tile, (buffer, index) in zip(self.tiles, self.loads, strict=False):
            elements.setdefault(values[buffer.name], {})[_index_in_tile(index, at)] = Load(tile, (c, r))
        for v, of_index in elements.items():
            self.e.anchor(v, _read_from_shared_tiles(of_index))
        block: list[Stmt] = []
        self.emit(
            block, substitute_loops(self.b.anchors.space, self.b.shape, self.merged, [at[a.name] for a in self.merged])
        )
        for v in elements:
            del self.e.anchored[v]
        tiles = {buffer.name: tile for tile, (buffer, _) in self._shared_tile_of_buffers()}
        return [
            Store(tiles[s.buffer.name], (c, r), s.value) if isinstance(s, Store) and s.buffer.name in tiles else s
            for s in block
        ]

    def _shared_tile_of_buffers(self) -> list[tuple[Buffer, tuple[Buffer, Index]]]:
        return list(zip(self.tiles[len(self.loads) :], self.stores, strict=True))

    def _write_tile_element(self, r: Dim, c: Dim) -> list[Stmt]:
        """Return the stores of tile element (r, c) to the results that are transposed."""
        at = self._tile_element_index(r, c)
        return [
            Store(buffer, _index_in_tile(index, at), Load(tile, (c, r)))
            for tile, (buffer, index) in self._shared_tile_of_buffers()
        ]


def _read_from_shared_tiles(elements: Mapping[Index, Scalar]) -> Provide:
    return elements.get


def _index_in_tile(index: Index, at: Mapping[str, Dim]) -> Index:
    return tuple(substitute(i, at) for i in index)
