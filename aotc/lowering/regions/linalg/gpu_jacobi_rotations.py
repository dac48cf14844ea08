"""Jacobi rotations of columns in shared memory, by one GPU block, until all columns are orthogonal.

:mod:`.gpu_eig_svd` computes eigenvectors and singular vectors with it. Each step of a sweep rotates all columns, one
pair per group of lanes. The lanes keep the pair in registers, reduce its dot products by shuffles, and compute the
angle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from aotc.ir.dims.algebra import Dim, ceildiv, mod, static, sym
from aotc.ir.loop.ir import Apply, Buffer, Const, For, If, Load, LoopKind, Scalar, Stmt, Store, While
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.elements import constant_scalar, real_and_imaginary
from aotc.lowering.plans.linalg.gpu_factors import JacobiPlan
from aotc.lowering.regions.linalg.gpu_cholesky_trsm import conjugate_scalar
from aotc.lowering.regions.linalg.gpu_factor_common import (
    BLOCK_BARRIER,
    WARP_BARRIER,
    Fill,
    MatrixColumns,
    binary_call,
    comparison_call,
)
from aotc.vmfb.dtypes import kind_of, to_numpy

Rows = Callable[[Dim, Dim], Sequence[Stmt]]


class JacobiRotations:
    """Emit rotations of pairs of the columns ``w``; further rows of each column may be rotated with them.

    ``noise`` is the squared norm up to which a column is not rotated, or None.
    """

    def __init__(self, b: RegionBuilder, head: Index, plan: JacobiPlan) -> None:
        """Allocate the columns in shared memory and the scalars of each thread.

        ``head`` is the index of the matrix in the batch.
        """
        out, self.most = b.outputs[0], plan.sweeps
        columns, rows = map(static, out.shape[len(head) :])
        self.held = layout = plan.columns
        self.c = c = MatrixColumns(b, out, head, layout.warps)
        self.b, self.e, self.n, self.rows = b, c.e, columns, rows
        self.lanes = layout.lanes
        self.lane, self.group = mod(c.t, self.lanes), c.t // self.lanes
        self.w = self.allocate_shared(c.dtype, (layout.padded_count, layout.pitch))
        self.far = self.allocate_shared("i1", (c.warps,))
        self.sweeps = self._real_buffer_value(Buffer(b.fresh("sweeps"), "i64", (), "private"))
        self.x2, self.y2, self.dot = (
            c.allocate_per_thread(c.real),
            c.allocate_per_thread(c.real),
            c.allocate_per_thread(),
        )
        self.moved, self.changed, self.first, self.second = (
            c.allocate_per_thread("i1"),
            c.allocate_per_thread("i1"),
            c.allocate_per_thread("i32"),
            c.allocate_per_thread("i32"),
        )
        self.parts = [self._column_registers(), self._column_registers()] if layout.in_registers else []
        self.angle = (
            (c.allocate_per_thread(c.real), c.allocate_per_thread()) if layout.more or not layout.in_registers else ()
        )
        self.noise: Scalar | None = None
        eps = float(np.finfo(to_numpy(c.real)).eps)
        # Columns are orthogonal if the cosine of their angle is below its rounding error.
        self.small = eps * rows**0.5

    # --- helpers ---

    def allocate_shared(self, dtype: str, shape: tuple[int, ...]) -> Buffer:
        """Allocate a buffer in shared memory."""
        return self._real_buffer_value(Buffer(self.b.fresh("held"), dtype, shape, "shared"))

    def _column_registers(self) -> Buffer:
        count = self.held.padded_rows(self.rows) // self.lanes
        return self._real_buffer_value(Buffer(self.b.fresh("part"), self.c.dtype, (self.c.threads, count), "private"))

    def _real_buffer_value(self, buffer: Buffer) -> Buffer:
        self.c.made.append(buffer)
        return buffer

    def real_constant(self, x: float) -> Scalar:
        """Return a constant of the real dtype of the matrix (f32 for c64)."""
        return constant_scalar(x, self.c.real)

    def squared_magnitude(self, x: Scalar) -> Scalar:
        """Return ``|x|^2`` of a real or complex scalar, as a real scalar."""
        x = self.e.bind(x)
        parts = real_and_imaginary(x) if kind_of(x.dtype) == "c" else (x,)
        squares = [binary_call("mul", part, part) for part in map(self.e.bind, parts)]
        return binary_call("add", *squares) if len(squares) == 2 else squares[0]

    def scaled_by_real(self, x: Scalar, factor: Scalar) -> Scalar:
        """Return the product of ``x`` and a real scalar."""
        return binary_call("mul", x, self.convert_to_matrix_dtype(factor))

    def convert_to_matrix_dtype(self, x: Scalar) -> Scalar:
        """Convert a real scalar to the (possibly complex) dtype of the matrix."""
        return Apply("complex", (x, self.real_constant(0)), self.c.dtype) if kind_of(self.c.dtype) == "c" else x

    def sums_over_group(self, *buffers: Buffer) -> list[Stmt]:
        """Return an all-reduce by shuffles: each lane gets the sums of the buffers over the lanes of its group."""
        return self.c.warp_butterfly_reduce(
            buffers, lambda x, y: [binary_call("add", *z) for z in zip(x, y, strict=True)], last=self.lanes
        )

    def loop_over_groups(self, test: Scalar | None, fill: Fill) -> Stmt:
        """Return a loop over the threads of the block, restricted to groups for which ``test`` holds at run time."""
        inner = self.e.new_block()
        fill(inner)
        return For("t", 0, self.c.threads, tuple(inner) if test is None else (If(test, tuple(inner)),), "thread")

    def loop_over_columns(self, body: Callable[[Dim, Callable[[Fill], Stmt]], Sequence[Stmt]]) -> Stmt:
        """Return a loop over all columns, one per group and iteration; see :meth:`MatrixColumns.loop_over_columns`."""
        name, groups = self.b.fresh("c"), self.c.threads // self.lanes
        count = ceildiv(self.n, groups)
        column = sym(name, 0, count) * groups + self.group
        exists = None if self.n % groups == 0 else comparison_call("lt", IndexScalar(column), IndexScalar(self.n))
        return For(name, 0, count, tuple(body(column, lambda fill: self.loop_over_groups(exists, fill))))

    def append_row_loop(self, block: list[Stmt], extent: Dim, each: Callable[[Dim], Sequence[Stmt]]) -> None:
        """Append a loop over ``extent`` rows in which lane l of a group has rows l, l + lanes, ..."""
        name = self.b.fresh("i")
        inner = self.e.new_block()
        inner += each(sym(name, 0, extent))
        block.append(For(name, self.lane, extent, tuple(inner), step=self.lanes))
        self.e.enter(block)

    def append_vector_loop(self, block: list[Stmt], rows: int, each: Rows) -> None:
        """Append a loop over rows in which a lane has vectors of adjacent rows.

        ``each`` gets the row, and the index of its element in the registers of the lane.
        """
        chunk, u, width = self.b.fresh("v"), self.b.fresh("u"), self.held.vector_width
        chunks = self.held.padded_rows(rows) // (width * self.lanes)
        at, of = sym(chunk, 0, chunks), sym(u, 0, width)
        inner = self.e.new_block()
        inner += each((at * self.lanes + self.lane) * width + of, at * width + of)
        kind: LoopKind = "unroll" if self.held.in_registers else "serial"
        block.append(For(chunk, 0, chunks, (For(u, 0, width, tuple(inner), "lanes"),), kind))
        self.e.enter(block)

    # --- sweeps ---

    def sweep_statements(self) -> list[Stmt]:
        """Return the sweeps, which end if all pairs are nearly orthogonal or a maximum number is reached."""
        c, steps = self.c, 2 * self.held.pairs - 1
        begin = c.loop_over_threads(
            lambda block: c.append_on_first_lane(block, [self._share_convergence_flag(Const(True, "i1"))])
        )
        clear = c.loop_over_threads(lambda block: block.append(c.store_thread_scalar(self.moved, Const(False, "i1"))))
        between, after = (WARP_BARRIER, [BLOCK_BARRIER]) if c.warps == 1 else (BLOCK_BARRIER, [])
        steps_loop = For(self.b.fresh("s"), 0, steps, (*self._rotate_and_advance(), between))
        joined = c.warp_butterfly_reduce([self.moved], lambda x, y: [binary_call("or", x[0], y[0])], first=self.lanes)
        share = c.loop_over_threads(
            lambda block: c.append_on_first_lane(
                block, [self._share_convergence_flag(c.load_of_thread_scalar(self.moved))]
            )
        )
        more = Store(self.sweeps, (), binary_call("add", Load(self.sweeps, ()), Const(1, "i64")))
        fewer = comparison_call("lt", Load(self.sweeps, ()), IndexScalar(self.most))
        sweep = (clear, steps_loop, *after, *joined, share, more, BLOCK_BARRIER)
        return [
            begin, Store(self.sweeps, (), Const(0, "i64")),
            c.loop_over_threads(self._assign_column_pairs), BLOCK_BARRIER,
            While((), binary_call("and", self.is_not_converged(), fewer), sweep),
        ]  # fmt: skip

    def _share_convergence_flag(self, far: Scalar) -> Stmt:
        return Store(self.far, (self.c.warp,), far)

    def is_not_converged(self) -> Scalar:
        """Return a scalar that is True at run time if pairs were far from orthogonal in the last sweep."""
        some: Scalar = Load(self.far, (0,))
        for k in range(1, self.c.warps):
            some = binary_call("or", some, Load(self.far, (k,)))
        return some

    def _assign_column_pairs(self, block: list[Stmt]) -> None:
        """Append the assignment of an initial column pair to each group of lanes.

        All columns but the last are on a circle, the last is in its centre. Group ``k`` has the columns ``k`` positions
        before and behind a mark, which moves around the circle.
        """
        m, k = 2 * self.held.pairs - 1, self.group
        alone = comparison_call("eq", IndexScalar(k), Const(0, "i64"))
        ahead = Apply("select", (alone, Const(m, "i32"), IndexScalar(k, "i32")), "i32")
        block += [
            self.c.store_thread_scalar(self.first, ahead),
            self.c.store_thread_scalar(self.second, IndexScalar(mod(m - mod(k, m), m), "i32")),
        ]  # fmt: skip

    def _advance_column_pairs(self, block: list[Stmt]) -> None:
        """Append the move of each group's two columns to their next places on the circle of columns."""
        last, one = 2 * self.held.pairs - 2, Const(1, "i32")
        for place in (self.first, self.second):
            old = self.e.bind(self.c.load_of_thread_scalar(place))
            new = Apply(
                "select",
                (comparison_call("eq", old, Const(last, "i32")), Const(0, "i32"), binary_call("add", old, one)),
                "i32",
            )
            stays = comparison_call("gt", old, Const(last, "i32"))
            block.append(self.c.store_thread_scalar(place, Apply("select", (stays, old, new), "i32")))

    def _rotate_and_advance(self) -> list[Stmt]:
        """Return the rotation of each group's pair, and the advance to its next pair."""
        some = self.held.pairs * self.lanes < self.c.threads
        has_pair = comparison_call("lt", IndexScalar(self.group), IndexScalar(self.held.pairs)) if some else None

        def rotate_pair(block: list[Stmt]) -> None:
            self._write_rotated_columns(block)
            self._advance_column_pairs(block)

        return [
            self.loop_over_groups(has_pair, self._read_column_pair),
            self.loop_over_groups(has_pair, self._dot_products_of_pair),
            *self.sums_over_group(self.x2, self.y2, self.dot),
            self.loop_over_groups(has_pair, self._rotate_pair), self.loop_over_groups(has_pair, rotate_pair),
        ]  # fmt: skip

    def _column_numbers_of_group(self) -> list[Dim]:
        """Return the numbers of a group's two columns; neighbouring groups use neighbouring columns."""
        places = (self.first, self.second)
        return [
            sym(self.e.bind(self.c.load_of_thread_scalar(place), "n").name, 0, self.held.padded_count)
            for place in places
        ]

    def _read_column_pair(self, block: list[Stmt]) -> None:
        """Append the identity rotation, and the load of a group's columns to registers if they fit."""
        c = self.c
        block.append(c.store_thread_scalar(self.changed, Const(False, "i1")))
        if self.angle:
            cosine, sine = self.angle
            block += [
                c.store_thread_scalar(cosine, self.real_constant(1)),
                c.store_thread_scalar(sine, c.zero_constant()),
            ]
        if self.held.in_registers:
            columns = self._column_numbers_of_group()
            self.append_vector_loop(block, self.rows, lambda i, slot: [
                Store(part, (c.t, slot), Load(self.w, (j, i))) for part, j in zip(self.parts, columns, strict=True)
            ])  # fmt: skip

    def _dot_products_of_pair(self, block: list[Stmt]) -> None:
        """Append a thread's part of the dot products of a pair of columns."""
        c, bind = self.c, self.e.bind
        block += [
            c.store_thread_scalar(self.x2, self.real_constant(0)),
            c.store_thread_scalar(self.y2, self.real_constant(0)),
            c.store_thread_scalar(self.dot, c.zero_constant()),
        ]
        columns = [] if self.held.in_registers else self._column_numbers_of_group()

        def add_products(i: Dim, slot: Dim) -> list[Stmt]:
            """Return the additions of one row to both squared lengths and to the dot product."""
            x, y = (
                [bind(Load(self.w, (j, i))) for j in columns]
                if columns
                else [bind(Load(part, (c.t, slot))) for part in self.parts]
            )
            squares = [
                Store(to, (c.t,), bind(self.squared_magnitude(z)), "add") for to, z in ((self.x2, x), (self.y2, y))
            ]
            return [*squares, Store(self.dot, (c.t,), binary_call("mul", conjugate_scalar(x), y), "add")]

        self.append_vector_loop(block, self.rows, add_products)

    def _rotate_pair(self, block: list[Stmt]) -> None:
        """Append the angle of a pair that is not orthogonal, and the rotation of columns in registers.

        The angle a has tan(2 a) = 2 |g| / (y^2 - x^2): cos(2 a) = |y^2 - x^2| r, sin(2 a) = +-2 |g| r.
        """
        c, bind = self.c, self.e.bind
        x2, y2, g = (bind(c.load_of_thread_scalar(z)) for z in (self.x2, self.y2, self.dot))
        g2 = bind(self.squared_magnitude(g))
        both = bind(binary_call("mul", x2, y2))
        # The columns are orthogonal to working precision unless |g| > small |x| |y|.
        rotates = comparison_call("gt", g2, binary_call("mul", self.real_constant(self.small**2), both))
        if self.noise is not None:
            rotates = binary_call("and", rotates, comparison_call("gt", binary_call("min", x2, y2), self.noise))
        inner = self.e.new_block()
        difference = bind(binary_call("sub", y2, x2))
        root = bind(
            self._inverse_square_root(
                binary_call(
                    "add", binary_call("mul", difference, difference), binary_call("mul", self.real_constant(4), g2)
                )
            )
        )
        half = self.real_constant(0.5)
        cosine2 = bind(
            binary_call(
                "add", binary_call("mul", binary_call("mul", half, Apply("abs", (difference,), c.real)), root), half
            )
        )
        secant = bind(self._inverse_square_root(cosine2))
        cosine, factor = bind(binary_call("mul", cosine2, secant)), bind(binary_call("mul", root, secant))
        back = comparison_call("lt", difference, self.real_constant(0))
        factor = bind(Apply("select", (back, Apply("neg", (factor,), c.real), factor), c.real))
        sine = bind(self.scaled_by_real(conjugate_scalar(g), factor))
        far = binary_call("or", c.load_of_thread_scalar(self.moved), self._needs_another_sweep(g2, both, factor))
        inner += [c.store_thread_scalar(self.moved, far), c.store_thread_scalar(self.changed, Const(True, "i1"))]
        inner += [c.store_thread_scalar(to, x) for to, x in zip(self.angle, (cosine, sine), strict=False)]
        if self.held.in_registers:
            self._rotate_registers(inner, cosine, sine)
        block.append(If(rotates, tuple(inner)))
        self.e.enter(block)

    def _inverse_square_root(self, x: Scalar) -> Scalar:
        return Apply("rsqrt", (x,), self.c.real)

    def _needs_another_sweep(self, g2: Scalar, both: Scalar, factor: Scalar) -> Scalar:
        """Return a scalar that is True at run time if a pair's cosine or its rotation's sine is large.

        Other rotations of the sweep change a dot product that was made 0 by sums of products of two such numbers.
        """
        most = (self.small / self.n) ** 0.5
        cosine = comparison_call("gt", g2, binary_call("mul", self.real_constant((most / 2) ** 2), both))
        sine = comparison_call(
            "gt", binary_call("mul", g2, binary_call("mul", factor, factor)), self.real_constant((most * 2) ** 2)
        )
        return binary_call("or", cosine, sine)

    def _rotated_elements(self, x: Scalar, y: Scalar, cosine: Scalar, sine: Scalar) -> list[Scalar]:
        """Return the elements of one row of both columns after the rotation."""
        return [
            binary_call("sub", self.scaled_by_real(x, cosine), binary_call("mul", sine, y)),
            binary_call("add", binary_call("mul", conjugate_scalar(sine), x), self.scaled_by_real(y, cosine)),
        ]

    def _rotate_registers(self, block: list[Stmt], cosine: Scalar, sine: Scalar) -> None:
        """Append the rotation of the columns of a pair that are in registers."""
        def rotate_element(i: Dim, slot: Dim) -> list[Stmt]:
            x, y = (self.e.bind(Load(part, (self.c.t, slot))) for part in self.parts)
            rotated = self._rotated_elements(x, y, cosine, sine)
            return [Store(part, (self.c.t, slot), z) for part, z in zip(self.parts, rotated, strict=True)]

        self.append_vector_loop(block, self.rows, rotate_element)

    def _write_rotated_columns(self, block: list[Stmt]) -> None:
        """Append the store of a group's rotated columns to memory."""
        c, layout, bind = self.c, self.held, self.e.bind
        columns = self._column_numbers_of_group()
        inner = self.e.new_block()
        angle = [bind(c.load_of_thread_scalar(x)) for x in self.angle]

        def rotate_in_memory(first: int) -> Rows:
            """Return a function that rotates the rows from ``first`` on in shared memory."""
            def rotate_element(i: Dim, slot: Dim) -> list[Stmt]:
                x, y = (bind(Load(self.w, (j, i + first))) for j in columns)
                rotated = self._rotated_elements(x, y, *angle)
                return [Store(self.w, (j, i + first), z) for j, z in zip(columns, rotated, strict=True)]

            return rotate_element

        def store_from_registers(i: Dim, slot: Dim) -> list[Stmt]:
            return [Store(self.w, (j, i), Load(x, (c.t, slot))) for j, x in zip(columns, self.parts, strict=True)]

        self.append_vector_loop(inner, self.rows, store_from_registers if layout.in_registers else rotate_in_memory(0))
        if layout.more:
            self.append_vector_loop(inner, layout.more, rotate_in_memory(layout.padded_rows(self.rows)))
        block.append(If(c.load_of_thread_scalar(self.changed), tuple(inner)))
        self.e.enter(block)
