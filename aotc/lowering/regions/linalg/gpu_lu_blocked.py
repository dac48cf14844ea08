"""``getrf`` on a GPU by panels of a few columns, a block of threads per matrix of known size (right-looking)::

    for g in range(0, min(m, n), w):                        # a panel: each row is in the registers of a thread
        for k in range(g, g + w):
            p = the position from k on whose row has the largest element in column k
            the rows at positions k and p swap positions, but not threads
            divide column k by a[k, k] in the rows behind, subtract row k times it from their later columns
        a[:, g:g+w] = the panel, each row at its position
        f = the rows of the panel times the inverse of its triangle
        for some of the other columns at a time:            # several groups of threads, a thread for each row
            x = a[rows in their new order, columns];  barrier
            a[:, columns] = x, less f x[g:g+w] where columns are behind the panel;  barrier

``x - f x[g:g+w]`` is ``u = l^-1 x`` in the rows of the panel, and ``x - l u`` behind it: no thread waits for ``u``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from aotc.ir.dims.algebra import Dim, mod, static, sym
from aotc.ir.loop.ir import WARP, Apply, Barrier, Buffer, Const, For, If, Load, Scalar, Stmt, Store
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.elements import conjunction_of_tests, constant_scalar, test_index
from aotc.lowering.plans.linalg.gpu_factors import PanelLuPlan
from aotc.lowering.regions.linalg.gpu_factor_common import Fill, MatrixColumns, binary_call, comparison_call


def larger_pivot(x: Sequence[Scalar], y: Sequence[Scalar]) -> list[Scalar]:
    """Return the larger of two (number, row) pairs; of equal numbers the first."""
    first = binary_call("and", comparison_call("eq", y[0], x[0]), comparison_call("lt", y[1], x[1]))
    theirs = binary_call("or", comparison_call("gt", y[0], x[0]), first)
    return [Apply("select", (theirs, b, a), a.dtype) for a, b in zip(x, y, strict=True)]


def _i32_row_number(n: Dim) -> Scalar:
    """Return a row number in the dtype that threads store."""
    return Apply("convert", (IndexScalar(n),), "i32")


class LuPanels:
    """Emit the blocked LU factorisation of the matrix ``head`` of the first output."""

    def __init__(self, b: RegionBuilder, head: Index, plan: PanelLuPlan) -> None:
        """Allocate the buffers of a block that factors one matrix; ``head`` is the index of the matrix."""
        matrix, self.pivots, self.status = b.outputs
        self.columns, self.rows = map(static, matrix.shape[len(head) :])
        self.tall, self.each, self.rest, self.some, self.groups = (
            plan.tall, plan.panel, plan.rest, plan.some, plan.groups
        )  # fmt: skip
        self.c = c = MatrixColumns(b, matrix, head, self.tall * self.groups // WARP)
        self.b, self.e, self.head, self.count = b, c.e, head, min(self.rows, self.columns)
        self.barrier = Barrier(warp=c.threads == WARP)
        self.t = c.t
        self._panel_buffers(plan.shared_buffers(matrix.dtype))

    def _panel_buffers(self, shared: Mapping[str, Buffer]) -> None:
        """Allocate the buffers of a panel: rows in registers, and the ``shared`` buffers of the plan."""
        c = self.c

        def allocate_registers(count: int) -> Buffer:
            return c._real_buffer_value(Buffer(self.b.fresh("own"), c.dtype, (c.threads, count), "private"))

        def allocate_shared(role: str) -> Buffer:
            return c._real_buffer_value(replace(shared[role], name=self.b.fresh("held")))

        self.own = allocate_registers(self.each)
        self.place, self.row, self.pivot = (
            c.allocate_per_thread("i32"),
            c.allocate_per_thread("i32"),
            c.allocate_per_thread("i32"),
        )
        self.best, self.number = c.allocate_per_thread(c.real), c.allocate_per_thread("i32")
        self.upper, self.failed, self.factors = (
            allocate_shared("upper"),
            c.allocate_shared("i32"),
            allocate_shared("factors"),
        )
        # Several warps exchange their candidates for the pivot through shared memory.
        if self.tall > WARP:
            self.bests, self.places = allocate_shared("bests"), allocate_shared("places")
        if self.rest:
            self.x = allocate_registers(self.some)
            self.numbers, self.triangle, self.top = (
                allocate_shared("numbers"),
                allocate_shared("triangle"),
                allocate_shared("top"),
            )

    def factor_statements(self) -> list[Stmt]:
        """Return all statements of a blocked LU factorization, with their allocations."""
        c, name = self.c, self.b.fresh("g")
        panels = -(-self.count // self.each)
        begin = sym(name, 0, panels) * self.each
        start = [c.loop_over_threads(lambda block: block.append(Store(self.failed, (0,), Const(0, "i32"))), 1)]
        start += [self.barrier] if self.tall == WARP else []  # else another barrier precedes its first read
        steps = [
            self._loop_over_row_threads(lambda block: self._read_panel(block, begin)),
            self._factor_panel_columns(begin),
        ]
        steps += [self._loop_over_row_threads(lambda block: self._write_panel(block, begin)), self.barrier]
        if self.rest:
            steps += [
                self._loop_over_row_threads(lambda block: self._invert_panel_triangle(block, begin)),
                self.barrier,
                *self._update_columns_outside_panel(begin),
            ]
        end = c.loop_over_threads(lambda block: block.append(Store(self.status, self.head, Load(self.failed, (0,)))), 1)
        return c.with_allocations([*start, For(name, 0, panels, tuple(steps)), end])

    # --- helpers ---

    def _loop_over_row_threads(self, fill: Fill) -> Stmt:
        """Return a loop over the threads of the first group, which have one row each."""
        return self.c.loop_over_threads(fill, self.tall)

    def _thread_element(self, buffer: Buffer, at: Dim) -> Scalar:
        return Load(buffer, (self.t, at))

    def _loop_over_panel_columns(self, each: Callable[[Dim], Stmt], first: Dim = 0, last: int = 0) -> Stmt:
        """Return a loop over the columns of a panel."""
        name = self.b.fresh("j")
        return For(name, first, last or self.each, (each(sym(name, 0, self.each)),), "unroll")

    def _guarded_by(self, tests: Sequence[Scalar], then: Sequence[Stmt], other: Sequence[Stmt] = ()) -> list[Stmt]:
        return [If(conjunction_of_tests(tests), tuple(then), tuple(other))] if tests else list(then)

    def _is_in_matrix(self, column: Dim, row: Dim) -> list[Scalar]:
        return [*self._row_exists(row), *test_index(column, self.columns, "lt")]

    def _row_exists(self, row: Dim) -> list[Scalar]:
        """Return the test that a thread's row exists in the matrix."""
        return [] if self.tall == self.rows else [comparison_call("lt", IndexScalar(row), IndexScalar(self.rows))]

    def _position_of_thread_row(self) -> Dim:
        """Return the position of a thread's row, bound to a name."""
        return sym(
            self.e.bind(Apply("convert", (self.c.load_of_thread_scalar(self.place),), "i64"), "n").name, 0, self.tall
        )

    # --- the panel ---

    def _read_panel(self, block: list[Stmt], begin: Dim) -> None:
        """Append the load of a panel to registers, one row per thread; elements beyond the matrix are 0."""
        t, zero = self.t, self.c.zero_constant()

        def read_column(j: Dim) -> Stmt:
            read = Store(self.own, (t, j), self.c.load_element(begin + j, t))
            tests = self._is_in_matrix(begin + j, t)
            return If(conjunction_of_tests(tests), (read,), (Store(self.own, (t, j), zero),)) if tests else read

        block += [
            self.c.store_thread_scalar(self.place, _i32_row_number(t)),
            self._loop_over_panel_columns(read_column),
        ]

    def _factor_panel_columns(self, begin: Dim) -> Stmt:
        """Return the loop over the columns of the panel; the current column is in the first register of each row."""
        c, name = self.c, self.b.fresh("q")
        q = sym(name, 0, self.each)
        steps: list[Stmt] = [self._loop_over_row_threads(lambda block: self._pivot_candidate(block, begin + q))]
        steps += c.warp_butterfly_reduce([self.best, self.row], larger_pivot, self.tall)
        if self.tall > WARP:
            stores = [
                Store(self.bests, (c.warp,), c.load_of_thread_scalar(self.best)),
                Store(self.places, (c.warp,), c.load_of_thread_scalar(self.row)),
            ]
            steps += [self._loop_over_row_threads(lambda block: c.append_on_first_lane(block, stores)), self.barrier]
        steps += [self._loop_over_row_threads(lambda block: self._publish_pivot_row(block, begin + q)), self.barrier]
        steps.append(self._loop_over_row_threads(lambda block: self._eliminate_below_pivot(block, begin + q, q)))
        if self.tall == WARP:
            steps.append(self.barrier)
        return For(name, 0, self.each, tuple(steps))

    def _pivot_candidate(self, block: list[Stmt], k: Dim) -> None:
        """Append the statements that make a thread's row a candidate for the pivot of column ``k``."""
        c = self.c
        size = self.e.bind(c.pivot_magnitude(self.e.bind(self._thread_element(self.own, 0))))
        least, place = Const(-1.0, c.real), c.load_of_thread_scalar(self.place)
        tests = [
            comparison_call("ge", place, _i32_row_number(k)),
            *self._row_exists(self.t),
            comparison_call("gt", size, least),
        ]
        then = (c.store_thread_scalar(self.best, size), c.store_thread_scalar(self.row, place))
        block.append(
            If(
                conjunction_of_tests(tests),
                then,
                (c.store_thread_scalar(self.best, least), c.store_thread_scalar(self.row, _i32_row_number(k))),
            )
        )

    def _publish_pivot_row(self, block: list[Stmt], k: Dim) -> None:
        """Append the copy of the pivot row to shared memory and the record of its position."""
        c, bind = self.c, self.e.bind
        candidate: list[Scalar] = [bind(c.load_of_thread_scalar(self.best)), bind(c.load_of_thread_scalar(self.row))]
        if self.tall > WARP:
            candidate = [bind(Load(self.bests, (0,))), bind(Load(self.places, (0,)))]
            for w in range(1, self.tall // WARP):
                other = [bind(Load(self.bests, (w,))), bind(Load(self.places, (w,)))]
                candidate = [bind(x) for x in larger_pivot(candidate, other)]
        p = candidate[1]
        block.append(c.store_thread_scalar(self.pivot, p))
        is_zero = comparison_call("eq", self._thread_element(self.own, 0), c.zero_constant())
        is_first = binary_call("and", is_zero, comparison_call("eq", Load(self.failed, (0,)), Const(0, "i32")))
        noted: list[Stmt] = [
            Store(self.pivots, (*self.head, k), binary_call("add", p, Const(1, "i32"))),
            If(is_first, (Store(self.failed, (0,), _i32_row_number(k + 1)),)),
        ]
        shown = [self._loop_over_panel_columns(lambda j: Store(self.upper, (j,), self._thread_element(self.own, j)))]
        shown += self._guarded_by(test_index(k, self.count, "lt"), noted)
        block.append(If(comparison_call("eq", c.load_of_thread_scalar(self.place), p), tuple(shown)))

    def _eliminate_below_pivot(self, block: list[Stmt], k: Dim, q: Dim) -> None:
        """Append the row swap for pivot ``k``, and the update of the rows below it."""
        c, t, bind = self.c, self.t, self.e.bind
        place, p = bind(c.load_of_thread_scalar(self.place)), bind(c.load_of_thread_scalar(self.pivot))
        other = Apply("select", (comparison_call("eq", place, _i32_row_number(k)), p, place), "i32")
        now = bind(Apply("select", (comparison_call("eq", place, p), _i32_row_number(k), other), "i32"))
        block.append(c.store_thread_scalar(self.place, now))
        pivot, is_behind = bind(Load(self.upper, (0,))), bind(comparison_call("gt", now, _i32_row_number(k)))
        divided = Store(self.own, (t, 0), binary_call("div", self._thread_element(self.own, 0), pivot))
        block.append(If(binary_call("and", is_behind, comparison_call("ne", pivot, c.zero_constant())), (divided,)))
        x = bind(self._thread_element(self.own, 0))
        block.append(Store(self.factors, (q, t), x))
        block.append(If(is_behind, (self._shift_and_subtract(x, self.upper),), (self._shift_and_subtract(),)))

    def _shift_and_subtract(self, x: Scalar | None = None, less: Buffer | None = None) -> Stmt:
        """Return the shift of a row by one register, with ``x`` times another row subtracted."""

        def shift_column(j: Dim) -> Stmt:
            own = self._thread_element(self.own, j + 1)
            if x is not None and less is not None:
                own = binary_call("sub", own, binary_call("mul", x, Load(less, (j + 1,))))
            return Store(self.own, (self.t, j), own)

        return self._loop_over_panel_columns(shift_column, 0, self.each - 1)

    def _write_panel(self, block: list[Stmt], begin: Dim) -> None:
        """Append the stores of the panel, and the start of the inversion of its triangle."""
        t, n = self.t, self._position_of_thread_row()

        def write_column(j: Dim) -> Stmt:
            write = Store(self.c.out, self.c.element_index(begin + j, n), Load(self.factors, (j, t)))
            tests = self._is_in_matrix(begin + j, n)
            return If(conjunction_of_tests(tests), (write,)) if tests else write

        block += self._guarded_by(test_index(n, begin, "ge"), [self._loop_over_panel_columns(write_column)])
        if self.rest:
            own = self._loop_over_panel_columns(lambda j: Store(self.own, (t, j), Load(self.factors, (j, t))))
            unit = self._loop_over_panel_columns(
                lambda j: Store(self.own, (t, j), self._unit_triangle_element(n - begin, j))
            )
            shown = self._loop_over_panel_columns(lambda j: self._publish_triangle_row(n - begin, j))
            block.append(Store(self.numbers, (n,), _i32_row_number(t)))
            block += self._guarded_by(self._is_in_panel(n, begin), [unit, shown], [own])

    def _publish_triangle_row(self, row: Dim, j: Dim) -> Stmt:
        """Return the copy of a row of the triangle to shared memory, with its diagonal in the last column."""
        source = row + j - (self.each - 1)
        copy = Store(self.triangle, (row, j), Load(self.factors, (source, self.t)))
        is_there = comparison_call("ge", IndexScalar(source), Const(0, "i64"))
        return If(is_there, (copy,), (Store(self.triangle, (row, j), self.c.zero_constant()),))

    def _unit_triangle_element(self, row: Dim, j: Dim) -> Scalar:
        one, zero = constant_scalar(1, self.c.dtype), self.c.zero_constant()
        return Apply("select", (comparison_call("eq", IndexScalar(row), IndexScalar(j)), one, zero), self.c.dtype)

    def _is_in_panel(self, n: Dim, begin: Dim) -> list[Scalar]:
        return [*test_index(n, begin, "ge"), *test_index(n, begin + self.each, "lt")]

    # --- the others ---

    def _invert_panel_triangle(self, block: list[Stmt], begin: Dim) -> None:
        """Append the factors by which the rows of the panel are subtracted from each row.

        A row of the panel itself takes only rows that are not behind it. The last register of a row is its factor for
        row ``q``; the other registers shift up to it.
        """
        t, n, last, name = self.t, self._position_of_thread_row(), self.each - 1, self.b.fresh("q")
        q = last - sym(name, 0, self.each)
        inner = self.e.new_block()
        x = self.e.bind(self._thread_element(self.own, last))
        of_panel = binary_call("sub", self._unit_triangle_element(n - begin, q), x)
        inner += self._guarded_by(
            self._is_in_panel(n, begin), [Store(self.factors, (q, n), of_panel)], [Store(self.factors, (q, n), x)]
        )

        def shift_register_up(off: bool, j: Dim) -> Stmt:
            own = self._thread_element(self.own, last - 1 - j)
            less = binary_call("mul", x, Load(self.triangle, (q, last - 1 - j)))
            return Store(self.own, (t, last - j), binary_call("sub", own, less) if off else own)

        is_above = comparison_call("ge", IndexScalar(n - begin), IndexScalar(q))
        moves = [
            self._loop_over_panel_columns(partial(shift_register_up, off), 0, last)
            for off in (True, False)
        ]
        inner.append(If(is_above, (moves[0],), (moves[1],)))
        block.append(For(name, 0, self.each, tuple(inner)))

    def _update_columns_outside_panel(self, begin: Dim) -> list[Stmt]:
        """Return the loop that updates the columns outside of the panel."""
        c, name = self.c, self.b.fresh("v")
        row, group = mod(c.t, self.tall), c.t // self.tall

        def read_row_number(block: list[Stmt]) -> None:
            factors = self._loop_over_panel_columns(lambda j: Store(self.own, (c.t, j), Load(self.factors, (j, row))))
            block += [factors, c.store_thread_scalar(self.number, Load(self.numbers, (row,)))]

        iterations = -(-self.rest // (self.groups * self.some))
        first = sym(name, 0, iterations) * self.some * self.groups + group
        read = c.loop_over_threads(
            lambda block: self._for_each_updated_column(
                block, first, begin, row, self._gather_column_rows(begin, row, group)
            )
        )
        write = c.loop_over_threads(
            lambda block: self._for_each_updated_column(
                block, first, begin, row, self._apply_panel_to_columns(begin, row, group)
            )
        )
        return [
            c.loop_over_threads(read_row_number),
            For(name, 0, iterations, (read, self.barrier, write, self.barrier)),
        ]

    def _for_each_updated_column(
        self, block: list[Stmt], first: Dim, begin: Dim, row: Dim,
        do: Callable[[Dim, Dim, Scalar], list[Stmt]],
    ) -> None:  # fmt: skip
        """Append the statements of ``do`` for each of the columns that a thread updates at a time."""
        name = self.b.fresh("u")
        u = sym(name, 0, self.some)
        number = first + u * self.groups
        body = self.e.new_block()
        is_right = self.e.bind(Apply("ge", (IndexScalar(number), IndexScalar(begin)), "i1"))
        column = Apply("select", (is_right, IndexScalar(number + self.each), IndexScalar(number)), "i64")
        at = sym(self.e.bind(column, "n").name, 0, None)
        inner = self.e.new_block()
        inner += do(u, at, is_right)
        body += self._guarded_by([*test_index(at, self.columns, "lt"), *test_index(row, begin, "ge")], inner)
        block.append(For(name, 0, self.some, tuple(body), "unroll"))
        self.e.enter(block)

    def _gather_column_rows(self, begin: Dim, row: Dim, group: Dim) -> Callable[[Dim, Dim, Scalar], list[Stmt]]:
        """Return the function that loads a thread's elements of a column in the new row order.

        The elements in the rows of the panel also go to shared memory.
        """

        def gather_element(u: Dim, column: Dim, is_right: Scalar) -> list[Stmt]:
            """Return the load of an element, from the row that a swap moves there.

            Elements right of the panel in its rows are also copied to shared memory.
            """
            c = self.c
            number = Apply("convert", (c.load_of_thread_scalar(self.number),), "i64")
            source = sym(self.e.bind(number, "n").name, 0, self.rows)
            read: Stmt = Store(self.x, (c.t, u), c.load_element(column, source))
            tests = self._row_exists(row)
            if tests:
                read = If(conjunction_of_tests(tests), (read,), (Store(self.x, (c.t, u), c.zero_constant()),))
            shown = Store(self.top, (group, u, row - begin), Load(self.x, (c.t, u)))
            among = [is_right, *test_index(row, begin + self.each, "lt")]
            return [read, If(conjunction_of_tests(among), (shown,))]

        return gather_element

    def _apply_panel_to_columns(self, begin: Dim, row: Dim, group: Dim) -> Callable[[Dim, Dim, Scalar], list[Stmt]]:
        """Return the function that subtracts the panel's rows from a thread's element of a column, and stores it."""

        def update_element(u: Dim, column: Dim, is_right: Scalar) -> list[Stmt]:
            """Return the update of an element right of the panel.

            Left of the panel, only elements that a row swap moved are stored.
            """
            c, x = self.c, Load(self.x, (self.c.t, u))

            def subtract_row(j: Dim) -> Stmt:
                less = binary_call("mul", Load(self.own, (c.t, j)), Load(self.top, (group, u, j)))
                return Store(self.x, (c.t, u), binary_call("sub", x, less))

            def subtract_row_above(j: Dim) -> Stmt:
                return If(comparison_call("ge", IndexScalar(row - begin), IndexScalar(j)), (subtract_row(j),))

            is_behind = comparison_call("ge", IndexScalar(row), IndexScalar(begin + self.each))
            less = If(
                is_behind,
                (self._loop_over_panel_columns(subtract_row),),
                (self._loop_over_panel_columns(subtract_row_above),),
            )
            write = Store(c.out, c.element_index(column, row), x)
            moved = comparison_call("ne", c.load_of_thread_scalar(self.number), _i32_row_number(row))
            tests = self._row_exists(row)
            return self._guarded_by(tests, [If(is_right, (less, write), (If(moved, (write,)),))])

        return update_element
