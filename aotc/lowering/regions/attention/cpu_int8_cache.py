"""Attention of few queries to integer KV caches, multiplied as integers.

A query ``q`` is represented as ``step * n``, with integers ``n`` of a few bytes, scaled so that the largest element
uses all bits. The weights of a block are represented likewise. An integer is a sum of *digits*, signed bytes, times
powers of 256 (*places*). The digits of one place of all elements form a row of an integer matmul with keys, or values.
The instruction requires one unsigned operand, so 128 is added to keys and values. Sums are exact; 128 times the sum of
digits is subtracted again::

    n[d] = round(q[d] / step);  s[t] = step * sum over places p of 256 ** p * (n[p] . (k[t] + 128) - 128 * sum of n[p])

With three bytes a step is 2 ** -23 of the largest element, like the rounding error of f32. Terms that do not fill a
tile are multiplied as floats, one by one. So are *odd* rows: with numbers that are not finite, or weights below 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aotc.ir.dims.algebra import Dim, static, sym
from aotc.ir.loop.forms.tile_forms import F32_I8, I8_OFFSET
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, For, If, Let, Load, Scalar, Stmt, Store, Tile, Var
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.index_maps import Index, linearize
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.attention.cpu import IntegerAttentionPlan
from aotc.lowering.regions.attention.cpu_decode import AttentionRows
from aotc.vmfb.dtypes import size_of

QUAD = 4  # neighbouring terms that one instruction multiplies
_LEAST = 1e-30  # smaller numbers count as 0: the inverse of their step is not an f32
_INFINITE = 0x7F800000  # bits of an infinite f32
_WHOLE = 1 << 23  # from this number up to twice as much, neighbouring f32 differ by 1
_WHOLE_BITS = 0x4B000000  # bits of the f32 _WHOLE
_SPARE = 4  # numbers at the end of the range that are left free for rounding up


class AttentionIntegers(AttentionRows):
    """Emit a grid item of attention with few query rows and integer keys and values."""

    plan: IntegerAttentionPlan

    def __init__(self, b: RegionBuilder, op: Op, plan: IntegerAttentionPlan) -> None:
        """Allocate the integer digits of queries and weights, the steps of their scales, and the integer sums."""
        super().__init__(b, op, plan)
        self.lanes = b.target.vector_bytes // size_of("i32")
        keys, count = [self.sizes[a] for a in self.heads], self.blocks.digits * len(self.queries)
        self.q_step, self.w_step = (self._scratch_buffer("step", *self.top.shape) for _ in range(2))
        self.q_digits = self._scratch_buffer("digits", *keys, count, self.depth, dtype="i8")
        self.w_digits = self._scratch_buffer("digits", *keys, count, self.blocks.terms, dtype="i8")
        self.q_sums, self.w_sums = (self._scratch_buffer("digit", *keys, count, dtype="i32") for _ in range(2))
        self.dots = self._scratch_buffer("dots", count, self.lanes, dtype="i32")
        self.sums = self._scratch_buffer("sums", *keys, count * self.columns, dtype="i32")
        self.odd_query, self.odd_weight = (self._private_scalar("odd", "i32") for _ in range(2))
        self.buffers += [
            *(self.q_step, self.w_step, self.q_digits, self.w_digits, self.q_sums, self.w_sums),
            *(self.dots, self.sums, self.odd_query, self.odd_weight),
        ]

    # --- numbers of some bytes ---

    def _quantize_row(self, block: list[Stmt], odd: Buffer, step: Buffer, at: Index, x: Buffer, count: Dim) -> Scalar:
        """Emit the quantization scale of row ``at`` of ``x``; return the inverse of the scale.

        The bits of non-negative floats are ordered like their values, and below those of infinity. Any other row is
        odd: it is multiplied as floats.
        """
        largest, extent = self._private_scalar("largest", "u32"), x.shape[-1]
        block += [Alloc(largest), Store(largest, (), Const(0, "u32"))]
        bits = lambda i: Apply("bitcast", (self._magnitude_of_element(x, (*at, i)),), "u32")
        block.append(self._index_loop("t", count, lambda b, i: b.append(Store(largest, (), bits(i), "max")), extent))
        self.e.enter(block)
        most = self.e.bind(Load(largest, ()))
        fine = self.e.bind(Apply("lt", (most, Const(_INFINITE, "u32")), "i1"))
        block.append(Store(odd, (), Apply("select", (fine, Const(0, "i32"), Const(1, "i32")), "i32"), "max"))
        size = self._apply_in_sum_dtype(
            "select", fine, Apply("bitcast", (most,), self.wide), self._sum_dtype_literal(1)
        )
        whole = self.e.bind(self._apply_in_sum_dtype("max", size, self._sum_dtype_literal(_LEAST)))
        block.append(
            Store(
                step,
                at,
                self._apply_in_sum_dtype("div", whole, self._sum_dtype_literal(self._largest_quantized_integer)),
            )
        )
        return self.e.bind(
            self._apply_in_sum_dtype("div", self._sum_dtype_literal(self._largest_quantized_integer), whole)
        )

    def _magnitude_of_element(self, x: Buffer, at: Index) -> Scalar:
        """Return the absolute value of an element; weights have no sign, or are odd."""
        return self._apply_in_sum_dtype("abs", Load(x, at)) if x is self.q else Load(x, at)

    @property
    def _largest_quantized_integer(self) -> int:
        """Return the largest integer of a quantized element: all its digits are 127, less a few spare units."""
        return 127 * sum(1 << 8 * place for place in range(self.blocks.digits)) - _SPARE

    def _emit_quantized_digits(
        self, block: list[Stmt], digits: Buffer, sums: Buffer, at: Index, size: Dim, number: Callable[[Dim], Scalar]
    ) -> None:
        """Emit the quantized query as 8-bit digits, and the sums of its digits.

        A digit is a byte of the integer after adding 128 in each place, less 128.
        """
        rows = [self._digit_row_index(at, place) for place in range(self.blocks.digits)]
        totals = [self._private_scalar("total", "i32") for _ in rows]
        block += [line for x in totals for line in (Alloc(x), Store(x, (), Const(0, "i32")))]
        moved = sum(128 << 8 * place for place in range(self.blocks.digits))

        def write_digits_of_element(inner: list[Stmt], i: Dim) -> None:
            """Emit the signed digits of an integer in base 256, and the sums of each digit."""
            n = self.e.bind(Apply("add", (number(i), Const(moved, "i32")), "i32"))
            for place, (row, total) in enumerate(zip(rows, totals, strict=True)):
                shifted = Apply("shr_logic", (n, Const(8 * place, "i32")), "i32") if place else n
                byte = Apply("and", (shifted, Const(255, "i32")), "i32")
                digit = self.e.bind(Apply("sub", (byte, Const(128, "i32")), "i32"))
                inner += [Store(digits, (*row, i), Apply("convert", (digit,), "i8")), Store(total, (), digit, "add")]

        block.append(self._index_loop("t", size, write_digits_of_element, digits.shape[-1]))
        block += [Store(sums, row, Load(total, ())) for row, total in zip(rows, totals, strict=True)]
        self.e.enter(block)

    def _digit_row_index(self, at: Index, place: int) -> Index:
        """Return the index of the digits of one place of a query's integers."""
        heads, own = at[: len(self.heads)], at[len(self.heads) :]
        return (*heads, place * len(self.queries) + linearize(own, self.top.shape[len(self.heads) :]))

    def _dequantized_sum(self, sums: Sequence[Scalar], digits: Sequence[Scalar], step: Scalar) -> Scalar:
        """Return the float of integer sums, one per place, less 128 times the sum of their ``digits``."""
        total: Scalar = self._sum_dtype_literal(0)
        for x, own in reversed(list(zip(sums, digits, strict=True))):
            exact = Apply("sub", (x, Apply("mul", (own, Const(128, "i32")), "i32")), "i32")
            higher = self._apply_in_sum_dtype("mul", total, self._sum_dtype_literal(256))
            total = self._apply_in_sum_dtype("add", higher, Apply("convert", (exact,), self.wide))
        return self._apply_in_sum_dtype("mul", total, step)

    def _loops_over_quantized_keys(
        self, body: list[Stmt], odd: Buffer, count: Dim, at_once: int,
        some: Callable[[list[Stmt], Index, Dim], None], one: Callable[[list[Stmt], Dim], None],
    ) -> None:  # fmt: skip
        """Emit loops over keys (``at_once`` per iteration unless a row is odd) and over key heads."""
        name, begin, t = self.b.fresh("n"), self.b.fresh("n"), self.b.fresh("t")
        most = self.blocks.terms // at_once
        groups = Apply("select", (self._are_digits_exact(odd), IndexScalar(count // at_once), Const(0, "i64")), "i64")
        body.append(Let(Var(name, "i64"), groups))
        each = lambda b, n: b.extend(self._loops_over_key_heads(lambda c, index: some(c, index, n * at_once)))
        body.append(self._index_loop("t", sym(name, 0, most + 1), each, most))
        body.append(Let(Var(begin, "i64"), IndexScalar(sym(name, 0, most + 1) * at_once)))
        rest = self.e.new_block()
        one(rest, sym(t, 0, self.blocks.terms))
        body.append(For(t, sym(begin, 0, self.blocks.terms + 1), count, tuple(rest)))

    # --- queries and scores ---

    def _begin_all_query_rows(self, body: list[Stmt]) -> None:
        """Emit the initialization of all query rows."""
        body.append(Store(self.odd_query, (), Const(0, "i32")))
        super()._begin_all_query_rows(body)

    def _begin_query_row(self, block: list[Stmt], at: Index) -> None:
        """Emit the start of a row, and the digits of its query."""
        super()._begin_query_row(block, at)
        steps = self._quantize_row(block, self.odd_query, self.q_step, at, self.q, self.depth)
        near = lambda d: self._apply_in_sum_dtype(
            "round_even", self._apply_in_sum_dtype("mul", Load(self.q, (*at, d)), steps)
        )
        number = lambda d: Apply("convert", (near(d),), "i32")
        self._emit_quantized_digits(block, self.q_digits, self.q_sums, at, self.depth, number)

    def _emit_scores(self, body: list[Stmt], first: Dim, count: Dim) -> None:
        """Emit the scores of ``count`` keys by integer matmuls of digits, or by floats if there are none."""
        if self.plan.key_form is None:
            super()._emit_scores(body, first, count)
            return
        row = self._layout_of_head(1).outer
        one = lambda b, t: b.extend(
            self._loops_over_key_heads(
                lambda c, index: c.extend(self._score_dot_products(index, [t], first, F32_I8, row))
            )
        )
        some = lambda b, index, t: self._score_vector(b, index, t, first, row)
        self._loops_over_quantized_keys(body, self.odd_query, count, self.lanes, some, one)

    def _score_vector(self, block: list[Stmt], index: Index, begin: Dim, first: Dim, row: Dim) -> None:
        """Emit the scores of a vector of keys of a block, from key ``begin`` of the block on."""
        rows = static(self.dots.shape[0])
        for t in range(self.lanes):
            block += [
                *self._prefetch_keys_or_values(1, self.depth, first + begin + t),
                *self._prefetch_scales(first + begin + t),
            ]
        x = self._operand_element(self.op.operands[1], self.op.attrs["k_dims"], first + begin, 0, dtype="i8")
        assert isinstance(x, Load)
        block.append(Tile(
            rows, self.lanes, self.dots, 0, self.lanes,
            self.q_digits, linearize((*index, 0, 0), self.q_digits.shape), self.depth,
            x.buffer, linearize(x.index, x.buffer.shape), ((self.depth // QUAD, QUAD, QUAD),), I8_OFFSET, b_column=row,
        ))  # fmt: skip
        for own, r in self.queries:
            at = (*index, *own, r)

            def store_score(inner: list[Stmt], t: Dim, at: Index = at) -> None:
                rows = [self._digit_row_index(at, place) for place in range(self.blocks.digits)]
                sums, digits = [Load(self.dots, (row[-1], t)) for row in rows], [Load(self.q_sums, row) for row in rows]
                x = self._dequantized_sum(sums, digits, Load(self.q_step, at))
                inner.append(Store(self.scores, (*at, begin + t), x))

            block.append(self._index_loop("t", self.lanes, store_score))

    # --- weights and values ---

    def _decode_key_block(self, body: list[Stmt], first: Dim, count: Dim) -> None:
        """Emit the scores, weights and sums of ``count`` keys from key ``first`` on, and copies of their scales."""
        body.append(Store(self.odd_weight, (), Const(0, "i32")))
        super()._decode_key_block(body, first, count)

    def _softmax_of_row(self, block: list[Stmt], at: Index, first: Dim, count: Dim) -> None:
        """Emit the softmax weights of a row, quantized to 8-bit digits.

        Adding 2 ** 23 to an f32 leaves a whole number in its low bits.
        """
        super()._softmax_of_row(block, at, first, count)
        if not self.plan.digit_terms:
            return
        steps = self._quantize_row(block, self.odd_weight, self.w_step, at, self.scores, count)
        scaled = lambda t: self._apply_in_sum_dtype("mul", Load(self.scores, (*at, t)), steps)
        bits = lambda t: Apply(
            "bitcast", (self._apply_in_sum_dtype("add", scaled(t), self._sum_dtype_literal(_WHOLE)),), "i32"
        )
        number = lambda t: Apply("sub", (bits(t), Const(_WHOLE_BITS, "i32")), "i32")
        whole = count // self.plan.digit_terms * self.plan.digit_terms
        self._emit_quantized_digits(block, self.w_digits, self.w_sums, at, whole, number)

    def _emit_weighted_sums(self, body: list[Stmt], first: Dim, count: Dim) -> None:
        """Emit the addition of weighted values of ``count`` keys by integer matmuls of digits, or by floats."""
        if not self.plan.digit_terms:
            super()._emit_weighted_sums(body, first, count)
            return
        row = self._layout_of_head(2).outer
        body += self._loops_over_key_heads(self._clear_sums)
        some = lambda b, index, t: self._add_weighted_values(b, index, t, first, row)
        one = lambda b, t: self._add_values_of_keys(b, [(t, first + t)])
        self._loops_over_quantized_keys(body, self.odd_weight, count, self.plan.digit_terms, some, one)
        inside = self.e.new_block()
        inside += self._loops_over_query_rows(self._add_integer_sums)
        body.append(If(self._are_digits_exact(self.odd_weight), tuple(inside)))

    def _are_digits_exact(self, odd: Buffer) -> Apply:
        """Return a scalar that is True at run time if digits can represent all rows so far."""
        return Apply("eq", (Load(odd, ()), Const(0, "i32")), "i1")

    def _clear_sums(self, block: list[Stmt], index: Index) -> None:
        zero = lambda c: Store(self.sums, (*index, c), Const(0, "i32"))
        block.append(self._index_loop("c", self.sums.shape[-1], lambda b, c: b.append(zero(c))))

    def _add_weighted_values(self, block: list[Stmt], index: Index, begin: Dim, first: Dim, row: Dim) -> None:
        """Emit the products of weights and values of some keys, added to integer sums."""
        value, dims, cols = self.op.operands[2], self.op.attrs["v_dims"], QUAD * self.lanes
        terms = self.plan.digit_terms
        for t in range(terms):
            block += self._prefetch_keys_or_values(2, self.columns, first + begin + t, terms)

        def emit_tile(inner: list[Stmt], j: Dim) -> None:
            """Emit the tile that multiplies the digits of weights by one run of value columns."""
            x = self._operand_element(value, dims, first + begin, j * cols, dtype="i8")
            assert isinstance(x, Load)
            inner.append(Tile(
                self.blocks.digits * len(self.queries), cols,
                self.sums, linearize((*index, j * cols), self.sums.shape), self.columns,
                self.w_digits, linearize((*index, 0, begin), self.w_digits.shape), self.blocks.terms,
                x.buffer, linearize(x.index, x.buffer.shape), ((terms // QUAD, QUAD, QUAD * row),), I8_OFFSET,
                b_inner=row, adds=True,
            ))  # fmt: skip

        block.append(self._index_loop("j", self.columns // cols, emit_tile))

    def _add_integer_sums(self, block: list[Stmt], at: Index) -> None:
        """Emit the addition of a block's integer sums to those of earlier blocks."""
        step = Load(self.w_step, at)

        def add_column(inner: list[Stmt], c: Dim) -> None:
            rows = [self._digit_row_index(at, place) for place in range(self.blocks.digits)]
            sums = [Load(self.sums, (*row[:-1], row[-1] * self.columns + c)) for row in rows]
            x = self._dequantized_sum(sums, [Load(self.w_sums, row) for row in rows], step)
            inner.append(Store(self.acc, (*at, c), x, "add"))

        block.append(self._index_loop("c", self.columns, add_column))
