"""The operands of blocked attention on a CPU, and its two matmuls in tiles.

:mod:`.cpu_blocked` has the softmax between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, maximum, minimum, static, sym
from aotc.ir.loop.forms.matmul import View
from aotc.ir.loop.forms.tile_forms import form_of_operands
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, For, If, Scalar, Stmt, Store, Tile
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.cpu_attention import AttentionPlan
from aotc.lowering.plans.cpu_tiles import split_rows
from aotc.lowering.regions.attention.cpu_common import AttentionItem

WIDENED = ("bf16", "f16")  # dtypes of values that f32 tiles read without a copy


@dataclass(frozen=True, slots=True)
class Lines:
    """Keys or values as tiles read them: element (t, c) is at ``start + t * row + c * column`` of ``buffer``.

    If ``copied``, the buffer is a copy of one block, and its first term has index 0.
    """

    buffer: Buffer
    start: Dim
    row: Dim
    column: Dim
    copied: bool = False


class AttentionBlocks(AttentionItem):
    """Emitter of the operands and the matmuls of a grid item."""

    keys: Lines
    values: Lines

    def __init__(self, b: RegionBuilder, op: Op, plan: AttentionPlan) -> None:
        super().__init__(b, op, plan.wide, plan.rows)
        self.plan = plan
        self.single = isinstance(self.terms, int) and self.terms <= plan.terms and self.parts == 1
        self.used: Dim = plan.rows  # rows that are computed, in whole vectors
        self.scores = self._buffer("s", plan.terms + 2 * plan.tile_terms, plan.rows)
        self.kind = "bf16" if plan.pairs else self.wide  # dtype that tiles multiply
        g = plan.group
        panels = plan.rows // plan.tile_rows
        self.q = self._buffer("q", panels, self.depth // g, plan.tile_rows * g, dtype=self.kind)
        w = self._buffer("w", -(-plan.terms // g), plan.rows * g, dtype="bf16") if plan.pairs else None
        self.weights = w or self.scores
        self.acc, self.part = (self._buffer(x, plan.rows, plan.columns) for x in ("acc", "part"))
        self.numbers = [
            Buffer(b.fresh(x), self.wide, (plan.rows,), "private") for x in ("top", "low", "factor", "fresh", "total")
        ]
        self.top, self.low, self.factor, self.fresh, self.total = self.numbers

    def _pairs(self, end: Dim, extent: int, make: Callable[..., None]) -> list[Stmt]:
        """Return the loop of ``make(block, u)`` over pairs u of numbers below ``end``, and over an odd last one."""
        both = self._for("u", end // 2, make, extent // 2)
        if end % 2 == 0:
            return [both]
        name = self.b.fresh("u")
        inside: list[Stmt] = []
        self.e.enter(inside)
        make(inside, sym(name, 0, (extent + 1) // 2), both=False)
        return [both, For(name, end // 2, (end + 1) // 2, tuple(inside))]

    def _rounded(self, x: Scalar) -> Scalar:
        return Apply("convert", (x,), "bf16")

    # --- operands ---

    def _lines(self, body: list[Stmt], number: int, columns: int) -> Lines:
        """Return the layout in which tiles read keys or values: their own, or a copy of a block."""
        plan, view = self.plan, self._view(number, columns)
        if view is not None and self._reads(number, view, columns):
            return Lines(view.buffer, view.start, view.outer, view.depth)
        if number == 1:
            buffer = self._buffer("k", plan.terms + plan.tile_terms, columns, dtype=self.kind)
        else:
            buffer = self._buffer("v", -(-plan.terms // plan.group), plan.columns * plan.group, dtype=self.kind)
        body.append(Alloc(buffer))
        return Lines(buffer, 0, static(buffer.shape[1]), 1, copied=True)

    def _reads(self, number: int, view: View, columns: int) -> bool:
        """Return True if tiles read keys or values without a copy.

        Pairs of a key's depths are adjacent in memory; pairs of terms of values never are.
        """
        dtype, in_rows = view.buffer.dtype, view.depth == 1 and columns % self.plan.tile_columns == 0
        if number == 1:
            return dtype == self.kind and (view.depth == 1 or not self.plan.pairs)
        short = dtype in WIDENED and not (dtype == "f16" and "f16" in self.b.target.lacks) and self.wide == "f32"
        return in_rows and not self.plan.pairs and (dtype == self.wide or short)

    def _copy(self, lines: Lines, number: int, columns: int, first: Dim, count: Dim) -> list[Stmt]:
        """Return the loops that copy keys or values of a block of ``count`` terms, in the dtype that tiles multiply."""
        if not lines.copied:
            return []
        value, dims = self.op.operands[number], self.op.attrs[("", "k_dims", "v_dims")[number]]

        def at(t: Dim, c: Dim) -> Scalar:
            return self._element(value, dims, first + t, c, dtype=self.kind)

        def line(block: list[Stmt], t: Dim) -> None:
            block.append(self._for("c", columns, lambda inner, c: inner.append(Store(lines.buffer, (t, c), at(t, c)))))

        def pair(block: list[Stmt], u: Dim, both: bool = True) -> None:
            def one(inner: list[Stmt], c: Dim) -> None:
                beside = at(2 * u + 1, c) if both else Const(0.0, "bf16")
                inner += [Store(lines.buffer, (u, 2 * c + n), x) for n, x in enumerate((at(2 * u, c), beside))]

            block.append(self._for("c", columns, one))

        if number == 2 and self.plan.pairs:
            return self._pairs(count, self.plan.terms, pair)
        return [self._for("t", count, line, self.plan.terms)]

    def _turn_queries(self, body: list[Stmt]) -> None:
        """Write the queries of the block as vectors of rows; rows beyond the last are 0."""
        plan, dims, g = self.plan, self.op.attrs["q_dims"], self.plan.group

        def place(r: Dim, u: Dim, n: int) -> Index:
            return (r // plan.tile_rows, u, r % plan.tile_rows * g + n)

        def rows(end: Dim, element: Callable[[Dim, Dim], Scalar]) -> For:
            def one(inner: list[Stmt], r: Dim, u: Dim) -> None:
                inner += [Store(self.q, place(r, u, n), element(r, u * g + n)) for n in range(g)]

            def row(b: list[Stmt], r: Dim) -> None:
                b.append(self._for("depth", self.depth // g, lambda c, u: one(c, r, u)))

            return self._for("r", end, row, plan.rows)

        body += [] if self.whole else [rows(plan.rows, lambda r, d: Const(0.0, self.kind))]
        query = self.op.operands[0]
        body.append(rows(self.height, lambda r, d: self._element(query, dims, self.row + r, d, dtype=self.kind)))

    # --- scores ---

    def _at(self, t: Dim, r: Dim) -> Index:
        return (t + self.plan.tile_terms, r)

    def _tiles(self, first: Dim, count: Dim) -> list[Stmt]:
        """Return the tiles of a block's scores.

        The last tile begins early if keys are read from the model's memory, so that no tile reads beyond them.
        """
        plan, keys, g = self.plan, self.keys, self.plan.group
        panels = plan.rows // plan.tile_rows

        def tiles(height: int, end: Dim) -> list[Stmt]:
            def tile(block: list[Stmt], i: Dim) -> None:
                start = i * height
                if not keys.copied:
                    start = minimum(start, self.terms - first - height)
                begin = self._named(block, start + height, plan.terms + 2 * height) - height
                base = keys.start + (begin if keys.copied else first + begin) * keys.row

                def panel(inner: list[Stmt], j: Dim) -> None:
                    out = (begin + plan.tile_terms) * plan.rows + j * plan.tile_rows
                    inner.append(Tile(
                        height, plan.tile_rows, self.scores, out, plan.rows,
                        keys.buffer, base, keys.row, self.q, j * self.depth * plan.tile_rows,
                        ((self.depth // g, keys.column * g, plan.tile_rows * g),), plan.form,
                    ))  # fmt: skip

                end = panels if self.whole else self.used // plan.tile_rows
                block.append(self._for("j", end, panel, panels))

            return [self._for("i", (end + (height - 1)) // height, tile)]

        height = plan.tile_terms
        if keys.copied or (isinstance(self.terms, int) and self.terms >= height):
            return tiles(height, count)
        enough = Apply("ge", (IndexScalar(self.terms), Const(height, "i64")), "i1")
        return [If(enough, tuple(tiles(height, count)), tuple(tiles(1, count)))]

    def _sums(self, first: Dim, count: Dim) -> For:
        """Return the matmul of a block's weights and values; with a single block it is the result."""
        plan, values, g = self.plan, self.values, self.plan.group
        out, weights = self.acc if self.single else self.part, self.weights
        begin, a_row, a_step = plan.tile_terms * plan.rows, 1, plan.rows
        if plan.pairs:
            begin, a_row, a_step = 0, g, g * plan.rows
        base = values.start if values.copied else values.start + first * values.row
        steps = (count + (g - 1)) // g

        def panel(block: list[Stmt], j: Dim) -> None:
            row: Dim = 0
            for height, tiles in split_rows(plan.rows, plan.tile_height):

                def tile(inner: list[Stmt], i: Dim, row: Dim = row, height: int = height) -> None:
                    at = row + i * height
                    inner.append(Tile(
                        height, plan.tile_columns, out, at * plan.columns + j * plan.tile_columns, plan.columns,
                        weights, begin + at * a_row, a_row, values.buffer, base + j * plan.tile_columns * g,
                        ((steps, a_step, values.row),), form_of_operands(weights.dtype, values.buffer.dtype),
                    ))  # fmt: skip

                needed = minimum(tiles, maximum(self.height - row + (height - 1), 0) // height)
                block.append(self._for("i", tiles if self.whole else needed, tile, tiles))
                row = row + height * tiles

        return self._for("j", plan.columns // plan.tile_columns, panel)
