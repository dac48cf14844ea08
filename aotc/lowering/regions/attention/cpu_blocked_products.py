"""Emit the operands of blocked attention on a CPU, and its two matmuls by tiles.

:mod:`.cpu_blocked` emits the softmax between the matmuls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, maximum, minimum, static, sym
from aotc.ir.loop.forms.tile_forms import form_of_operands
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, For, If, Scalar, Stmt, Store, Tile
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.attention.cpu import BlockedAttentionPlan
from aotc.lowering.plans.cpu_tiles import split_rows
from aotc.lowering.regions.attention.cpu_common import AttentionItem


@dataclass(frozen=True, slots=True)
class KeyValueLayout:
    """Memory layout of keys or values for tiles: element (t, c) is at ``start + t * row + c * column`` of ``buffer``.

    If ``copied``, the buffer is a copy of one block, and its first term has index 0.
    """

    buffer: Buffer
    start: Dim
    row: Dim
    column: Dim
    copied: bool = False


class AttentionBlocks(AttentionItem):
    """Emit the operands and the two matmuls of a grid item of blocked attention."""

    keys: KeyValueLayout
    values: KeyValueLayout

    def __init__(self, b: RegionBuilder, op: Op, plan: BlockedAttentionPlan) -> None:
        """Name the scratch buffers of a grid item: queries as panels, scores and weights of one block of keys.

        ``acc`` are the weighted sums of values so far, ``part`` those of one block. For each row, ``top`` is the
        maximum so far, ``low`` the number subtracted from scores, ``total`` the sum of weights so far, ``fresh`` that
        of one block. ``factor`` rescales both sums if a block raises the maximum.
        """
        blocks = plan.blocks
        super().__init__(b, op, blocks.wide, blocks.rows)
        self.plan, self.blocks, self.single = plan, blocks, plan.is_single
        self.used: Dim = blocks.rows  # rows that are computed, in whole vectors
        self.scores = self._scratch_buffer("s", blocks.terms + 2 * blocks.tile_terms, blocks.rows)
        self.kind = blocks.dtype  # dtype that tiles multiply
        g = blocks.group
        panels = blocks.rows // blocks.tile_rows
        self.q = self._scratch_buffer("q", panels, self.depth // g, blocks.tile_rows * g, dtype=self.kind)
        w = self._scratch_buffer("w", -(-blocks.terms // g), blocks.rows * g, dtype="bf16") if blocks.pairs else None
        self.weights = w or self.scores
        self.acc, self.part = (self._scratch_buffer(x, blocks.rows, blocks.columns) for x in ("acc", "part"))
        self.numbers = [
            Buffer(b.fresh(x), self.wide, (blocks.rows,), "private") for x in ("top", "low", "factor", "fresh", "total")
        ]
        self.top, self.low, self.factor, self.fresh, self.total = self.numbers

    def _loop_over_pairs(self, end: Dim, extent: int, make: Callable[..., None]) -> list[Stmt]:
        """Return the loop of ``make(block, u)`` over pairs u of indices below ``end``, and over an odd last index."""
        both = self._index_loop("u", end // 2, make, extent // 2)
        if end % 2 == 0:
            return [both]
        name = self.b.fresh("u")
        inside: list[Stmt] = []
        self.e.enter(inside)
        make(inside, sym(name, 0, (extent + 1) // 2), both=False)
        return [both, For(name, end // 2, (end + 1) // 2, tuple(inside))]

    def _round_to_tile_dtype(self, x: Scalar) -> Scalar:
        return Apply("convert", (x,), "bf16")

    # --- operands ---

    def _key_or_value_layout(self, body: list[Stmt], number: int, columns: int) -> KeyValueLayout:
        """Return the layout of keys or values for register tiles: as stored, or copied block by block."""
        blocks, copied = self.blocks, self.plan.copies_keys if number == 1 else self.plan.copies_values
        if not copied:
            view = self._layout_of_head(number)
            return KeyValueLayout(view.buffer, view.start, view.outer, view.depth)
        if number == 1:
            buffer = self._scratch_buffer("k", blocks.terms + blocks.tile_terms, columns, dtype=self.kind)
        else:
            buffer = self._scratch_buffer(
                "v", -(-blocks.terms // blocks.group), blocks.columns * blocks.group, dtype=self.kind
            )
        body.append(Alloc(buffer))
        return KeyValueLayout(buffer, 0, static(buffer.shape[1]), 1, copied=True)

    def _copy_keys_or_values(
        self, lines: KeyValueLayout, number: int, columns: int, first: Dim, count: Dim
    ) -> list[Stmt]:
        """Return the loops that copy keys or values of a block of ``count`` terms, in the dtype that tiles multiply."""
        if not lines.copied:
            return []
        value, dims = self.op.operands[number], self.op.attrs[("", "k_dims", "v_dims")[number]]

        def load_element(t: Dim, c: Dim) -> Scalar:
            return self._operand_element(value, dims, first + t, c, dtype=self.kind)

        def copy_row(block: list[Stmt], t: Dim) -> None:
            block.append(
                self._index_loop(
                    "c", columns, lambda inner, c: inner.append(Store(lines.buffer, (t, c), load_element(t, c)))
                )
            )

        # Tiles of bf16 multiply pairs of terms: their elements alternate, and an odd last term is paired with zeros.
        def copy_pair(block: list[Stmt], u: Dim, both: bool = True) -> None:
            def copy_pair_element(inner: list[Stmt], c: Dim) -> None:
                second = load_element(2 * u + 1, c) if both else Const(0.0, "bf16")
                inner += [
                    Store(lines.buffer, (u, 2 * c + n), x) for n, x in enumerate((load_element(2 * u, c), second))
                ]

            block.append(self._index_loop("c", columns, copy_pair_element))

        if number == 2 and self.blocks.pairs:
            return self._loop_over_pairs(count, self.blocks.terms, copy_pair)
        return [self._index_loop("t", count, copy_row, self.blocks.terms)]

    def _transpose_queries(self, body: list[Stmt]) -> None:
        """Emit the copy of the block's queries to vectors of rows; rows beyond the last are 0."""
        blocks, dims, g = self.blocks, self.op.attrs["q_dims"], self.blocks.group

        def transposed_index(r: Dim, u: Dim, n: int) -> Index:
            return (r // blocks.tile_rows, u, r % blocks.tile_rows * g + n)

        def copy_rows(end: Dim, element: Callable[[Dim, Dim], Scalar]) -> For:
            """Return the loop that copies rows of queries up to ``end`` to panels."""
            def copy_element(inner: list[Stmt], r: Dim, u: Dim) -> None:
                inner += [Store(self.q, transposed_index(r, u, n), element(r, u * g + n)) for n in range(g)]

            def copy_row(b: list[Stmt], r: Dim) -> None:
                b.append(self._index_loop("depth", self.depth // g, lambda c, u: copy_element(c, r, u)))

            return self._index_loop("r", end, copy_row, blocks.rows)

        body += [] if self.whole else [copy_rows(blocks.rows, lambda r, d: Const(0.0, self.kind))]
        query = self.op.operands[0]
        body.append(
            copy_rows(self.height, lambda r, d: self._operand_element(query, dims, self.row + r, d, dtype=self.kind))
        )

    # --- scores ---

    def _score_index(self, t: Dim, r: Dim) -> Index:
        return (t + self.blocks.tile_terms, r)

    def _score_tiles(self, first: Dim, count: Dim) -> list[Stmt]:
        """Return the register tiles that compute a block of scores.

        If keys are read in place, the last tile overlaps the previous one, so that no tile reads beyond the keys.
        """
        blocks, keys, g = self.blocks, self.keys, self.blocks.group
        panels = blocks.rows // blocks.tile_rows

        def tiles_of_height(height: int, end: Dim) -> list[Stmt]:
            """Return the loop over tiles of ``height`` keys up to ``end``, each with all panels of rows."""
            def emit_key_tile(block: list[Stmt], i: Dim) -> None:
                """Emit the tiles of one run of keys; keys in place end with the last key, and may repeat some."""
                start = i * height
                if not keys.copied:
                    start = minimum(start, self.terms - first - height)
                begin = self._bind_index(block, start + height, blocks.terms + 2 * height) - height
                base = keys.start + (begin if keys.copied else first + begin) * keys.row

                def emit_row_panel(inner: list[Stmt], j: Dim) -> None:
                    out = (begin + blocks.tile_terms) * blocks.rows + j * blocks.tile_rows
                    inner.append(Tile(
                        height, blocks.tile_rows, self.scores, out, blocks.rows,
                        keys.buffer, base, keys.row, self.q, j * self.depth * blocks.tile_rows,
                        ((self.depth // g, keys.column * g, blocks.tile_rows * g),), blocks.form,
                    ))  # fmt: skip

                end = panels if self.whole else self.used // blocks.tile_rows
                block.append(self._index_loop("j", end, emit_row_panel, panels))

            return [self._index_loop("i", (end + (height - 1)) // height, emit_key_tile)]

        height = blocks.tile_terms
        if keys.copied or (isinstance(self.terms, int) and self.terms >= height):
            return tiles_of_height(height, count)
        enough = Apply("ge", (IndexScalar(self.terms), Const(height, "i64")), "i1")
        return [If(enough, tuple(tiles_of_height(height, count)), tuple(tiles_of_height(1, count)))]

    def _weighted_value_tiles(self, first: Dim, count: Dim) -> For:
        """Return the matmul of a block's softmax weights and values."""
        blocks, values, g = self.blocks, self.values, self.blocks.group
        out, weights = self.acc if self.single else self.part, self.weights
        begin, a_row, a_step = blocks.tile_terms * blocks.rows, 1, blocks.rows
        if blocks.pairs:
            begin, a_row, a_step = 0, g, g * blocks.rows
        base = values.start if values.copied else values.start + first * values.row
        steps = (count + (g - 1)) // g

        def emit_value_panel(block: list[Stmt], j: Dim) -> None:
            """Emit the tiles of one panel of value columns, for each run of rows of one tile height."""
            row: Dim = 0
            for height, tiles in split_rows(blocks.rows, blocks.tile_height):

                def emit_row_tile(inner: list[Stmt], i: Dim, row: Dim = row, height: int = height) -> None:
                    at = row + i * height
                    inner.append(Tile(
                        height, blocks.tile_columns, out, at * blocks.columns + j * blocks.tile_columns, blocks.columns,
                        weights, begin + at * a_row, a_row, values.buffer, base + j * blocks.tile_columns * g,
                        ((steps, a_step, values.row),), form_of_operands(weights.dtype, values.buffer.dtype),
                    ))  # fmt: skip

                needed = minimum(tiles, maximum(self.height - row + (height - 1), 0) // height)
                block.append(self._index_loop("i", tiles if self.whole else needed, emit_row_tile, tiles))
                row = row + height * tiles

        return self._index_loop("j", blocks.columns // blocks.tile_columns, emit_value_panel)
