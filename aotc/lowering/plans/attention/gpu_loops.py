"""Emit attention as the plain loops that define it: the planner reads them, and the GPU kernel has them as body."""

from __future__ import annotations

import math

from aotc.ir.dims.algebra import Dim, ceildiv, maximum, minimum, product, sym
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, For, Kernel, Let, Load, Scalar, Stmt, Store, Var
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.opset.attention import ABSENT
from aotc.ir.opset.dim_attributes import dims_of
from aotc.ir.tensor.ir import Value
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.elements import Elements, conjunction_of_tests
from aotc.lowering.elements.tensor_core_loops import as_tensor_core_operand
from aotc.lowering.plans.attention.sizes import AttentionSizes


def attention_loops(b: RegionBuilder, e: Elements, sizes: AttentionSizes) -> Kernel:
    """Return the kernel of ``attention`` in the form for :func:`read_attention`, without its tiling."""
    return _AttentionLoops(b, e, sizes).attention_loop_kernel()


class _AttentionLoops:
    """Emit the loops of one ``attention`` in the form that :mod:`aotc.ir.loop.forms.attention` reads."""

    def __init__(self, b: RegionBuilder, e: Elements, sizes: AttentionSizes) -> None:
        """Name the loops and the private buffers of one row: maximum, total, score and weighted sums."""
        self.b, self.op, self.sizes, self.e = b, b.region_root_op("attention"), sizes, e
        self.z, self.row, self.term, self.d, self.col = (e.names(x) for x in ("z", "row", "term", "depth", "col"))
        self.part: int = self.op.attrs.get("part", 0)
        self.parts = ceildiv(sizes.terms, self.part) if self.part else 1
        self.heads = product(sizes.batch) * self.parts
        self.at_head = delinearize(sym(self.z, 0, self.heads), (*sizes.batch, self.parts))
        self.top, self.whole, self.total = (Buffer(e.names(x), "f32", (), "private") for x in ("top", "whole", "total"))
        self.sums = Buffer(e.names("sums"), "f32", (sizes.width,), "private")
        self.at_row = sym(self.row, 0, sizes.rows)

    def attention_loop_kernel(self) -> Kernel:
        """Return the attention kernel as loops, before a tiling is chosen."""
        s = self.sizes
        body: list[Stmt] = [Alloc(x) for x in (self.top, self.whole, self.sums)]
        body += [Store(self.top, (), _f32_literal(-math.inf)), Store(self.whole, (), _f32_literal(0))]
        body.append(For(self.col, 0, s.width, (Store(self.sums, (self._column_index(),), _f32_literal(0)),)))
        body.append(For(self.term, self.at_head[-1] * self.part, self._end_of_terms(), tuple(self._key_statements())))
        body.append(For(self.col, 0, s.width, tuple(self._store_weighted_means())))
        if self.part:
            body.append(self._store_log_sum_of_part())
        rows = For(self.row, 0, s.rows, tuple(body))
        work = product((self.heads, s.rows, s.terms)) * (2 * (s.depth + s.width))
        return self.b.kernel(1, (For(self.z, 0, self.heads, (rows,)),), work)

    def _end_of_terms(self) -> Dim:
        """Return the number of keys that a row may attend to; later keys have no weight."""
        s = self.sizes
        end = s.terms if s.offset is None else minimum(s.terms, maximum(self._causal_row_number() + s.offset + 1, 0))
        return minimum(end, (self.at_head[-1] + 1) * self.part) if self.part else end

    def _causal_row_number(self) -> Dim:
        """Return the row number with which a causal mask compares terms."""
        return self.at_row if self.sizes.grouped == ABSENT else 0

    def _column_index(self) -> Dim:
        return sym(self.col, 0, self.sizes.width)

    def _element_index(self, value: Value, dims: tuple[int, ...], *last: Dim, rows: bool = True) -> Index:
        """Return the index of an element of an operand or result, at the current head."""
        at = self.at_head[:-1]
        index_: list[Dim] = [0] * value.type.rank
        for d, i in zip(self.sizes.dims_in_template_order(dims, rows), (*at, *last), strict=True):
            if d != ABSENT:
                index_[d] = i
        return tuple(index_)

    def _load_operand(self, number: int, key: str, *last: Dim) -> Scalar:
        """Return the load of an element of an operand, directly or through a view, as tensor cores round it."""
        value = self.op.operands[number]
        index = self._element_index(value, self.op.attrs[key], *last, rows=number == 0)
        buffer = self.b.buffers.get(value)
        x = self._load_through_view(value, index) if buffer is None else Load(buffer, index)
        return as_tensor_core_operand(x, "f32")

    def _load_through_view(self, value: Value, index: Index) -> Scalar:
        """Return the load of an element of ``value`` from the input that it is a view of."""
        block, aside = self.e.block, self.e.new_block()
        x = self.e.at(value, index)
        bound = {s.var: s.value for s in aside if isinstance(s, Let)}
        while isinstance(x, Var):
            x = bound[x]
        self.e.enter(block)
        return x

    def _key_statements(self) -> list[Stmt]:
        """Return the statements for one key."""
        s = self.sizes
        term, d = sym(self.term, 0, s.terms), sym(self.d, 0, s.depth)
        inner = self.e.new_block()
        pair = self._load_operand(0, "q_dims", self.at_row, d), self._load_operand(1, "k_dims", term, d)
        inner.append(Store(self.total, (), Apply("mul", pair, "f32"), "add"))
        body: list[Stmt] = [
            Alloc(self.total),
            Store(self.total, (), _f32_literal(0)),
            For(self.d, 0, s.depth, tuple(inner)),
        ]
        self.e.enter(body)
        score = self._bind_value(body, self._attention_score(term))
        # Online softmax (Milakov and Gimelshein, 2018): a new maximum scales all earlier sums.
        highest = self._bind_value(body, Apply("max", (Load(self.top, ()), score), "f32"))
        # The maximum is -inf while all keys are masked; the base is then 0, as -inf - -inf is NaN.
        none = Apply("eq", (highest, _f32_literal(-math.inf)), "i1")
        base = self._bind_value(body, Apply("select", (none, _f32_literal(0), highest), "f32"))
        decay = self._bind_value(body, _exp_of_difference(Load(self.top, ()), base))
        weight = self._bind_value(body, _exp_of_difference(score, base))
        body.append(Store(self.top, (), highest))
        body.append(Store(self.whole, (), _f32_sum(_f32_product(Load(self.whole, ()), decay), weight)))
        kind = self.op.operands[2].type.dtype
        narrow = weight if kind == "f32" else Apply("convert", (weight,), kind)
        rounded = self._bind_value(body, as_tensor_core_operand(narrow, "f32"))
        place = (self._column_index(),)
        inside = self.e.new_block()
        value = _f32_product(rounded, self._load_operand(2, "v_dims", term, self._column_index()))
        inside.append(Store(self.sums, place, _f32_sum(_f32_product(Load(self.sums, place), decay), value)))
        body.append(For(self.col, 0, s.width, tuple(inside)))
        return body

    def _bind_value(self, body: list[Stmt], value: Scalar) -> Var:
        var = Var(self.e.names("t"), value.dtype)
        body.append(Let(var, value))
        return var

    def _attention_score(self, term: Dim) -> Scalar:
        """Return the score of a term: its dot product scaled, biased and masked."""
        attrs, extra = self.op.attrs, list(self.op.operands[3:])
        x: Scalar = _f32_product(Load(self.total, ()), _f32_literal(attrs["scale"]))
        if attrs["bias_dims"]:
            bias = extra.pop(0)
            added = self.e.at(bias, self._element_index(bias, attrs["bias_dims"], self.at_row, term))
            x = _f32_sum(x, added if added.dtype == "f32" else Apply("convert", (added,), "f32"))
        tests = [self.e.at(m, self._element_index(m, attrs["mask_dims"], self.at_row, term)) for m in extra]
        if dims_of(attrs, "causal") and self.sizes.offset is None:
            seen = Apply(
                "le", (IndexScalar(term), IndexScalar(self._causal_row_number() + dims_of(attrs, "causal")[0])), "i1"
            )
            tests.append(seen)
        return Apply("select", (conjunction_of_tests(tests), x, _f32_literal(attrs["fill"])), "f32") if tests else x

    def _store_weighted_means(self) -> list[Stmt]:
        """Return the statements that store the weighted mean of values; 0 for rows without keys."""
        s = self.sizes
        body = self.e.new_block()
        mean: Scalar = self._bind_value(
            body, Apply("div", (Load(self.sums, (self._column_index(),)), Load(self.whole, ())), "f32")
        )
        if not isinstance(s.terms, int):
            none = Apply("eq", (IndexScalar(s.terms), Const(0, "i64")), "i1")
            mean = Apply("select", (none, _f32_literal(0), mean), "f32")
        out = self.b.outputs[0]
        mean = mean if out.dtype == "f32" else Apply("convert", (mean,), out.dtype)
        body.append(Store(out, self._result_index(), mean))
        return body

    def _result_index(self) -> Index:
        """Return the index of a mean in the result; with split-KV, the number of the part comes first."""
        dims = self.op.attrs["out_dims"]
        first = bool(self.part)
        places = [d + first for d in dims]
        index = self._element_index(self.op.results[0], tuple(places), self.at_row, self._column_index())
        return (self.at_head[-1], *index[1:]) if first else index

    def _store_log_sum_of_part(self) -> Store:
        """Return the store of the logarithm of the sum of a row's weights in a part."""
        value = _f32_sum(Load(self.top, ()), Apply("log", (Load(self.whole, ()),), "f32"))
        column = self.op.attrs["out_dims"][-1] + 1
        part, *rows = (i for d, i in enumerate(self._result_index()) if d != column)
        return Store(self.b.outputs[1], (*rows, part), value)


def _f32_literal(x: float) -> Const:
    return Const(float(x), "f32")


def _f32_product(x: Scalar, y: Scalar) -> Apply:
    return Apply("mul", (x, y), "f32")


def _f32_sum(x: Scalar, y: Scalar) -> Apply:
    return Apply("add", (x, y), "f32")


def _exp_of_difference(x: Scalar, y: Scalar) -> Apply:
    """Return ``exp(x - y)`` of f32 scalars."""
    return Apply("exp", (Apply("sub", (x, y), "f32"),), "f32")
