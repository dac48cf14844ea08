"""Cholesky factorisation and triangular solve on a GPU: a block of threads per matrix, or per run of right-hand sides.

Both are blocked algorithms, with the panels of a :class:`TriangleBlock`. The diagonal block of a panel is in registers
and shared memory, one thread per column. The trailing update is a matmul with tiles of 4 x 4 elements per thread::

    for g in range(0, n, 32):                                  # a Cholesky factor, as an upper triangle
        a[g:g+32, g:g+32] = factor of itself                   # a warp
        a[g:g+32, g+32:] = solution by it of a[g:g+32, g+32:]  # a thread for each column;  barrier
        a[g+32:, g+32:] -= a[g:g+32, g+32:]^H a[g:g+32, g+32:] # tiles of the upper triangle;  barrier
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from aotc.ir.dims.algebra import Dim, ceildiv, maximum, minimum, mod, sym
from aotc.ir.loop.ir import Alloc, Apply, Barrier, Buffer, Const, For, If, Load, Scalar, Stmt, Store
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.elements import conjunction_of_tests, constant_scalar, test_index
from aotc.lowering.plans.linalg.gpu_triangles import BlockCholeskyPlan, BlockSolvePlan, TriangleBlock
from aotc.lowering.regions.linalg.gpu_transpose_triangle import TriangleTranspose
from aotc.vmfb.dtypes import kind_of, real_of

Coefficient = Callable[[Dim, Dim], Scalar]


def conjugate_scalar(x: Scalar) -> Scalar:
    """Return the complex conjugate; a real scalar is its own."""
    return Apply("conj", (x,), x.dtype) if kind_of(x.dtype) == "c" else x


def _real_part(x: Scalar) -> Scalar:
    return Apply("real", (x,), real_of(x.dtype)) if kind_of(x.dtype) == "c" else x


def _convert_real_scalar(x: Scalar, dtype: str) -> Scalar:
    """Convert a real scalar to ``dtype``, which may be complex."""
    return x if x.dtype == dtype else Apply("complex", (x, constant_scalar(0, x.dtype)), dtype)


def _complex_product(x: Scalar, y: Scalar) -> Scalar:
    return Apply("mul", (x, y), x.dtype)


class _TrianglePanels:
    """Base of both emitters: threads, a column in registers, and the diagonal block of a panel in shared memory."""

    def __init__(self, b: RegionBuilder, plan: TriangleBlock, dtype: str, n: Dim) -> None:
        """Name the registers of a panel and the shared memory of a diagonal block."""
        self.b, self.e, self.dtype, self.n = b, b.elements(), dtype, n
        self.threads, self.each, self.side = plan.threads, plan.panel, plan.side
        self.t = sym("t", 0, self.threads)
        self.own = Buffer(b.fresh("own"), dtype, (self.threads, self.each), "private")
        self.diagonal, self.inverse = (replace(x, name=b.fresh(x.name)) for x in plan.shared_buffers(dtype))
        self.one = constant_scalar(1, dtype)
        self.zero = constant_scalar(0, dtype)

    def thread_loop(self, block: Sequence[Stmt], count: int = 0) -> For:
        return For("t", 0, count or self.threads, tuple(block), "thread")

    def row_in_panel(self, i: Dim) -> Dim:
        """Return the position within its panel of matrix row ``i``."""
        return i if mod(self.n, self.each) == 0 else minimum(i, self.n - 1)

    def substitute_column(self, t: Dim) -> list[Stmt]:
        """Return the substitution for the column of thread ``t`` by the diagonal block in shared memory."""
        q, i = sym("q", 0, self.each), sym("i", 0, self.each)
        unknown = Load(self.own, (t, q))
        less = Apply(
            "sub", (Load(self.own, (t, i)), _complex_product(Load(self.diagonal, (q, i)), unknown)), self.dtype
        )
        rest = For("i", q + 1, self.each, (Store(self.own, (t, i), less),), "unroll")
        divide = Store(self.own, (t, q), _complex_product(unknown, Load(self.inverse, (q,))))
        return [For("q", 0, self.each, (divide, rest), "unroll")]

    def subtract_tile_product(
        self, left: Callable[[Dim, Dim], Scalar], right: Callable[[Dim, Dim], Scalar], inner: Dim,
        cell: Callable[[Dim, Dim], Index], inside: Callable[[Dim, Dim], list[Scalar]], out: Buffer,
    ) -> list[Stmt]:  # fmt: skip
        """Return the update of a tile of ``out`` by a small matmul.

        It subtracts ``sum(left(r, u) * right(r, v) for r < inner)`` from each ``out[cell(u, v)]``.
        """
        u, v = sym("u", 0, self.side), sym("v", 0, self.side)
        r = self.b.fresh("r")
        sums = Buffer(self.b.fresh("sums"), self.dtype, (self.side, self.side), "private")
        ups, across = (Buffer(self.b.fresh("x"), self.dtype, (self.side,), "private") for _ in range(2))

        def loop_over_tile(block: Sequence[Stmt]) -> For:
            return For("u", 0, self.side, (For("v", 0, self.side, tuple(block), "unroll"),), "unroll")

        term = _complex_product(Load(ups, (u,)), Load(across, (v,)))
        step: list[Stmt] = []
        for name, at, into, read in (("u", u, ups, left), ("v", v, across, right)):
            block = self.e.new_block()
            block.append(Store(into, (at,), read(sym(r, 0, inner), at)))
            step.append(For(name, 0, self.side, tuple(block), "lanes"))
        step.append(loop_over_tile([Store(sums, (u, v), term, "add")]))
        block = self.e.new_block()
        tests = inside(u, v)
        place = cell(u, v)
        store = Store(out, place, Apply("sub", (Load(out, place), Load(sums, (u, v))), self.dtype))
        block.append(If(conjunction_of_tests(tests), (store,)) if tests else store)
        body: list[Stmt] = [Alloc(sums), Alloc(ups), Alloc(across), loop_over_tile([Store(sums, (u, v), self.zero)])]
        return [*body, For(r, 0, inner, tuple(step)), loop_over_tile(block)]


# --- cholesky ----------------------------------------------------------------


def factor_in_block(
    b: RegionBuilder, plan: BlockCholeskyPlan, out: Buffer, head: Index, failed: Buffer, lower: bool
) -> list[Stmt]:
    """Return the statements that factor a matrix and clear its other triangle; all threads load the failure flag."""
    f = _BlockCholesky(b, plan.block, out, head)
    mirror = TriangleTranspose(b, out, head, plan)
    body: list[Stmt] = [*mirror.copy_lower_to_upper(), Barrier()] if lower else []
    body += f.factor_statements()
    body += [*(mirror.move_upper_to_lower() if lower else mirror.clear_lower_triangle()), Barrier()]
    return [mirror.allocate_tiles(), *f.allocate_panel(), *body, Store(failed, (), Load(f.failed, (0,)))]


class _BlockCholesky(_TrianglePanels):
    """Emit the factorisation of the upper triangle of a matrix by a block of threads."""

    def __init__(self, b: RegionBuilder, plan: TriangleBlock, out: Buffer, head: Index) -> None:
        super().__init__(b, plan, out.dtype, out.shape[-1])
        self.out, self.head = out, head
        self.failed = Buffer(b.fresh("failed"), "i1", (1,), "shared")

    def allocate_panel(self) -> list[Stmt]:
        """Return the allocations of shared buffers and the barrier before the first step that could fail."""
        begin = For("z", 0, 1, (Store(self.failed, (0,), Const(False, "i1")),), "thread")
        return [*map(Alloc, (self.own, self.diagonal, self.inverse, self.failed)), begin, Barrier()]

    def factor_statements(self) -> list[Stmt]:
        """Return the loop over panels of a blocked Cholesky factorization."""
        panels = ceildiv(self.n, self.each)
        begin = sym("g", 0, panels) * self.each
        steps = [*self._factor_diagonal_block(begin), Barrier()]
        if panels != 1:
            steps += [
                self._solve_right_of_diagonal(begin),
                Barrier(),
                self._trailing_update(begin + self.each),
                Barrier(),
            ]
        return [For("g", 0, panels, tuple(steps))]

    def _at(self, i: Dim, k: Dim) -> Index:
        return (*self.head, i, k)

    def _factor_diagonal_block(self, begin: Dim) -> list[Stmt]:
        """Return the factorisation of the diagonal block, one thread per column.

        Beyond the end of the matrix the block continues as the identity.
        """
        i, t = sym("i", 0, self.each), sym("t", 0, self.each)
        own = (t, i)
        tests = [*test_index(begin + t, self.n, "lt"), Apply("le", (IndexScalar(i), IndexScalar(t)), "i1")]
        unit = Apply("select", (Apply("eq", (IndexScalar(i), IndexScalar(t)), "i1"), self.one, self.zero), self.dtype)
        read = Store(self.own, own, Load(self.out, self._at(begin + i, begin + t)))
        load = For(
            "i", 0, self.each, (If(conjunction_of_tests(tests), (read,), (Store(self.own, own, unit),)),), "unroll"
        )
        inverses = self.e.new_block()
        pivot = self.e.bind(_real_part(Load(self.diagonal, (t, t))))
        root = self.e.bind(_convert_real_scalar(Apply("sqrt", (pivot,), pivot.dtype), self.dtype))
        inverses.append(Store(self.inverse, (t,), Apply("div", (self.one, root), self.dtype)))
        q = sym("q", 0, self.each)
        place = self._at(begin + q, begin + t)
        write = [
            Store(self.diagonal, (q, t), conjugate_scalar(Load(self.own, (t, q)))),
            _guarded_by_tests(test_index(begin + t, self.n, "lt"), Store(self.out, place, Load(self.own, (t, q)))),
        ]
        above = Apply("le", (IndexScalar(q), IndexScalar(t)), "i1")
        back = For("q", 0, self.each, (If(above, tuple(write)),), "unroll")
        return [
            self.thread_loop([load], self.each),
            For("q", 0, self.each, tuple(self._eliminate_pivot_row(q, t)), "unroll"),
            self.thread_loop(inverses, self.each), Barrier(warp=True), self.thread_loop([back], self.each),
        ]  # fmt: skip

    def _eliminate_pivot_row(self, q: Dim, t: Dim) -> list[Stmt]:
        """Return the update of the rows below row ``q``, and the division of the row by the root of its pivot.

        The update multiplies by the inverse of the pivot, so that no thread waits for the root.
        """
        i = sym("i", 0, self.each)
        row = Store(self.diagonal, (q, t), Load(self.own, (t, q)))
        block = self.e.new_block()
        pivot = self.e.bind(_real_part(Load(self.diagonal, (q, q))))
        positive = Apply("gt", (pivot, constant_scalar(0, pivot.dtype)), "i1")
        block.append(If(Apply("not", (positive,), "i1"), (Store(self.failed, (0,), Const(True, "i1")),)))
        inverse = self.e.bind(
            _convert_real_scalar(Apply("div", (constant_scalar(1, pivot.dtype), pivot), pivot.dtype), self.dtype)
        )
        factor = self.e.bind(_complex_product(Load(self.own, (t, q)), inverse))
        less = _complex_product(conjugate_scalar(Load(self.diagonal, (q, i))), factor)
        rest = Store(self.own, (t, i), Apply("sub", (Load(self.own, (t, i)), less), self.dtype))
        block.append(For("i", q + 1, self.each, (rest,), "unroll"))
        root = _convert_real_scalar(Apply("sqrt", (pivot,), pivot.dtype), self.dtype)
        block.append(Store(self.own, (t, q), Apply("div", (Load(self.own, (t, q)), root), self.dtype)))
        return [self.thread_loop([row], self.each), Barrier(warp=True), self.thread_loop(block, self.each)]

    def _solve_right_of_diagonal(self, begin: Dim) -> Stmt:
        """Return the solve for the columns right of the diagonal block, one thread per column."""
        c, i = self.b.fresh("c"), sym("i", 0, self.each)
        at = self._at(self.row_in_panel(begin + i), sym(c, 0, self.n))
        read = For("i", 0, self.each, (Store(self.own, (self.t, i), Load(self.out, at)),), "unroll")
        write = For("i", 0, self.each, (Store(self.out, at, Load(self.own, (self.t, i))),), "unroll")
        column = (read, *self.substitute_column(self.t), write)
        return self.thread_loop([For(c, begin + self.each + self.t, self.n, column, step=self.threads)])

    def _trailing_update(self, end: Dim) -> Stmt:
        """Return the trailing update: the panel that ends at ``end`` is subtracted, one tile per thread.

        Rows of tiles are taken in pairs (first and last, and so on): all pairs have the same number of tiles.
        """
        e, body, p = self.e, self.e.new_block(), self.b.fresh("p")
        tiles = maximum(ceildiv(self.n - end, self.side), 0)  # the last panel may end beyond the matrix
        number = sym(p, 0, ceildiv(tiles, 2) * (tiles + 1))
        low, place = number // (tiles + 1), mod(number, tiles + 1)
        is_low = e.bind(Apply("lt", (IndexScalar(place), IndexScalar(tiles - low)), "i1"))
        row = e.bind(Apply("select", (is_low, IndexScalar(low), IndexScalar(tiles - 1 - low)), "i64"), "n")
        across = e.bind(Apply("select", (is_low, IndexScalar(place), IndexScalar(place - tiles + low)), "i64"), "n")
        i0 = end + sym(row.name, 0, None) * self.side
        k0 = i0 + sym(across.name, 0, None) * self.side

        def panel_element(first: Dim) -> Callable[[Dim, Dim], Scalar]:
            return lambda r, u: Load(
                self.out, self._at(self.row_in_panel(end - self.each + r), self._clamped_row(first + u))
            )

        left = panel_element(i0)
        tile = self.subtract_tile_product(
            lambda r, u: conjugate_scalar(left(r, u)),
            panel_element(k0),
            self.each,
            lambda u, v: self._at(i0 + u, k0 + v),
            lambda u, v: (
                [] if self._has_whole_panels() else [*self._is_row_in_matrix(i0 + u), *self._is_row_in_matrix(k0 + v)]
            ),
            self.out,
        )
        once = Apply("ne", (IndexScalar(low), IndexScalar(tiles - 1 - low)), "i1")
        body.append(If(Apply("or", (is_low, once), "i1"), tuple(tile)))
        return self.thread_loop([For(p, self.t, ceildiv(tiles, 2) * (tiles + 1), tuple(body), step=self.threads)])

    def _has_whole_panels(self) -> bool:
        return mod(self.n, self.side) == 0

    def _clamped_row(self, i: Dim) -> Dim:
        return i if self._has_whole_panels() else minimum(i, self.n - 1)

    def _is_row_in_matrix(self, i: Dim) -> list[Scalar]:
        return [Apply("lt", (IndexScalar(i), IndexScalar(self.n)), "i1")]


def _guarded_by_tests(tests: Sequence[Scalar], stmt: Stmt) -> Stmt:
    return If(conjunction_of_tests(tests), (stmt,)) if tests else stmt


# --- triangular_solve --------------------------------------------------------


def solve_in_block(
    b: RegionBuilder, plan: BlockSolvePlan, head: Index, matrix: Coefficient, forward: bool, others: tuple[Dim, Dim]
) -> list[Stmt]:
    """Return the statements that solve a triangular system for a range of right-hand sides.

    Parameters
    ----------
    matrix : callable
        ``matrix(i, k)`` is the coefficient of unknown ``k`` in equation ``i``.
    forward : bool
        Is the first unknown computed first?
    others : tuple
        The first right-hand side, and the end of the range.
    """
    return _BlockTriangularSolve(b, plan, head, matrix, forward, others).factor_statements()


class _BlockTriangularSolve(_TrianglePanels):
    """Emit a blocked triangular solve; unknown ``s`` is the unknown of step ``s``.

    The unknowns of a right-hand side are in a column of the output if ``left``, else in a row. If ``unit``, the
    diagonal is 1, whatever the matrix contains there.
    """

    def __init__(
        self, b: RegionBuilder, plan: BlockSolvePlan, head: Index, matrix: Coefficient, forward: bool,
        others: tuple[Dim, Dim],
    ) -> None:  # fmt: skip
        """Name the buffers of a solve with rows in forward or backward order.

        ``matrix(row, column)`` returns an element of the triangle. ``others`` are the first right-hand side of the
        block and the end of all.
        """
        out, attrs = b.outputs[0], b.region_root_op("triangular_solve").attrs
        self.unit, self.left = attrs["unit_diagonal"], attrs["left_side"]
        super().__init__(b, plan.block, out.dtype, out.shape[-2 if self.left else -1])
        self.out, self.head, self.count = out, head, plan.columns
        self.first, self.end = others
        self.place: Callable[[Dim], Dim] = (lambda s: s) if forward else (lambda s: self.n - 1 - s)
        self.matrix: Coefficient = lambda s, r: matrix(self.place(s), self.place(r))
        self.found = Buffer(b.fresh("found"), self.dtype, (self.each, self.count), "shared")

    def _at(self, s: Dim, c: Dim) -> Index:
        return (*self.head, self.place(s), c) if self.left else (*self.head, c, self.place(s))

    def factor_statements(self) -> list[Stmt]:
        """Return the loop over panels of a blocked triangular solve."""
        panels = ceildiv(self.n, self.each)
        begin = sym("g", 0, panels) * self.each
        steps = [
            self._load_diagonal_block(begin),
            Barrier(),
            self._invert_diagonal(),
            Barrier(),
            self._solve_panel_unknowns(begin),
            Barrier(),
        ]
        if panels != 1:
            steps += [self._update_later_equations(begin), Barrier()]
        buffers = map(Alloc, (self.own, self.diagonal, self.inverse, self.found))
        return [*buffers, For("g", 0, panels, tuple(steps))]

    def _load_diagonal_block(self, begin: Dim) -> Stmt:
        """Return the load of the diagonal block to shared memory; the identity follows a matrix's end."""
        size = self.each * self.each
        p = sym(self.b.fresh("p"), 0, size)
        i, q = p // self.each, mod(p, self.each)
        equal = Apply("eq", (IndexScalar(i), IndexScalar(q)), "i1")
        unit = Apply("select", (equal, self.one, self.zero), self.dtype)
        tests: list[Scalar] = [Apply("lt" if self.unit else "le", (IndexScalar(q), IndexScalar(i)), "i1")]
        tests += test_index(begin + i, self.n, "lt")
        read = Store(self.diagonal, (q, i), self.matrix(begin + i, begin + q))
        load = If(conjunction_of_tests(tests), (read,), (Store(self.diagonal, (q, i), unit),))
        return self.thread_loop([For(str(p), self.t, size, (load,), step=self.threads)])

    def _invert_diagonal(self) -> Stmt:
        t = sym("t", 0, self.each)
        inverse = Apply("div", (self.one, Load(self.diagonal, (t, t))), self.dtype)
        return self.thread_loop([Store(self.inverse, (t,), inverse)], self.each)

    def _solve_panel_unknowns(self, begin: Dim) -> Stmt:
        """Return the computation of a panel's unknowns, one thread per right-hand side."""
        i, t = sym("i", 0, self.each), sym("t", 0, self.count)
        cell = (t, i)
        tests = test_index(begin + i, self.n, "lt")
        at = self._at(begin + i, self.first + t)
        read: Stmt = Store(self.own, cell, Load(self.out, at))
        if tests:
            read = If(conjunction_of_tests(tests), (read,), (Store(self.own, cell, self.zero),))
        value = Load(self.own, cell)
        write = (Store(self.found, (i, t), value), _guarded_by_tests(tests, Store(self.out, at, value)))
        body: list[Stmt] = [For("i", 0, self.each, (read,), "unroll"), *self.substitute_column(t)]
        body.append(For("i", 0, self.each, write, "unroll"))
        exists = test_index(self.first + t, self.end, "lt")
        return self.thread_loop([If(conjunction_of_tests(exists), tuple(body))] if exists else body, self.count)

    def _update_later_equations(self, begin: Dim) -> Stmt:
        """Return the update of later equations by the panel's unknowns, tile by tile."""
        end = begin + self.each
        wide = self.count // self.side
        p = self.b.fresh("p")
        tiles = ceildiv(self.n - end, self.side) * wide
        number = sym(p, 0, tiles)
        s0, c0 = end + number // wide * self.side, mod(number, wide) * self.side
        tile = self.subtract_tile_product(
            lambda r, u: self.matrix(minimum(s0 + u, self.n - 1), self.row_in_panel(begin + r)),
            lambda r, v: Load(self.found, (r, c0 + v)), self.each,
            lambda u, v: self._at(s0 + u, self.first + c0 + v),
            lambda u, v: [
                Apply("lt", (IndexScalar(s0 + u), IndexScalar(self.n)), "i1"),
                *test_index(self.first + c0 + v, self.end, "lt"),
            ],
            self.out,
        )  # fmt: skip
        return self.thread_loop([For(p, self.t, tiles, tuple(tile), step=self.threads)])
