"""Prefix scans on a GPU: a block of threads scans a row, some thousand neighbouring elements at a time.

Each thread scans a few neighbours in registers. The last results of the threads are scanned in shared memory, in steps
of doubling distance (W. Hillis and G. Steele, "Data parallel algorithms", 1986). The total before a thread is then
combined with each of its elements::

    x        0 1 2 3 | 4 5 6 7 | 8 9 a b
    own      scan    | scan    | scan            each thread
    ends     3         7         b          ->   scan of the ends
    result   before the thread, combined with its own

Elements pass through shared memory on the way in and out, so that neighbouring threads access neighbours in memory.

Columns do not need that: a block has a few neighbouring columns, each scanned by several threads in sequence; every
thread of a column combines their last results in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aotc.ir.dims.algebra import Dim, ceildiv, minimum, mod, sym
from aotc.ir.loop.ir import Alloc, Apply, Barrier, Buffer, Const, For, If, Kernel, Load, Scalar, Stmt, Store
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.lowering.analysis.prefix_scans import scan_of
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.elements import conjunction_of_tests, test_index
from aotc.lowering.elements.row_axis import RowBlocks, rows_along_dim
from aotc.lowering.plans.gpu_column_scans import ColumnScanPlan
from aotc.lowering.plans.gpu_scans import RowScanPlan
from aotc.lowering.regions.common.bank_padding import bank_padded_index


def lower_row_scan(b: RegionBuilder, plan: RowScanPlan) -> Kernel:
    """Lower a scan along contiguous rows."""
    return _RowScan(b, plan).row_scan_kernel()


class _BlockScan:
    """Base of both scan emitters: the combiner, and buffers with an element for each result."""

    def __init__(self, b: RegionBuilder) -> None:
        self.b, self.op, self.e = b, b.region_root_op("reduce_window"), b.elements()
        scan = scan_of(self.op)
        assert scan is not None
        self.dim, self.reverse, self.n = scan.dim, scan.reverse, b.shape[scan.dim]

    def _scan_buffers(self, name: str, shape: tuple[int, ...], space: str) -> list[Buffer]:
        return [Buffer(self.b.fresh(name), v.type.dtype, shape, space) for v in self.op.results]  # type: ignore[arg-type]

    def _combine_in_order(self, earlier: Sequence[Scalar], later: Sequence[Scalar]) -> list[Scalar]:
        """Return ``earlier`` combined with ``later``, in the order of the elements in memory."""
        arguments = (*later, *earlier) if self.reverse else (*earlier, *later)
        return [self.e.bind(x) for x in self.e.inline_region(self.op.regions[0], tuple(arguments))]

    def _load_elements(self, buffers: Sequence[Buffer], *at: Dim) -> list[Scalar]:
        return [self.e.bind(Load(x, at)) for x in buffers]

    def _store_elements(self, buffers: Sequence[Buffer], at: tuple[Dim, ...], values: Sequence[Scalar]) -> None:
        self.e.block += [Store(x, at, v) for x, v in zip(buffers, values, strict=True)]

    def _guarded_by_tests(self, tests: list[Scalar], block: Sequence[Stmt]) -> list[Stmt]:
        if any(isinstance(test, Const) for test in tests):  # the test is never true
            return []
        return [If(conjunction_of_tests(tests), tuple(block))] if tests else list(block)


class _RowScan(_BlockScan):
    """Emit the steps by which a block scans a row."""

    def __init__(self, b: RegionBuilder, plan: RowScanPlan) -> None:
        """Name the shared tile of a row, the totals of threads, the carry and the elements in registers."""
        super().__init__(b)
        self.rows, self.place = rows_along_dim(b.shape, self.dim)
        self.threads, self.each = plan.threads, plan.each
        tile, *ends, carry = plan.shared_buffer_shapes
        self.tile = self._scan_buffers("tile", tile, "shared")
        self.ends = [self._scan_buffers("ends", shape, "shared") for shape in ends]
        self.carry = self._scan_buffers("carry", carry, "shared")
        self.own = self._scan_buffers("own", (self.threads, self.each), "private")

    def row_scan_kernel(self) -> Kernel:
        """Return the kernel: a loop over chunks of a row, in which threads scan parts and combine their totals."""
        size = self.threads * self.each
        chunks = ceildiv(self.n, size)
        self.begin = sym("c", 0, chunks) * size
        left = minimum(self.n - self.begin, size)
        self.busy = ceildiv(left, self.each)
        every = [*self.tile, *self.ends[0], *self.ends[1], *self.carry, *self.own]
        start = self.e.new_block()
        inits = [self.e.at(v, ()) for v in self.op.inits]
        start += [Store(c, (0,), init) for c, init in zip(self.carry, inits, strict=True)]
        steps = [self._read_tile(), Barrier(), self._scan_thread_elements(), Barrier(), *self._scan_thread_ends()]
        steps += [self._combine_with_totals(), Barrier()]
        steps += [self._write_tile(), self._carry_to_next_chunk(), Barrier()]
        body: list[Stmt] = [Alloc(x) for x in every]
        body += [For("z", 0, 1, tuple(start), "thread"), For("c", 0, chunks, tuple(steps))]
        return self.b.grid(self.rows, body, self.b.scalar_operations())

    @property
    def _thread_number(self) -> Dim:
        return sym("t", 0, self.threads)

    def _thread_loop(self, block: Sequence[Stmt]) -> For:
        return For("t", 0, self.threads, tuple(block), "thread")

    def _is_inside_row(self, place: Dim) -> list[Scalar]:
        return test_index(self.begin + place, self.n, "lt")

    def _position_in_row(self, place: Dim) -> Dim:
        step = self.begin + place
        return self.n - 1 - step if self.reverse else step

    def _loop_over_thread_elements(self, write: object, neighbours: bool) -> For:
        """Return the loop over a thread's elements: ``neighbours``, or else one per row of the tile."""
        block: list[Stmt] = []
        for u in range(self.each):
            place = self._thread_number * self.each + u if neighbours else self._thread_number + u * self.threads
            inner = self.e.new_block()
            write(place)  # type: ignore[operator]
            block += self._guarded_by_tests(self._is_inside_row(place), inner)
        return self._thread_loop(block)

    def _read_tile(self) -> For:
        """Return the loads of a chunk of the row to shared memory."""
        def read_element(place: Dim) -> None:
            values = [self.e.at(x, self.place(self._position_in_row(place))) for x in self.op.inputs]
            self._store_elements(self.tile, (bank_padded_index(place),), values)

        return self._loop_over_thread_elements(read_element, neighbours=False)

    def _write_tile(self) -> For:
        """Return the stores of the tile to the results that are read."""
        def write_element(place: Dim) -> None:
            pairs = zip(self.op.results, self._load_elements(self.tile, bank_padded_index(place)), strict=True)
            at = self.place(self._position_in_row(place))
            self.e.block += [Store(out, at, x) for v, x in pairs if (out := self.b.output_buffer_of(v)) is not None]

        return self._loop_over_thread_elements(write_element, neighbours=False)

    def _scan_thread_elements(self) -> For:
        """Return the scan of each thread's elements; after the end of the row the last result is repeated."""
        first = self._thread_number * self.each
        block = self.e.new_block()
        self._store_elements(
            self.own, (self._thread_number, 0), self._load_elements(self.tile, bank_padded_index(first))
        )
        for u in range(1, self.each):
            inner = self.e.new_block()
            values = self._combine_in_order(
                self._load_elements(self.own, self._thread_number, u - 1),
                self._load_elements(self.tile, bank_padded_index(first + u)),
            )
            self._store_elements(self.own, (self._thread_number, u), values)
            tests = self._is_inside_row(first + u)
            copy = self.e.new_block()
            self._store_elements(
                self.own, (self._thread_number, u), self._load_elements(self.own, self._thread_number, u - 1)
            )
            rest = self._guarded_by_tests(tests, inner)
            block += [If(conjunction_of_tests(tests), tuple(inner), tuple(copy))] if tests and rest else rest or copy
        self.e.enter(block)
        self._store_elements(
            self.ends[0], (self._thread_number,), self._load_elements(self.own, self._thread_number, self.each - 1)
        )
        return self._thread_loop(self._guarded_by_tests(self._is_inside_row(first), block))

    def _scan_thread_ends(self) -> list[Stmt]:
        """Return the scan of the threads' last results in shared memory, in steps of doubling distance."""
        steps: list[Stmt] = []
        reach = 1
        while reach < self.threads:
            old, new = self.ends
            far = self.e.new_block()
            self._store_elements(
                new,
                (self._thread_number,),
                self._combine_in_order(
                    self._load_elements(old, self._thread_number - reach), self._load_elements(old, self._thread_number)
                ),
            )
            near = self.e.new_block()
            self._store_elements(new, (self._thread_number,), self._load_elements(old, self._thread_number))
            test = conjunction_of_tests(test_index(self._thread_number, reach, "ge"))
            busy = test_index(self._thread_number, self.busy, "lt")
            steps += [self._thread_loop(self._guarded_by_tests(busy, [If(test, tuple(far), tuple(near))])), Barrier()]
            self.ends.reverse()
            reach *= 2
        return steps

    def _combine_with_totals(self) -> For:
        """Return the combination of each element with the total before its thread, in this chunk and earlier chunks."""
        before = self._scan_buffers("before", (), "private")
        block: list[Stmt] = [Alloc(x) for x in before]
        first = self.e.new_block()
        self._store_elements(before, (), self._load_elements(self.carry, 0))
        others = self.e.new_block()
        self._store_elements(
            before,
            (),
            self._combine_in_order(
                self._load_elements(self.carry, 0), self._load_elements(self.ends[0], self._thread_number - 1)
            ),
        )
        block.append(If(conjunction_of_tests(test_index(self._thread_number, 1, "lt")), tuple(first), tuple(others)))
        for u in range(self.each):
            place = self._thread_number * self.each + u
            inner = self.e.new_block()
            values = self._combine_in_order(
                self._load_elements(before), self._load_elements(self.own, self._thread_number, u)
            )
            self._store_elements(self.tile, (bank_padded_index(place),), values)
            block += self._guarded_by_tests(self._is_inside_row(place), inner)
        return self._thread_loop(self._guarded_by_tests(test_index(self._thread_number, self.busy, "lt"), block))

    def _carry_to_next_chunk(self) -> For:
        """Return the combination of the carry with the last total of the chunk."""
        block = self.e.new_block()
        last = self._load_elements(self.ends[0], self.busy - 1)
        self._store_elements(self.carry, (0,), self._combine_in_order(self._load_elements(self.carry, 0), last))
        return For("z", 0, 1, tuple(block), "thread")


def lower_column_scan(b: RegionBuilder, plan: ColumnScanPlan) -> Kernel:
    """Lower a scan along columns."""
    return _ColumnScan(b, plan).column_scan_kernel()


class _ColumnScan(_BlockScan):
    """Emit the steps by which a block scans neighbouring columns."""

    def __init__(self, b: RegionBuilder, plan: ColumnScanPlan) -> None:
        """Divide the threads into columns and groups of steps; name the totals and the registers."""
        super().__init__(b)
        self.plan = plan
        self.rows = RowBlocks(b.shape, self.dim, plan.width)
        self.threads = plan.width * plan.groups
        self.t = sym("t", 0, self.threads)
        self.column, self.group = mod(self.t, plan.width), self.t // plan.width
        self.ends = self._scan_buffers("ends", plan.shared_buffer_shape, "shared")
        self.own = self._scan_buffers("own", (self.threads, plan.each), "private")
        self.carry, self.before = (self._scan_buffers(name, (self.threads,), "private") for name in ("carry", "before"))

    def column_scan_kernel(self) -> Kernel:
        """Return the kernel: threads scan their elements of a chunk, then combine them with the totals before these."""
        size = self.plan.groups * self.plan.each
        chunks = ceildiv(self.n, size)
        chunk = sym("c", 0, chunks)
        self.begin, self.parity = chunk * size, mod(chunk, 2)
        self.busy = ceildiv(minimum(self.n - self.begin, size), self.plan.each)
        start = self.e.new_block()
        self._store_elements(self.carry, (self.t,), [self.e.bind(self.e.at(v, ())) for v in self.op.inits])
        steps: list[Stmt] = [
            self._loop_over_column_threads(self._scan_thread_elements),
            Barrier(),
            self._loop_over_column_threads(self._combine_with_totals),
        ]
        body: list[Stmt] = [Alloc(x) for x in (*self.ends, *self.own, *self.carry, *self.before)]
        body += [For("t", 0, self.threads, tuple(start), "thread"), For("c", 0, chunks, tuple(steps))]
        return self.b.grid(self.rows.items, body, self.b.scalar_operations())

    def _loop_over_column_threads(self, write: Callable[[], list[Stmt]]) -> For:
        """Return a loop over the threads that have a column, and elements of it."""
        tests = [*test_index(self.column, self.rows.width, "lt"), *test_index(self.group, self.busy, "lt")]
        return For("t", 0, self.threads, tuple(self._guarded_by_tests(tests, write())), "thread")

    def _loop_over_thread_elements(self, first: int, write: Callable[[Dim, Dim], None]) -> list[Stmt]:
        """Return the loop over a thread's existing elements from the ``first`` on."""
        u = sym(self.b.fresh("u"), 0, self.plan.each)
        step = self.begin + self.group * self.plan.each + u
        inner = self.e.new_block()
        write(u, self.n - 1 - step if self.reverse else step)
        guarded = self._guarded_by_tests(test_index(step, self.n, "lt"), inner)
        return [For(str(u), first, self.plan.each, tuple(guarded), "unroll")]

    def _scan_thread_elements(self) -> list[Stmt]:
        """Return the scan of a thread's elements of its column, and the store of its last result."""

        def read_element(u: Dim, position: Dim) -> None:
            values = [self.e.at(x, self.rows.element_index(position, self.column)) for x in self.op.inputs]
            self._store_elements(self.own, (self.t, u), values)

        def combine_with_previous(u: Dim, position: Dim) -> None:
            values = self._combine_in_order(
                self._load_elements(self.own, self.t, u - 1), self._load_elements(self.own, self.t, u)
            )
            self._store_elements(self.own, (self.t, u), values)

        block = [
            *self._loop_over_thread_elements(0, read_element),
            *self._loop_over_thread_elements(1, combine_with_previous),
        ]
        self.e.enter(block)  # at the end of a column, no thread follows one with fewer elements
        last = self._load_elements(self.own, self.t, self.plan.each - 1)
        self._store_elements(self.ends, (self.parity, self.group, self.column), last)
        return block

    def _combine_with_totals(self) -> list[Stmt]:
        """Return the combination of a thread's elements with the totals before them, and the stores."""
        name = self.b.fresh("k")
        k = sym(name, 0, self.plan.groups)
        inner = self.e.new_block()
        before_own = self.e.new_block()
        self._store_elements(self.before, (self.t,), self._load_elements(self.carry, self.t))
        own = Apply("eq", (IndexScalar(k), IndexScalar(self.group)), "i1")
        self.e.enter(inner)
        inner.append(If(own, tuple(before_own)))
        ends = self._load_elements(self.ends, self.parity, k, self.column)
        self._store_elements(
            self.carry, (self.t,), self._combine_in_order(self._load_elements(self.carry, self.t), ends)
        )

        def write_element(u: Dim, position: Dim) -> None:
            """Emit the store of element ``u``, combined with the total of all elements before the thread's."""
            values = self._combine_in_order(
                self._load_elements(self.before, self.t), self._load_elements(self.own, self.t, u)
            )
            pairs = zip(self.op.results, values, strict=True)
            at = self.rows.element_index(position, self.column)
            self.e.block += [Store(out, at, x) for v, x in pairs if (out := self.b.output_buffer_of(v)) is not None]

        return [For(name, 0, self.busy, tuple(inner)), *self._loop_over_thread_elements(0, write_element)]
