"""syevd and gesdd on a GPU: Jacobi's method from one side (Hestenes 1958), a block of threads for each matrix.

Columns are turned in pairs until all are orthogonal to each other; then ``w = a v``, where ``v`` is the product of the
turns, has the singular values of ``a`` as norms of its columns. In each step of a sweep half as many pairs as there are
columns are turned side by side, in the order of a round-robin tournament (Brent and Luk 1985), a warp for each::

    w, v = a / max(|a|), identity
    while a sweep has turned any, and there were not too many:
        for s in range(n - 1 or n):
            for p, q in the pairs of step s:                                  # a warp for each
                x, y = w[:, p], w[:, q];  g = conj(x) . y
                if |g| > eps sqrt(rows) |x| |y|, and neither column is noise beside the matrix:
                    z = (|y|^2 - |x|^2) / (2 |g|);  t = sign(z) / (|z| + sqrt(1 + z^2));  c = 1 / sqrt(1 + t^2)
                    x, y = c x - t c y / (g / |g|), t c x + c y / (g / |g|)   # and so columns p, q of v
            barrier

Eigenvalues are found of the matrix plus 5/4 of its norm (Frobenius) on the diagonal, which has none that are negative:
its singular vectors are eigenvectors, and ``conj(v) . w`` its eigenvalues. The matrices lie in shared memory; results
are stored in the order of the values.
"""

from __future__ import annotations

from aotc.ir.dims import Dim
from aotc.ir.loop_ir import Apply, Load, Scalar, Stmt, Store
from aotc.ir.loop_ir import Index as IndexScalar
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.regions.ops.linalg_cuda import conj
from aotc.lowering.regions.ops.linalg_turns import Jacobi
from aotc.lowering.regions.ops.linalg_warps import op2, test2
from aotc.lowering.regions.region import RegionBuilder
from aotc.vmfb.dtypes import kind_of


def eigen(b: RegionBuilder, head: Index, lower: bool) -> list[Stmt]:
    """Return the statements of syevd for the matrix ``head`` of the first output, of which they read one triangle.

    The outputs are the vectors, in the place of the matrix, the values, ascending, and the status.
    """
    return _Eigen(b, head, lower).statements()


def singular(b: RegionBuilder, head: Index) -> list[Stmt]:
    """Return the statements of gesdd for the matrix ``head`` of the first output, which has no more columns than rows.

    It is lost. The other outputs are the values, descending, the left vectors, 0 for values that are 0 beside the
    largest, the adjoint of the right ones, and the status.
    """
    return _Singular(b, head).statements()


class _Eigen(Jacobi):
    """syevd."""

    def __init__(self, b: RegionBuilder, head: Index, lower: bool) -> None:
        super().__init__(b, head, b.outputs[1], b.outputs[2])
        self.lower = lower

    def given(self, column: Dim, row: Dim) -> Scalar:
        """Return an element, by those of the triangle that is given."""
        c = self.c
        here = test2("ge" if self.lower else "le", IndexScalar(row), IndexScalar(column))
        return Apply("select", (here, c.element(column, row), conj(c.element(row, column))), c.dtype)

    def diagonal(self) -> Scalar:
        """Return 5/4 of the norm of the scaled matrix."""
        return op2("mul", self.real(1.25), Load(self.norm, (0,)))

    def number(self, j: Dim, i: Dim) -> Scalar:
        """Return a term of ``conj(v) . w``."""
        term = op2("mul", conj(Load(self.v, (j, i))), Load(self.w, (j, i)))
        return Apply("real", (term,), self.c.real) if kind_of(term.dtype) == "c" else term

    def value(self, total: Scalar) -> Scalar:
        """Return the eigenvalue of the scaled matrix."""
        return op2("sub", total, self.diagonal())

    def store(self, block: list[Stmt], column: Dim, to: Dim) -> None:
        """Append what stores an eigenvector."""
        c = self.c
        self.along(block, self.n, lambda i: [Store(c.out, c.place(to, i), self.vector(column, i))])


class _Singular(Jacobi):
    """gesdd."""

    descending = True

    def __init__(self, b: RegionBuilder, head: Index) -> None:
        super().__init__(b, head, b.outputs[1], b.outputs[4])
        self.left, self.right = b.outputs[2:4]

    def number(self, j: Dim, i: Dim) -> Scalar:
        """Return the square of an element of a column."""
        return self.square(Load(self.w, (j, i)))

    def value(self, total: Scalar) -> Scalar:
        """Return the norm of a column."""
        return Apply("sqrt", (total,), self.c.real)

    def store(self, block: list[Stmt], column: Dim, to: Dim) -> None:
        """Append what stores both vectors of a value; the left one of a value that is noise is 0."""
        c, bind = self.c, self.e.bind
        size = bind(Load(self.found, (column,)))
        one = op2("div", self.real(1), size)
        factor = bind(Apply("select", (test2("gt", size, self.noise()), one, self.real(0)), c.real))

        def each(i: Dim) -> list[Stmt]:
            x = bind(self.times(Load(self.w, (column, i)), factor))
            return [Store(self.left, (*self.head, to, i), x), Store(c.out, c.place(to, i), x)]

        self.along(block, self.rows, each)
        self.along(block, self.n, lambda i: [Store(self.right, (*self.head, i, to), conj(self.vector(column, i)))])
