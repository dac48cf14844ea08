"""The operands of attention on a CPU, and its two products in tiles; :mod:`.attention` has the softmax between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aotc.ir.dims import Dim, maximum, minimum, static, sym
from aotc.ir.loop_ir import Alloc, Apply, Buffer, Const, For, If, Let, Load, Scalar, Stmt, Store, Tile, Var
from aotc.ir.loop_ir import Index as IndexScalar
from aotc.ir.loop_products import view_of
from aotc.ir.opset.attention import ABSENT, axes
from aotc.ir.tensor_ir import Op, Value
from aotc.lowering.analysis.attention.plan import AttentionPlan
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.analysis.tiling import split_rows
from aotc.lowering.regions.region import RegionBuilder

Make = Callable[[list[Stmt], Dim], None]


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
        panels = () if plan.few else (plan.tile_rows,)
        self.q = self._buffer("q", plan.rows // (plan.tile_rows or 1), self.depth, *panels)
        self.acc, self.part = (self._buffer(x, plan.rows, plan.columns) for x in ("acc", "part"))
        self.numbers = [
            Buffer(b.fresh(x), self.wide, (plan.rows,), "private") for x in ("top", "low", "factor", "fresh", "total")
        ]
        self.top, self.low, self.factor, self.fresh, self.total = self.numbers

    def _buffer(self, name: str, *shape: Dim) -> Buffer:
        return Buffer(self.b.fresh(name), self.wide, shape, "scratch")

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

    def _number(self, x: float) -> Const:
        return Const(float(x), self.wide)

    def _apply(self, fn: str, *args: Scalar) -> Apply:
        return Apply(fn, args, self.wide)

    def _element(self, value: Value, dims: Sequence[int], *last: Dim) -> Scalar:
        """Return an element of an operand at this head and ``last`` in the dtype of the sums."""
        index: list[Dim] = [0] * value.type.rank
        for d, i in zip(dims, (*self.at, *last), strict=True):
            if d != ABSENT:
                index[d] = i
        x = self.e.at(value, tuple(index))
        return x if x.dtype in (self.wide, "i1") else self._apply("convert", x)

    # --- operands ---

    def _lines(self, body: list[Stmt], number: int, columns: int) -> Lines:
        """Return how tiles read keys or values: as they lie, or a copy of a block."""
        value, dims = self.op.operands[number], self.op.attrs[("", "k_dims", "v_dims")[number]]
        t, c = self.b.fresh("t"), self.b.fresh("c")
        trial: list[Stmt] = []
        self.e.enter(trial)
        x = self._element(value, dims, sym(t, 0, self.terms), sym(c, 0, columns))
        view = view_of(x, t, c, set(), set()) if isinstance(x, Load) and not trial else None
        in_rows = view is not None and view.depth == 1 and columns % self.plan.tile_columns == 0
        if view is not None and (number == 1 or in_rows):
            return Lines(view.buffer, view.start, view.outer, view.depth)
        width = columns if number == 1 else self.plan.columns
        rows = self.plan.terms + (self.plan.tile_terms if number == 1 else 0)
        buffer = self._buffer("kv"[number - 1], rows, width)
        body.append(Alloc(buffer))
        return Lines(buffer, 0, width, 1, copied=True)

    def _copy(self, lines: Lines, number: int, columns: int, first: Dim, count: Dim) -> list[Stmt]:
        """Return what copies keys or values of a block of ``count`` terms, in the dtype of the sums."""
        if not lines.copied:
            return []
        value, dims = self.op.operands[number], self.op.attrs[("", "k_dims", "v_dims")[number]]

        def line(block: list[Stmt], t: Dim) -> None:
            def one(inner: list[Stmt], c: Dim) -> None:
                inner.append(Store(lines.buffer, (t, c), self._element(value, dims, first + t, c)))

            block.append(self._for("c", columns, one))

        return [self._for("t", count, line, self.plan.terms)]

    def _turn_queries(self, body: list[Stmt]) -> None:
        """Write the queries of the block, vectors of rows; rows that do not exist are 0."""
        plan, dims = self.plan, self.op.attrs["q_dims"]

        def place(r: Dim, d: Dim) -> Index:
            return (r, d) if plan.few else (r // plan.tile_rows, d, r % plan.tile_rows)

        def zero(block: list[Stmt], r: Dim) -> None:
            block.append(self._for("d", self.depth, lambda b, d: b.append(Store(self.q, place(r, d), self._number(0)))))

        def row(block: list[Stmt], r: Dim) -> None:
            def one(inner: list[Stmt], d: Dim) -> None:
                inner.append(Store(self.q, place(r, d), self._element(self.op.operands[0], dims, self.row + r, d)))

            block.append(self._for("d", self.depth, one))

        body += [] if self.whole else [self._for("r", plan.rows, zero)]
        body.append(self._for("r", self.height, row, plan.rows))

    # --- scores ---

    def _at(self, t: Dim, r: Dim) -> Index:
        return (r, t) if self.plan.few else (t + self.plan.tile_terms, r)

    def _tiles(self, first: Dim, count: Dim) -> list[Stmt]:
        """Return the scores of a block in tiles; the last tile begins early where keys lie in memory of the model's."""
        plan, keys = self.plan, self.keys
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
                            j * self.depth * plan.tile_rows, ((self.depth, keys.column, plan.tile_rows),), self.wide,
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
        """Return the scores of a block as dot products, a key after the other."""
        key, dims = self.op.operands[1], self.op.attrs["k_dims"]
        dot = Buffer(self.b.fresh("dot"), self.wide, (), "private")

        def term(block: list[Stmt], t: Dim) -> None:
            def row(inner: list[Stmt], r: Dim) -> None:
                def one(last: list[Stmt], d: Dim) -> None:
                    product_ = self._apply("mul", Load(self.q, (r, d)), self._element(key, dims, first + t, d))
                    last.append(Store(dot, (), product_, "add"))

                inner += [Alloc(dot), Store(dot, (), self._number(0)), self._for("d", self.depth, one)]
                inner.append(Store(self.scores, self._at(t, r), Load(dot, ())))

            block.append(self._for("r", self.height, row, self.plan.rows))

        return [self._for("t", count, term, self.plan.terms)]

    def _sums(self, first: Dim, count: Dim) -> For:
        """Return the products of the weights of a block and its values, of the only block the result."""
        plan, values = self.plan, self.values
        out = self.acc if self.single else self.part
        begin, a_row, a_step = (0, plan.terms, 1) if plan.few else (plan.tile_terms * plan.rows, 1, plan.rows)
        base = values.start if values.copied else values.start + first * values.row

        def panel(block: list[Stmt], j: Dim) -> None:
            row: Dim = 0
            for height, tiles in split_rows(plan.rows, plan.tile_height):

                def tile(inner: list[Stmt], i: Dim, row: Dim = row, height: int = height) -> None:
                    at = row + i * height
                    inner.append(
                        Tile(
                            height, plan.tile_columns, out, at * plan.columns + j * plan.tile_columns, plan.columns,
                            self.scores, begin + at * a_row, a_row, values.buffer, base + j * plan.tile_columns,
                            ((count, a_step, values.row),), self.wide,
                        )
                    )

                needed = minimum(tiles, maximum(self.height - row + (height - 1), 0) // height)
                block.append(self._for("i", tiles if self.whole else needed, tile, tiles))
                row = row + height * tiles

        return self._for("j", plan.columns // plan.tile_columns, panel)

