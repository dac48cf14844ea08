"""cholesky and triangular_solve on a GPU: a block of threads for each matrix, or each run of right-hand sides.

Both work on rows whose elements lie side by side: warps take rows, the threads of a warp neighbouring elements. A
Cholesky factor is made as an upper triangle, some rows at a time: these are finished one after the other, each from
those above it, then taken off all rows below at once::

    for j in range(0, n, 8):
        for q in range(8): row j + q -= rows above it; row j + q /= its pivot's root;  barrier
        for i, k below and right of them: a[i, k] -= sum(conj(a[j + q, i]) * a[j + q, k] for q in range(8));  barrier
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aotc.ir.dims import Dim, ceildiv, minimum, sym
from aotc.ir.loop_ir import WARP, Alloc, Apply, Barrier, Buffer, Const, For, If, Load, Scalar, Stmt, Store
from aotc.ir.loop_ir import Index as IndexScalar
from aotc.lowering.analysis.costs.table_algorithms import PANEL_ROWS, TRIANGLE_THREADS
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.regions.elemental import constant_scalar
from aotc.lowering.regions.region import RegionBuilder
from aotc.vmfb.dtypes import kind_of, real_of


def _conj(x: Scalar) -> Scalar:
    return Apply("conj", (x,), x.dtype) if kind_of(x.dtype) == "c" else x


def _real(x: Scalar) -> Scalar:
    return Apply("real", (x,), real_of(x.dtype)) if kind_of(x.dtype) == "c" else x


class _Block:
    """What a block of threads does in turn: each is a loop over its threads, and a barrier."""

    def __init__(self, b: RegionBuilder, threads: int) -> None:
        self.b, self.e, self.threads = b, b.elements(), threads

    def rows(self, begin: Dim, end: Dim, columns: tuple[Dim, Dim], write: Callable[[Dim, Dim], Sequence[Stmt]]) -> Stmt:
        """Return what does ``write(row, column)``: a warp for each row, a thread for each column."""
        t = sym("t", 0, self.threads)
        i, k = self.b.fresh("i"), self.b.fresh("k")
        inner = write(sym(i, 0, end), sym(k, 0, columns[1]))
        across = For(k, columns[0] + t % WARP, columns[1], tuple(inner), step=WARP)
        down = For(i, begin + t // WARP, end, (across,), step=self.threads // WARP)
        return For("t", 0, self.threads, (down,), "thread")

    def line(self, begin: Dim, end: Dim, write: Callable[[Dim], Sequence[Stmt]], first: Sequence[Stmt] = ()) -> Stmt:
        """Return what does ``write(place)`` along a row, after what each thread does ``first``."""
        k = self.b.fresh("k")
        inner = write(sym(k, 0, end))
        loop = For(k, begin + sym("t", 0, self.threads), end, tuple(inner), step=self.threads)
        return For("t", 0, self.threads, (*first, loop), "thread")


# --- cholesky ----------------------------------------------------------------


def factor_in_block(b: RegionBuilder, out: Buffer, head: Index, failed: Buffer, lower: bool) -> list[Stmt]:
    """Return the statements that factor a matrix and clear its other triangle; every thread learns if it failed."""
    f = _Factor(b, out, head, failed)
    n = f.n
    clear = constant_scalar(0, out.dtype)
    body: list[Stmt] = []

    def mirrored(i: Dim, k: Dim) -> Stmt:
        return Store(out, (*head, i, k), _conj(Load(out, (*head, k, i))))

    def above(i: Dim, k: Dim, stmt: Stmt) -> list[Stmt]:
        return [If(Apply("lt", (IndexScalar(i), IndexScalar(k)), "i1"), (stmt,))]

    if lower:
        body += [f.rows(0, n, (0, n), lambda i, k: above(i, k, mirrored(i, k))), Barrier()]
    body += f.statements()
    if lower:
        body += [f.rows(0, n, (0, n), lambda i, k: above(k, i, mirrored(i, k))), Barrier()]
    body.append(
        f.rows(0, n, (0, n), lambda i, k: above(*((i, k) if lower else (k, i)), Store(out, (*head, i, k), clear)))
    )
    return [*body, Barrier()]


class _Factor(_Block):
    """Writes the factorisation of the upper triangle."""

    def __init__(self, b: RegionBuilder, out: Buffer, head: Index, failed: Buffer) -> None:
        super().__init__(b, TRIANGLE_THREADS.value)
        self.out, self.head, self.failed = out, head, failed
        self.n = out.shape[-1]

    def statements(self) -> list[Stmt]:
        """Return the loop over groups of rows."""
        each = PANEL_ROWS.value
        groups = ceildiv(self.n, each)
        begin = sym("g", 0, groups) * each
        count = minimum(self.n - begin, each)
        q = sym("q", 0, count)
        end = minimum(begin + each, self.n)
        below = self.rows(end, self.n, (end, self.n), lambda i, k: self._less(begin, count, i, k))
        steps = (For("q", 0, count, tuple(self._finish(begin, q))), below, Barrier())
        return [For("g", 0, groups, steps)]

    def _at(self, i: Dim, k: Dim) -> Load:
        return Load(self.out, (*self.head, i, k))

    def _rest(self, block: list[Stmt], begin: Dim, end: Dim, i: Dim, k: Dim) -> Scalar:
        """Append what takes rows from ``begin`` to ``end`` off an element; return what is left of it."""
        acc = Buffer(self.b.fresh("acc"), self.out.dtype, (), "private")
        r = self.b.fresh("r")
        row = begin + sym(r, 0, end - begin)
        term = Apply("mul", (_conj(self._at(row, i)), self._at(row, k)), acc.dtype)
        less = Apply("sub", (Load(acc, ()), term), acc.dtype)
        block += [Alloc(acc), Store(acc, (), self._at(i, k)), For(r, 0, end - begin, (Store(acc, (), less),))]
        return Load(acc, ())

    def _less(self, begin: Dim, count: Dim, i: Dim, k: Dim) -> list[Stmt]:
        """Take a group of rows off element ``(i, k)`` of the upper triangle."""
        block: list[Stmt] = []
        block.append(Store(self.out, (*self.head, i, k), self._rest(block, begin, begin + count, i, k)))
        return [If(Apply("le", (IndexScalar(i), IndexScalar(k)), "i1"), tuple(block))]

    def _finish(self, begin: Dim, q: Dim) -> list[Stmt]:
        """Finish a row: every thread computes the pivot, whose place is written when all have read it."""
        row = begin + q
        first = self.e.new_block()
        pivot = self.e.bind(_real(self._rest(first, begin, row, row, row)))
        positive = Apply("gt", (pivot, constant_scalar(0, pivot.dtype)), "i1")
        first.append(If(Apply("not", (positive,), "i1"), (Store(self.failed, (), Const(True, "i1")),)))
        root = self.e.bind(Apply("sqrt", (pivot,), pivot.dtype))
        whole: Scalar = root
        if kind_of(self.out.dtype) == "c":
            whole = self.e.bind(Apply("complex", (root, constant_scalar(0, root.dtype)), self.out.dtype))
        t = sym("t", 0, self.threads)
        held = Buffer(self.b.fresh("root"), self.out.dtype, (self.threads, 1), "private")
        first.append(Store(held, (t, 0), whole))

        def write(k: Dim) -> list[Stmt]:
            block: list[Stmt] = []
            rest = self._rest(block, begin, row, row, k)
            return [*block, Store(self.out, (*self.head, row, k), Apply("div", (rest, whole), self.out.dtype))]

        line = self.line(row + 1, self.n, write, first)
        last = Store(self.out, (*self.head, row, row), Load(held, (sym("z", 0, 1), 0)))
        return [Alloc(held), line, Barrier(), For("z", 0, 1, (last,), "thread")]


# --- triangular_solve --------------------------------------------------------

Coefficient = Callable[[Dim, Dim], Scalar]


def solve_in_block(
    b: RegionBuilder, out: Buffer, head: Index, matrix: Coefficient, unit: bool, left: bool,
    steps: tuple[Dim, tuple[Dim, Dim]], others: tuple[Dim, Dim],
) -> list[Stmt]:  # fmt: skip
    """Return the statements that solve for the right-hand sides from one to another.

    Each step finds an unknown of all of them, and takes it off those that come later.

    Parameters
    ----------
    matrix : callable
        ``matrix(i, k)``: with what unknown ``k`` stands in equation ``i``.
    steps : tuple
        The unknown that step ``s`` finds, and the range of those that come after it.
    """
    block = _Block(b, TRIANGLE_THREADS.value)
    n = out.shape[-2 if left else -1]
    i, after = steps

    def at(k: Dim, c: Dim) -> Index:
        return (*head, k, c) if left else (*head, c, k)

    def divide(c: Dim) -> list[Stmt]:
        return [Store(out, at(i, c), Apply("div", (Load(out, at(i, c)), matrix(i, i)), out.dtype))]

    def less(k: Dim, c: Dim) -> list[Stmt]:
        term = Apply("mul", (matrix(k, i), Load(out, at(i, c))), out.dtype)
        return [Store(out, at(k, c), Apply("sub", (Load(out, at(k, c)), term), out.dtype))]

    body: list[Stmt] = [] if unit else [block.line(*others, divide), Barrier()]
    if left:
        body += [block.rows(*after, others, less), Barrier()]
    else:
        body += [block.rows(*others, after, lambda c, k: less(k, c)), Barrier()]
    return [For("s", 0, n, tuple(body))]

