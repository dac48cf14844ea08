"""Attention of few queries on a CPU: keys and values are read once, in the order in which they lie in memory.

Where a term's keys of several heads lie side by side, an item has all these heads, each with an online softmax of its
own; queries that share a key are multiplied with it while it is there. Of each block of terms::

    for t, for h:  s[h, t] = sum over d of q[h, d] * k[t, h, d]          // keys ahead are fetched
    for h:         s[h, :] = exp(s[h, :] - new top of h), sums rescaled
    for t, for h:  acc[h, :] += s[h, t] * v[t, h, :]

Keys and values of integers are multiplied as they are; their scales, one for each key, are of scores and weights.
A block of which the mask, or the causal row, allows no term is not read: only if some maximum is so low that what is
masked has weight beside it, these blocks follow. A part of the terms that has none asks the first term that is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from aotc.ir.dims import Dim, minimum, product, static, sym
from aotc.ir.loop_ir import Alloc, Apply, Buffer, Const, For, If, Let, Load, Prefetch, Scalar, Stmt, Store, Var
from aotc.ir.loop_ir import Index as IndexScalar
from aotc.lowering.analysis.attention.integers import INTEGERS
from aotc.lowering.analysis.costs.table_attention import FETCHED_KEYS, VALUE_TERMS
from aotc.lowering.analysis.costs.table_columns import FETCH_LINE
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.regions.elemental import all_of
from aotc.lowering.regions.nests import some_at_a_time
from aotc.lowering.regions.ops.attention_on_cpus.attention_seen import AttentionSeen
from aotc.vmfb.dtypes import size_of


class AttentionRows(AttentionSeen):
    """Writes an item of few rows."""

    def item(self, at: Sequence[Dim], part: Dim) -> list[Stmt]:
        """Return what computes the rows of the heads side by side, at an index of the other batch axes."""
        others = iter(at)
        self.at = tuple(0 if a in self.sizes else next(others) for a in range(len(self.batch)))
        body: list[Stmt] = [Alloc(x) for x in (self.q, self.scores, self.acc, self.top, self.total)]
        self.e.enter(body)
        self._take_part(body, part)
        if not self.whole:
            self.height = self._named(body, self.rows, self.plan.rows + 1)
        body += self._each(self._begin)
        self._blocks(body)
        body += self._each(self._end)
        return body

    # --- an item ---

    def _begin(self, block: list[Stmt], at: Index) -> None:
        """Write the start of a row: its query, widened and scaled, and nothing summed yet."""
        query, dims, zero = self.op.operands[0], self.op.attrs["q_dims"], self._number(0)
        row = self.row + at[-1]
        block.append(Store(self.top, at, self._number(-math.inf)))
        block.append(Store(self.total, at, zero))

        def depth(inner: list[Stmt], d: Dim) -> None:
            inner.append(Store(self.q, (*at, d), self._element(query, dims, row, d)))

        block.append(self._for("d", self.depth, depth))
        block.append(self._for("c", self.columns, lambda inner, c: inner.append(Store(self.acc, (*at, c), zero))))

    def _end(self, block: list[Stmt], at: Index) -> None:
        self._results(block, at[-1], [Load(x, at) for x in (self.top, self.total)], self.acc, at)

    def _blocks(self, body: list[Stmt]) -> None:
        """Write the loop over blocks of terms; where there is a mask first those of which some term is allowed."""
        size = self.plan.terms
        blocks = (self.part_terms + (size - 1)) // size
        if not self.several:
            body.append(self._for("n", blocks, lambda b, n: self._block(b, *self._terms_of(b, n))))
            return
        certain = self.op.attrs["fill"] == -math.inf
        end, wanted = self._own("end", "i64"), self._own("wanted", "i32")
        body += [Alloc(end), Alloc(wanted), Store(end, (), IndexScalar(blocks))]

        def phase(block: list[Stmt], p: Dim) -> None:
            name, n = self.b.fresh("to"), self.b.fresh("n")
            block.append(Let(Var(name, "i64"), Load(end, ())))
            inside = self.e.new_block()
            first, count = self._terms_of(inside, sym(n, 0, blocks))
            allowed = self._some_allowed(inside, first, count)
            inner = self.e.new_block()
            self._block(inner, first, count)
            now = Apply("eq", (allowed, IndexScalar(1 - p, "i32")), "i1")
            inside.append(If(now, tuple(inner)))
            block.append(For(n, 0, sym(name, 0, blocks + 1), tuple(inside)))
            self.e.enter(block)
            block.append(Store(end, (), Const(0, "i64")))
            block += [] if certain else self._second(p, end, wanted, blocks)

        body.append(self._for("phase", 1 if certain else 2, phase))

    def _terms_of(self, block: list[Stmt], n: Dim) -> tuple[Dim, Dim]:
        """Return the first term of block ``n``, and how many it has."""
        size = self.plan.terms
        first = self.begin + n * size
        return first, self._named(block, minimum(size, self.end - first), size + 1)

    # --- a block of terms ---

    def _block(self, body: list[Stmt], first: Dim, count: Dim) -> None:
        """Write what is done with ``count`` terms from ``first`` on."""
        terms = self.plan.terms
        body.append(self._for("t", count, lambda b, t: self._dots(b, t, first), terms))
        body += self._each(lambda b, at: self._softmax(b, at, first, count))
        plain = self.op.operands[2].type.dtype not in INTEGERS and len(list(self._queries())) == 1
        some = 1 if plain else VALUE_TERMS.value
        some_at_a_time(
            body, self.b.fresh("t"), 0, count, some, lambda b, at: self._sums(b, [(t, first + t) for t in at])
        )

    def _ahead(self, number: int, length: int, term: Dim) -> list[Stmt]:
        """Return what fetches a key or value that is multiplied after some others."""
        value, dims = self.op.operands[number], self.op.attrs[("", "k_dims", "v_dims")[number]]
        size = size_of(value.type.dtype)
        side_by_side = product(self.sizes[a] for a in self.heads)
        after = max(-(-FETCHED_KEYS.value // (static(side_by_side) * length * size)), 1)
        there = minimum(term + after, self.terms - 1)
        found: list[Stmt] = []
        for d in range(0, length, FETCH_LINE.value // size):
            x = self._element(value, dims, there, d, dtype=value.type.dtype)
            found += [Prefetch(x.buffer, x.index)] if isinstance(x, Load) else []
        return found

    def _dots(self, block: list[Stmt], t: Dim, first: Dim) -> None:
        """Write the scores of a term: a vector of sums for each query, which is added up."""
        key, dims = self.op.operands[1], self.op.attrs["k_dims"]
        lanes = self.b.target.vector_bytes // size_of(self.wide)
        whole, queries = self.depth // lanes, list(self._queries())

        def head(body: list[Stmt], index: Index) -> None:
            body += self._ahead(1, self.depth, first + t)
            sums = [Buffer(self.b.fresh("sums"), self.wide, (lanes,), "private") for _ in queries]
            dots = [self._own("dot") for _ in queries]
            body += [Alloc(x) for x in (*sums, *dots)]

            def add(inner: list[Stmt], d: Dim, into: Sequence[Buffer], at: Index) -> None:
                x = self._element(key, dims, first + t, d)
                for buffer, (own, r) in zip(into, queries, strict=True):
                    inner.append(Store(buffer, at, self._apply("mul", Load(self.q, (*index, *own, r, d)), x), "add"))

            def each(make: Callable[[Buffer, Buffer, Dim], Store]) -> For:
                return self._for("l", lanes, lambda b, at: b.extend(make(x, y, at) for x, y in zip(sums, dots)))

            body.append(each(lambda x, _, at: Store(x, (at,), self._number(-0.0))))
            step = lambda b, n: b.append(self._for("l", lanes, lambda i, at: add(i, n * lanes + at, sums, (at,))))
            body += [self._for("d", whole, step)] if whole else []
            body += [Store(x, (), self._number(-0.0)) for x in dots]
            body.append(each(lambda x, y, at: Store(y, (), Load(x, (at,)), "add")))
            if self.depth % lanes:
                rest = lambda b, d: add(b, whole * lanes + d, dots, ())
                body.append(self._for("d", self.depth % lanes, rest))
            for x, (own, r) in zip(dots, queries, strict=True):
                body.append(Store(self.scores, (*index, *own, r, t), Load(x, ())))

        block += self._keys(head)

    def _softmax(self, block: list[Stmt], at: Index, first: Dim, count: Dim) -> None:
        """Write the weights of a row in place of its scores, and what its sums so far weigh beside them."""
        attrs, row, terms = self.op.attrs, self.row + at[-1], self.plan.terms
        top, fresh = self._own("top"), self._own("fresh")
        old = self.e.bind(Load(self.top, at))
        block += [Alloc(top), Alloc(fresh), Store(top, (), old), Store(fresh, (), self._number(0))]

        def score(inner: list[Stmt], t: Dim) -> None:
            x = self._changed(Load(self.scores, (*at, t)), row, first + t)
            if tests := self._tests(row, first + t):
                x = self._apply("select", all_of(tests), x, self._number(attrs["fill"]))
            if not isinstance(x, Load):
                x = self.e.bind(x)
                inner.append(Store(self.scores, (*at, t), x))
            inner.append(Store(top, (), x, "max"))

        def weigh(inner: list[Stmt], t: Dim) -> None:
            below = self._apply("sub", Load(self.scores, (*at, t)), low)
            weight: Scalar = self.e.bind(self._apply("exp", below))
            inner.append(Store(fresh, (), weight, "add"))
            if self.v_scale is not None:
                weight = self._apply("mul", weight, self._element(self.v_scale, attrs["v_scale_dims"], row, first + t))
            inner.append(Store(self.scores, (*at, t), weight))

        block.append(self._for("t", count, score, terms))
        self.e.enter(block)
        now = self.e.bind(Load(top, ()))
        low = self._low(now)
        factor = self.e.bind(self._apply("exp", self._apply("sub", old, low)))
        block += [Store(self.top, at, now), self._for("t", count, weigh, terms)]
        total = self._apply("add", self._apply("mul", Load(self.total, at), factor), Load(fresh, ()))
        block.append(Store(self.total, at, total))

        def rescale(inner: list[Stmt], c: Dim) -> None:
            inner.append(Store(self.acc, (*at, c), self._apply("mul", Load(self.acc, (*at, c)), factor)))

        block.append(self._for("c", self.columns, rescale))

    def _sums(self, block: list[Stmt], terms: Sequence[tuple[Dim, Dim]]) -> None:
        """Write the values of some terms (of the block, of all), weighed, added to the sums of each query."""
        value, dims, queries = self.op.operands[2], self.op.attrs["v_dims"], list(self._queries())

        def head(body: list[Stmt], index: Index) -> None:
            for _, term in terms:
                body += self._ahead(2, self.columns, term)
            self.e.enter(body)
            weights = [[self.e.bind(Load(self.scores, (*index, *own, r, t))) for t, _ in terms] for own, r in queries]

            def column(inner: list[Stmt], c: Dim) -> None:
                some = [self._element(value, dims, term, c) for _, term in terms]
                some = some if len(queries) == 1 else [self.e.bind(x) for x in some]
                for own_weights, (own, r) in zip(weights, queries, strict=True):
                    products = [self._apply("mul", w, x) for w, x in zip(own_weights, some, strict=True)]
                    inner += [Store(self.acc, (*index, *own, r, c), x, "add") for x in products]

            body.append(self._for("c", self.columns, column))

        block += self._keys(head)
