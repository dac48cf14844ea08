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
from collections.abc import Callable, Iterator, Sequence
from itertools import product as product_of

from aotc.ir.dims import Dim, minimum, product, static, sym
from aotc.ir.loop_ir import Alloc, Apply, Buffer, Const, For, If, Let, Load, Prefetch, Scalar, Stmt, Store, Var
from aotc.ir.loop_ir import Index as IndexScalar
from aotc.ir.opset.attention import ABSENT
from aotc.ir.tensor_ir import Op, Value
from aotc.lowering.analysis.attention.integers import INTEGERS
from aotc.lowering.analysis.attention.plan import RowsPlan
from aotc.lowering.analysis.costs.table_attention import FETCHED_KEYS, VALUE_TERMS
from aotc.lowering.analysis.costs.table_columns import FETCH_LINE
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.regions.elemental import all_of
from aotc.lowering.regions.nests import some_at_a_time
from aotc.lowering.regions.ops.attention_item import AttentionItem
from aotc.lowering.regions.region import RegionBuilder
from aotc.vmfb.dtypes import size_of

Query = tuple[tuple[int, ...], int]  # an index of the axes that share a key, and a row


class AttentionRows(AttentionItem):
    """Writes an item of few rows."""

    def __init__(self, b: RegionBuilder, op: Op, plan: RowsPlan) -> None:
        super().__init__(b, op, plan.wide, plan.rows)
        self.plan = plan
        sizes = [static(self.batch[a]) for a in plan.beside]
        shared = [a for a in plan.beside if op.attrs["k_dims"][a] == ABSENT]
        self.heads = [a for a in plan.beside if a not in shared]
        self.shared = shared
        self.sizes = dict(zip(plan.beside, sizes, strict=True))
        shape = tuple(self.sizes[a] for a in (*self.heads, *shared))
        self.count = product(shape)
        self.q = self._buffer("q", *shape, plan.rows, self.depth)
        self.scores = self._buffer("s", *shape, plan.rows, plan.terms)
        self.acc = self._buffer("acc", *shape, plan.rows, self.columns)
        self.top, self.total = (self._buffer(x, *shape, plan.rows) for x in ("top", "total"))
        self.several = bool(op.attrs["mask_dims"] or op.attrs["causal"])

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

    # --- loops over heads ---

    def _each(self, make: Callable[[list[Stmt], Index], None], all_rows: bool = False) -> list[Stmt]:
        """Return the loops over heads, queries that share keys, and rows, of what ``make(block, index)`` writes."""
        axes = (*self.heads, *self.shared)

        def level(block: list[Stmt], n: int, index: tuple[Dim, ...]) -> None:
            if n == len(axes):
                rows = self.plan.rows if all_rows else self.height
                block.append(self._for("r", rows, lambda b, r: self._at_query(b, index, r, make), self.plan.rows))
                return
            block.append(self._for("h", self.sizes[axes[n]], lambda b, h: level(b, n + 1, (*index, h))))

        found: list[Stmt] = []
        level(found, 0, ())
        return found

    def _at_query(
        self, block: list[Stmt], index: tuple[Dim, ...], r: Dim, make: Callable[[list[Stmt], Index], None]
    ) -> None:
        before = self._go(dict(zip((*self.heads, *self.shared), index, strict=True)))
        make(block, (*index, r))
        self.at = before

    def _go(self, places: dict[int, Dim]) -> tuple[Dim, ...]:
        """Set the index of some batch axes; return what it was."""
        before, self.at = self.at, tuple(places.get(a, i) for a, i in enumerate(self.at))
        return before

    def _keys(self, make: Callable[[list[Stmt], Index], None]) -> list[Stmt]:
        """Return the loops over heads of keys, in their order in memory, of what ``make(block, index)`` writes."""

        def level(block: list[Stmt], n: int, index: tuple[Dim, ...]) -> None:
            if n < len(self.heads):
                block.append(self._for("h", self.sizes[self.heads[n]], lambda b, h: level(b, n + 1, (*index, h))))
                return
            before = self._go(dict(zip(self.heads, index, strict=True)))
            make(block, index)
            self.at = before

        found: list[Stmt] = []
        level(found, 0, ())
        return found

    def _queries(self) -> Iterator[Query]:
        """Yield the queries that share a key."""
        yield from product_of(product_of(*(range(self.sizes[a]) for a in self.shared)), range(self.plan.rows))

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

    # --- masks ---

    def _tests(self, row: Dim, term: Dim) -> list[Scalar]:
        """Return what must hold for a term to be allowed."""
        attrs = self.op.attrs
        found = [self._element(self.mask, attrs["mask_dims"], row, term)] if self.mask is not None else []
        for offset in attrs["causal"]:
            found.append(Apply("le", (IndexScalar(term), IndexScalar(row + offset)), "i1"))
        return found

    def _some_allowed(self, block: list[Stmt], first: Dim, count: Dim) -> Scalar:
        """Return 1 if some row of some head may see some term of a block, else 0."""
        some, attrs = self._own("some", "i32"), self.op.attrs
        block += [Alloc(some), Store(some, (), Const(int(self.mask is None), "i32"))]
        if self.mask is not None:
            block += self._over_mask(lambda b, row: b.append(self._for(
                "t", count, lambda inner, t: inner.append(Store(some, (), self._one(row, first + t), "max")),
                self.plan.terms,
            )))  # fmt: skip
            self.e.enter(block)
        found: Scalar = Load(some, ())
        for offset in attrs["causal"]:
            seen = Apply("le", (IndexScalar(first), IndexScalar(self.row + self.rows - 1 + offset)), "i1")
            found = Apply("select", (seen, found, Const(0, "i32")), "i32")
        return self.e.bind(found)

    def _one(self, row: Dim, term: Dim) -> Scalar:
        """Return 1 where the mask allows a term, else 0."""
        allowed = self._element(self._the_mask, self.op.attrs["mask_dims"], row, term)
        return Apply("select", (allowed, Const(1, "i32"), Const(0, "i32")), "i32")

    @property
    def _the_mask(self) -> Value:
        assert self.mask is not None
        return self.mask

    def _over_mask(self, make: Callable[[list[Stmt], Dim], None]) -> list[Stmt]:
        """Return the loops over the heads and rows that the mask tells apart."""
        dims = self.op.attrs["mask_dims"]
        axes = [a for a in (*self.heads, *self.shared) if dims[a] != ABSENT]

        def level(block: list[Stmt], n: int, places: dict[int, Dim]) -> None:
            if n < len(axes):
                more = lambda b, h: level(b, n + 1, {**places, axes[n]: h})
                block.append(self._for("h", self.sizes[axes[n]], more))
                return
            before = self._go(places)
            if dims[-2] == ABSENT:
                make(block, 0)
            else:
                block.append(self._for("r", self.height, lambda b, r: make(b, self.row + r), self.plan.rows))
            self.at = before

        found: list[Stmt] = []
        level(found, 0, {})
        return found

    def _second(self, phase: Dim, end: Buffer, wanted: Buffer, blocks: Dim) -> list[Stmt]:
        """Return what lets the blocks of which nothing is allowed follow, if that has weight in some row."""
        once: list[Stmt] = [Store(wanted, (), Const(0, "i32"))]

        def ask(block: list[Stmt], at: Index) -> None:
            self._ask(block, Load(self.top, at), wanted)

        once += self._each(ask)
        dims = self.op.attrs["mask_dims"]
        alike = self.mask is not None and all(dims[a] == ABSENT for a in (*self.sizes, -2))
        if "split" in self.op.attrs and alike and not self.op.attrs["causal"]:
            self.e.enter(once)
            is_wanted = Apply("ne", (Load(wanted, ()), Const(0, "i32")), "i1")
            once.append(If(is_wanted, tuple(self._elsewhere(wanted))))
        follow = Store(end, (), IndexScalar(blocks))
        once.append(If(Apply("ne", (Load(wanted, ()), Const(0, "i32")), "i1"), (follow,)))
        return [If(Apply("eq", (IndexScalar(phase), Const(0, "i64")), "i1"), tuple(once))]

    def _ask(self, block: list[Stmt], top: Scalar, wanted: Buffer) -> None:
        """Write that the masked terms are wanted if they have weight beside a maximum."""
        light = self._is_weightless(top)
        block.append(Store(wanted, (), Apply("select", (light, Const(0, "i32"), Const(1, "i32")), "i32"), "max"))

    def _elsewhere(self, wanted: Buffer) -> list[Stmt]:
        """Return what asks again, with the score of the first allowed term of all parts."""
        body = self.e.new_block()
        place, found = self._own("place", "i64"), self.b.fresh("found")

        def look(inner: list[Stmt], t: Dim) -> None:
            allowed = self._element(self._the_mask, self.op.attrs["mask_dims"], 0, t)
            at = Apply("select", (allowed, IndexScalar(t), IndexScalar(self.terms)), "i64")
            inner.append(Store(place, (), at, "min"))

        body += [Alloc(place), Store(place, (), IndexScalar(self.terms)), self._for("t", self.terms, look)]
        body.append(Let(Var(found, "i64"), Load(place, ())))
        there = sym(found, 0, self.terms)

        def ask(block: list[Stmt], at: Index) -> None:
            dot = self._own("dot")
            block += [Alloc(dot), Store(dot, (), self._number(0))]
            key = lambda d: self._element(self.op.operands[1], self.op.attrs["k_dims"], there, d)
            block.append(self._for("d", self.depth, lambda inner, d: inner.append(
                Store(dot, (), self._apply("mul", Load(self.q, (*at, d)), key(d)), "add")
            )))  # fmt: skip
            self.e.enter(block)
            score = self._changed(Load(dot, ()), self.row + at[-1], there)
            self._ask(block, self._apply("max", score, Load(self.top, at)), wanted)

        some = self.e.new_block()
        some.append(Store(wanted, (), Const(0, "i32")))
        some += self._each(ask)
        exists = Apply("lt", (IndexScalar(there), IndexScalar(self.terms)), "i1")
        body.append(If(exists, tuple(some)))
        return body

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

    def _changed(self, x: Scalar, row: Dim, term: Dim) -> Scalar:
        """Return a product scaled and biased."""
        attrs = self.op.attrs
        if attrs["scale"] != 1:
            x = self._apply("mul", x, self._number(attrs["scale"]))
        if self.k_scale is not None:
            x = self._apply("mul", x, self._element(self.k_scale, attrs["k_scale_dims"], row, term))
        if self.bias is not None:
            x = self._apply("add", x, self._element(self.bias, attrs["bias_dims"], row, term))
        return x

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
