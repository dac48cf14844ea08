"""Eigenvalues (``syevd``) and SVD (``gesdd``) on a GPU: one-sided Jacobi (Hestenes 1958), a block per matrix.

Pairs of columns are rotated until all columns are orthogonal. Then ``w = a v``, where ``v`` is the product of the
rotations, and the norms of the columns of ``w`` are the singular values of ``a``. Each step of a sweep rotates disjoint
pairs of all columns in parallel, in the order of a round-robin tournament (Brent and Luk 1985), a few lanes per pair::

    w, v = a / max(|a|), identity
    while pairs of the last sweep were far from orthogonal, and there were not too many:
        for s in range(n - 1 or n):
            for p, q in the pairs of step s:                                  # a group of lanes for each
                x, y = w[:, p], w[:, q];  g = conj(x) . y
                if |g| > eps sqrt(rows) |x| |y|, and neither column is noise relative to the matrix:
                    a = atan(2 |g| / (|y|^2 - |x|^2)) / 2;  c, s = cos a, sin a conj(g) / |g|
                    x, y = c x - s y, conj(s) x + c y                         # and likewise columns p, q of v
            barrier

For eigenvalues, 5/4 of the Frobenius norm is added to the diagonal, so that none is negative. The columns of ``w`` are
then eigenvectors, and ``v`` is not needed. The columns are in shared memory; results are stored in the order of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from aotc.ir.dims.algebra import Dim, mod, sym
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, For, If, Load, Scalar, Stmt, Store
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.elements import constant_scalar, real_and_imaginary
from aotc.lowering.plans.linalg.gpu_factors import EigenPlan, JacobiPlan, SingularPlan
from aotc.lowering.regions.linalg.gpu_cholesky_trsm import conjugate_scalar
from aotc.lowering.regions.linalg.gpu_factor_common import BLOCK_BARRIER, Fill, binary_call, comparison_call
from aotc.lowering.regions.linalg.gpu_jacobi_rotations import JacobiRotations
from aotc.vmfb.dtypes import kind_of, to_numpy


def eigen_statements(b: RegionBuilder, head: Index, plan: EigenPlan) -> list[Stmt]:
    """Return the statements of ``syevd`` for the matrix ``head`` of the first output; one triangle is read.

    The outputs are the eigenvectors, which overwrite the matrix, the eigenvalues in ascending order, and the status.
    """
    return _JacobiEigen(b, head, plan).kernel_statements()


def svd_statements(b: RegionBuilder, head: Index, plan: SingularPlan) -> list[Stmt]:
    """Return the statements of ``gesdd`` for the matrix ``head`` of the first output.

    The matrix must not have more columns than rows, and is overwritten. The other outputs are the values, descending,
    the left vectors (0 for values that are 0 relative to the largest), the adjoint of the right vectors, and the
    status.
    """
    return _JacobiSvd(b, head, plan).kernel_statements()


class Jacobi(JacobiRotations):
    """Base of the Jacobi kernels for eigenvalues and for singular values.

    A block of threads handles the matrix ``out[head]`` of the first output (``head`` is the index in the batch): it
    rotates columns until they are orthogonal, then stores values and vectors, sorted by value.
    """

    descending = False

    def __init__(self, b: RegionBuilder, head: Index, plan: JacobiPlan, values: Buffer, status: Buffer) -> None:
        """Allocate the shared memory of the values, of their order and of the scale of the matrix.

        ``values`` and ``status`` are results of the kernel; ``head`` is the index of the matrix in the batch.
        """
        super().__init__(b, head, plan)
        c = self.c
        self.head, self.values, self.status = head, values, status
        self.found, self.unit = self.allocate_shared(c.real, (self.n,)), self.allocate_shared(c.real, (self.n,))
        self.rank, self.partial = self.allocate_shared("i64", (self.n,)), self.allocate_shared(c.real, (c.warps,))
        self.scale, self.norm = c.allocate_shared(c.real), c.allocate_shared(c.real)
        self.own = c.allocate_per_thread(c.real)

    def kernel_statements(self) -> list[Stmt]:
        """Return the kernel's body: allocations of all buffers, then the statements."""
        c = self.c
        least = float(np.finfo(to_numpy(c.real)).tiny)  # the inverse of a smaller number would overflow
        largest = self._reduce_over_threads(self.scale, self._largest_parts, "max", least)
        squares = self._reduce_over_threads(self.norm, self._scaled_squares, "add")
        body = [
            *largest,
            *squares,
            c.loop_over_threads(self._initialize_columns),
            BLOCK_BARRIER,
            *self.sweep_statements(),
        ]
        body += [
            self._compute_column_values(),
            BLOCK_BARRIER,
            c.loop_over_threads(self._rank_column_values),
            BLOCK_BARRIER,
            *self._store_results(),
        ]
        return c.with_allocations(body)

    # --- what is turned ---

    def input_element(self, column: Dim, row: Dim) -> Scalar:
        """Return the load of an element of the input matrix."""
        return self.c.load_element(column, row)

    def diagonal_shift(self) -> Scalar | None:
        """Return the shift added to the diagonal, or None."""
        return None

    def inverse_scale(self) -> Scalar:
        """Return the factor that scales the largest real or imaginary part to 1."""
        return self.e.bind(binary_call("div", self.real_constant(1), Load(self.scale, (0,))))

    def _loop_over_matrix_elements(
        self, block: list[Stmt], each: Callable[[Dim, Dim], Sequence[Stmt]], rows: int = 0
    ) -> None:
        """Append a loop over the elements of the matrix, or of ``rows`` rows, distributed over threads."""
        name, rows = self.b.fresh("f"), rows or self.rows
        flat = sym(name, 0, self.n * rows)
        inner = self.e.new_block()
        inner += each(flat // rows, mod(flat, rows))
        block.append(For(name, self.c.t, self.n * rows, tuple(inner), step=self.c.threads))
        self.e.enter(block)

    def _largest_parts(self, block: list[Stmt]) -> None:
        """Append the copy of the matrix to shared memory, and each thread's largest real or imaginary part."""
        c, bind = self.c, self.e.bind

        def copy_element(j: Dim, i: Dim) -> list[Stmt]:
            """Return the copy of an input element to shared memory, and the update of the thread's maximum."""
            x = bind(self.input_element(j, i))
            parts = real_and_imaginary(x) if kind_of(x.dtype) == "c" else (x,)
            size = c.load_of_thread_scalar(self.own)
            for part in parts:
                size = binary_call("max", size, Apply("abs", (part,), c.real))
            return [Store(self.w, (j, i), x), c.store_thread_scalar(self.own, size)]

        self._loop_over_matrix_elements(block, copy_element)

    def _scaled_squares(self, block: list[Stmt]) -> None:
        """Append the scaling of a thread's elements, and the sum of their squares."""
        c, scale = self.c, self.inverse_scale()

        def scale_element(j: Dim, i: Dim) -> list[Stmt]:
            """Return the scaling of an element, and the addition of its square to the thread's sum."""
            x = self.e.bind(self.scaled_by_real(Load(self.w, (j, i)), scale))
            return [
                Store(self.w, (j, i), x),
                c.store_thread_scalar(
                    self.own, binary_call("add", c.load_of_thread_scalar(self.own), self.squared_magnitude(x))
                ),
            ]

        self._loop_over_matrix_elements(block, scale_element)

    def _reduce_over_threads(self, to: Buffer, look: Fill, how: str, least: float = 0) -> list[Stmt]:
        """Return the reduction of the threads' values by ``how``; a sum is replaced by its square root."""
        c = self.c

        def reduce_in_warp(block: list[Stmt]) -> None:
            block.append(c.store_thread_scalar(self.own, self.real_constant(0)))
            look(block)

        def reduce_warps(block: list[Stmt]) -> None:
            total = self.real_constant(least)
            for k in range(c.warps):
                total = binary_call(how, total, Load(self.partial, (k,)))
            block.append(Store(to, (0,), Apply("sqrt", (total,), c.real) if how == "add" else total))

        return [
            c.loop_over_threads(reduce_in_warp),
            *c.warp_butterfly_reduce([self.own], lambda x, y: [binary_call(how, x[0], y[0])]),
            c.loop_over_threads(
                lambda block: c.append_on_first_lane(
                    block, [Store(self.partial, (c.warp,), c.load_of_thread_scalar(self.own))]
                )
            ),
            BLOCK_BARRIER,
            c.loop_over_threads(reduce_warps, 1),
            BLOCK_BARRIER,
        ]

    def _initialize_columns(self, block: list[Stmt]) -> None:
        """Append the initial matrix of the Jacobi iteration: shifted diagonal, zero rows, identity below."""
        c, more, pitch = self.c, self.diagonal_shift(), self.held.pitch
        if more is not None:
            name = self.b.fresh("j")
            own = (sym(name, 0, self.n),) * 2
            shifted = binary_call("add", Load(self.w, own), self.convert_to_matrix_dtype(self.e.bind(more)))
            block.append(For(name, c.t, self.n, (Store(self.w, own, shifted),), step=c.threads))
        self._clear_columns(block)
        if pitch == self.rows:
            return
        first = self.held.padded_rows(self.rows)

        def initialize_element(j: Dim, i: Dim) -> list[Stmt]:
            own = comparison_call("eq", IndexScalar(i + self.rows), IndexScalar(j + first))
            one = constant_scalar(1, c.dtype)
            unit = Apply("select", (own, one, c.zero_constant()), c.dtype) if self.held.more else c.zero_constant()
            return [Store(self.w, (j, i + self.rows), unit)]

        self._loop_over_matrix_elements(block, initialize_element, pitch - self.rows)

    def _clear_columns(self, block: list[Stmt]) -> None:
        """Append the clearing of padding columns."""
        none, pitch = self.held.padded_count - self.n, self.held.pitch
        if none:
            name = self.b.fresh("f")
            flat = sym(name, 0, none * pitch)
            clear = Store(self.w, (self.n + flat // pitch, mod(flat, pitch)), self.c.zero_constant())
            block.append(For(name, self.c.t, none * pitch, (clear,), step=self.c.threads))

    # --- results ---

    def append_column_sums(self, block: list[Stmt], j: Dim) -> None:
        """Append a thread's part of the two sums from which a column's value is computed."""
        raise NotImplementedError

    def value_of_sums(self, total: Scalar, squares: Scalar) -> Scalar:
        """Return a column's eigenvalue or singular value from its two sums."""
        raise NotImplementedError

    def _compute_column_values(self) -> Stmt:
        """Return the loop that computes the eigenvalue or singular value of each column."""
        c = self.c

        def compute_value(column: Dim, by: Callable[[Fill], Stmt]) -> Sequence[Stmt]:
            """Return the statements that compute the value of one column, and the reciprocal of its length."""
            def sum_column(block: list[Stmt]) -> None:
                block += [
                    c.store_thread_scalar(self.x2, self.real_constant(0)),
                    c.store_thread_scalar(self.y2, self.real_constant(0)),
                ]
                self.append_column_sums(block, column)

            def store_value(block: list[Stmt]) -> None:
                squares = self.e.bind(c.load_of_thread_scalar(self.y2))
                total = self.e.bind(self.value_of_sums(c.load_of_thread_scalar(self.x2), squares))
                one = binary_call("div", self.real_constant(1), Apply("sqrt", (squares,), c.real))
                first = comparison_call("eq", IndexScalar(self.lane), Const(0, "i64"))
                block.append(If(first, (Store(self.found, (column,), total), Store(self.unit, (column,), one))))

            return [by(sum_column), *self.sums_over_group(self.x2, self.y2), by(store_value)]

        return self.loop_over_columns(compute_value)

    def vector_element(self, j: Dim, i: Dim) -> Scalar:
        """Return an element of a normalised vector."""
        return self.scaled_by_real(Load(self.w, (j, i)), Load(self.unit, (j,)))

    def _rank_column_values(self, block: list[Stmt]) -> None:
        """Append the sorted position of each value: the count of values before it; NaN keeps its position."""
        c, before = self.c, "gt" if self.descending else "lt"
        own, others = self.b.fresh("j"), self.b.fresh("k")
        j, k = sym(own, 0, self.n), sym(others, 0, self.n)
        count = Buffer(self.b.fresh("count"), "i64", (), "private")
        mine, other = Load(self.found, (j,)), Load(self.found, (k,))
        beyond = binary_call("or", comparison_call(before, mine, other), comparison_call(before, other, mine))
        earlier = binary_call(
            "and", Apply("not", (beyond,), "i1"), comparison_call("lt", IndexScalar(k), IndexScalar(j))
        )
        first = binary_call("or", comparison_call(before, other, mine), earlier)
        more = Apply("select", (first, Const(1, "i64"), Const(0, "i64")), "i64")
        inner: list[Stmt] = [Alloc(count), Store(count, (), Const(0, "i64"))]
        inner.append(For(others, 0, self.n, (Store(count, (), binary_call("add", Load(count, ()), more)),)))
        inner.append(Store(self.rank, (j,), Load(count, ())))
        block.append(For(own, c.t, self.n, tuple(inner), step=c.threads))
        self.e.enter(block)

    def store_vectors(self, block: list[Stmt], column: Dim, to: Dim) -> None:
        """Append the stores of the vectors of ``column`` at sorted position ``to``."""
        raise NotImplementedError

    def _store_results(self) -> list[Stmt]:
        """Return the stores of values and vectors in sorted order, and of the status: 1 if sweeps did not converge."""
        c = self.c

        def store_column(column: Dim, by: Callable[[Fill], Stmt]) -> Sequence[Stmt]:
            """Return the stores of a column's value and vectors at its place in the sorted order."""
            def store_value_and_vectors(block: list[Stmt]) -> None:
                to = sym(self.e.bind(Load(self.rank, (column,)), "n").name, 0, self.n)
                largest = self.e.bind(Load(self.scale, (0,)))
                value = binary_call("mul", Load(self.found, (column,)), largest)
                first = comparison_call("eq", IndexScalar(self.lane), Const(0, "i64"))
                block.append(If(first, (Store(self.values, (*self.head, to), value),)))
                self.store_vectors(block, column, to)

            return [by(store_value_and_vectors)]

        def store_status(block: list[Stmt]) -> None:
            finite = Apply("is_finite", (Load(self.norm, (0,)),), "i1")
            done = binary_call("and", finite, Apply("not", (self.is_not_converged(),), "i1"))
            good = Apply("select", (done, Const(0, "i32"), Const(1, "i32")), "i32")
            block.append(Store(self.status, self.head, good))

        return [self.loop_over_columns(store_column), c.loop_over_threads(store_status, 1)]


class _JacobiEigen(Jacobi):
    """Emit ``syevd``: eigenvalues and eigenvectors of a Hermitian matrix."""

    def __init__(self, b: RegionBuilder, head: Index, plan: EigenPlan) -> None:
        super().__init__(b, head, plan, b.outputs[1], b.outputs[2])
        self.lower = b.region_root_op("lapack").attrs["options"]["uplo"] == "L"

    def _lower_triangle_element(self, column: Dim, row: Dim) -> Scalar:
        """Return an element of the lower triangle."""
        c = self.c
        return c.load_element(column, row) if self.lower else conjugate_scalar(c.load_element(row, column))

    def input_element(self, column: Dim, row: Dim) -> Scalar:
        """Return an element of the Hermitian input matrix, from its stored triangle."""
        c = self.c
        is_stored = comparison_call("ge", IndexScalar(row), IndexScalar(column))
        return Apply(
            "select",
            (
                is_stored,
                self._lower_triangle_element(column, row),
                conjugate_scalar(self._lower_triangle_element(row, column)),
            ),
            c.dtype,
        )

    def diagonal_shift(self) -> Scalar:
        """Return 5/4 of the norm of the scaled matrix; 1 for a zero matrix."""
        norm = self.e.bind(Load(self.norm, (0,)))
        more = binary_call("mul", self.real_constant(1.25), norm)
        return Apply(
            "select", (comparison_call("eq", norm, self.real_constant(0)), self.real_constant(1), more), self.c.real
        )

    def append_column_sums(self, block: list[Stmt], j: Dim) -> None:
        """Append the terms of ``conj(w) . (a w) / 2`` of column ``j``, from the lower triangle of ``a``."""
        c, bind = self.c, self.e.bind
        scale = self.inverse_scale()

        def add_matrix_row(i: Dim) -> list[Stmt]:
            """Return the stores of the terms of row ``i``; of the Hermitian matrix only the lower triangle is read."""
            own = bind(Load(self.w, (j, i)))
            total = Buffer(self.b.fresh("total"), c.dtype, (), "private")
            outer = self.e.block
            name = self.b.fresh("k")
            inner = self.e.new_block()
            k = sym(name, 0, self.n)
            term = binary_call(
                "mul", self.scaled_by_real(self._lower_triangle_element(k, i), scale), Load(self.w, (j, k))
            )
            inner.append(Store(total, (), term, "add"))
            self.e.enter(outer)
            outer += [Alloc(total), Store(total, (), c.zero_constant()), For(name, 0, i, tuple(inner))]
            # The elements above the diagonal give the conjugate terms: half of the sum is the real part of the terms
            # below, plus half of the diagonal's.
            half = binary_call(
                "mul",
                self.scaled_by_real(
                    self._lower_triangle_element(i, i), self.e.bind(binary_call("mul", self.real_constant(0.5), scale))
                ),
                own,
            )
            whole = binary_call("mul", conjugate_scalar(own), binary_call("add", Load(total, ()), half))
            real = Apply("real", (whole,), c.real) if kind_of(c.dtype) == "c" else whole
            return [
                Store(self.x2, (c.t,), real, "add"),
                Store(self.y2, (c.t,), bind(self.squared_magnitude(own)), "add"),
            ]

        self.append_row_loop(block, self.n, add_matrix_row)

    def value_of_sums(self, total: Scalar, squares: Scalar) -> Scalar:
        """Return the eigenvalue of the scaled matrix."""
        return binary_call("div", binary_call("add", total, total), squares)

    def store_vectors(self, block: list[Stmt], column: Dim, to: Dim) -> None:
        """Append the stores of an eigenvector."""
        c = self.c
        self.append_row_loop(
            block, self.n, lambda i: [Store(c.out, c.element_index(to, i), self.vector_element(column, i))]
        )


class _JacobiSvd(Jacobi):
    """Emit ``gesdd``: singular values and vectors."""

    descending = True

    def __init__(self, b: RegionBuilder, head: Index, plan: SingularPlan) -> None:
        super().__init__(b, head, plan, b.outputs[1], b.outputs[4])
        self.left, self.right = b.outputs[2:4]
        self.noise = binary_call("mul", self._noise_norm(), self._noise_norm())

    def _noise_norm(self) -> Scalar:
        """Return the norm up to which a column is rounding noise."""
        return binary_call("mul", self.real_constant(self.small), Load(self.norm, (0,)))

    def append_column_sums(self, block: list[Stmt], j: Dim) -> None:
        """Append the squares of a column, and of the same column of the product of rotations."""

        def add_squares(to: Buffer, first: int) -> Callable[[Dim], list[Stmt]]:
            return lambda i: [Store(to, (self.c.t,), self.squared_magnitude(Load(self.w, (j, i + first))), "add")]

        self.append_row_loop(block, self.rows, add_squares(self.x2, 0))
        self.append_row_loop(block, self.n, add_squares(self.y2, self.held.padded_rows(self.rows)))

    def value_of_sums(self, total: Scalar, squares: Scalar) -> Scalar:
        """Return the norm of a column, corrected for the rounding of the rotations."""
        return Apply("sqrt", (binary_call("div", total, squares),), self.c.real)

    def store_vectors(self, block: list[Stmt], column: Dim, to: Dim) -> None:
        """Append the stores of both vectors of a value; the left vector of a value that is noise is 0."""
        c, bind = self.c, self.e.bind
        size = bind(Load(self.found, (column,)))
        one = binary_call("div", self.real_constant(1), size)
        factor = bind(
            Apply("select", (comparison_call("gt", size, self._noise_norm()), one, self.real_constant(0)), c.real)
        )

        def store_element(i: Dim) -> list[Stmt]:
            x = bind(self.scaled_by_real(Load(self.w, (column, i)), factor))
            return [Store(self.left, (*self.head, to, i), x), Store(c.out, c.element_index(to, i), x)]

        first = self.held.padded_rows(self.rows)
        self.append_row_loop(block, self.rows, store_element)
        self.append_row_loop(
            block,
            self.n,
            lambda i: [
                Store(self.right, (*self.head, i, to), conjugate_scalar(self.vector_element(column, i + first)))
            ],
        )
