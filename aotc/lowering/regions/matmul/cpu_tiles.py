"""Matmuls and convolutions with their epilogues on a CPU: register tiles over packed or in-place operands.

A grid item computes a block of row tiles times a group of column panels. Each tile is accumulated entirely in
registers. If an epilogue is fused, or the tile exceeds the result, the tile is stored to a small private buffer first,
and the epilogue reads it while it is in the L1 cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from aotc.ir.dims.algebra import Dim, Expr, maximum, minimum, product, sym
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, For, If, Kernel, Let, Load, Stmt, Store, Tile, Var
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.lowering.analysis.index_maps import Index, delinearize, linearize
from aotc.lowering.analysis.tiled_product import Levels, TiledProduct, tiled_product
from aotc.lowering.elements.builder import RegionBuilder, grid_item, store_results
from aotc.lowering.elements.elements import provide_scalar
from aotc.lowering.plans.cpu_contract import RegisterTilePlan, row_tiles


def lower_register_tiles(b: RegionBuilder, plan: RegisterTilePlan) -> Kernel:
    """Lower a matmul or convolution by register tiles."""
    p = tiled_product(b.root)
    assert p is not None
    return RegisterTiles(b, plan, p).register_tile_kernel()


class RegisterTiles:
    """Emit the grid, the panels, the tiles and the epilogue of a matmul or convolution.

    Subclasses may read the panels elsewhere than in the right operand.
    """

    def __init__(self, b: RegionBuilder, plan: RegisterTilePlan, p: TiledProduct) -> None:
        """Divide the rows into tiles, and name the copy of left rows if the plan has one."""
        self.b, self.plan, self.p, self.op = b, plan, p, b.root
        self.rows = row_tiles(p.m, plan.height, plan.tall)
        self.copy: Buffer | None = None
        self.b_inner: Dim = 0
        if plan.copied_pitch:
            self.copy = Buffer(b.fresh("rows"), p.a.type.dtype, (self.rows.max_rows, plan.copied_pitch), "private")
        self.e = b.elements()

    def register_tile_kernel(self) -> Kernel:
        """Return the kernel whose grid items compute a block of row tiles times a group of panels."""
        p, plan = self.p, self.plan
        row_blocks = (self.rows.tiles + (plan.row_block - 1)) // plan.row_block
        panel_blocks = (p.panels + (plan.panel_block - 1)) // plan.panel_block
        extents = (*p.outer, panel_blocks, row_blocks)
        grid = product(extents)
        *outer, panel_at, row_at = delinearize(grid_item(grid), extents)
        block: list[Stmt] = []
        self._loop_over_panels(block, tuple(outer), panel_at * plan.panel_block, row_at * plan.row_block)
        return self.b.grid(grid, block, product((*p.outer, p.m, p.n, p.k)) * 2)

    def _loop_over_panels(self, block: list[Stmt], outer: Index, begin: Dim, first: Dim) -> None:
        """Emit the loops over panels from ``begin`` and row tiles from ``first``, in the order of the plan."""
        plan, panels = self.plan, self.p.panels
        panel = sym("q", 0, panels) if panels != 1 else 0
        tile = sym("t", 0, self.rows.tiles) if self.rows.tiles != 1 else 0
        end, last = minimum(begin + plan.panel_block, panels), minimum(first + plan.row_block, self.rows.tiles)
        body: list[Stmt] = []
        self.emit_tile_and_epilogue(body, outer, panel, tile)
        if plan.rows_outer:
            block += _loop_unless_constant(
                "t",
                tile,
                first,
                last,
                self._copy_tile_rows(outer, tile) + _loop_unless_constant("q", panel, begin, end, body),
            )
        else:
            rows = _loop_unless_constant("t", tile, first, last, body)
            block += _loop_unless_constant(
                "q", panel, begin, end, self.panel_preparation(outer, panel, last - first) + rows
            )

    def panel_preparation(self, outer: Index, panel: Dim, tiles: Dim) -> list[Stmt]:
        """Return the statements before the ``tiles`` row tiles of a panel; none for packed panels."""
        return []

    def left_rows(self, outer: Index, start: Dim, done: Dim) -> tuple[Buffer, Dim, Dim]:
        """Return the left buffer, the first element of row ``start + done``, and the row pitch in elements."""
        own = self.copy
        if own is not None:
            return own, done * own.shape[1], own.shape[1]
        return self.b.buffers[self.p.a], self.p.a_at(outer, start + done), self.p.a_row

    def right_panel(self, outer: Index, panel: Dim) -> tuple[Buffer, Dim, Levels]:
        """Return the buffer of a panel, its first element, and the loops over terms."""
        return self.b.buffers[self.p.b], self.p.b_at(outer, panel), self.p.levels

    def columns_before_panel(self, column: Dim) -> Dim:
        """Return the number of columns of a tile before ``column``, the first one of its panel."""
        p = self.p
        return maximum(0, column + p.cols - p.n) if p.pixels and not p.is_whole else 0

    def _copy_tile_rows(self, outer: Index, tile: Dim) -> list[Stmt]:
        """Return the statements that copy the left operand's rows of a tile; none if the plan copies no rows."""
        if self.copy is None:
            return []
        start, most = self.rows.first_row(tile), self.rows.max_rows
        r, j = sym("i", 0, most), sym("j", 0, self.p.k)
        store = Store(self.copy, (r, j), Load(self.b.buffers[self.p.a], (*outer, start + r, j)))
        return [Alloc(self.copy), For("i", 0, minimum(most, self.p.m - start), (For("j", 0, self.p.k, (store,)),))]

    def emit_tile_and_epilogue(self, block: list[Stmt], outer: Index, panel: Dim, tile: Dim) -> None:
        """Emit a register tile of rows and its epilogue, shared by tiles of different heights."""
        rows, start = self.rows, self.rows.first_row(tile)
        if rows.ragged is not None:
            self._emit_full_or_partial_tile(block, outer, panel, start, rows.ragged)
        elif rows.tall == 0:
            self._tile_with_epilogue(block, outer, panel, start, rows.height)
        else:
            tall: list[Stmt] = []
            low: list[Stmt] = []
            test = Apply("lt", (IndexScalar(tile), Const(rows.tall, "i64")), "i1")
            if self.plan.own_epilogues:
                self._tile_with_epilogue(tall, outer, panel, start, rows.height + 1)
                self._tile_with_epilogue(low, outer, panel, start, rows.height)
                block.append(If(test, tuple(tall), tuple(low)))
                return
            out = self.tile_result_buffer(block, self.p.place(outer, start, panel * self.p.cols), rows.height + 1)
            self.emit_register_tile(tall, out, outer, panel, start, rows.height + 1)
            self.emit_register_tile(low, out, outer, panel, start, rows.height)
            block.append(If(test, tuple(tall), tuple(low)))
            count = rows.height + minimum(1, maximum(0, rows.tall - tile))
            self.emit_epilogue(block, out, outer, start, panel, count, rows.height + 1)

    def _tile_with_epilogue(
        self, block: list[Stmt], outer: Index, panel: Dim, start: Dim, height: int, done: Dim = 0
    ) -> None:
        """Emit the tile of ``height`` rows from row ``start + done`` on, and the epilogue of these rows."""
        out = self.tile_result_buffer(block, self.p.place(outer, start + done, panel * self.p.cols), height)
        self.emit_register_tile(block, out, outer, panel, start, height, done)
        self.emit_epilogue(block, out, outer, start + done, panel, height, height)

    def _emit_full_or_partial_tile(self, block: list[Stmt], outer: Index, panel: Dim, start: Dim, m: Dim) -> None:
        """Emit a full tile, or the remaining rows by smaller tiles."""
        full: list[Stmt] = []
        index = self.p.place(outer, start, panel * self.p.cols)
        out = None if self.plan.own_epilogues else self.tile_result_buffer(block, index, self.rows.height)
        if self.plan.own_epilogues:
            self._tile_with_epilogue(full, outer, panel, start, self.rows.height)
        else:
            self.emit_register_tile(full, out, outer, panel, start, self.rows.height)
        left = self.e.names("left")
        rest: list[Stmt] = [Let(Var(left, "i64"), IndexScalar(m - start))]
        self.emit_remaining_rows(rest, out, outer, panel, start, sym(left, 0, self.rows.height))
        test = Apply("ge", (IndexScalar(m - start), Const(self.rows.height, "i64")), "i1")
        block.append(If(test, tuple(full), tuple(rest)))
        self.emit_epilogue(block, out, outer, start, panel, minimum(self.rows.height, m - start), self.rows.height)

    def emit_remaining_rows(
        self, rest: list[Stmt], out: Buffer | None, outer: Index, panel: Dim, start: Dim, remaining: Dim
    ) -> None:
        """Emit the ``remaining`` rows after the last full tile by tiles of powers of two, the largest first."""
        height = 1 << (self.rows.height - 1).bit_length() - 1 if self.rows.height > 1 else 1
        while height:
            part: list[Stmt] = []
            done = (remaining // (2 * height)) * (2 * height)
            if self.plan.own_epilogues:
                self._tile_with_epilogue(part, outer, panel, start, height, done)
            else:
                self.emit_register_tile(part, out, outer, panel, start, height, done)
            rest.append(If(Apply("eq", (IndexScalar((remaining // height) % 2), Const(1, "i64")), "i1"), tuple(part)))
            height //= 2

    def tile_result_buffer(self, block: list[Stmt], index: Index, height: int) -> Buffer | None:
        """Return the buffer of tiles of at most ``height`` rows before the epilogue; None if tiles go to the result.

        ``index`` is that of their first element in the result.
        """
        if self.plan.is_direct:
            return None
        out = Buffer(self.b.fresh("tile"), self.p.form.out, (height, self.p.cols), "private")
        block.append(Alloc(out))
        return out

    def emit_register_tile(
        self, block: list[Stmt], out: Buffer | None, outer: Index, panel: Dim, start: Dim, height: int, done: Dim = 0
    ) -> None:
        """Emit one register tile of ``height`` rows from row ``start + done`` on."""
        p = self.p
        rows = self.left_rows(outer, start, done)
        place = self.tile_position(out, p.place(outer, start + done, panel * p.cols), done)
        block.append(
            Tile(
                height, p.cols, *place, *rows, *self.right_panel(outer, panel), p.form,
                a_inner=p.a_inner if p.form.group > 1 else 1, b_inner=self.b_inner,
            )
        )  # fmt: skip

    def tile_position(self, out: Buffer | None, index: Index, done: Dim) -> tuple[Buffer, Dim, Dim]:
        """Return the buffer of a tile, its first element, and its row pitch in elements.

        ``index`` is that of the tile in the result, ``done`` the number of rows before it in a buffer of several tiles.
        """
        if out is None:
            shape = self.op.result.type.shape
            return self.b.outputs[0], linearize(index, shape), shape[-1]
        return out, 0 if self.plan.own_epilogues else done * self.p.cols, self.p.cols

    def emit_epilogue(
        self, block: list[Stmt], tile: Buffer | None, outer: Index, start: Dim, panel: Dim, count: Dim, most: int
    ) -> None:
        """Emit the epilogue of ``count`` rows (at most ``most``), unless the tile was stored to the result directly."""
        if tile is None:
            return
        p = self.p
        column = panel * p.cols
        r = sym("r", 0, most) if most > 1 else 0
        width: Dim = p.cols if p.is_whole else minimum(p.cols, p.n - column)
        c = sym("c", 0, p.cols)
        inner: list[Stmt] = []
        self.e.anchored.clear()
        self.e.enter(inner)
        self.e.anchor(self.op.result, provide_scalar(Load(tile, (r, c + self.columns_before_panel(column)))))
        store_results(self.b, self.e, p.place(outer, start + r, column + c))
        block.append(self._tile_store_loops(inner, count, width, most))

    def _tile_store_loops(self, inner: Sequence[Stmt], rows: Dim, columns: Dim, most: int) -> For:
        """Return the loops that store ``rows`` (at most ``most``) by ``columns`` of a tile in the order of the plan."""
        if most == 1:
            return For("c", 0, columns, tuple(inner))
        if self.plan.by_columns:
            return For("c", 0, columns, (For("r", 0, rows, tuple(inner)),))
        return For("r", 0, rows, (For("c", 0, columns, tuple(inner)),))


def _loop_unless_constant(name: str, at: Dim, start: Dim, stop: Dim, body: list[Stmt]) -> list[Stmt]:
    """Return a loop for ``at``, or its body if ``at`` is a constant."""
    return [For(name, start, stop, tuple(body))] if isinstance(at, Expr) else body
