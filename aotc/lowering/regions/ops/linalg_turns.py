"""What a block of a GPU's threads does to find eigenvectors and singular vectors: :mod:`.linalg_jacobi`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from aotc.ir.dims import Dim, ceildiv, mod, static, sym
from aotc.ir.loop_ir import WARP, Alloc, Apply, Buffer, Const, For, If, Load, Scalar, Stmt, Store, While
from aotc.ir.loop_ir import Index as IndexScalar
from aotc.lowering.analysis.costs.table_algorithms import JACOBI_SWEEPS
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.regions.elemental import constant_scalar, real_and_imaginary
from aotc.lowering.regions.ops.linalg_cuda import conj
from aotc.lowering.regions.ops.linalg_warps import BLOCK_BARRIER, Columns, Fill, op2, test2
from aotc.lowering.regions.region import RegionBuilder
from aotc.vmfb.dtypes import kind_of, to_numpy


class Jacobi:
    """Turns the columns of the matrix ``head`` of the first output in pairs until they are orthogonal."""

    descending = False

    def __init__(self, b: RegionBuilder, head: Index, values: Buffer, status: Buffer) -> None:
        self.c = c = Columns(b, b.outputs[0], head)
        self.b, self.e, self.head, self.values, self.status = b, c.e, head, values, status
        self.n, self.rows = static(c.columns), static(c.rows)
        self.w, self.v = self._matrix(self.rows), self._matrix(self.n)
        self.found, self.unit, self.rank = self._row(c.real), self._row(c.real), self._row("i64")
        self.partial = self._row(c.real, c.warps)
        self.turned, self.sweeps = c.shared("i1"), c.shared("i64")
        self.some = self._row("i1", c.warps)
        self.scale, self.norm = c.shared(c.real), c.shared(c.real)
        self.own, self.moved = c.own(c.real), c.own("i1")
        self.x2, self.y2, self.dot = c.own(c.real), c.own(c.real), c.own()
        eps = float(np.finfo(to_numpy(c.real)).eps)
        self.small = eps * self.rows**0.5

    def _matrix(self, rows: int) -> Buffer:
        return self._shared(self.c.dtype, (self.n, rows))

    def _row(self, dtype: str, count: int = 0) -> Buffer:
        return self._shared(dtype, (count or self.n,))

    def _shared(self, dtype: str, shape: tuple[int, ...]) -> Buffer:
        buffer = Buffer(self.b.fresh("held"), dtype, shape, "shared")
        self.c.made.append(buffer)
        return buffer

    def statements(self) -> list[Stmt]:
        """Return all of it."""
        c = self.c
        least = float(np.finfo(to_numpy(c.real)).tiny)  # one over what is less would be no number
        largest = self._over_all(self.scale, self._largest_part, "max", least)
        squares = self._over_all(self.norm, lambda x: self.square(self._scaled(x)), "add")
        body = [*largest, *squares, c.by_threads(self._start), BLOCK_BARRIER, *self._sweeps()]
        body += [*self._numbers(), BLOCK_BARRIER, c.by_threads(self._ranks), BLOCK_BARRIER, *self._results()]
        return c.whole(body)

    # --- helpers ---

    def real(self, x: float) -> Scalar:
        """Return a real number."""
        return constant_scalar(x, self.c.real)

    def square(self, x: Scalar) -> Scalar:
        """Return ``|x|^2``."""
        x = self.e.bind(x)
        parts = real_and_imaginary(x) if kind_of(x.dtype) == "c" else (x,)
        squares = [op2("mul", part, part) for part in map(self.e.bind, parts)]
        return op2("add", *squares) if len(squares) == 2 else squares[0]

    def times(self, x: Scalar, factor: Scalar) -> Scalar:
        """Return ``x`` times a real number."""
        return op2("mul", x, self._wide(factor)) if kind_of(x.dtype) == "c" else op2("mul", x, factor)

    def _wide(self, x: Scalar) -> Scalar:
        return Apply("complex", (x, self.real(0)), self.c.dtype) if kind_of(self.c.dtype) == "c" else x

    def _scaled(self, x: Scalar) -> Scalar:
        return self.times(x, self.e.bind(op2("div", self.real(1), Load(self.scale, (0,)))))

    def given(self, column: Dim, row: Dim) -> Scalar:
        """Return an element of the matrix."""
        return self.c.element(column, row)

    def _by_elements(self, block: list[Stmt], each: Callable[[Dim, Dim], Sequence[Stmt]]) -> None:
        """Append a loop over the elements of the matrix, in turn a thread's."""
        name = self.b.fresh("f")
        flat = sym(name, 0, self.n * self.rows)
        inner = self.e.new_block()
        inner += each(flat // self.rows, mod(flat, self.rows))
        block.append(For(name, self.c.t, self.n * self.rows, tuple(inner), step=self.c.threads))
        self.e.enter(block)

    def along(self, block: list[Stmt], extent: Dim, each: Callable[[Dim], Sequence[Stmt]]) -> None:
        """Append a loop over rows, the lanes of a warp side by side."""
        name = self.b.fresh("i")
        inner = self.e.new_block()
        inner += each(sym(name, 0, extent))
        block.append(For(name, self.c.lane, extent, tuple(inner), step=WARP))
        self.e.enter(block)

    def _largest_part(self, x: Scalar) -> Scalar:
        parts = real_and_imaginary(x) if kind_of(x.dtype) == "c" else (x,)
        sizes = [Apply("abs", (part,), self.c.real) for part in parts]
        return op2("max", *sizes) if len(sizes) == 2 else sizes[0]

    def summed(self, *held: Buffer) -> list[Stmt]:
        """Return what leaves every lane of a warp with the sums of those of all."""
        return self.c.among_lanes(held, lambda x, y: [op2("add", *z) for z in zip(x, y, strict=True)])

    def _over_all(self, to: Buffer, of: Callable[[Scalar], Scalar], how: str, least: float = 0) -> list[Stmt]:
        """Return what finds the largest of numbers of all elements and ``least``, or the root of their sum."""
        c = self.c

        def look(block: list[Stmt]) -> None:
            block.append(c.keep(self.own, self.real(0)))
            self._by_elements(block, lambda j, i: [
                c.keep(self.own, op2(how, c.mine(self.own), of(self.e.bind(self.given(j, i)))))
            ])  # fmt: skip

        def join(block: list[Stmt]) -> None:
            total = self.real(least)
            for k in range(c.warps):
                total = op2(how, total, Load(self.partial, (k,)))
            block.append(Store(to, (0,), Apply("sqrt", (total,), c.real) if how == "add" else total))

        return [
            c.by_threads(look), *c.among_lanes([self.own], lambda x, y: [op2(how, x[0], y[0])]),
            c.by_threads(lambda block: c.first_lane(block, [Store(self.partial, (c.warp,), c.mine(self.own))])),
            BLOCK_BARRIER, c.by_threads(join, 1), BLOCK_BARRIER,
        ]  # fmt: skip

    # --- what is turned ---

    def diagonal(self) -> Scalar | None:
        """Return what is added to the diagonal."""
        return None

    def _start(self, block: list[Stmt]) -> None:
        """Append what fills both matrices."""
        c, zero, one = self.c, self.c.zero(), constant_scalar(1, self.c.dtype)

        def each(j: Dim, i: Dim) -> list[Stmt]:
            x = self.e.bind(self._scaled(self.given(j, i)))
            more = self.diagonal()
            if more is None:
                return [Store(self.w, (j, i), x)]
            shifted = op2("add", x, self._wide(more))
            own = test2("eq", IndexScalar(i), IndexScalar(j))
            return [Store(self.w, (j, i), Apply("select", (own, shifted, x), c.dtype))]

        self._by_elements(block, each)
        name = self.b.fresh("f")
        flat = sym(name, 0, self.n * self.n)
        j, i = flat // self.n, mod(flat, self.n)
        unit = Apply("select", (test2("eq", IndexScalar(i), IndexScalar(j)), one, zero), c.dtype)
        block.append(For(name, c.t, self.n * self.n, (Store(self.v, (j, i), unit),), step=c.threads))

    # --- turns ---

    def _sweeps(self) -> list[Stmt]:
        c, steps = self.c, self.n - 1 + self.n % 2
        most = IndexScalar(JACOBI_SWEEPS.value)
        begin = [Store(self.turned, (0,), Const(self.n > 1, "i1")), Store(self.sweeps, (0,), most)]
        if self.n == 1:
            return [c.by_threads(lambda block: block.extend(begin), 1), BLOCK_BARRIER]
        name = self.b.fresh("s")
        turns = For(name, 0, steps, (self._step(sym(name, 0, steps)), BLOCK_BARRIER))
        clear = c.by_threads(lambda block: block.append(c.keep(self.moved, Const(False, "i1"))))
        share = c.by_threads(
            lambda block: c.first_lane(block, [Store(self.some, (c.warp,), c.mine(self.moved))])
        )

        def look(block: list[Stmt]) -> None:
            some: Scalar = Load(self.some, (0,))
            for k in range(1, c.warps):
                some = op2("or", some, Load(self.some, (k,)))
            fewer = op2("sub", Load(self.sweeps, (0,)), Const(1, "i64"))
            block += [Store(self.turned, (0,), some), Store(self.sweeps, (0,), fewer)]

        goes_on = op2("and", Load(self.turned, (0,)), test2("gt", Load(self.sweeps, (0,)), Const(0, "i64")))
        sweep = (clear, turns, share, BLOCK_BARRIER, c.by_threads(look, 1), BLOCK_BARRIER)
        return [c.by_threads(lambda block: block.extend(begin), 1), BLOCK_BARRIER, While((), goes_on, sweep)]

    def _step(self, s: Dim) -> Stmt:
        """Return what turns the pairs of a step: ``m`` columns stand in a circle, one in its middle if n is even."""
        c, first = self.c, self.n % 2
        m, pairs = self.n - 1 + first, self.n // 2
        name = self.b.fresh("k")
        count = ceildiv(pairs, c.warps)
        k = first + sym(name, 0, count) * c.warps + c.warp

        def by(fill: Fill) -> Stmt:
            inner = self.e.new_block()
            p, q = mod(s + k, m), mod(s - k + (m * (1 + pairs // m)), m)
            self.p, self.q = self._place(p, k, first), q
            fill(inner)
            there = test2("lt", IndexScalar(k), IndexScalar(pairs + first))
            return For("t", 0, c.threads, (If(there, tuple(inner)),), "thread")

        sums = self.summed(self.x2, self.y2, self.dot)
        return For(name, 0, count, (by(self._multiply), *sums, by(self._turn)))

    def _place(self, p: Dim, k: Dim, first: int) -> Dim:
        if first:
            return p
        middle = test2("eq", IndexScalar(k), Const(0, "i64"))
        found = Apply("select", (middle, IndexScalar(self.n - 1), IndexScalar(p)), "i64")
        return sym(self.e.bind(found, "n").name, 0, self.n)

    def _multiply(self, block: list[Stmt]) -> None:
        c = self.c
        block += [c.keep(self.x2, self.real(0)), c.keep(self.y2, self.real(0)), c.keep(self.dot, c.zero())]

        def each(i: Dim) -> list[Stmt]:
            x, y = (self.e.bind(Load(self.w, (j, i))) for j in (self.p, self.q))
            parts = zip((self.x2, self.y2), (x, y), strict=True)
            more: list[Stmt] = [Store(to, (c.t,), self.e.bind(self.square(z)), "add") for to, z in parts]
            return [*more, Store(self.dot, (c.t,), op2("mul", conj(x), y), "add")]

        self.along(block, self.rows, each)

    def _turn(self, block: list[Stmt]) -> None:
        """Append what turns a pair of columns of both matrices, if they are not orthogonal."""
        c, bind = self.c, self.e.bind
        root = [bind(Apply("sqrt", (c.mine(z),), c.real)) for z in (self.x2, self.y2)]
        g = bind(c.mine(self.dot))
        is_complex = kind_of(g.dtype) == "c"
        size = bind(Apply("sqrt", (self.square(g),), c.real) if is_complex else Apply("abs", (g,), c.real))
        bound = op2("mul", op2("mul", self.real(self.small), root[0]), root[1])
        inner = self.e.new_block()
        z = bind(op2("div", op2("sub", c.mine(self.y2), c.mine(self.x2)), op2("mul", self.real(2), size)))
        far = bind(op2("add", Apply("abs", (z,), c.real), Apply("sqrt", (self._one_more(z),), c.real)))
        up = test2("ge", z, self.real(0))
        t = bind(op2("div", Apply("select", (up, self.real(1), self.real(-1)), c.real), far))
        cosine = bind(op2("div", self.real(1), Apply("sqrt", (self._one_more(t),), c.real)))
        sine = bind(op2("mul", t, cosine))
        phase = bind(self._phase(g, size))
        inner.append(c.keep(self.moved, Const(True, "i1")))
        self.along(inner, self.rows, lambda i: self._turned(self.w, i, cosine, sine, phase))
        self.along(inner, self.n, lambda i: self._turned(self.v, i, cosine, sine, phase))
        heard = test2("gt", op2("min", *root), self.noise())
        block.append(If(op2("and", test2("gt", size, bound), heard), tuple(inner)))

    def noise(self) -> Scalar:
        """Return the norm up to which a column is what rounding has left of the others."""
        return op2("mul", self.real(self.small), Load(self.norm, (0,)))

    def _phase(self, g: Scalar, size: Scalar) -> Scalar:
        """Return what makes ``g`` the positive number ``size``."""
        if kind_of(g.dtype) == "c":
            return conj(op2("div", g, self._wide(size)))
        return Apply("select", (test2("lt", g, self.real(0)), self.real(-1), self.real(1)), self.c.real)

    def _one_more(self, x: Scalar) -> Scalar:
        return op2("add", self.real(1), op2("mul", x, x))

    def _turned(self, matrix: Buffer, i: Dim, cosine: Scalar, sine: Scalar, phase: Scalar) -> list[Stmt]:
        bind, first, second = self.e.bind, (matrix, (self.p, i)), (matrix, (self.q, i))
        x, y = bind(Load(*first)), bind(op2("mul", Load(*second), phase))
        return [
            Store(*first, op2("sub", self.times(x, cosine), self.times(y, sine))),
            Store(*second, op2("add", self.times(x, sine), self.times(y, cosine))),
        ]

    # --- results ---

    def number(self, j: Dim, i: Dim) -> Scalar:
        """Return what is summed over a column for its value, in terms of the square of the vector's length."""
        raise NotImplementedError

    def value(self, total: Scalar) -> Scalar:
        """Return the value of a column by the sum."""
        raise NotImplementedError

    def _numbers(self) -> list[Stmt]:
        """Return what finds the value of each column."""
        c = self.c

        def turn(column: Dim, by: Callable[[Fill], Stmt]) -> Sequence[Stmt]:
            def multiply(block: list[Stmt]) -> None:
                block += [c.keep(self.x2, self.real(0)), c.keep(self.y2, self.real(0))]
                self.along(block, self.rows, lambda i: [Store(self.x2, (c.t,), self.number(column, i), "add")])
                self.along(block, self.n, lambda i: [
                    Store(self.y2, (c.t,), self.square(Load(self.v, (column, i))), "add")
                ])  # fmt: skip

            def keep(block: list[Stmt]) -> None:
                squares = self.e.bind(c.mine(self.y2))
                total = self.e.bind(self.value(op2("div", c.mine(self.x2), squares)))
                one = op2("div", self.real(1), Apply("sqrt", (squares,), c.real))
                c.first_lane(block, [Store(self.found, (column,), total), Store(self.unit, (column,), one)])

            return [by(multiply), *self.summed(self.x2, self.y2), by(keep)]

        return [c.over_columns(0, turn)]

    def vector(self, j: Dim, i: Dim) -> Scalar:
        """Return an element of a column of the product of the turns, which rounding has made a little longer than 1."""
        return self.times(Load(self.v, (j, i)), Load(self.unit, (j,)))

    def _ranks(self, block: list[Stmt]) -> None:
        """Append what counts for each value those that come before it; what is no number stays in its place."""
        c, before = self.c, "gt" if self.descending else "lt"
        own, others = self.b.fresh("j"), self.b.fresh("k")
        j, k = sym(own, 0, self.n), sym(others, 0, self.n)
        count = Buffer(self.b.fresh("count"), "i64", (), "private")
        mine, other = Load(self.found, (j,)), Load(self.found, (k,))
        beyond = op2("or", test2(before, mine, other), test2(before, other, mine))
        earlier = op2("and", Apply("not", (beyond,), "i1"), test2("lt", IndexScalar(k), IndexScalar(j)))
        first = op2("or", test2(before, other, mine), earlier)
        more = Apply("select", (first, Const(1, "i64"), Const(0, "i64")), "i64")
        inner: list[Stmt] = [Alloc(count), Store(count, (), Const(0, "i64"))]
        inner.append(For(others, 0, self.n, (Store(count, (), op2("add", Load(count, ()), more)),)))
        inner.append(Store(self.rank, (j,), Load(count, ())))
        block.append(For(own, c.t, self.n, tuple(inner), step=c.threads))
        self.e.enter(block)

    def store(self, block: list[Stmt], column: Dim, to: Dim) -> None:
        """Append what stores the vectors of a column as those of number ``to``."""
        raise NotImplementedError

    def _results(self) -> list[Stmt]:
        c = self.c

        def turn(column: Dim, by: Callable[[Fill], Stmt]) -> Sequence[Stmt]:
            def write(block: list[Stmt]) -> None:
                to = sym(self.e.bind(Load(self.rank, (column,)), "n").name, 0, self.n)
                largest = self.e.bind(Load(self.scale, (0,)))
                found = op2("mul", Load(self.found, (column,)), largest)
                c.first_lane(block, [Store(self.values, (*self.head, to), found)])
                self.store(block, column, to)

            return [by(write)]

        def state(block: list[Stmt]) -> None:
            finite = Apply("is_finite", (Load(self.norm, (0,)),), "i1")
            done = op2("and", finite, Apply("not", (Load(self.turned, (0,)),), "i1"))
            good = Apply("select", (done, Const(0, "i32"), Const(1, "i32")), "i32")
            block.append(Store(self.status, self.head, good))

        return [c.over_columns(0, turn), c.by_threads(state, 1)]
