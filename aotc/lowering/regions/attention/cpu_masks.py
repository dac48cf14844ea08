"""Emit masks of attention of few queries: loops over adjacent heads, and skipping of blocks that are masked completely.

A kernel of :mod:`.cpu_decode` first reads the blocks with unmasked terms. It reads the others only if the maximum of
some row is so low that masked terms have weight in it. A part of the terms (split-KV) without unmasked terms cannot
compute the maximum of its row: it uses the score of the first unmasked term in any part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product as product_of

from aotc.ir.dims.algebra import Dim, static, sym
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, If, Let, Load, Scalar, Stmt, Store, Var
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.opset.attention import ABSENT
from aotc.ir.opset.dim_attributes import dims_of
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.attention.cpu import DecodeAttentionPlan
from aotc.lowering.regions.attention.cpu_common import AttentionItem

Query = tuple[tuple[int, ...], int]  # index of the axes that share a key, and a row


class AttentionMasks(AttentionItem):
    """Emit the loops over heads and the masks of a grid item with few query rows."""

    def __init__(self, b: RegionBuilder, op: Op, plan: DecodeAttentionPlan) -> None:
        """Name the scratch buffers of a grid item.

        ``heads`` are the batch axes of the item along which keys vary, ``shared`` those whose queries share keys.
        ``scores`` are those of one block of terms, ``top`` and ``total`` the maximum and the sum of weights of each
        row, ``acc`` the weighted sums of values. ``several`` is True if masks may exclude terms.
        """
        blocks = plan.blocks
        super().__init__(b, op, blocks.wide, blocks.rows)
        self.plan, self.blocks = plan, blocks
        sizes = [static(self.batch[a]) for a in blocks.whole_axes]
        shared = [a for a in blocks.whole_axes if op.attrs["k_dims"][a] == ABSENT]
        self.heads = [a for a in blocks.whole_axes if a not in shared]
        self.shared = shared
        self.sizes = dict(zip(blocks.whole_axes, sizes, strict=True))
        shape = tuple(self.sizes[a] for a in (*self.heads, *shared))
        whole_axes = product_of(*(range(self.sizes[a]) for a in shared))
        self.queries: list[Query] = list(product_of(whole_axes, range(blocks.rows)))  # queries that share a key
        self.q = self._scratch_buffer("q", *shape, blocks.rows, self.depth, dtype="bf16" if blocks.pairs else "")
        self.scores = self._scratch_buffer("s", *shape, blocks.rows, blocks.terms)
        self.acc = self._scratch_buffer("acc", *shape, blocks.rows, self.columns)
        self.top, self.total = (self._scratch_buffer(x, *shape, blocks.rows) for x in ("top", "total"))
        keys = [self.sizes[a] for a in self.heads]
        scales = {n: op.attrs.get(f"{n}_dims") for n in ("k_scale", "v_scale")}
        of_terms = [n for n, dims in scales.items() if dims and dims[-1] != ABSENT]
        self.factors = {n: self._scratch_buffer("f", *keys, blocks.terms) for n in of_terms}
        weights = (*shape, blocks.rows, blocks.terms)
        self.weights = self._scratch_buffer("w", *weights, dtype="bf16") if plan.value_columns else None
        pairs = [self.weights] if self.weights is not None else []
        self.buffers = [self.q, self.scores, self.acc, self.top, self.total, *self.factors.values(), *pairs]
        self.several = bool(op.attrs["mask_dims"] or dims_of(op.attrs, "causal"))

    # --- loops over heads ---

    def _loops_over_query_rows(self, make: Callable[[list[Stmt], Index], None]) -> list[Stmt]:
        """Return the loops over heads, queries that share keys, and rows, around ``make(block, index)``."""

        def loop_over_rows(block: list[Stmt], index: Index) -> None:
            block.append(self._index_loop("r", self.height, lambda b, r: make(b, (*index, r)), self.blocks.rows))

        return self._loops_over_batch_axes((*self.heads, *self.shared), loop_over_rows)

    def _loops_over_key_heads(self, make: Callable[[list[Stmt], Index], None]) -> list[Stmt]:
        """Return the loops over heads of keys, in memory order, around ``make(block, index)``."""
        return self._loops_over_batch_axes(self.heads, make)

    def _loops_over_batch_axes(self, axes: Sequence[int], make: Callable[[list[Stmt], Index], None]) -> list[Stmt]:
        """Return loops over the batch axes around ``make(block, index)``."""

        def loop_over_axis(block: list[Stmt], index: Index) -> None:
            """Emit the loop over the next axis, or the body once all axes have an index."""
            if len(index) < len(axes):
                size = self.sizes[axes[len(index)]]
                block.append(self._index_loop("h", size, lambda b, h: loop_over_axis(b, (*index, h))))
                return
            places = dict(zip(axes, index, strict=True))
            before, self.at = self.at, tuple(places.get(a, i) for a, i in enumerate(self.at))
            make(block, index)
            self.at = before

        stmts: list[Stmt] = []
        loop_over_axis(stmts, ())
        return stmts

    def _query_element(self, at: Index, d: Dim) -> Scalar:
        """Return an element of a query in the dtype of the sums."""
        x = Load(self.q, (*at, d))
        return x if x.dtype == self.wide else Apply("convert", (x,), self.wide)

    def _scale_at(self, name: str, row: Dim, term: Dim) -> Scalar | None:
        """Return the scale of an integer key or value; None if keys or values are floats."""
        value = self.k_scale if name == "k_scale" else self.v_scale
        return self._operand_element(value, self.op.attrs[f"{name}_dims"], row, term) if value is not None else None

    def _copy_cache_scales(self, first: Dim, count: Dim) -> list[Stmt]:
        """Return the loops that copy the scales of a block of keys, contiguous per head."""
        stmts: list[Stmt] = []
        for name, buffer in self.factors.items():

            def copy_scales_of_head(block: list[Stmt], at: Index, name: str = name, buffer: Buffer = buffer) -> None:
                def copy_scale(inner: list[Stmt], t: Dim) -> None:
                    scale = self._scale_at(name, self.row, first + t)
                    inner += [Store(buffer, (*at, t), scale)] if scale is not None else []

                block.append(self._index_loop("t", count, copy_scale, self.blocks.terms))

            stmts += self._loops_over_key_heads(copy_scales_of_head)
        return stmts

    def _cache_scale_of_term(self, name: str, at: Index, t: Dim, first: Dim) -> Scalar | None:
        """Return the scale of a key or value of a block for the query at ``at``; None if they are floats."""
        if name in self.factors:
            return Load(self.factors[name], (*at[: len(self.heads)], t))
        return self._scale_at(name, self.row + at[-1], first + t)

    # --- masks ---

    def _unmasked_tests(self, row: Dim, term: Dim) -> list[Scalar]:
        """Return the tests at run time that all hold for a key that is not masked."""
        attrs = self.op.attrs
        tests = [self._operand_element(self.mask, attrs["mask_dims"], row, term)] if self.mask is not None else []
        for offset in dims_of(attrs, "causal"):
            tests.append(Apply("le", (IndexScalar(term), IndexScalar(row + offset)), "i1"))
        return tests

    def _is_any_key_unmasked(self, block: list[Stmt], first: Dim, count: Dim) -> Scalar:
        """Emit the test of a block's mask; return 1 if it allows a key in any row of any head, else 0."""
        some, attrs = self._private_scalar("some", "i32"), self.op.attrs
        block += [Alloc(some), Store(some, (), Const(int(self.mask is None), "i32"))]
        if self.mask is not None:
            block += self._loops_over_mask(
                lambda b, row: b.append(
                    self._index_loop(
                        "t",
                        count,
                        lambda inner, t: inner.append(Store(some, (), self._mask_allows_term(row, first + t), "max")),
                        self.blocks.terms,
                    )
                )
            )
            self.e.enter(block)
        allowed: Scalar = Load(some, ())
        for offset in dims_of(attrs, "causal"):
            seen = Apply("le", (IndexScalar(first), IndexScalar(self.row + self.rows - 1 + offset)), "i1")
            allowed = Apply("select", (seen, allowed, Const(0, "i32")), "i32")
        return self.e.bind(allowed)

    def _mask_allows_term(self, row: Dim, term: Dim) -> Scalar:
        """Return 1 where the mask allows a term, else 0."""
        allowed = self._operand_element(self._mask_operand, self.op.attrs["mask_dims"], row, term)
        return Apply("select", (allowed, Const(1, "i32"), Const(0, "i32")), "i32")

    @property
    def _mask_operand(self) -> Value:
        assert self.mask is not None
        return self.mask

    def _loops_over_mask(self, make: Callable[[list[Stmt], Dim], None]) -> list[Stmt]:
        """Return the loops over the heads and rows along which the mask varies."""
        dims = self.op.attrs["mask_dims"]
        axes = [a for a in (*self.heads, *self.shared) if dims[a] != ABSENT]

        def loop_over_rows(block: list[Stmt], _: Index) -> None:
            """Emit the loop over the rows of a mask, or a single iteration if it is the same for all rows."""
            if dims[-2] == ABSENT:
                make(block, 0)
            else:
                block.append(self._index_loop("r", self.height, lambda b, r: make(b, self.row + r), self.blocks.rows))

        return self._loops_over_batch_axes(axes, loop_over_rows)

    def _request_masked_blocks(self, phase: Dim, end: Buffer, requested: Buffer, blocks: Dim) -> list[Stmt]:
        """Return the statements that also request fully masked blocks, if some row needs them."""
        once: list[Stmt] = [Store(requested, (), Const(0, "i32"))]

        def request_for_row(block: list[Stmt], at: Index) -> None:
            self._request_masked_terms(block, Load(self.top, at), requested)

        once += self._loops_over_query_rows(request_for_row)
        dims = self.op.attrs["mask_dims"]
        alike = self.mask is not None and all(dims[a] == ABSENT for a in (*self.sizes, -2))
        if "split" in self.op.attrs and alike and not dims_of(self.op.attrs, "causal"):
            self.e.enter(once)
            is_wanted = Apply("ne", (Load(requested, ()), Const(0, "i32")), "i1")
            once.append(If(is_wanted, tuple(self._allowed_in_other_parts(requested))))
        follow = Store(end, (), IndexScalar(blocks))
        once.append(If(Apply("ne", (Load(requested, ()), Const(0, "i32")), "i1"), (follow,)))
        return [If(Apply("eq", (IndexScalar(phase), Const(0, "i64")), "i1"), tuple(once))]

    def _request_masked_terms(self, block: list[Stmt], top: Scalar, requested: Buffer) -> None:
        """Emit the request for masked keys, if these have weight relative to the maximum ``top``."""
        light = self._masked_terms_have_no_weight(top)
        block.append(Store(requested, (), Apply("select", (light, Const(0, "i32"), Const(1, "i32")), "i32"), "max"))

    def _allowed_in_other_parts(self, requested: Buffer) -> list[Stmt]:
        """Return the test for keys allowed in other split-KV parts, by the score of the first allowed key."""
        body = self.e.new_block()
        place, name = self._private_scalar("place", "i64"), self.b.fresh("found")

        def find_first_unmasked(inner: list[Stmt], t: Dim) -> None:
            allowed = self._operand_element(self._mask_operand, self.op.attrs["mask_dims"], 0, t)
            at = Apply("select", (allowed, IndexScalar(t), IndexScalar(self.terms)), "i64")
            inner.append(Store(place, (), at, "min"))

        body += [
            Alloc(place),
            Store(place, (), IndexScalar(self.terms)),
            self._index_loop("t", self.terms, find_first_unmasked),
        ]
        body.append(Let(Var(name, "i64"), Load(place, ())))
        first = sym(name, 0, self.terms)

        def request_for_row(block: list[Stmt], at: Index) -> None:
            """Emit the score of the first allowed key for a row, and the request that depends on it."""
            dot = self._private_scalar("dot")
            block += [Alloc(dot), Store(dot, (), self._sum_dtype_literal(0))]
            key = lambda d: self._operand_element(self.op.operands[1], self.op.attrs["k_dims"], first, d)
            block.append(self._index_loop("depth", self.depth, lambda inner, d: inner.append(
                Store(dot, (), self._apply_in_sum_dtype("mul", self._query_element(at, d), key(d)), "add")
            )))  # fmt: skip
            self.e.enter(block)
            row = self.row + at[-1]
            score = self._scaled_and_biased_score(Load(dot, ()), row, first, self._scale_at("k_scale", row, first))
            self._request_masked_terms(block, self._apply_in_sum_dtype("max", score, Load(self.top, at)), requested)

        some = self.e.new_block()
        some.append(Store(requested, (), Const(0, "i32")))
        some += self._loops_over_query_rows(request_for_row)
        exists = Apply("lt", (IndexScalar(first), IndexScalar(self.terms)), "i1")
        body.append(If(exists, tuple(some)))
        return body

    def _scaled_and_biased_score(self, x: Scalar, row: Dim, term: Dim, factor: Scalar | None) -> Scalar:
        """Return a dot product times the scale and the factor of its key, plus the bias."""
        attrs = self.op.attrs
        if attrs["scale"] != 1:
            x = self._apply_in_sum_dtype("mul", x, self._sum_dtype_literal(attrs["scale"]))
        if factor is not None:
            x = self._apply_in_sum_dtype("mul", x, factor)
        if self.bias is not None:
            x = self._apply_in_sum_dtype("add", x, self._operand_element(self.bias, attrs["bias_dims"], row, term))
        return x
