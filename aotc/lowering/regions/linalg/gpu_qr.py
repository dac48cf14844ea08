"""``geqrf`` and ``orgqr`` on a GPU: Householder reflectors, one block per matrix (:mod:`.gpu_factor_common`)::

    for k in range(min(m, n)):                                        # geqrf
        v, tau[k], a[k, k] = reflector of a[k:, k]; a[k+1:, k] = v    # a warp
        barrier
        for j in range(k + 1, n):                                     # a warp for each
            a[k:, j] -= conj(tau[k]) * (conj(1, v) . a[k:, j]) * (1, v)
        barrier

orgqr processes the reflectors from the last to the first, and computes the columns of their product in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aotc.ir.dims.algebra import Dim, minimum, sym
from aotc.ir.loop.ir import WARP, Apply, For, Load, Scalar, Stmt, Store
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.elements import constant_scalar, real_and_imaginary
from aotc.lowering.plans.linalg.gpu_factors import HouseholderPlan, ReflectorProductPlan
from aotc.lowering.regions.linalg.gpu_cholesky_trsm import conjugate_scalar
from aotc.lowering.regions.linalg.gpu_factor_common import (
    BLOCK_BARRIER,
    WARP_BARRIER,
    Fill,
    MatrixColumns,
    binary_call,
    comparison_call,
)
from aotc.vmfb.dtypes import kind_of


def qr_by_reflectors(b: RegionBuilder, head: Index, plan: HouseholderPlan) -> list[Stmt]:
    """Return the statements of ``geqrf`` for the matrix ``head``; the outputs are the factors and ``tau``."""
    return _Householder(b, head, plan.warps).factor_statements()


def product_of_reflectors(b: RegionBuilder, head: Index, plan: ReflectorProductPlan) -> list[Stmt]:
    """Return the statements of ``orgqr`` for the matrix ``head``."""
    return _ProductOfReflectors(b, head, plan.warps).product_statements()


class _Reflectors:
    """Base of both emitters: apply a reflector to the columns after it."""

    def __init__(self, b: RegionBuilder, head: Index, warps: int) -> None:
        self.c = c = MatrixColumns(b, b.outputs[0], head, warps)
        self.e, self.head, self.name = c.e, head, b.fresh("k")
        self.dot = c.allocate_per_thread()

    def apply_reflector(self, k: Dim, tau: Callable[[], Scalar]) -> Stmt:
        """Return the subtraction of ``tau (v . x) v`` from the columns ``x`` after column ``k``, which is ``v``."""
        c = self.c

        def update_column(column: Dim, by: Callable[[Fill], Stmt]) -> Sequence[Stmt]:
            """Return the statements of one column: its dot product with ``v``, then the subtraction."""
            def dot_with_column(block: list[Stmt]) -> None:
                """Append the terms of each lane; the diagonal element of ``v`` is 1 and not stored."""
                block.append(c.store_thread_scalar(self.dot, c.zero_constant()))
                c.append_on_first_lane(block, [c.store_thread_scalar(self.dot, c.load_element(column, k))])
                c.append_row_loop(
                    block,
                    k + 1,
                    lambda i: [
                        Store(
                            self.dot,
                            (c.t,),
                            binary_call("mul", conjugate_scalar(c.load_element(k, i)), c.load_element(column, i)),
                            "add",
                        )
                    ],
                )

            def subtract_from_column(block: list[Stmt]) -> None:
                """Append the subtraction of ``tau (v . x) v`` from each lane's rows."""
                factor = self.e.bind(binary_call("mul", c.load_of_thread_scalar(self.dot), tau()))
                own = c.element_index(column, k)
                c.append_on_first_lane(block, [Store(c.out, own, binary_call("sub", Load(c.out, own), factor))])

                def subtract_in_row(i: Dim) -> list[Stmt]:
                    less = binary_call(
                        "sub", c.load_element(column, i), binary_call("mul", c.load_element(k, i), factor)
                    )
                    return [Store(c.out, c.element_index(column, i), less)]

                c.append_row_loop(block, k + 1, subtract_in_row)

            return [by(dot_with_column), *c.warp_sum(self.dot), by(subtract_from_column)]

        return c.loop_over_columns(k + 1, update_column)


class _Householder(_Reflectors):
    """Emit ``geqrf``: reflectors that make a matrix upper triangular."""

    def __init__(self, b: RegionBuilder, head: Index, warps: int) -> None:
        """Allocate the scalars of a reflector: norm, scale, ``beta`` and ``tau``."""
        super().__init__(b, head, warps)
        c = self.c
        self.taus, self.count = b.outputs[1], minimum(c.rows, c.columns)
        self.largest, self.sum = c.allocate_per_thread(c.real), c.allocate_per_thread(c.real)
        self.scale, self.beta, self.reflector_tau = (
            c.allocate_per_thread(),
            c.allocate_per_thread(),
            c.allocate_per_thread(),
        )
        self.held = c.allocate_shared()

    def factor_statements(self) -> list[Stmt]:
        """Return all statements of the Householder QR factorization, with their allocations."""
        k = sym(self.name, 0, self.count)
        behind = self.apply_reflector(k, lambda: conjugate_scalar(Load(self.held, (0,))))
        steps = [*self._scaled_norm_below(k), *self._reflector_of_column(k), BLOCK_BARRIER, behind, BLOCK_BARRIER]
        return self.c.with_allocations([For(self.name, 0, self.count, tuple(steps))])

    def _scaled_norm_below(self, k: Dim) -> list[Stmt]:
        """Return statements for the largest part below row ``k``, and the sum of squares relative to it.

        A part is a real or an imaginary part.
        """
        c = self.c

        def find_largest_part(block: list[Stmt]) -> None:
            """Append the largest part of each lane's rows."""
            block.append(c.store_thread_scalar(self.largest, c.zero_constant(c.real)))
            c.append_row_loop(
                block,
                k + 1,
                lambda i: [
                    c.store_thread_scalar(
                        self.largest,
                        binary_call(
                            "max",
                            c.load_of_thread_scalar(self.largest),
                            c.pivot_magnitude(self.e.bind(c.load_element(k, i))),
                        ),
                    )
                ],
            )

        # Squares relative to the largest part neither overflow nor underflow.
        def add_scaled_squares(block: list[Stmt]) -> None:
            """Append the sum of squares of each lane's rows, relative to the largest part."""
            unit = self.e.bind(self._nonzero_scale())
            block.append(c.store_thread_scalar(self.sum, c.zero_constant(c.real)))

            def add_row(i: Dim) -> list[Stmt]:
                x = self.e.bind(c.load_element(k, i))
                parts = [self.e.bind(binary_call("div", part, unit)) for part in self._real_parts_of(x)]
                return [Store(self.sum, (c.t,), binary_call("mul", part, part), "add") for part in parts]

            c.append_row_loop(block, k + 1, add_row)

        larger = c.warp_butterfly_reduce([self.largest], lambda x, y: [binary_call("max", x[0], y[0])], WARP)
        return [
            c.loop_over_threads(find_largest_part, WARP),
            *larger,
            c.loop_over_threads(add_scaled_squares, WARP),
            *c.warp_sum(self.sum, WARP),
        ]

    def _real_parts_of(self, x: Scalar) -> Sequence[Scalar]:
        return real_and_imaginary(x) if kind_of(x.dtype) == "c" else (x,)

    def _nonzero_scale(self) -> Scalar:
        """Return the largest real or imaginary part of a column, or 1 if all are 0."""
        largest, real = self.c.load_of_thread_scalar(self.largest), self.c.real
        is_zero = comparison_call("eq", largest, self.c.zero_constant(real))
        return Apply("select", (is_zero, constant_scalar(1, real), largest), real)

    def _reflector_of_column(self, k: Dim) -> list[Stmt]:
        """Return the reflector of column ``k``, which makes all elements below row ``k`` 0."""
        c = self.c

        def write_reflector(block: list[Stmt]) -> None:
            """Append the stores of ``beta`` on the diagonal, of ``tau``, and of the scaled vector below."""
            scale, beta, tau = (c.load_of_thread_scalar(x) for x in (self.scale, self.beta, self.reflector_tau))
            c.append_on_first_lane(block, [
                Store(c.out, c.element_index(k, k), beta), Store(self.taus, (*self.head, k), tau),
                Store(self.held, (0,), tau)
            ])  # fmt: skip
            c.append_row_loop(
                block,
                k + 1,
                lambda i: [Store(c.out, c.element_index(k, i), binary_call("mul", c.load_element(k, i), scale))],
            )

        return [
            c.loop_over_threads(lambda block: self._reflector_scalars(block, k), WARP),
            WARP_BARRIER,
            c.loop_over_threads(write_reflector, WARP),
        ]

    def _reflector_scalars(self, block: list[Stmt], k: Dim) -> None:
        """Append ``beta``, ``tau`` and the scale of the reflector, as LAPACK's larfg computes them."""
        c, bind, real = self.c, self.e.bind, self.c.real
        alpha = bind(c.load_element(k, k))
        parts = [bind(part) for part in self._real_parts_of(alpha)]
        rest = bind(
            binary_call("mul", self._nonzero_scale(), Apply("sqrt", (c.load_of_thread_scalar(self.sum),), real))
        )
        sizes = [bind(Apply("abs", (x,), real)) for x in (rest, *parts)]
        most = bind(sizes[0])
        for size in sizes[1:]:
            most = bind(binary_call("max", most, size))
        shares = [bind(binary_call("div", x, most)) for x in sizes]
        squares = binary_call("mul", shares[0], shares[0])
        for share in shares[1:]:
            squares = binary_call("add", squares, binary_call("mul", share, share))
        norm = bind(binary_call("mul", most, Apply("sqrt", (squares,), real)))
        is_left = comparison_call("lt", parts[0], c.zero_constant(real))
        # ``beta`` has the sign that ``alpha`` has not, so that ``beta - alpha`` does not cancel.
        beta = bind(Apply("select", (is_left, norm, Apply("neg", (norm,), real)), real))
        tau: Scalar = bind(binary_call("div", binary_call("sub", beta, parts[0]), beta))
        wide: Scalar = beta
        if len(parts) == 2:
            tau = Apply("complex", (tau, binary_call("div", Apply("neg", (parts[1],), real), beta)), c.dtype)
            wide = Apply("complex", (beta, c.zero_constant(real)), c.dtype)
        scale = binary_call("div", constant_scalar(1, c.dtype), binary_call("sub", alpha, wide))
        done = comparison_call("eq", rest, c.zero_constant(real))
        if len(parts) == 2:
            done = binary_call("and", done, comparison_call("eq", parts[1], c.zero_constant(real)))
        done = bind(done)
        choices = (
            (self.scale, constant_scalar(1, c.dtype), scale),
            (self.beta, alpha, wide),
            (self.reflector_tau, c.zero_constant(), tau),
        )
        block += [c.store_thread_scalar(to, Apply("select", (done, x, y), c.dtype)) for to, x, y in choices]


class _ProductOfReflectors(_Reflectors):
    """Emit ``orgqr``: the product of reflectors."""

    def __init__(self, b: RegionBuilder, head: Index, warps: int) -> None:
        super().__init__(b, head, warps)
        self.taus = b.buffers[b.region_root_op("lapack").operands[1]]
        self.count = self.taus.shape[-1]

    def reflector_tau(self, k: Dim) -> Scalar:
        """Return the scalar ``tau`` of reflector ``k``."""
        return Load(self.taus, (*self.head, k))

    def product_statements(self) -> list[Stmt]:
        """Return all statements that multiply the reflectors, with their allocations."""
        c, k = self.c, self.count - 1 - sym(self.name, 0, self.count)
        steps = [
            self.apply_reflector(k, lambda: self.reflector_tau(k)),
            BLOCK_BARRIER,
            self._column_from_reflector(k),
            BLOCK_BARRIER,
        ]
        loop = For(self.name, 0, self.count, tuple(steps))
        return c.with_allocations([c.loop_over_columns(self.count, self._identity_column), BLOCK_BARRIER, loop])

    def _identity_column(self, column: Dim, by: Callable[[Fill], Stmt]) -> Sequence[Stmt]:
        """Return the initialisation of a column after the reflectors to a column of the identity."""

        def store_identity_element(i: Dim) -> list[Stmt]:
            return [Store(self.c.out, self.c.element_index(column, i), self._identity_element(i, column))]

        return [by(lambda block: self.c.append_row_loop(block, 0, store_identity_element))]

    def _identity_element(self, i: Dim, k: Dim) -> Scalar:
        one, c = constant_scalar(1, self.c.dtype), self.c
        return Apply("select", (comparison_call("eq", IndexScalar(i), IndexScalar(k)), one, c.zero_constant()), c.dtype)

    def _column_from_reflector(self, k: Dim) -> Stmt:
        """Return the computation of column ``k``: the identity's column less ``tau`` times the reflector."""
        c = self.c

        def store_element(i: Dim) -> list[Stmt]:
            """Return the store of an element of the identity minus ``tau v``; 0 above the diagonal."""
            factor = self.e.bind(self.reflector_tau(k))
            old = Apply("select", (comparison_call("eq", IndexScalar(i), IndexScalar(k)), constant_scalar(1, c.dtype),
                                   c.load_element(k, i)), c.dtype)  # fmt: skip
            less = binary_call("sub", self._identity_element(i, k), binary_call("mul", old, factor))
            above = comparison_call("lt", IndexScalar(i), IndexScalar(k))
            return [Store(c.out, c.element_index(k, i), Apply("select", (above, c.zero_constant(), less), c.dtype))]

        return c.loop_over_threads(lambda block: c.append_row_loop(block, 0, store_element), WARP)
