"""Blocks of a region that reads across its rows: reads that are strided along a row are transposed first, in scratch.

    for p in parallel(0, 64):
        for k in range(0, 64):
            turned = private("f32[16, 16]")
            for i in range(0, 16):
                for j in range(0, 16):
                    turned[i, j] = x[j + 16*k, i + 16*p]
            for i in range(0, 16):
                for j in range(0, 16):
                    out[i + 16*p, j + 16*k] = turned[i, j] + y[i + 16*p, j + 16*k]

A block has the height of a cache line of the operand, so that each line is read once. Its width is so small that the L1
cache keeps its lines even if they share a set. :mod:`aotc.kernels.emit.vector.transposes` turns the copy into a
transpose in registers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from aotc.ir.dims.algebra import Dim, Expr, Sym, sym
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.access import leaves, operands, with_scalars
from aotc.ir.loop.ir import Alloc, Apply, Buffer, For, Let, Load, Scalar, Stmt, Store, walk
from aotc.lowering.analysis.anchors import axis_of
from aotc.lowering.analysis.index_maps import linearize
from aotc.lowering.plans.resources import memory_limits
from aotc.lowering.plans.thresholds import FETCH_LINE, FEW_TURNED, TURNED_OPERANDS, TURNED_TILE
from aotc.lowering.regions.common.builder import RegionBuilder
from aotc.lowering.regions.common.nests import Emit, NestAxis, coefficient, grid_loop, place
from aotc.lowering.threshold import BlockSize
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class TurnedBlocks:
    """Blocks of ``height`` steps of ``axes[-2]``, the last axis of the grid, and ``width`` of the innermost one.

    The blocks of a tile of ``rows`` and ``columns`` follow each other; an item has ``tiles`` adjacent tiles.
    ``is_copied`` is True if operands are transposed into thread-local memory first; a region that only copies does not
    need that.
    """

    axes: tuple[NestAxis, ...]
    height: int
    width: int
    rows: int
    columns: int
    tiles: int
    is_copied: bool


TURNED_ELEMENTS = BlockSize(
    1 << 15,
    "elements per grid item of a blocked transpose, at most",
    "some microseconds of one core",
)


def turned_blocks(
    b: RegionBuilder, outer: Sequence[NestAxis], inner: Sequence[NestAxis], trial: Sequence[Stmt], is_copy: bool
) -> TurnedBlocks | None:
    """Return the blocks of a region whose element ``trial`` computes; None if it transposes nothing, or too much.

    ``is_copy`` is True for a region that copies one operand without computation.
    """
    if not outer or len(inner) != 1 or not all(isinstance(s, Let) or _is_plain_store(s) for s in trial):
        return None
    along, beside = (axis_of(b.anchors.space[axis.members[-1]]) for axis in (outer[-1], inner[-1]))
    if along is None or beside is None:
        return None
    found = {(x.buffer.name, x.index): x for x in loads_of(trial) if is_turned(x, along, beside)}
    if not found or not TURNED_OPERANDS.holds(len(found)):
        return None
    sizes = [size_of(x.buffer.dtype) for x in found.values()]
    line = FETCH_LINE.value // min(sizes)
    height, width = (_part(axis.extent, line) for axis in (outer[-1], inner[-1]))
    fits = is_copy or height * width * sum(sizes) <= memory_limits(b.target)["private"][1]
    if not height or not width or not fits:
        return None
    axes = (*outer, inner[-1])
    rows, columns = (equal_parts(axis.extent, n, TURNED_TILE.value) for axis, n in zip(axes[-2:], (height, width)))
    tiles = equal_parts(inner[-1].extent, columns, TURNED_ELEMENTS.value // rows) // columns
    return TurnedBlocks(axes, *((rows, columns) if is_copy else (height, width)), rows, columns, tiles, not is_copy)


def loops_over_blocks(b: RegionBuilder, blocks: TurnedBlocks, emit: Emit) -> tuple[Dim, tuple[Stmt, ...]]:
    """Return the grid and the loops over the blocks; ``emit(block, index)`` adds the statements of an element."""
    *outer, rows, columns = blocks.axes
    across = blocks.tiles * blocks.columns
    pieces = NestAxis(columns.members, columns.extent // across, columns.name)
    names = [b.fresh(x) for x in ("i", "j")]
    i, j = (sym(name, 0, n) for name, n in zip(names, (blocks.height, blocks.width), strict=True))

    def item(block: list[Stmt], symbols: list[Dim], begin: Dim, end: Dim) -> None:
        steps = ((blocks.columns, across), (blocks.height, blocks.rows), (blocks.width, blocks.columns))
        loops = [(b.fresh("k"), step, whole // step) for step, whole in steps]
        tile, row, column = (sym(name, 0, count) * step if count > 1 else 0 for name, step, count in loops)
        inside: list[Stmt] = []
        first = symbols[-1] * across + tile + column
        emit(inside, place(b.anchors.space, b.shape, blocks.axes, [*symbols[:-1], begin + row + i, first + j]))
        body = _turned_first(b, inside, (i, j), blocks) if blocks.is_copied else [tuple(inside)]
        nests: tuple[Stmt, ...] = tuple(s if isinstance(s, Alloc) else _nest(names, blocks, s) for s in body)
        for name, _, count in reversed(loops):
            nests = (For(name, 0, count, nests),) if count > 1 else nests
        block.extend(nests)

    return grid_loop([*outer, pieces], (rows, blocks.rows), item, 1)


def _turned_first(
    b: RegionBuilder, body: Sequence[Stmt], at: tuple[Dim, Dim], blocks: TurnedBlocks
) -> list[Alloc | tuple[Stmt, ...]]:
    """Return the allocations, the transposing copies, and ``body`` reading the copies, one entry per loop nest."""
    along, beside = (next(iter(symbols(i))) for i in at)
    copies: dict[tuple[str, tuple[Dim, ...]], Load] = {}
    made: list[Alloc | tuple[Stmt, ...]] = []
    for x in loads_of(body):
        if (x.buffer.name, x.index) not in copies and is_turned(x, along, beside):
            copy = Buffer(b.fresh("turned"), x.buffer.dtype, (blocks.height, blocks.width), "private")
            copies[x.buffer.name, x.index] = Load(copy, at)
            made += [Alloc(copy), (Store(copy, at, x),)]
    return [*made, with_scalars(tuple(body), lambda s: reading(s, copies))]


def reading(scalar: Scalar, copies: Mapping[tuple[str, tuple[Dim, ...]], Load]) -> Scalar:
    """Return ``scalar`` with loads of copies substituted for those of operands."""
    known: dict[int, Scalar] = {}

    def new(x: Scalar) -> Scalar:
        if id(x) not in known:
            match x:
                case Load(buffer=buffer, index=index):
                    known[id(x)] = copies.get((buffer.name, index), x)
                case Apply(args=args):
                    known[id(x)] = replace(x, args=tuple(map(new, args)))
                case _:
                    known[id(x)] = x
        return known[id(x)]

    return new(scalar)


def _nest(names: Sequence[str], blocks: TurnedBlocks, body: tuple[Stmt, ...]) -> For:
    return For(names[0], 0, blocks.height, (For(names[1], 0, blocks.width, body),))


def _is_plain_store(stmt: Stmt) -> bool:
    return isinstance(stmt, Store) and not stmt.reduce


def loads_of(body: Sequence[Stmt]) -> list[Load]:
    """Return every load of ``body``."""
    return [x for s in walk(tuple(body)) for x in leaves(operands(s)) if isinstance(x, Load)]


def is_turned(x: Load, along: Sym, beside: Sym) -> bool:
    """Return True if elements are contiguous along the rows, and strided along the loop."""
    at = linearize(x.index, x.buffer.shape)
    step = coefficient(at, beside)
    return coefficient(at, along) == 1 and isinstance(step, int) and step > 1


def _part(extent: Dim, line: int) -> int:
    """Return ``line`` or half of it if it divides ``extent``; 0 if neither does, or ``extent`` is unknown or short."""
    if isinstance(extent, Expr) or FEW_TURNED.holds(extent):
        return 0
    return line_of(extent, line)


def line_of(extent: int, line: int) -> int:
    """Return ``line`` or half of it if it divides ``extent``, else 0."""
    return next((n for n in (line, line // 2) if extent % n == 0), 0)


def equal_parts(extent: Dim, part: int, most: int) -> int:
    """Return the largest multiple of ``part`` up to ``most`` that divides ``extent``; else ``part``."""
    return next((n for n in range(most // part * part, part, -part) if extent % n == 0), part)
