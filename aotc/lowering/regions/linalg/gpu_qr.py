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
    return _Householder(b, head, plan.warps).statements()


def product_of_reflectors(b: RegionBuilder, head: Index, plan: ReflectorProductPlan) -> list[Stmt]:
    """Return the statements of ``orgqr`` for the matrix ``head``."""
    return _ProductOfReflectors(b, head, plan.warps).statements()


class _Reflectors:
    """Base of both emitters: the application of a reflector to the columns behind it."""

    def __init__(self, b: RegionBuilder, head: Index, warps: int) -> None:
        self.c = c = MatrixColumns(b, b.outputs[0], head, warps)
        self.e, self.head, self.name = c.e, head, b.fresh("k")
        self.dot = c.own()

    def applied(self, k: Dim, tau: Callable[[], Scalar]) -> Stmt:
        """Subtract ``tau (v . x) v`` from each column ``x`` behind column ``k``, which contains ``v``."""
        c = self.c

        def update(column: Dim, by: Callable[[Fill], Stmt]) -> Sequence[Stmt]:
            def multiply(block: list[Stmt]) -> None:
                block.append(c.keep(self.dot, c.zero()))
                c.first_lane(block, [c.keep(self.dot, c.element(column, k))])
                c.along_rows(
                    block,
                    k + 1,
                    lambda i: [
                        Store(
                            self.dot,
                            (c.t,),
                            binary_call("mul", conjugate_scalar(c.element(k, i)), c.element(column, i)),
                            "add",
                        )
                    ],
                )

            def take_off(block: list[Stmt]) -> None:
                factor = self.e.bind(binary_call("mul", c.load_of_thread_scalar(self.dot), tau()))
                own = c.place(column, k)
                c.first_lane(block, [Store(c.out, own, binary_call("sub", Load(c.out, own), factor))])

                def each(i: Dim) -> list[Stmt]:
                    less = binary_call("sub", c.element(column, i), binary_call("mul", c.element(k, i), factor))
                    return [Store(c.out, c.place(column, i), less)]

                c.along_rows(block, k + 1, each)

            return [by(multiply), *c.added(self.dot), by(take_off)]

        return c.over_columns(k + 1, update)


class _Householder(_Reflectors):
    """Emitter of ``geqrf``."""

    def __init__(self, b: RegionBuilder, head: Index, warps: int) -> None:
        super().__init__(b, head, warps)
        c = self.c
        self.taus, self.count = b.outputs[1], minimum(c.rows, c.columns)
        self.largest, self.sum = c.own(c.real), c.own(c.real)
        self.scale, self.beta, self.tau = c.own(), c.own(), c.own()
        self.held = c.shared()

    def statements(self) -> list[Stmt]:
        """Return all statements of the Householder QR factorization, with their allocations."""
        k = sym(self.name, 0, self.count)
        behind = self.applied(k, lambda: conjugate_scalar(Load(self.held, (0,))))
        steps = [*self._scaled_norm_below(k), *self._reflector_of_column(k), BLOCK_BARRIER, behind, BLOCK_BARRIER]
        return self.c.whole([For(self.name, 0, self.count, tuple(steps))])

    def _scaled_norm_below(self, k: Dim) -> list[Stmt]:
        """Return the largest part below row ``k``, and the sum of squares relative to it."""
        c = self.c

        def look(block: list[Stmt]) -> None:
            block.append(c.keep(self.largest, c.zero(c.real)))
            c.along_rows(
                block,
                k + 1,
                lambda i: [
                    c.keep(
                        self.largest,
                        binary_call("max", c.load_of_thread_scalar(self.largest), c.size(self.e.bind(c.element(k, i)))),
                    )
                ],
            )

        def add(block: list[Stmt]) -> None:
            unit = self.e.bind(self._nonzero_scale())
            block.append(c.keep(self.sum, c.zero(c.real)))

            def each(i: Dim) -> list[Stmt]:
                x = self.e.bind(c.element(k, i))
                parts = [self.e.bind(binary_call("div", part, unit)) for part in self._real_parts_of(x)]
                return [Store(self.sum, (c.t,), binary_call("mul", part, part), "add") for part in parts]

            c.along_rows(block, k + 1, each)

        larger = c.warp_butterfly_reduce([self.largest], lambda x, y: [binary_call("max", x[0], y[0])], WARP)
        return [c.by_threads(look, WARP), *larger, c.by_threads(add, WARP), *c.added(self.sum, WARP)]

    def _real_parts_of(self, x: Scalar) -> Sequence[Scalar]:
        return real_and_imaginary(x) if kind_of(x.dtype) == "c" else (x,)

    def _nonzero_scale(self) -> Scalar:
        """Return the largest part, or 1 if all are 0."""
        largest, real = self.c.load_of_thread_scalar(self.largest), self.c.real
        is_zero = comparison_call("eq", largest, self.c.zero(real))
        return Apply("select", (is_zero, constant_scalar(1, real), largest), real)

    def _reflector_of_column(self, k: Dim) -> list[Stmt]:
        """Return the reflector of column ``k``, which makes all elements below row ``k`` 0."""
        c = self.c

        def write(block: list[Stmt]) -> None:
            scale, beta, tau = (c.load_of_thread_scalar(x) for x in (self.scale, self.beta, self.tau))
            c.first_lane(block, [
                Store(c.out, c.place(k, k), beta), Store(self.taus, (*self.head, k), tau), Store(self.held, (0,), tau)
            ])  # fmt: skip
            c.along_rows(
                block, k + 1, lambda i: [Store(c.out, c.place(k, i), binary_call("mul", c.element(k, i), scale))]
            )

        return [
            c.by_threads(lambda block: self._reflector_scalars(block, k), WARP),
            WARP_BARRIER,
            c.by_threads(write, WARP),
        ]

    def _reflector_scalars(self, block: list[Stmt], k: Dim) -> None:
        """Append ``beta``, ``tau`` and the scale of the reflector, as LAPACK's larfg computes them."""
        c, bind, real = self.c, self.e.bind, self.c.real
        alpha = bind(c.element(k, k))
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
        is_left = comparison_call("lt", parts[0], c.zero(real))
        beta = bind(Apply("select", (is_left, norm, Apply("neg", (norm,), real)), real))
        tau: Scalar = bind(binary_call("div", binary_call("sub", beta, parts[0]), beta))
        wide: Scalar = beta
        if len(parts) == 2:
            tau = Apply("complex", (tau, binary_call("div", Apply("neg", (parts[1],), real), beta)), c.dtype)
            wide = Apply("complex", (beta, c.zero(real)), c.dtype)
        scale = binary_call("div", constant_scalar(1, c.dtype), binary_call("sub", alpha, wide))
        done = comparison_call("eq", rest, c.zero(real))
        if len(parts) == 2:
            done = binary_call("and", done, comparison_call("eq", parts[1], c.zero(real)))
        done = bind(done)
        kept = ((self.scale, constant_scalar(1, c.dtype), scale), (self.beta, alpha, wide), (self.tau, c.zero(), tau))
        block += [c.keep(to, Apply("select", (done, x, y), c.dtype)) for to, x, y in kept]


class _ProductOfReflectors(_Reflectors):
    """Emitter of ``orgqr``."""

    def __init__(self, b: RegionBuilder, head: Index, warps: int) -> None:
        super().__init__(b, head, warps)
        self.taus = b.buffers[b.region_root_op("lapack").operands[1]]
        self.count = self.taus.shape[-1]

    def tau(self, k: Dim) -> Scalar:
        """Return the scalar ``tau`` of reflector ``k``."""
        return Load(self.taus, (*self.head, k))

    def statements(self) -> list[Stmt]:
        """Return all statements that multiply the reflectors, with their allocations."""
        c, k = self.c, self.count - 1 - sym(self.name, 0, self.count)
        steps = [self.applied(k, lambda: self.tau(k)), BLOCK_BARRIER, self._column_from_reflector(k), BLOCK_BARRIER]
        loop = For(self.name, 0, self.count, tuple(steps))
        return c.whole([c.over_columns(self.count, self._identity_column), BLOCK_BARRIER, loop])

    def _identity_column(self, column: Dim, by: Callable[[Fill], Stmt]) -> Sequence[Stmt]:
        """Return the initialisation of a column behind the reflectors: one of the identity."""

        def each(i: Dim) -> list[Stmt]:
            return [Store(self.c.out, self.c.place(column, i), self._identity_element(i, column))]

        return [by(lambda block: self.c.along_rows(block, 0, each))]

    def _identity_element(self, i: Dim, k: Dim) -> Scalar:
        one, c = constant_scalar(1, self.c.dtype), self.c
        return Apply("select", (comparison_call("eq", IndexScalar(i), IndexScalar(k)), one, c.zero()), c.dtype)

    def _column_from_reflector(self, k: Dim) -> Stmt:
        """Return the computation of column ``k``: that of the identity less ``tau`` times the reflector."""
        c = self.c

        def each(i: Dim) -> list[Stmt]:
            factor = self.e.bind(self.tau(k))
            was = Apply("select", (comparison_call("eq", IndexScalar(i), IndexScalar(k)), constant_scalar(1, c.dtype),
                                   c.element(k, i)), c.dtype)  # fmt: skip
            less = binary_call("sub", self._identity_element(i, k), binary_call("mul", was, factor))
            above = comparison_call("lt", IndexScalar(i), IndexScalar(k))
            return [Store(c.out, c.place(k, i), Apply("select", (above, c.zero(), less), c.dtype))]

        return c.by_threads(lambda block: c.along_rows(block, 0, each), WARP)
