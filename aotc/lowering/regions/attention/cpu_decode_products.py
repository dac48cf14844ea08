"""The two matmuls of attention of few queries on a CPU: scores of some terms, and the weighted sum of their values.

Queries that share a key are multiplied with it while it is in registers: the rows of a tile of dot products are these
queries, its columns are some terms. Values are added to the sums of all these queries.
"""

from __future__ import annotations

from collections.abc import Sequence

from aotc.ir.dims.algebra import Dim, minimum, product, static
from aotc.ir.loop.forms.tile_forms import FORMS, form_of_operands
from aotc.ir.loop.ir import Load, Prefetch, Stmt, Store, Tile
from aotc.lowering.analysis.attention_int_cache import INTEGERS
from aotc.lowering.analysis.index_maps import Index, linearize
from aotc.lowering.elements.nests import some_at_a_time
from aotc.lowering.plans.thresholds import FETCH_LINE
from aotc.lowering.regions.attention.cpu_masks import AttentionSeen
from aotc.lowering.threshold import BlockSize
from aotc.vmfb.dtypes import size_of

FETCHED_KEYS = BlockSize(
    16384,
    "prefetch distance in bytes of keys or values",
    "Zen 5, one core, 16 heads of 128 bf16 keys in memory order, throughput relative to a plain read: distance 0 "
    "0.75, 4096 0.8, 8192 0.88, 16384 0.93 to 1.08",
)
DOT_TERMS = BlockSize(
    4,
    "terms per tile of dot products with the queries, at most",
    "Zen 5, one core, throughput relative to a plain read: 4 bf16 queries with 1 term 0.54, 2 terms 0.74, 4 terms "
    "0.75; one i8 query with 1 term 0.62, 4 terms 0.7. One bf16 query with 1 term 1.03, 4 terms 0.87, and f32 of "
    "several heads with 1 term 0.72, 4 terms 0.56: these use one term, in memory order",
)
TURNED_WORDS = BlockSize(
    4,
    "divisor of the number of 32-bit words of a key whose words are transposed in registers",
    "4 words are the part of a register within which its shuffles stay",
)
TURNED_QUERIES = BlockSize(
    4,
    "queries per vector of a key, at least, for its words to be transposed in registers",
    "Zen 5, one core, bf16, time relative to keys in memory order: 8 queries of 64 elements 0.84 (keys from memory "
    "0.97 to 1.06), 4 queries of 64 up to 1.2",
)
PAIR_TERMS = BlockSize(
    8,
    "terms per step of the weighted sum of values by instructions for bf16 pairs",
    "Zen 5, one core, 4 queries of 8 heads of 128, throughput relative to a plain read: 4 terms 0.57, 8 terms 0.75, "
    "32 terms 0.52; in f32 0.68",
)
VALUE_TERMS = BlockSize(
    4,
    "terms per step of the weighted sum of values that are integers or that several queries share",
    "Zen 5, one core, bf16 values of 128 in the L2 cache, GB/s with 1, 2, 4, 8 terms: 4 queries 24, 38, 51, 56; 1 "
    "query 93, 136, 135, 129. From memory 1 term is fastest, because it reads in order",
)


class AttentionProducts(AttentionSeen):
    """Emitter of the matmuls of few queries."""

    @property
    def side_by_side(self) -> int:
        """Number of heads whose keys are adjacent in memory."""
        return static(product(self.sizes[a] for a in self.heads))

    def _ahead(self, number: int, length: int, term: Dim, least: int = 1) -> list[Stmt]:
        """Return prefetches of a key or value that is multiplied later, by ``least`` terms or more."""
        value, dims = self.op.operands[number], self.op.attrs[("", "k_dims", "v_dims")[number]]
        size = size_of(value.type.dtype)
        after = max(-(-FETCHED_KEYS.value // (self.side_by_side * length * size)), least)
        there = minimum(term + after, self.terms - 1)
        found: list[Stmt] = []
        for d in range(0, length, FETCH_LINE.value // size):
            x = self._element(value, dims, there, d, dtype=value.type.dtype)
            found += [Prefetch(x.buffer, x.index)] if isinstance(x, Load) else []
        return found

    def _scales_of(self, term: Dim) -> list[Stmt]:
        """Return prefetches of the scales of a key and its value, which are read once the scores exist."""
        found: list[Stmt] = []
        for name in self.factors:
            x = self._scale_at(name, self.row, term)
            found += [Prefetch(x.buffer, x.index)] if isinstance(x, Load) else []
        return found

    def _is_plain(self, number: int) -> bool:
        """Return True if reading keys, or values, bounds the matmul, so that only their order in memory matters."""
        dtype = self.op.operands[number].type.dtype
        return dtype not in INTEGERS and (len(self.queries) == 1 or (bool(self.heads) and size_of(dtype) >= 4))

    # --- scores ---

    def _write_scores(self, body: list[Stmt], first: Dim, count: Dim) -> None:
        """Write the scores of ``count`` terms from term ``first`` on."""
        keys = self._view(1, self.depth)
        form = self._form(keys.buffer.dtype) if keys is not None and keys.depth == 1 else None
        if keys is None or form is None:
            body += self._keys(lambda b, at: b.extend(self._dots_by_terms(at, first, count)))
            return
        queries, row = len(self.queries), keys.outer
        some = 1 if self._is_plain(1) else min(DOT_TERMS.value, max(self.b.target.registers // 2 // queries, 1))
        some = self.b.target.vector_bytes // size_of(self.wide) if self._turns_keys(form) else some

        def tiles(block: list[Stmt], at: list[Dim]) -> None:
            block += self._keys(lambda b, index: b.extend(self._dots(index, at, first, form, row)))

        some_at_a_time(body, self.b.fresh("t"), 0, count, some, tiles)

    def _turns_keys(self, form: str) -> bool:
        """Return True if words of keys are transposed in registers, for one key per vector lane.

        It saves the horizontal sums of dot products.
        """
        is_x86, words = self.b.target.triple.startswith("x86_64"), self.depth // FORMS[form].group
        whole = form == "bf16" and is_x86 and words % TURNED_WORDS.value == 0
        vectors = -(-words * size_of(self.wide) // self.b.target.vector_bytes)
        return whole and len(self.queries) >= TURNED_QUERIES.value * vectors

    def _form(self, dtype: str) -> str | None:
        """Return the form of the tile that multiplies queries with keys of a dtype, or None if there is none."""
        if dtype in self.b.target.lacks:
            return None
        form = "f32_s8" if (self.wide, dtype) == ("f32", "i8") else form_of_operands(self.q.dtype, dtype)
        return form if form in FORMS else None

    def _dots(self, index: Index, terms: Sequence[Dim], first: Dim, form: str, row: Dim) -> list[Stmt]:
        """Return the tile of the queries that share a head's keys and the keys of some terms of a block."""
        key, dims, group = self.op.operands[1], self.op.attrs["k_dims"], FORMS[form].group
        x = self._element(key, dims, first + terms[0], 0, dtype=key.type.dtype)
        assert isinstance(x, Load)
        queries = self.queries
        own, r = queries[0]
        places = [linearize((*index, *own, r, n), y.shape) for y, n in ((self.scores, terms[0]), (self.q, 0))]
        found: list[Stmt] = []
        for t in terms:
            found += [*self._ahead(1, self.depth, first + t), *self._scales_of(first + t)]
        return [*found, Tile(
            len(queries), len(terms), self.scores, places[0], self.plan.terms, self.q, places[1], self.depth,
            x.buffer, linearize(x.index, x.buffer.shape), ((self.depth // group, group, group),), form, b_column=row,
        )]  # fmt: skip

    def _dots_by_terms(self, index: Index, first: Dim, count: Dim) -> list[Stmt]:
        """Return the scores of a head whose key elements are not adjacent, in vectors of terms."""
        queries = [(*index, *own, r) for own, r in self.queries]

        def clear(block: list[Stmt], t: Dim) -> None:
            block += [Store(self.scores, (*at, t), self._number(0)) for at in queries]

        def add(block: list[Stmt], t: Dim, d: Dim) -> None:
            x = self.e.bind(self._element(self.op.operands[1], self.op.attrs["k_dims"], first + t, d))
            block += [Store(self.scores, (*at, t), self._apply("mul", self._query(at, d), x), "add") for at in queries]

        def depth(block: list[Stmt], d: Dim) -> None:
            block.append(self._for("t", count, lambda b, t: add(b, t, d), self.plan.terms))

        return [self._for("t", count, clear, self.plan.terms), self._for("depth", self.depth, depth)]

    # --- values ---

    def _write_sums(self, body: list[Stmt], first: Dim, count: Dim) -> None:
        """Write the weighted values of ``count`` terms from term ``first`` on, added to the sums."""
        values = self._view(2, self.columns)
        if values is not None and values.depth == 1 and self.weights is not None:
            some, row = PAIR_TERMS.value, values.outer
        else:
            some, row = 1 if self._is_plain(2) else VALUE_TERMS.value, None

        def sums(block: list[Stmt], at: list[Dim]) -> None:
            if row is not None and len(at) > 1:
                block += self._keys(lambda b, index: b.extend(self._sums_of_pairs(index, at, first, row)))
            else:
                self._sums(block, [(t, first + t) for t in at])

        some_at_a_time(body, self.b.fresh("t"), 0, count, some, sums)

    def _sums_of_pairs(self, index: Index, terms: Sequence[Dim], first: Dim, row: Dim) -> list[Stmt]:
        """Return the tiles that add the values of some terms of a head, by pairs, to the sums of each query."""
        value, dims, queries = self.op.operands[2], self.op.attrs["v_dims"], self.queries
        weights, cols = self.weights, self._pair_columns()
        assert weights is not None
        own, r = queries[0]
        begin = linearize((*index, *own, r, terms[0]), weights.shape)

        def tile(block: list[Stmt], j: Dim) -> None:
            x = self._element(value, dims, first + terms[0], j * cols, dtype=value.type.dtype)
            assert isinstance(x, Load)
            out = linearize((*index, *own, r, j * cols), self.acc.shape)
            block.append(Tile(
                len(queries), cols, self.acc, out, self.columns, weights, begin, self.plan.terms,
                x.buffer, linearize(x.index, x.buffer.shape), ((len(terms) // 2, 2, 2 * row),), "bf16", b_inner=row,
                adds=True,
            ))  # fmt: skip

        return [self._for("j", self.columns // cols, tile)]

    def _pair_columns(self) -> int:
        """Return the columns of a tile of pairs: an even number of vectors whose sums leave registers free."""
        lanes = self.b.target.vector_bytes // size_of(self.wide)
        most = max(self.b.target.registers // 4 // len(self.queries), 1)
        return max(2 * lanes * n for n in range(1, most + 1) if self.columns % (2 * lanes * n) == 0)

    def _sums(self, block: list[Stmt], terms: Sequence[tuple[Dim, Dim]]) -> None:
        """Add the weighted values of some terms (numbered in the block, and in all) to the sums of each query."""
        value, dims, queries = self.op.operands[2], self.op.attrs["v_dims"], self.queries

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
