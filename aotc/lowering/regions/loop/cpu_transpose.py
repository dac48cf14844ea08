"""Loops in blocks for regions that read across their rows: strided reads are first transposed to a small buffer.

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
from dataclasses import replace

from aotc.ir.dims.algebra import Dim, sym
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.access import with_scalars
from aotc.ir.loop.ir import Alloc, Apply, Buffer, For, Kernel, Load, Scalar, Stmt, Store
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.nests import Emit, NestAxis, grid_loop, make_axes, substitute_loops
from aotc.lowering.elements.windows import window_element_emitter
from aotc.lowering.plans.cpu_transpose import TransposedLoopPlan, is_transposed_load, loads_in_body


def lower_transposed_loops(b: RegionBuilder, plan: TransposedLoopPlan) -> Kernel:
    """Lower an elementwise region with strided reads to loops over blocks, transposed into copies first."""
    grid, body = transposed_block_loops(b, plan, window_element_emitter(b, b.elements()))
    return b.kernel(grid, body, b.scalar_operations())


def transposed_block_loops(b: RegionBuilder, blocks: TransposedLoopPlan, emit: Emit) -> tuple[Dim, tuple[Stmt, ...]]:
    """Return the grid and the loops over the blocks; ``emit(block, index)`` adds the statements of an element."""
    axes = make_axes(b.shape, blocks.axes)
    *outer, rows, columns = axes
    across = blocks.tiles * blocks.columns
    pieces = NestAxis(columns.members, columns.extent // across, columns.name)
    names = [b.fresh(x) for x in ("i", "j")]
    i, j = (sym(name, 0, n) for name, n in zip(names, (blocks.height, blocks.width), strict=True))

    def emit_item(block: list[Stmt], symbols: list[Dim], begin: Dim, end: Dim) -> None:
        """Emit one item: tiles of ``rows`` by ``columns`` elements, each in blocks of ``height`` by ``width``."""
        steps = ((blocks.columns, across), (blocks.height, blocks.rows), (blocks.width, blocks.columns))
        loops = [(b.fresh("k"), step, whole // step) for step, whole in steps]
        tile, row, column = (sym(name, 0, count) * step if count > 1 else 0 for name, step, count in loops)
        inside: list[Stmt] = []
        first = symbols[-1] * across + tile + column
        emit(inside, substitute_loops(b.anchors.space, b.shape, axes, [*symbols[:-1], begin + row + i, first + j]))
        body = _transposing_copies_and_body(b, inside, (i, j), blocks) if blocks.is_copied else [tuple(inside)]
        nests: tuple[Stmt, ...] = tuple(
            s if isinstance(s, Alloc) else _nest_of_block_loops(names, blocks, s) for s in body
        )
        for name, _, count in reversed(loops):
            nests = (For(name, 0, count, nests),) if count > 1 else nests
        block.extend(nests)

    return grid_loop([*outer, pieces], (rows, blocks.rows), emit_item, 1)


def _transposing_copies_and_body(
    b: RegionBuilder, body: Sequence[Stmt], at: tuple[Dim, Dim], blocks: TransposedLoopPlan
) -> list[Alloc | tuple[Stmt, ...]]:
    """Return the allocations, the transposing copies, and ``body`` reading the copies, one entry per loop nest."""
    along, across = (next(iter(symbols(i))) for i in at)
    copies: dict[tuple[str, tuple[Dim, ...]], Load] = {}
    parts: list[Alloc | tuple[Stmt, ...]] = []
    for x in loads_in_body(body):
        if (x.buffer.name, x.index) not in copies and is_transposed_load(x, along, across):
            copy = Buffer(b.fresh("turned"), x.buffer.dtype, (blocks.height, blocks.width), "private")
            copies[x.buffer.name, x.index] = Load(copy, at)
            parts += [Alloc(copy), (Store(copy, at, x),)]
    return [*parts, with_scalars(tuple(body), lambda s: with_loads_of_copies(s, copies))]


def with_loads_of_copies(scalar: Scalar, copies: Mapping[tuple[str, tuple[Dim, ...]], Load]) -> Scalar:
    """Return ``scalar`` with loads of copies substituted for those of operands."""
    replaced: dict[int, Scalar] = {}

    def replace_load(x: Scalar) -> Scalar:
        """Return ``x`` with loads replaced; shared subexpressions are rewritten once."""
        if id(x) not in replaced:
            match x:
                case Load(buffer=buffer, index=index):
                    replaced[id(x)] = copies.get((buffer.name, index), x)
                case Apply(args=args):
                    replaced[id(x)] = replace(x, args=tuple(map(replace_load, args)))
                case _:
                    replaced[id(x)] = x
        return replaced[id(x)]

    return replace_load(scalar)


def _nest_of_block_loops(names: Sequence[str], blocks: TransposedLoopPlan, body: tuple[Stmt, ...]) -> For:
    return For(names[0], 0, blocks.height, (For(names[1], 0, blocks.width, body),))
