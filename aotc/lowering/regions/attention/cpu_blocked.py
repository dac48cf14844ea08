"""Attention on a CPU: online softmax over blocks of terms (keys), without storing the score matrix.

As in T. Dao et al., "FlashAttention" (2022), with the online softmax of M. Milakov and N. Gimelshein (2018).

A grid item computes a block of rows of one head. Queries are transposed, so that a tile of scores is terms by vectors
of rows. Keys are then read in their own layout, and a maximum or sum over terms combines whole vectors::

    for n in range(0, blocks of terms):
        s[t, r] = tile(k[t, :], q[:, r])
        top[r] = max over t of scaled, biased, masked s[t, r];  scale = exp(old top - top)
        s[t, r] = exp(s[t, r] - top[r]);  total[r] = total[r] * scale + sum over t of s[t, r]
        acc[r, :] = acc[r, :] * scale + tile(s[:, r], v[:, :])
    out[r, :] = acc[r, :] / total[r]

:mod:`.cpu_decode` lowers attention of few rows. On a processor with instructions for pairs of bf16 both matmuls use
these: queries are stored as pairs of elements, rounded weights and values as pairs of terms. With a causal mask only
blocks of terms that some row may attend to are visited. The others follow only if the maximum of some row is so low
that masked terms have weight in it (only in unusual inputs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from aotc.ir.dims.algebra import Dim, maximum, minimum, product, sym
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, For, If, Kernel, Let, Load, Scalar, Stmt, Store, Var
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.opset.attention import attention_axis_sizes
from aotc.ir.opset.dim_attributes import dims_of
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.cost_model.work import DEAR_WORK
from aotc.lowering.elements.builder import RegionBuilder, grid_item
from aotc.lowering.elements.elements import conjunction_of_tests
from aotc.lowering.plans.attention.cpu import (
    AttentionByRowsPlan,
    BlockedAttentionPlan,
    DecodeAttentionPlan,
    IntegerAttentionPlan,
)
from aotc.lowering.regions.attention.cpu_blocked_products import AttentionBlocks
from aotc.lowering.regions.attention.cpu_decode import AttentionRows
from aotc.lowering.regions.attention.cpu_int8_cache import AttentionIntegers


def lower_decode_attention(b: RegionBuilder, plan: DecodeAttentionPlan) -> Kernel:
    """Lower a region around ``attention`` with few query rows (decoding) to one kernel for CPUs."""
    return _blocked_attention_kernel(
        b, plan.blocks.rows, lambda at, part, _: _decode_attention_statements(b, plan, at, part), plan.blocks.whole_axes
    )


def lower_blocked_attention(b: RegionBuilder, plan: BlockedAttentionPlan) -> Kernel:
    """Lower a region around ``attention`` to a CPU kernel that computes blocks of scores (flash attention)."""
    return _blocked_attention_kernel(
        b, plan.blocks.rows, _BlockedAttention(b, b.region_root_op("attention"), plan).attention_item_statements
    )


def lower_attention_by_rows(b: RegionBuilder, plan: AttentionByRowsPlan) -> Kernel:
    """Lower a region around ``attention`` to two variants, decode and blocked, selected by the row count."""
    op, few, many = b.region_root_op("attention"), plan.few, plan.many
    rows = attention_axis_sizes(tuple(v.type for v in op.operands), op.attrs)[1]

    def emit_item(at: Index, part: Dim, block: Dim) -> list[Stmt]:
        """Return an item with both algorithms: a call with few rows runs the one for decoding."""
        variants = (
            _decode_attention_statements(b, few, at, part),
            _BlockedAttention(b, op, many).attention_item_statements(at, part, block),
        )
        test = Apply("le", (IndexScalar(rows), Const(few.blocks.rows, "i64")), "i1")
        return [If(test, *map(tuple, variants))]

    return _blocked_attention_kernel(b, many.blocks.rows, emit_item)


def _decode_attention_statements(b: RegionBuilder, plan: DecodeAttentionPlan, at: Index, part: Dim) -> list[Stmt]:
    """Return the statements that compute all query rows of some heads by the decoding plan."""
    op = b.region_root_op("attention")
    if isinstance(plan, IntegerAttentionPlan):
        return AttentionIntegers(b, op, plan).decode_item_statements(at, part)
    return AttentionRows(b, op, plan).decode_item_statements(at, part)


Item = Callable[[Index, Dim, Dim], list[Stmt]]


def _blocked_attention_kernel(
    b: RegionBuilder, rows_at_once: int, item: Item, whole_axes: Sequence[int] = ()
) -> Kernel:
    """Return the kernel with grid items ``item(head, range of keys, block of query rows)``."""
    op = b.region_root_op("attention")
    batch, rows, terms, depth, columns = attention_axis_sizes(tuple(v.type for v in op.operands), op.attrs)
    outer = [n for a, n in enumerate(batch) if a not in whole_axes]
    extents = (*outer, op.attrs.get("split", 1), (rows + (rows_at_once - 1)) // rows_at_once)
    grid = product(extents)
    body: list[Stmt] = []
    *at, part, block = _bind_index_components(b, body, delinearize(grid_item(grid), extents), extents)
    work = product((*batch, rows, terms)) * (2 * (depth + columns) + DEAR_WORK.value)
    return b.grid(grid, [*body, *item(tuple(at), part, block)], work)


def _bind_index_components(b: RegionBuilder, block: list[Stmt], index: Index, extents: Sequence[Dim]) -> list[Dim]:
    """Append statements that bind the components of an index to names; return the names as dims."""
    names: list[Dim] = []
    for i, n in zip(index, extents, strict=True):
        if not isinstance(i, int):
            name = b.fresh("n")
            block.append(Let(Var(name, "i64"), IndexScalar(i)))
            i = sym(name, 0, n)
        names.append(i)
    return names


class _BlockedAttention(AttentionBlocks):
    """Emit the kernel of blocked attention for the op ``attention``."""

    def attention_item_statements(self, at: Index, part: Dim, block: Dim) -> list[Stmt]:
        """Return the statements of one grid item: attention for a block of query rows."""
        blocks = self.blocks
        body: list[Stmt] = []
        self.at, self.row = at, block * blocks.rows
        self._begin_split_kv_part(body, part)
        if not self.whole:
            left = minimum(blocks.rows, self.rows - self.row)
            self.height = self._bind_index(body, left, blocks.rows + 1)
            vectors = (self.height + (blocks.tile_rows - 1)) // blocks.tile_rows
            self.used = self._bind_index(body, vectors * blocks.tile_rows, blocks.rows + 1)
        weights = (self.weights,) if blocks.pairs else ()
        body += [Alloc(x) for x in (self.q, self.scores, *weights, self.acc, *self.numbers)]
        self.values = self._key_or_value_layout(body, 2, self.columns)
        self.keys = self._key_or_value_layout(body, 1, self.depth)
        body += [] if self.single else [Alloc(self.part)]
        self._transpose_queries(body)
        self._clear_row_sums(body)
        self._loop_over_key_blocks(body)
        numbers = (self.top, self.total)
        write = lambda b, r: self._write_attention_row(b, r, [Load(x, (r,)) for x in numbers], self.acc, (r,))
        body.append(self._index_loop("r", self.height, write, blocks.rows))
        return body

    # --- blocks of terms ---

    def _clear_row_sums(self, body: list[Stmt]) -> None:
        """Emit the loops that set maxima to -inf, and sums and accumulators of rows to 0."""
        lowest, zero = self._sum_dtype_literal(-math.inf), self._sum_dtype_literal(0)

        def clear_maximum_and_sum(block: list[Stmt], r: Dim) -> None:
            block.extend((Store(self.top, (r,), lowest), Store(self.total, (r,), zero)))

        def clear_accumulators(block: list[Stmt], r: Dim) -> None:
            each = self._index_loop("c", self.blocks.columns, lambda b, c: b.append(Store(self.acc, (r, c), zero)))
            block.append(each)

        body.append(self._index_loop("r", self.blocks.rows, clear_maximum_and_sum))
        body += [] if self.single else [self._index_loop("r", self.blocks.rows, clear_accumulators)]

    def _loop_over_key_blocks(self, body: list[Stmt]) -> None:
        """Emit the loop over blocks of keys: blocks with keys that the causal mask allows come first."""
        blocks, causal = self.blocks, dims_of(self.op.attrs, "causal")
        if self.single:
            self._attend_to_key_block(body, 0, self.terms)
            return
        count = (self.part_terms + (blocks.terms - 1)) // blocks.terms

        def attend_to_block(block: list[Stmt], n: Dim) -> None:
            first = self.begin + n * blocks.terms
            self._attend_to_key_block(
                block, first, self._bind_index(block, minimum(blocks.terms, self.end - first), blocks.terms + 1)
            )

        if not causal:
            body.append(self._index_loop("n", count, attend_to_block))
            return
        seen = minimum(maximum(self.row + blocks.rows + causal[0], 0), self.terms)
        near = self._bind_index(body, (seen + (blocks.terms - 1)) // blocks.terms, count + 1)
        begin, end = (Buffer(self.b.fresh(x), "i64", (), "private") for x in ("begin", "end"))
        body += [Alloc(begin), Alloc(end), Store(begin, (), Const(0, "i64")), Store(end, (), IndexScalar(near))]

        def visit_blocks_of_phase(block: list[Stmt], _: Dim) -> None:
            """Emit the blocks from ``begin`` to ``end``; the second phase visits masked blocks that some row needs."""
            names = [self.b.fresh(x) for x in ("from", "to")]
            for name, at in zip(names, (begin, end), strict=True):
                block.append(Let(Var(name, "i64"), Load(at, ())))
            first, last = (sym(name, 0, count + 1) for name in names)
            n, inside = self.b.fresh("n"), self.e.new_block()
            attend_to_block(inside, sym(n, 0, count))
            block.append(For(n, first, last, tuple(inside)))
            block.append(Store(begin, (), IndexScalar(near)))
            block.append(
                self._index_loop(
                    "r", self.height, lambda b, r: self._extend_to_masked_blocks(b, r, end, count), blocks.rows
                )
            )

        body.append(self._index_loop("phase", 2, visit_blocks_of_phase))

    def _extend_to_masked_blocks(self, block: list[Stmt], r: Dim, end: Buffer, count: Dim) -> None:
        """Emit the extension of the loop to all ``count`` blocks if masked terms have weight in row ``r``."""
        weightless = self._masked_terms_have_no_weight(Load(self.top, (r,)))
        block.append(If(Apply("not", (weightless,), "i1"), (Store(end, (), IndexScalar(count)),)))

    def _attend_to_key_block(self, body: list[Stmt], first: Dim, count: Dim) -> None:
        """Emit attention for ``count`` keys from key ``first`` on."""
        blocks = self.blocks
        body += self._copy_keys_or_values(self.keys, 1, self.depth, first, count)
        body += self._score_tiles(first, count)
        body.append(self._index_loop("r", blocks.rows, self._save_row_maximum))
        body += self._loops_over_scores(count, lambda b, t, r: self._mask_score(b, t, r, first))
        body.append(self._index_loop("r", blocks.rows, self._rescale_row_sums))
        body += (
            self._weights_as_pairs(count)
            if blocks.pairs
            else self._loops_over_scores(count, self._softmax_weight_of_term, whole=True)
        )
        body.append(self._index_loop("r", blocks.rows, self._add_to_softmax_sum))
        body += self._copy_keys_or_values(self.values, 2, self.columns, first, count)
        body.append(self._weighted_value_tiles(first, count))
        body += [] if self.single else [self._index_loop("r", blocks.rows, self._add_block_product)]

    def _loops_over_scores(
        self, count: Dim, make: Callable[[list[Stmt], Dim, Dim], None], whole: bool = False
    ) -> list[Stmt]:
        """Return loops over the scores of a block, vectors innermost; if ``whole``, over whole vectors of rows."""
        rows = (self.used if whole else self.height, self.blocks.rows)
        terms = (count, self.blocks.terms)

        def loop_over_rows(block: list[Stmt], t: Dim) -> None:
            block.append(self._index_loop("j", rows[0], lambda inside, r: make(inside, t, r), rows[1]))

        return [self._index_loop("i", terms[0], loop_over_rows, terms[1])]

    def _mask_score(self, block: list[Stmt], t: Dim, r: Dim, first: Dim) -> None:
        """Emit one score, scaled, biased and masked, and the update of its row's maximum."""
        attrs, place = self.op.attrs, self._score_index(t, r)
        x: Scalar = Load(self.scores, place)
        row, term = self.row + r, first + t
        if attrs["scale"] != 1:
            x = self._apply_in_sum_dtype("mul", x, self._sum_dtype_literal(attrs["scale"]))
        if self.bias is not None:
            x = self._apply_in_sum_dtype("add", x, self._operand_element(self.bias, attrs["bias_dims"], row, term))
        tests = [self._operand_element(self.mask, attrs["mask_dims"], row, term)] if self.mask is not None else []
        for offset in dims_of(attrs, "causal"):
            tests.append(Apply("le", (IndexScalar(term), IndexScalar(row + offset)), "i1"))
        if tests:
            x = self._apply_in_sum_dtype(
                "select", conjunction_of_tests(tests), x, self._sum_dtype_literal(attrs["fill"])
            )
        if not isinstance(x, Load):
            x = self.e.bind(x)
            block.append(Store(self.scores, place, x))
        block.append(Store(self.top, (r,), x, "max"))

    def _softmax_weight_of_term(self, block: list[Stmt], t: Dim, r: Dim) -> None:
        """Emit the weight of a term, and its addition to the sum of its row."""
        weight = self._softmax_weight(t, r)
        block += [Store(self.scores, self._score_index(t, r), weight), Store(self.fresh, (r,), weight, "add")]

    def _weights_as_pairs(self, count: Dim) -> list[Stmt]:
        """Return the loops that write rounded weights of terms as pairs; an odd last term is paired with 0."""

        def write_pair(block: list[Stmt], u: Dim, both: bool = True) -> None:
            """Emit the weights of terms ``2 u`` and ``2 u + 1`` of all rows; without ``both``, the second is 0."""
            def write_pair_of_row(inner: list[Stmt], r: Dim) -> None:
                """Emit the rounded weights of a row, and their addition to the row's total."""
                weights = [self._softmax_weight(2 * u + n, r) for n in range(1 + both)]
                total = self._apply_in_sum_dtype("add", *weights) if both else weights[0]
                inner += [
                    Store(self.weights, (u, 2 * r + n), self._round_to_tile_dtype(x)) for n, x in enumerate(weights)
                ]
                inner += [] if both else [Store(self.weights, (u, 2 * r + 1), Const(0.0, "bf16"))]
                inner.append(Store(self.fresh, (r,), total, "add"))

            block.append(self._index_loop("r", self.used, write_pair_of_row, self.blocks.rows))

        return self._loop_over_pairs(count, self.blocks.terms, write_pair)

    def _softmax_weight(self, t: Dim, r: Dim) -> Scalar:
        """Return ``exp(score - maximum)`` of a term and a row, 0 for a row of only -inf."""
        below = self._apply_in_sum_dtype("sub", Load(self.scores, self._score_index(t, r)), Load(self.low, (r,)))
        return self.e.bind(self._apply_in_sum_dtype("decay", below))

    # --- from block to block ---

    def _save_row_maximum(self, block: list[Stmt], r: Dim) -> None:
        block.append(Store(self.low, (r,), Load(self.top, (r,))))

    def _rescale_row_sums(self, block: list[Stmt], r: Dim) -> None:
        """Emit the factor that rescales a row's sums to its new maximum; a row of only -inf subtracts 0."""
        low = self._subtracted_maximum(Load(self.top, (r,)))
        if not self.single:
            factor = self.e.bind(
                self._apply_in_sum_dtype("exp", self._apply_in_sum_dtype("sub", Load(self.low, (r,)), low))
            )
            block += [Store(self.factor, (r,), factor)]
            block += [Store(self.total, (r,), self._apply_in_sum_dtype("mul", Load(self.total, (r,)), factor))]
        block += [Store(self.low, (r,), low), Store(self.fresh, (r,), self._sum_dtype_literal(0))]

    def _add_to_softmax_sum(self, block: list[Stmt], r: Dim) -> None:
        block.append(Store(self.total, (r,), Load(self.fresh, (r,)), "add"))

    def _add_block_product(self, block: list[Stmt], r: Dim) -> None:
        """Emit the addition of a block's weighted values to a row of sums, rescaled to the new maximum."""
        def add_to_accumulator(inner: list[Stmt], c: Dim) -> None:
            old = self._apply_in_sum_dtype("mul", Load(self.acc, (r, c)), Load(self.factor, (r,)))
            inner.append(Store(self.acc, (r, c), self._apply_in_sum_dtype("add", old, Load(self.part, (r, c)))))

        block.append(self._index_loop("c", self.blocks.columns, add_to_accumulator))
