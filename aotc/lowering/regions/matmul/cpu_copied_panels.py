"""Matmuls of sizes that only a call knows, on a CPU: each grid item copies the panels of the right operand it reads.

The rows of a panel are then contiguous, whatever the columns of the matrix, and a panel that several row tiles read
stays in the second-level cache. This is the packing of K. Goto and R. van de Geijn, "Anatomy of high-performance matrix
multiplication" (2008), within the loop over panels::

    for q in range(p // 4, ...):
        panel0 = scratch("f32[k, 32]")
        copies3 = ((tiles > 2) & (k*n > 65536)) | (n < 32)
        if copies3:
            for s in range(0, k):
                for c in range(0, 32):
                    panel0[s, c] = a1[s, c + min(32*q, n - 32)]
        right1 = either(copies3, panel0[0, 0], a1[0, min(32*q, n - 32)])
        pitch2 = let(select(copies3, 32, n))
        for t in ...:
            tile(tile4, a0, right1, levels=[(k, 1, pitch2)])

The last panel begins at ``n - 32``, so that whole vectors are read: its first columns belong to the panel before it,
and the epilogue drops them. The terms of an element are added in the same order as over packed panels.

Strides are arguments of the tile functions, so that copies and matrices in place share them.
"""

from __future__ import annotations

from functools import reduce

from aotc.ir.dims.algebra import Dim, maximum, minimum, sym
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, Either, For, If, Kernel, Let, Load, Scalar, Stmt, Store, Var
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.analysis.tiled_product import Levels, TiledProduct, tiled_product
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.cpu_contract import CopiedPanelPlan
from aotc.lowering.regions.matmul.cpu_tiles import RegisterTiles

FEW_ROWS = 3
"""Rows of a tile for the remainder of fewer than half a tile; a fraction of the time of a full one."""


def lower_copied_panels(b: RegionBuilder, plan: CopiedPanelPlan) -> Kernel:
    """Lower a matmul by register tiles over copied panels."""
    p = tiled_product(b.root)
    assert p is not None
    return CopiedPanels(b, plan, p).register_tile_kernel()


class CopiedPanels(RegisterTiles):
    """Emit register tiles over copied panels."""

    def __init__(self, b: RegionBuilder, plan: CopiedPanelPlan, p: TiledProduct) -> None:
        """Name the buffers and variables of a kernel, all of them local to a grid item.

        ``panel`` is the copy of a panel; ``operand`` is the copy or the matrix, with a row pitch of ``pitch`` elements;
        ``copies`` is True if the panel is copied. ``terms`` is k rounded up to whole groups. ``padded`` is a copy of
        left rows with zeros behind the last term, ``incomplete`` is True if the last group has fewer terms.
        ``exceeds`` is True if a panel has columns beyond the result: its tiles then go to a buffer, ``target`` is the
        buffer or the result, and ``row`` its row pitch.
        """
        super().__init__(b, plan, p)
        self.sizes, group = plan, p.form.group
        self.terms = (p.k + (group - 1)) // group * group
        self.panel = Buffer(b.fresh("panel"), p.b.type.dtype, (self.terms, p.cols), "scratch")
        self.operand = Buffer(b.fresh("right"), p.b.type.dtype, (self.terms, maximum(p.n, p.cols)), "scratch")
        self.pitch, self.copies = b.fresh("pitch"), Var(b.fresh("copies"), "i1")
        self.b_inner = sym(self.pitch, 1) if group > 1 else 0
        left = p.a.type.dtype, (self.rows.max_rows, self.terms)
        self.padded, self.lefts = (Buffer(b.fresh(name), *left, "scratch") for name in ("padded", "left"))
        self.incomplete, self.shares = (Var(b.fresh(name), "i1") for name in ("incomplete", "shares"))
        self.target = Buffer(b.fresh("target"), p.form.out, (self.rows.max_rows, maximum(p.n, p.cols)), "scratch")
        self.exceeds, self.row = Var(b.fresh("exceeds"), "i1"), b.fresh("row")

    def first_panel_column(self, column: Dim) -> Dim:
        """Return the first column that a panel is read from."""
        return column if self.p.is_whole else maximum(0, minimum(column, self.p.n - self.p.cols))

    def columns_before_panel(self, column: Dim) -> Dim:
        """Return the number of columns of a tile before ``column``, the first one of its panel."""
        return column - self.first_panel_column(column)

    def right_panel(self, outer: Index, panel: Dim) -> tuple[Buffer, Dim, Levels]:
        """Return the buffer of a panel, its first element, and the loops over terms."""
        ((terms, a_step, _),) = self.p.levels
        return self.operand, 0, ((terms, a_step, self.p.form.group * sym(self.pitch, 1)),)

    def panel_preparation(self, outer: Index, panel: Dim, tiles: Dim) -> list[Stmt]:
        """Return the copy of a panel, if enough row tiles read it, and the selection of the copy or the matrix."""
        p, matrix = self.p, self.b.buffers[self.p.b]
        start = self.first_panel_column(panel * p.cols)
        many = Apply("gt", (IndexScalar(tiles), Const(self.sizes.in_place_tiles, "i64")), "i1")
        far = Apply("gt", (IndexScalar(p.k * p.n), Const(self.sizes.in_place_elements, "i64")), "i1")
        tests: list[Scalar] = [Apply("and", (many, far), "i1")]
        if not isinstance(p.n, int) or p.n < p.cols:
            tests.append(Apply("lt", (IndexScalar(p.n), Const(p.cols, "i64")), "i1"))
        if self.terms != p.k:
            tests.append(self.incomplete)
        pitch = Apply("select", (self.copies, Const(p.cols, "i64"), IndexScalar(p.n)), "i64")
        return [
            *self._columns_beyond_result(panel * p.cols),
            *self._row_tests(),
            Alloc(self.panel),
            Let(self.copies, reduce(lambda one, other: Apply("or", (one, other), "i1"), tests)),
            If(self.copies, self._copy_panel(matrix, outer, start)),
            Either(self.operand, self.copies, ((self.panel, (0, 0)), (matrix, (*outer, 0, start)))),
            Let(Var(self.pitch, "i64"), pitch),
        ]

    def _columns_beyond_result(self, column: Dim) -> list[Stmt]:
        """Return the test of a panel for columns beyond the result, and the row pitch of its tiles."""
        if not self.sizes.direct_panels:
            return []
        p = self.p
        exceeds = Apply("gt", (IndexScalar(column + p.cols), IndexScalar(p.n)), "i1")
        row = Apply("select", (self.exceeds, Const(p.cols, "i64"), IndexScalar(p.n)), "i64")
        return [Let(self.exceeds, exceeds), Let(Var(self.row, "i64"), row)]

    def tile_result_buffer(self, block: list[Stmt], index: Index, height: int) -> Buffer | None:
        """Return the buffer of tiles: the result at ``index``, or private memory if the panel exceeds the result."""
        out = super().tile_result_buffer(block, index, height)
        if out is not None and self.sizes.direct_panels:
            block.append(Either(self.target, self.exceeds, ((out, (0, 0)), (self.b.outputs[0], index))))
        return out

    def tile_position(self, out: Buffer | None, index: Index, done: Dim) -> tuple[Buffer, Dim, Dim]:
        """Return the buffer of a tile, its first element, and its row pitch in elements."""
        if out is None or not self.sizes.direct_panels:
            return super().tile_position(out, index, done)
        row = sym(self.row, 1)
        return self.target, done * row, row

    def emit_epilogue(
        self, block: list[Stmt], tile: Buffer | None, outer: Index, start: Dim, panel: Dim, count: Dim, most: int
    ) -> None:
        """Emit the epilogue of ``count`` rows, unless the tile was stored to the result directly."""
        stores: list[Stmt] = []
        super().emit_epilogue(stores, tile, outer, start, panel, count, most)
        if stores:
            block += [If(self.exceeds, tuple(stores))] if self.sizes.direct_panels else stores

    def _copy_panel(self, matrix: Buffer, outer: Index, start: Dim) -> tuple[Stmt, ...]:
        """Return the copy of a panel; rows after the end of the matrix are 0."""
        p = self.p
        s, c = sym("s", 0, self.terms), sym("c", 0, p.cols)
        store = Store(self.panel, (s, c), Load(matrix, (*outer, s, start + c)))
        copy = For("s", 0, p.k, (For("c", 0, minimum(p.cols, p.n), (store,)),))
        zero = Store(self.panel, (s, c), Const(0.0, self.panel.dtype))
        rest = (For("s", p.k, self.terms, (For("c", 0, p.cols, (zero,)),)),) if self.terms != p.k else ()
        return copy, *rest

    # --- rows of the left operand ---

    def _row_tests(self) -> list[Stmt]:
        """Return statements that test for an incomplete group of terms, and for rows that share cache sets."""
        p = self.p
        stmts: list[Stmt] = []
        if self.sizes.shared_sets:
            shared = Apply("eq", (IndexScalar(p.a_row % self.sizes.shared_sets), Const(0, "i64")), "i1")
            stmts.append(Let(self.shares, shared))
        if self.terms != p.k:
            incomplete = Apply("ne", (IndexScalar(self.terms), IndexScalar(p.k)), "i1")
            stmts += [Let(self.incomplete, incomplete), Alloc(self.padded)]
        return stmts

    def emit_tile_and_epilogue(self, block: list[Stmt], outer: Index, panel: Dim, tile: Dim) -> None:
        """Emit a register tile of rows and its epilogue; rows with an incomplete group of terms are copied."""
        p, first = self.p, self.rows.first_row(tile)
        if self.terms != p.k:
            matrix = self.b.buffers[p.a]
            r, s = sym("r", 0, self.rows.max_rows), sym("s", 0, self.terms)
            copy = Store(self.padded, (r, s), Load(matrix, (*outer, first + r, s)))
            zero = Store(self.padded, (r, s), Const(0.0, self.padded.dtype))
            row = (For("s", 0, p.k, (copy,)), For("s", p.k, self.terms, (zero,)))
            block.append(If(self.incomplete, (For("r", 0, minimum(self.rows.max_rows, p.m - first), row),)))
            block.append(Either(self.lefts, self.incomplete, ((self.padded, (0, 0)), (matrix, (*outer, first, 0)))))
        super().emit_tile_and_epilogue(block, outer, panel, tile)

    def left_rows(self, outer: Index, start: Dim, done: Dim) -> tuple[Buffer, Dim, Dim]:
        """Return the left buffer, the first element of row ``start + done``, and the row pitch in elements."""
        if self.terms == self.p.k:
            return super().left_rows(outer, start, done)
        return self.lefts, done * self.terms, self.terms

    def emit_register_tile(
        self, block: list[Stmt], out: Buffer | None, outer: Index, panel: Dim, start: Dim, height: int, done: Dim = 0
    ) -> None:
        """Emit one register tile of ``height`` rows, or two of half of them where rows share cache sets."""
        whole: list[Stmt] = []
        super().emit_register_tile(whole, out, outer, panel, start, height, done)
        if not self.sizes.shared_sets or height <= self.sizes.shared_rows:
            block += whole
            return
        halves: list[Stmt] = []
        first = (height + 1) // 2
        super().emit_register_tile(halves, out, outer, panel, start, first, done)
        super().emit_register_tile(halves, out, outer, panel, start, height - first, done + first)
        block.append(If(self.shares, tuple(halves), tuple(whole)))

    def emit_remaining_rows(
        self, rest: list[Stmt], out: Buffer | None, outer: Index, panel: Dim, start: Dim, remaining: Dim
    ) -> None:
        """Emit the rows after the last full tile: by tiles of half the rows, of ``FEW_ROWS``, and of one row.

        They are few functions, for which a kernel compiles sooner than for tiles of all powers of two.
        """
        done: Dim = 0
        for height in dict.fromkeys(((self.rows.height + 1) // 2, FEW_ROWS, 1)):
            count = (remaining - done) // height
            part: list[Stmt] = []
            i = sym(self.b.fresh("i"), 0, count)
            self.emit_register_tile(part, out, outer, panel, start, height, done + i * height)
            rest.append(For(str(i), 0, count, tuple(part)))
            done = done + count * height
