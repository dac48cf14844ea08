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
from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, Sym, product, sym
from aotc.ir.dims.symbols import substitute, symbols
from aotc.ir.loop.access import Access, accesses
from aotc.ir.loop.ir import Alloc, Apply, Barrier, Buffer, For, If, Let, Load, Scalar, Stmt, Store
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.loop.scratch import bytes_of_all
from aotc.ir.tensor.ir import Value
from aotc.lowering.analysis.index_maps import Index, delinearize, linearize
from aotc.lowering.elements.builder import RegionBuilder, grid_item
from aotc.lowering.elements.elements import Elements, Provide, all_of
from aotc.lowering.elements.nests import Emit, NestAxis, coefficient, place
from aotc.lowering.plans.thresholds import BLOCK_THREADS, LANE_BYTES, LANE_ELEMENTS
from aotc.lowering.threshold import BlockSize, Limit
from aotc.vmfb.dtypes import size_of

_PAD = 1


def tiles_over(
    b: RegionBuilder, e: Elements, merged: list[NestAxis], emit: Emit
) -> tuple[Dim, tuple[Stmt, ...]] | None:
    """Return the grid and the loops of a region that moves the last axis, or None if a tile is not worth it."""
    block: list[Stmt] = []
    emit(block, place(b.anchors.space, b.shape, merged, [a.symbol() for a in merged]))
    found = _turned(merged, block)
    if found is None:
        return None
    tiles = _TurnedTiles(b, e, merged, emit, found)
    return tiles.loops() if tiles.bytes <= b.target.shared else None


@dataclass(frozen=True, slots=True)
class _Turned:
    """The axes of a tile, and the accesses that go through shared memory.

    Attributes
    ----------
    rows, columns : int
        The axis along which the transposed arrays are contiguous, and that of the other arrays.
    loads : tuple of (Buffer, Index)
        Reads along the rows.
    stores : tuple of (Buffer, Index)
        Writes along the rows.
    """

    rows: int
    columns: int
    loads: tuple[tuple[Buffer, Index], ...]
    stores: tuple[tuple[Buffer, Index], ...]


TURNED_EXTENT = Limit(
    15,
    "extent of an axis that is too short for tiles in shared memory",
    "the cache keeps the lines that so few rows read",
)


def _turned(merged: list[NestAxis], block: list[Stmt]) -> _Turned | None:
    lets = {s.var.name for s in block if isinstance(s, Let)}
    names = [Sym(a.name, 0, a.extent) for a in merged]
    touched: dict[tuple[Buffer, Index, bool], int | None] = {}
    for a in accesses(tuple(block)):
        if a.buffer.space == "global" and a.index is not None:
            touched[a.buffer, a.index, a.write] = _axis_of(a, names, lets)
    columns = next((k for (_, _, write), k in touched.items() if write and k is not None), None)
    if columns is None:
        return None
    apart = {key: k for key, k in touched.items() if k not in (None, columns) and _steps(key, names[columns])}
    rows = next(iter(apart.values()), None)
    if rows is None:
        return None
    moved = [key for key, k in apart.items() if k == rows]
    if any(TURNED_EXTENT.holds(merged[k].extent) for k in (rows, columns)):
        return None
    loads = tuple((buffer, index) for buffer, index, write in moved if not write)
    return _Turned(rows, columns, loads, tuple((buffer, index) for buffer, index, write in moved if write))


def _steps(touched: tuple[Buffer, Index, bool], axis: Sym) -> bool:
    """Return True if the access moves along the axis."""
    buffer, index, _ = touched
    return coefficient(linearize(index, buffer.shape), axis) != 0


def _axis_of(a: Access, names: list[Sym], lets: set[str]) -> int | None:
    """Return the axis along which the access is contiguous, or None."""
    assert a.index is not None
    flat = linearize(a.index, a.buffer.shape)
    if not lets.isdisjoint(s.name for s in symbols(flat)):
        return None
    return next((k for k, name in enumerate(names) if coefficient(flat, name) == 1), None)


class _TurnedTiles:
    """Emitter of the tiles of a region."""

    def __init__(self, b: RegionBuilder, e: Elements, merged: list[NestAxis], emit: Emit, turned: _Turned) -> None:
        self.b, self.e, self.merged, self.emit, self.turned = b, e, merged, emit, turned
        through = (*turned.loads, *turned.stores)
        size = max(size_of(buffer.dtype) for buffer, _ in through)
        self.rows, self.columns = (_edge(merged[k].extent, size) for k in (turned.rows, turned.columns))
        self.tiles = [
            Buffer(b.fresh("tile"), buffer.dtype, (self.columns, self.rows + _PAD), "shared") for buffer, _ in through
        ]
        self.bytes = bytes_of_all(self.tiles)
        self.width = min(LANE_ELEMENTS.value, max(LANE_BYTES.value // size, 1))
        self.thread, self.lane = b.fresh("t"), b.fresh("u")

    def loops(self) -> tuple[Dim, tuple[Stmt, ...]]:
        """Return the grid size and its loop."""
        t = self.turned
        others = [k for k in range(len(self.merged)) if k not in (t.rows, t.columns)]
        edges = [(t.rows, self.rows), (t.columns, self.columns)]
        extents = [self.merged[k].extent for k in others]
        extents += [(self.merged[k].extent + (edge - 1)) // edge for k, edge in edges]
        grid = product(extents)
        *at, row, column = delinearize(grid_item(grid), extents)
        self.at = dict(zip(others, at, strict=True))
        self.first = (row * self.rows, column * self.columns)
        block: list[Stmt] = [Alloc(tile) for tile in self.tiles]
        if t.loads:
            block += [self._threads(self._read, along_rows=True), Barrier()]
        block.append(self._threads(self._compute, along_rows=False))
        if t.stores:
            block += [Barrier(), self._threads(self._write, along_rows=True)]
        return grid, (For("p", 0, grid, tuple(block), "parallel"),) if grid != 1 else tuple(block)

    # --- a step: what each thread does at (r, c) of the tile ---

    def _threads(self, step: Callable[[Dim, Dim], list[Stmt]], along_rows: bool) -> Stmt:
        """Return a loop over the threads, whose lanes are neighbours along the rows or along the columns."""
        ends = [(f, edge, self.merged[k].extent) for f, edge, k in self._edges()]
        tests = [
            Apply("lt", (IndexScalar(f + (edge - 1)), IndexScalar(extent)), "i1")
            for f, edge, extent in ends
            if not isinstance(extent, int) or extent % edge
        ]
        never = any(isinstance(extent, int) and extent < edge for _, edge, extent in ends)
        body: tuple[Stmt, ...] = () if never else (self._lanes(step, along_rows, self._width(along_rows)),)
        if tests:
            edge = self._lanes(step, along_rows, 1, guarded=True)
            body = (edge,) if never else (If(all_of(tests), body, (edge,)),)
        return For(self.thread, 0, BLOCK_THREADS.value, body, "thread")

    def _edges(self) -> list[tuple[Dim, int, int]]:
        (row, column), t = self.first, self.turned
        return [(row, self.rows, t.rows), (column, self.columns, t.columns)]

    def _width(self, along_rows: bool) -> int:
        """Return the adjacent elements per thread: a vector if the axis consists of whole vectors, else 1."""
        axis = self.merged[self.turned.rows if along_rows else self.turned.columns]
        return self.width if isinstance(axis.extent, int) and axis.extent % self.width == 0 else 1

    def _lanes(
        self, step: Callable[[Dim, Dim], list[Stmt]], along_rows: bool, width: int, guarded: bool = False
    ) -> Stmt:
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
        for (first, _, k), i in zip(self._edges(), (r, c), strict=True):
            body = (If(Apply("lt", (IndexScalar(first + i), IndexScalar(self.merged[k].extent)), "i1"), body),)
        return For(self.lane, 0, count, body)

    def _places(self, r: Dim, c: Dim) -> dict[str, Dim]:
        (row, column), t = self.first, self.turned
        at = {**self.at, t.rows: row + r, t.columns: column + c}
        return {self.merged[k].name: i for k, i in at.items()}

    def _read(self, r: Dim, c: Dim) -> list[Stmt]:
        at = self._places(r, c)
        loads = zip(self.tiles, self.turned.loads, strict=False)
        return [Store(tile, (c, r), Load(buffer, _moved(index, at))) for tile, (buffer, index) in loads]

    def _compute(self, r: Dim, c: Dim) -> list[Stmt]:
        at = self._places(r, c)
        held: dict[Value, dict[Index, Scalar]] = {}
        values = {buffer.name: v for v, buffer in self.b.buffers.items()}
        for tile, (buffer, index) in zip(self.tiles, self.turned.loads, strict=False):
            held.setdefault(values[buffer.name], {})[_moved(index, at)] = Load(tile, (c, r))
        for v, known in held.items():
            self.e.anchor(v, _known(known))
        block: list[Stmt] = []
        self.emit(block, place(self.b.anchors.space, self.b.shape, self.merged, [at[a.name] for a in self.merged]))
        for v in held:
            del self.e.anchored[v]
        kept = {buffer.name: tile for tile, (buffer, _) in self._kept()}
        return [
            Store(kept[s.buffer.name], (c, r), s.value) if isinstance(s, Store) and s.buffer.name in kept else s
            for s in block
        ]

    def _kept(self) -> list[tuple[Buffer, tuple[Buffer, Index]]]:
        return list(zip(self.tiles[len(self.turned.loads) :], self.turned.stores, strict=True))

    def _write(self, r: Dim, c: Dim) -> list[Stmt]:
        at = self._places(r, c)
        return [Store(buffer, _moved(index, at), Load(tile, (c, r))) for tile, (buffer, index) in self._kept()]


def _known(known: Mapping[Index, Scalar]) -> Provide:
    return known.get


def _moved(index: Index, at: Mapping[str, Dim]) -> Index:
    return tuple(substitute(i, at) for i in index)


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


def _edge(extent: Dim, size: int) -> int:
    """Return the edge of a tile along an axis: a power of two, not longer than the axis needs."""
    most = TURNED_EDGE.value
    while most * most * size > TURNED_BYTES.value:
        most //= 2
    while isinstance(extent, int) and most // 2 >= extent:
        most //= 2
    return most
