"""Emit the two matmuls of attention of few queries on a CPU: scores of some terms, and the weighted sum of values.

Queries that share a key are multiplied with it while it is in registers: the rows of a tile of dot products are these
queries, its columns are some terms. Values are added to the sums of all these queries.
"""

from __future__ import annotations

from collections.abc import Sequence

from aotc.ir.dims.algebra import Dim, minimum
from aotc.ir.loop.forms.tile_forms import BF16_PAIRS, TileForm
from aotc.ir.loop.ir import Load, Prefetch, Stmt, Store, Tile
from aotc.lowering.analysis.index_maps import Index, linearize
from aotc.lowering.elements.nests import loop_in_steps
from aotc.lowering.plans.thresholds import FETCH_LINE
from aotc.lowering.regions.attention.cpu_masks import AttentionMasks
from aotc.vmfb.dtypes import size_of


class AttentionProducts(AttentionMasks):
    """Emit the two matmuls of attention with few query rows."""

    def _prefetch_keys_or_values(self, number: int, length: int, term: Dim, least: int = 1) -> list[Stmt]:
        """Return prefetches of a key or value that will be multiplied ``least`` or more keys later."""
        value, dims = self.op.operands[number], self.op.attrs[("", "k_dims", "v_dims")[number]]
        size = size_of(value.type.dtype)
        after = (0, self.plan.keys_ahead, self.plan.values_ahead)[number]
        later = minimum(term + max(after, least), self.terms - 1)
        prefetches: list[Stmt] = []
        for d in range(0, length, FETCH_LINE.value // size):
            x = self._operand_element(value, dims, later, d, dtype=value.type.dtype)
            prefetches += [Prefetch(x.buffer, x.index)] if isinstance(x, Load) else []
        return prefetches

    def _prefetch_scales(self, term: Dim) -> list[Stmt]:
        """Return prefetches of the scales of a key and its value, which are read once the scores exist."""
        prefetches: list[Stmt] = []
        for name in self.factors:
            x = self._scale_at(name, self.row, term)
            prefetches += [Prefetch(x.buffer, x.index)] if isinstance(x, Load) else []
        return prefetches

    # --- scores ---

    def _emit_scores(self, body: list[Stmt], first: Dim, count: Dim) -> None:
        """Emit the scores of ``count`` keys from key ``first`` on."""
        form = self.plan.key_form
        if form is None:
            body += self._loops_over_key_heads(
                lambda b, at: b.extend(self._scores_vectorized_over_keys(at, first, count))
            )
            return
        row = self._layout_of_head(1).outer

        def emit_score_tiles(block: list[Stmt], at: list[Dim]) -> None:
            block += self._loops_over_key_heads(
                lambda b, index: b.extend(self._score_dot_products(index, at, first, form, row))
            )

        loop_in_steps(body, self.b.fresh("t"), 0, count, self.plan.key_terms, emit_score_tiles)

    def _score_dot_products(
        self, index: Index, terms: Sequence[Dim], first: Dim, form: TileForm, row: Dim
    ) -> list[Stmt]:
        """Return the register tile of dot products: queries that share a head's keys, times some keys."""
        key, dims, group = self.op.operands[1], self.op.attrs["k_dims"], form.group
        x = self._operand_element(key, dims, first + terms[0], 0, dtype=key.type.dtype)
        assert isinstance(x, Load)
        queries = self.queries
        own, r = queries[0]
        places = [linearize((*index, *own, r, n), y.shape) for y, n in ((self.scores, terms[0]), (self.q, 0))]
        prefetches: list[Stmt] = []
        for t in terms:
            prefetches += [*self._prefetch_keys_or_values(1, self.depth, first + t), *self._prefetch_scales(first + t)]
        return [*prefetches, Tile(
            len(queries), len(terms), self.scores, places[0], self.blocks.terms, self.q, places[1], self.depth,
            x.buffer, linearize(x.index, x.buffer.shape), ((self.depth // group, group, group),), form, b_column=row,
        )]  # fmt: skip

    def _scores_vectorized_over_keys(self, index: Index, first: Dim, count: Dim) -> list[Stmt]:
        """Return the scores of a head whose keys are strided in memory, vectorized over keys."""
        queries = [(*index, *own, r) for own, r in self.queries]

        def clear_score(block: list[Stmt], t: Dim) -> None:
            block += [Store(self.scores, (*at, t), self._sum_dtype_literal(0)) for at in queries]

        def add_product(block: list[Stmt], t: Dim, d: Dim) -> None:
            x = self.e.bind(self._operand_element(self.op.operands[1], self.op.attrs["k_dims"], first + t, d))
            block += [
                Store(self.scores, (*at, t), self._apply_in_sum_dtype("mul", self._query_element(at, d), x), "add")
                for at in queries
            ]

        def loop_over_keys(block: list[Stmt], d: Dim) -> None:
            block.append(self._index_loop("t", count, lambda b, t: add_product(b, t, d), self.blocks.terms))

        return [
            self._index_loop("t", count, clear_score, self.blocks.terms),
            self._index_loop("depth", self.depth, loop_over_keys),
        ]

    # --- values ---

    def _emit_weighted_sums(self, body: list[Stmt], first: Dim, count: Dim) -> None:
        """Emit the addition of the weighted values of ``count`` keys to the sums."""
        row = self._layout_of_head(2).outer if self.plan.value_columns else None

        def emit_sums_of_head(block: list[Stmt], at: list[Dim]) -> None:
            """Emit the additions for the keys ``at``: by tiles of pairs if possible, else key by key."""
            if row is not None and len(at) > 1:
                block += self._loops_over_key_heads(
                    lambda b, index: b.extend(self._pair_tiles_of_values(index, at, first, row))
                )
            else:
                self._add_values_of_keys(block, [(t, first + t) for t in at])

        loop_in_steps(body, self.b.fresh("t"), 0, count, self.plan.value_terms, emit_sums_of_head)

    def _pair_tiles_of_values(self, index: Index, terms: Sequence[Dim], first: Dim, row: Dim) -> list[Stmt]:
        """Return the tiles that add the values of some terms of a head, by pairs, to the sums of each query."""
        value, dims, queries = self.op.operands[2], self.op.attrs["v_dims"], self.queries
        weights, cols = self.weights, self.plan.value_columns
        assert weights is not None
        own, r = queries[0]
        begin = linearize((*index, *own, r, terms[0]), weights.shape)

        def emit_tile(block: list[Stmt], j: Dim) -> None:
            """Emit the tile of one run of value columns."""
            x = self._operand_element(value, dims, first + terms[0], j * cols, dtype=value.type.dtype)
            assert isinstance(x, Load)
            out = linearize((*index, *own, r, j * cols), self.acc.shape)
            block.append(Tile(
                len(queries), cols, self.acc, out, self.columns, weights, begin, self.blocks.terms,
                x.buffer, linearize(x.index, x.buffer.shape), ((len(terms) // 2, 2, 2 * row),), BF16_PAIRS, b_inner=row,
                adds=True,
            ))  # fmt: skip

        return [self._index_loop("j", self.columns // cols, emit_tile)]

    def _add_values_of_keys(self, block: list[Stmt], terms: Sequence[tuple[Dim, Dim]]) -> None:
        """Emit the addition of the weighted values of some keys to the sums of each query."""
        value, dims, queries = self.op.operands[2], self.op.attrs["v_dims"], self.queries

        def add_values_of_head(body: list[Stmt], index: Index) -> None:
            """Emit the addition of weighted values to the sums of all queries that share one key head."""
            for _, term in terms:
                body += self._prefetch_keys_or_values(2, self.columns, term)
            self.e.enter(body)
            weights = [[self.e.bind(Load(self.scores, (*index, *own, r, t))) for t, _ in terms] for own, r in queries]

            def add_column(inner: list[Stmt], c: Dim) -> None:
                some = [self._operand_element(value, dims, term, c) for _, term in terms]
                some = some if len(queries) == 1 else [self.e.bind(x) for x in some]
                for own_weights, (own, r) in zip(weights, queries, strict=True):
                    products = [self._apply_in_sum_dtype("mul", w, x) for w, x in zip(own_weights, some, strict=True)]
                    inner += [Store(self.acc, (*index, *own, r, c), x, "add") for x in products]

            body.append(self._index_loop("c", self.columns, add_column))

        block += self._loops_over_key_heads(add_values_of_head)
