"""The operands of attention on a CPU, and its two products in tiles; :mod:`.attention` has the softmax between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aotc.ir.dims import Dim, maximum, minimum, static, sym
from aotc.ir.loop_ir import Alloc, Apply, Buffer, Const, For, If, Let, Load, Prefetch, Scalar, Stmt, Store, Tile, Var
from aotc.ir.loop_ir import Index as IndexScalar
from aotc.ir.loop_products import View, view_of
from aotc.ir.opset.attention import ABSENT, axes
from aotc.ir.tensor_ir import Op, Value
from aotc.ir.tile_forms import form_of_operands
from aotc.lowering.analysis.attention.plan import AttentionPlan
from aotc.lowering.analysis.costs.table_attention import DOT_SUMS, DOT_TERMS, FETCHED_KEYS
from aotc.lowering.analysis.costs.table_columns import FETCH_LINE
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.analysis.tiling import split_rows
from aotc.lowering.regions.nests import some_at_a_time
from aotc.lowering.regions.region import RegionBuilder
from aotc.vmfb.dtypes import size_of

Make = Callable[[list[Stmt], Dim], None]
WIDENED = ("bf16", "f16")  # which tiles of f32 read as they lie


@dataclass(frozen=True, slots=True)
class Lines:
    """Keys or values as tiles read them: element (t, c) is at ``start + t * row + c * column`` of ``buffer``.

    ``copied``: it is a copy of a block, whose first term is 0.
    """

    buffer: Buffer
    start: Dim
    row: Dim
    column: Dim
    copied: bool = False


class AttentionBlocks:
    """Writes what an item reads and multiplies."""

    keys: Lines
    values: Lines

    def __init__(self, b: RegionBuilder, op: Op, plan: AttentionPlan) -> None:
        self.b, self.op, self.plan, self.e = b, op, plan, b.elements()
        self.wide = plan.wide
        sizes = axes(tuple(v.type for v in op.operands), op.attrs)
        self.batch, self.rows, self.terms = sizes[:3]
        self.depth, self.columns = static(sizes[3]), static(sizes[4])
        extra = list(op.operands[3:])
        self.bias = extra.pop(0) if op.attrs["bias_dims"] else None
        self.mask = extra.pop(0) if op.attrs["mask_dims"] else None
        self.single = isinstance(self.terms, int) and self.terms <= plan.terms
        self.whole = isinstance(self.rows, int) and self.rows % plan.rows == 0
        self.at: tuple[Dim, ...] = ()  # of the batch axes
        self.row: Dim = 0  # the first
        self.height: Dim = plan.rows  # how many of the rows exist
        self.used: Dim = plan.rows  # how many are computed, in whole vectors
        shape = (plan.rows, plan.terms) if plan.few else (plan.terms + 2 * plan.tile_terms, plan.rows)
        self.scores = self._buffer("s", *shape)
        self.kind = "bf16" if plan.pairs else self.wide  # of what tiles multiply
        g = plan.group
        panel = () if plan.few else (plan.tile_rows * g,)
        self.q = self._buffer("q", plan.rows // (plan.tile_rows or 1), self.depth // g, *panel, dtype=self.kind)
        w = self._buffer("w", -(-plan.terms // g), plan.rows * g, dtype="bf16") if plan.pairs else None
        self.weights = w or self.scores
        self.acc, self.part = (self._buffer(x, plan.rows, plan.columns) for x in ("acc", "part"))
        self.numbers = [
            Buffer(b.fresh(x), self.wide, (plan.rows,), "private") for x in ("top", "low", "factor", "fresh", "total")
        ]
        self.top, self.low, self.factor, self.fresh, self.total = self.numbers

    def _buffer(self, name: str, *shape: Dim, dtype: str = "") -> Buffer:
        return Buffer(self.b.fresh(name), dtype or self.wide, shape, "scratch")

    def _named(self, block: list[Stmt], i: Dim, extent: Dim) -> Dim:
        """Return a name for ``i``, which is below ``extent``, unless it is one already."""
        if isinstance(i, int):
            return i
        name = self.b.fresh("n")
        block.append(Let(Var(name, "i64"), IndexScalar(i)))
        return sym(name, 0, extent)

    def _for(self, prefix: str, end: Dim, make: Make, extent: Dim | None = None) -> For:
        """Return the loop of ``make(block, i)`` for ``i`` from 0 to ``end``."""
        name = self.b.fresh(prefix)
        inside: list[Stmt] = []
        self.e.enter(inside)
        make(inside, sym(name, 0, end if extent is None else extent))
        return For(name, 0, end, tuple(inside))

    def _pairs(self, end: Dim, extent: int, make: Callable[..., None]) -> list[Stmt]:
        """Return the loops of ``make(block, u)`` for pairs u of numbers below ``end``, and of the last if it is odd."""
        both = self._for("u", end // 2, make, extent // 2)
        if end % 2 == 0:
            return [both]
        name = self.b.fresh("u")
        inside: list[Stmt] = []
        self.e.enter(inside)
        make(inside, sym(name, 0, (extent + 1) // 2), both=False)
        return [both, For(name, end // 2, (end + 1) // 2, tuple(inside))]

    def _number(self, x: float) -> Const:
        return Const(float(x), self.wide)

    def _rounded(self, x: Scalar) -> Scalar:
        return Apply("convert", (x,), "bf16")

    def _apply(self, fn: str, *args: Scalar) -> Apply:
        return Apply(fn, args, self.wide)

    def _element(self, value: Value, dims: Sequence[int], *last: Dim, dtype: str = "") -> Scalar:
        """Return an element of an operand at this head and ``last`` in the dtype of the sums, or in ``dtype``."""
        index: list[Dim] = [0] * value.type.rank
        for d, i in zip(dims, (*self.at, *last), strict=True):
            if d != ABSENT:
                index[d] = i
        x, dtype = self.e.at(value, tuple(index)), dtype or self.wide
        return x if x.dtype in (dtype, "i1") else Apply("convert", (x,), dtype)

    # --- operands ---

    def _lines(self, body: list[Stmt], number: int, columns: int) -> Lines:
        """Return how tiles read keys or values: as they lie, or a copy of a block."""
        plan, value, dims = self.plan, self.op.operands[number], self.op.attrs[("", "k_dims", "v_dims")[number]]
        t, c = self.b.fresh("t"), self.b.fresh("c")
        trial: list[Stmt] = []
        self.e.enter(trial)
        x = self._element(value, dims, sym(t, 0, self.terms), sym(c, 0, columns), dtype=value.type.dtype)
        view = view_of(x, t, c, set(), set()) if isinstance(x, Load) and not trial else None
        if view is not None and self._reads(number, view, columns):
            return Lines(view.buffer, view.start, view.outer, view.depth)
        if number == 1:
            buffer = self._buffer("k", plan.terms + plan.tile_terms, columns, dtype=self.kind)
        else:
            buffer = self._buffer("v", -(-plan.terms // plan.group), plan.columns * plan.group, dtype=self.kind)
        body.append(Alloc(buffer))
        return Lines(buffer, 0, static(buffer.shape[1]), 1, copied=True)

    def _reads(self, number: int, view: View, columns: int) -> bool:
        """Do tiles read keys or values as they lie? Pairs of keys' depths lie side by side, those of terms never."""
        dtype, in_rows = view.buffer.dtype, view.depth == 1 and columns % self.plan.tile_columns == 0
        if number == 1:
            return dtype == self.kind and (view.depth == 1 or not self.plan.pairs)
        short = dtype in WIDENED and not (dtype == "f16" and "f16" in self.b.target.lacks) and self.wide == "f32"
        return in_rows and not self.plan.pairs and (dtype == self.wide or short)

    def _copy(self, lines: Lines, number: int, columns: int, first: Dim, count: Dim) -> list[Stmt]:
        """Return what copies keys or values of a block of ``count`` terms, in the dtype that tiles multiply."""
        if not lines.copied:
            return []
        value, dims = self.op.operands[number], self.op.attrs[("", "k_dims", "v_dims")[number]]

        def at(t: Dim, c: Dim) -> Scalar:
            return self._element(value, dims, first + t, c, dtype=self.kind)

        def line(block: list[Stmt], t: Dim) -> None:
            block.append(self._for("c", columns, lambda inner, c: inner.append(Store(lines.buffer, (t, c), at(t, c)))))

        def pair(block: list[Stmt], u: Dim, both: bool = True) -> None:
            def one(inner: list[Stmt], c: Dim) -> None:
                beside = at(2 * u + 1, c) if both else Const(0.0, "bf16")
                inner += [Store(lines.buffer, (u, 2 * c + n), x) for n, x in enumerate((at(2 * u, c), beside))]

            block.append(self._for("c", columns, one))

        if number == 2 and self.plan.pairs:
            return self._pairs(count, self.plan.terms, pair)
        return [self._for("t", count, line, self.plan.terms)]

    def _turn_queries(self, body: list[Stmt]) -> None:
        """Write the queries of the block, vectors of rows; rows that do not exist are 0."""
        plan, dims, g = self.plan, self.op.attrs["q_dims"], self.plan.group

        def place(r: Dim, u: Dim, n: int) -> Index:
            return (r, u) if plan.few else (r // plan.tile_rows, u, r % plan.tile_rows * g + n)

        def rows(end: Dim, element: Callable[[Dim, Dim], Scalar]) -> For:
            def one(inner: list[Stmt], r: Dim, u: Dim) -> None:
                inner += [Store(self.q, place(r, u, n), element(r, u * g + n)) for n in range(g)]

            return self._for(
                "r", end, lambda b, r: b.append(self._for("d", self.depth // g, lambda c, u: one(c, r, u))), plan.rows
            )

        body += [] if self.whole else [rows(plan.rows, lambda r, d: Const(0.0, self.kind))]
        query = self.op.operands[0]
        body.append(rows(self.height, lambda r, d: self._element(query, dims, self.row + r, d, dtype=self.kind)))

    # --- scores ---

    def _at(self, t: Dim, r: Dim) -> Index:
        return (r, t) if self.plan.few else (t + self.plan.tile_terms, r)

    def _tiles(self, first: Dim, count: Dim) -> list[Stmt]:
        """Return the scores of a block in tiles; the last tile begins early where keys lie in memory of the model's."""
        plan, keys, g = self.plan, self.keys, self.plan.group
        panels = plan.rows // plan.tile_rows

        def tiles(height: int, end: Dim) -> list[Stmt]:
            def tile(block: list[Stmt], i: Dim) -> None:
                start = i * height
                if not keys.copied:
                    start = minimum(start, self.terms - first - height)
                begin = self._named(block, start + height, plan.terms + 2 * height) - height
                base = keys.start + (begin if keys.copied else first + begin) * keys.row

                def panel(inner: list[Stmt], j: Dim) -> None:
                    out = (begin + plan.tile_terms) * plan.rows + j * plan.tile_rows
                    inner.append(
                        Tile(
                            height, plan.tile_rows, self.scores, out, plan.rows, keys.buffer, base, keys.row, self.q,
                            j * self.depth * plan.tile_rows,
                            ((self.depth // g, keys.column * g, plan.tile_rows * g),), plan.form,
                        )
                    )

                end = panels if self.whole else self.used // plan.tile_rows
                block.append(self._for("j", end, panel, panels))

            return [self._for("i", (end + (height - 1)) // height, tile)]

        height = plan.tile_terms
        if keys.copied or (isinstance(self.terms, int) and self.terms >= height):
            return tiles(height, count)
        enough = Apply("ge", (IndexScalar(self.terms), Const(height, "i64")), "i1")
        return [If(enough, tuple(tiles(height, count)), tuple(tiles(1, count)))]

    def _dots(self, first: Dim, count: Dim) -> list[Stmt]:
        """Return the scores of a block as dot products, some keys at a time, while later ones are fetched."""
        rows = self.plan.rows if self.whole else 1
        some = max(min(DOT_SUMS.value // rows, DOT_TERMS.value), 1)
        body: list[Stmt] = []

        def terms(block: list[Stmt], at: list[Dim]) -> None:
            block += self._ahead(first, at)
            if self.whole:
                self._some_dots(block, [(r, t) for t in at for r in range(rows)], first)
            else:
                each = lambda inner, r: self._some_dots(inner, [(r, t) for t in at], first)
                block.append(self._for("r", self.height, each, self.plan.rows))

        some_at_a_time(body, self.b.fresh("t"), 0, count, some, terms)
        return body

    def _ahead(self, first: Dim, terms: list[Dim]) -> list[Stmt]:
        """Return what fetches the keys that are multiplied after some others."""
        key, dims = self.op.operands[1], self.op.attrs["k_dims"]
        size = size_of(key.type.dtype)
        after = max(-(-FETCHED_KEYS.value // (self.depth * size)), len(terms))
        found: list[Stmt] = []
        for t in terms:
            there = minimum(first + t + after, self.terms - 1)
            for d in range(0, self.depth, FETCH_LINE.value // size):
                x = self._element(key, dims, there, d, dtype=key.type.dtype)
                found += [Prefetch(x.buffer, x.index)] if isinstance(x, Load) else []
        return found

    def _some_dots(self, block: list[Stmt], places: list[tuple[Dim, Dim]], first: Dim) -> None:
        """Write the scores at some ``places`` (row, term) of a block: a vector of sums each, which are added up."""
        key, dims = self.op.operands[1], self.op.attrs["k_dims"]
        lanes = self.b.target.vector_bytes // size_of(self.wide)
        sums = [Buffer(self.b.fresh("sums"), self.wide, (lanes,), "private") for _ in places]
        dots = [Buffer(self.b.fresh("dot"), self.wide, (), "private") for _ in places]
        block += [Alloc(x) for x in (*sums, *dots)]
        zero = self._number(-0.0)

        def each(make: Callable[[Buffer, Buffer, Dim], Store]) -> For:
            stores = lambda b, at: b.extend(make(x, y, at) for x, y in zip(sums, dots, strict=True))
            return self._for("l", lanes, stores)

        def add(inner: list[Stmt], d: Dim, into: Sequence[Buffer], at: Index) -> None:
            keys = {t: self._element(key, dims, first + t, d) for _, t in places}
            for x, (r, t) in zip(into, places, strict=True):
                inner.append(Store(x, at, self._apply("mul", Load(self.q, (r, d)), keys[t]), "add"))

        def step(inner: list[Stmt], n: Dim) -> None:
            inner.append(self._for("l", lanes, lambda b, at: add(b, n * lanes + at, sums, (at,))))

        whole = self.depth // lanes
        block.append(each(lambda x, _, at: Store(x, (at,), zero)))
        block += [self._for("d", whole, step)] if whole else []
        block += [Store(x, (), zero) for x in dots]
        block.append(each(lambda x, y, at: Store(y, (), Load(x, (at,)), "add")))
        if self.depth % lanes:
            block.append(self._for("d", self.depth % lanes, lambda b, d: add(b, whole * lanes + d, dots, ())))
        block += [Store(self.scores, self._at(t, r), Load(x, ())) for x, (r, t) in zip(dots, places, strict=True)]

    def _sums(self, first: Dim, count: Dim) -> For:
        """Return the products of the weights of a block and its values, of the only block the result."""
        plan, values, g = self.plan, self.values, self.plan.group
        out, weights = self.acc if self.single else self.part, self.weights
        begin, a_row, a_step = (0, plan.terms, 1) if plan.few else (plan.tile_terms * plan.rows, 1, plan.rows)
        if plan.pairs:
            begin, a_row, a_step = 0, g, g * plan.rows
        base = values.start if values.copied else values.start + first * values.row
        steps = (count + (g - 1)) // g

        def panel(block: list[Stmt], j: Dim) -> None:
            row: Dim = 0
            for height, tiles in split_rows(plan.rows, plan.tile_height):

                def tile(inner: list[Stmt], i: Dim, row: Dim = row, height: int = height) -> None:
                    at = row + i * height
                    inner.append(
                        Tile(
                            height, plan.tile_columns, out, at * plan.columns + j * plan.tile_columns, plan.columns,
                            weights, begin + at * a_row, a_row, values.buffer, base + j * plan.tile_columns * g,
                            ((steps, a_step, values.row),), form_of_operands(weights.dtype, values.buffer.dtype),
                        )
                    )

                needed = minimum(tiles, maximum(self.height - row + (height - 1), 0) // height)
                block.append(self._for("i", tiles if self.whole else needed, tile, tiles))
                row = row + height * tiles

        return self._for("j", plan.columns // plan.tile_columns, panel)

