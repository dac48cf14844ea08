"""Attention of few queries on a CPU: keys and values are read once, in memory order.

Where the keys of several heads are adjacent for each term, a grid item computes all these heads, each with its own
online softmax. Queries that share a key are multiplied with it while it is in registers. For each block of terms::

    for t, for h:  s[h, t] = sum over d of q[h, d] * k[t, h, d]          // later keys are prefetched
    for h:         s[h, :] = exp(s[h, :] - new top of h), sums rescaled
    for t, for h:  acc[h, :] += s[h, t] * v[t, h, :]

Integer keys and values are multiplied unscaled; their scales, one for each key, multiply scores and weights. A block
without unmasked terms is skipped. Skipped blocks follow only if the maximum of some row is so low that masked terms
have weight in it. In split-KV, a part without unmasked terms tests the score of the first unmasked term of all parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from aotc.ir.dims.algebra import Dim, maximum, minimum, sym
from aotc.ir.loop.ir import Alloc, Apply, Const, For, If, Let, Load, Scalar, Stmt, Store, Var
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.elements import conjunction_of_tests
from aotc.lowering.regions.attention.cpu_decode_products import AttentionProducts


class AttentionRows(AttentionProducts):
    """Emit a grid item of attention with few query rows."""

    def decode_item_statements(self, at: Sequence[Dim], part: Dim) -> list[Stmt]:
        """Return the statements of one grid item: attention for all query rows of some adjacent heads."""
        others = iter(at)
        self.at = tuple(0 if a in self.sizes else next(others) for a in range(len(self.batch)))
        body: list[Stmt] = [Alloc(x) for x in self.buffers]
        self._begin_split_kv_part(body, part)
        if not self.whole:
            self.height = self._bind_index(body, self.rows, self.blocks.rows + 1)
        self._begin_all_query_rows(body)
        self._decode_key_blocks(body)
        body += self._loops_over_query_rows(self._end_query_row)
        return body

    # --- an item ---

    def _begin_all_query_rows(self, body: list[Stmt]) -> None:
        """Emit the initialization of all query rows."""
        body += self._loops_over_query_rows(self._begin_query_row)

    def _begin_query_row(self, block: list[Stmt], at: Index) -> None:
        """Emit the start of a query row: load and widen the query, clear the sums."""
        query, dims, zero = self.op.operands[0], self.op.attrs["q_dims"], self._sum_dtype_literal(0)
        row = self.row + at[-1]
        block.append(Store(self.top, at, self._sum_dtype_literal(-math.inf)))
        block.append(Store(self.total, at, zero))

        def load_query_element(inner: list[Stmt], d: Dim) -> None:
            inner.append(Store(self.q, (*at, d), self._operand_element(query, dims, row, d, dtype=self.q.dtype)))

        block.append(self._index_loop("depth", self.depth, load_query_element))
        block.append(
            self._index_loop("c", self.columns, lambda inner, c: inner.append(Store(self.acc, (*at, c), zero)))
        )

    def _end_query_row(self, block: list[Stmt], at: Index) -> None:
        self._write_attention_row(block, at[-1], [Load(x, at) for x in (self.top, self.total)], self.acc, at)

    def _decode_key_blocks(self, body: list[Stmt]) -> None:
        """Emit the loop over blocks of keys; with a mask, blocks with an allowed key come first."""
        size = self.blocks.terms
        blocks = (self.part_terms + (size - 1)) // size
        if not self.several:
            body.append(
                self._index_loop("n", blocks, lambda b, n: self._decode_key_block(b, *self._terms_of_key_block(b, n)))
            )
            return
        # A fill of -inf gives masked keys no weight: blocks that are masked as a whole are skipped.
        certain = self.op.attrs["fill"] == -math.inf
        end, requested = self._private_scalar("end", "i64"), self._private_scalar("wanted", "i32")
        body += [Alloc(end), Alloc(requested), Store(end, (), IndexScalar(blocks))]

        def visit_blocks_of_phase(block: list[Stmt], p: Dim) -> None:
            """Emit a loop over blocks that processes those with an allowed key in phase 0, the others in phase 1."""
            name, n = self.b.fresh("to"), self.b.fresh("n")
            block.append(Let(Var(name, "i64"), Load(end, ())))
            inside = self.e.new_block()
            first, count = self._terms_of_key_block(inside, sym(n, 0, blocks))
            allowed = self._is_any_key_unmasked(inside, first, count)
            inner = self.e.new_block()
            self._decode_key_block(inner, first, count)
            now = Apply("eq", (allowed, IndexScalar(1 - p, "i32")), "i1")
            inside.append(If(now, tuple(inner)))
            block.append(For(n, 0, sym(name, 0, blocks + 1), tuple(inside)))
            self.e.enter(block)
            block.append(Store(end, (), Const(0, "i64")))
            block += [] if certain else self._request_masked_blocks(p, end, requested, blocks)

        body.append(self._index_loop("phase", 1 if certain else 2, visit_blocks_of_phase))

    def _terms_of_key_block(self, block: list[Stmt], n: Dim) -> tuple[Dim, Dim]:
        """Return the first key of block ``n``, and its number of keys, which is 0 beyond the last part."""
        size = self.blocks.terms
        first = self.begin + n * size
        left = minimum(size, self.end - first)
        return first, self._bind_index(block, left if self.parts == 1 else maximum(left, 0), size + 1)

    # --- a block of terms ---

    def _decode_key_block(self, body: list[Stmt], first: Dim, count: Dim) -> None:
        """Emit the scores, weights and sums of ``count`` keys from key ``first`` on."""
        self._emit_scores(body, first, count)
        body += self._copy_cache_scales(first, count)
        body += self._loops_over_query_rows(lambda b, at: self._softmax_of_row(b, at, first, count))
        self._emit_weighted_sums(body, first, count)

    def _softmax_of_row(self, block: list[Stmt], at: Index, first: Dim, count: Dim) -> None:
        """Emit the softmax weights in place of a row's scores, and the rescaling of its sums to the new maximum."""
        attrs, row, terms = self.op.attrs, self.row + at[-1], self.blocks.terms
        top, fresh = self._private_scalar("top"), self._private_scalar("fresh")
        old = self.e.bind(Load(self.top, at))
        block += [Alloc(top), Alloc(fresh), Store(top, (), old), Store(fresh, (), self._sum_dtype_literal(0))]

        def update_maximum(inner: list[Stmt], t: Dim) -> None:
            """Emit the scaled and masked score of one key, and the update of the row's maximum."""
            x = self._scaled_and_biased_score(
                Load(self.scores, (*at, t)), row, first + t, self._cache_scale_of_term("k_scale", at, t, first)
            )
            if tests := self._unmasked_tests(row, first + t):
                x = self._apply_in_sum_dtype(
                    "select", conjunction_of_tests(tests), x, self._sum_dtype_literal(attrs["fill"])
                )
            if not isinstance(x, Load):
                x = self.e.bind(x)
                inner.append(Store(self.scores, (*at, t), x))
            inner.append(Store(top, (), x, "max"))

        def store_weight(inner: list[Stmt], t: Dim) -> None:
            """Emit the weight of one key, relative to the maximum, and its addition to the total."""
            below = self._apply_in_sum_dtype("sub", Load(self.scores, (*at, t)), low)
            weight: Scalar = self.e.bind(self._apply_in_sum_dtype("decay", below))
            inner.append(Store(fresh, (), weight, "add"))
            factor = self._cache_scale_of_term("v_scale", at, t, first)
            weight = weight if factor is None else self._apply_in_sum_dtype("mul", weight, factor)
            inner.append(Store(self.scores, (*at, t), weight))
            if self.weights is not None:
                inner.append(Store(self.weights, (*at, t), Apply("convert", (weight,), "bf16")))

        block.append(self._index_loop("t", count, update_maximum, terms))
        self.e.enter(block)
        now = self.e.bind(Load(top, ()))
        low = self._subtracted_maximum(now)
        # Online softmax: a new maximum scales the total and all sums.
        factor = self.e.bind(self._apply_in_sum_dtype("exp", self._apply_in_sum_dtype("sub", old, low)))
        block += [Store(self.top, at, now), self._index_loop("t", count, store_weight, terms)]
        total = self._apply_in_sum_dtype(
            "add", self._apply_in_sum_dtype("mul", Load(self.total, at), factor), Load(fresh, ())
        )
        block.append(Store(self.total, at, total))

        def rescale_sum(inner: list[Stmt], c: Dim) -> None:
            inner.append(Store(self.acc, (*at, c), self._apply_in_sum_dtype("mul", Load(self.acc, (*at, c)), factor)))

        block.append(self._index_loop("c", self.columns, rescale_sum))
