"""Reductions over leading axes on a GPU: neighbouring threads process vectors of neighbouring columns.

A block has some columns. Their rows are distributed round-robin to its threads, and results combined in shared memory::

    for t in thread(0, 256):
        for q in range(0, n // 32):
            for e in lanes(0, 16): acc[t, e % 4] += x[32*q + 8*(e // 4) + t // 32, 128*p + 4*(t % 32) + e % 4]
        for u in lanes(0, 4): partial[t // 32, 4*(t % 32) + u] = acc[t, u]
    barrier()
    for t in thread(0, 128): y[128*p + t] = partial[0, t] + partial[1, t] + ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aotc.ir.dims.algebra import Dim, mod, product, sym
from aotc.ir.loop.access import loads_and_indices, statement_scalars
from aotc.ir.loop.ir import Alloc, Apply, Barrier, Buffer, For, If, Kernel, Load, Stmt, Store, walk
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.elements.builder import (
    RegionBuilder,
    anchor_results,
    grid_item,
    index_of_value_at_anchor,
    join_transposed,
    reduction_operands_at,
    store_combined,
    store_elements,
    store_rows,
)
from aotc.lowering.elements.nests import make_axes, substitute_loops
from aotc.lowering.plans.gpu_reductions import GpuColumnPlan
from aotc.lowering.plans.thresholds import BLOCK_THREADS
from aotc.lowering.regions.reduce.rows import Accumulators


def lower_columns_cuda(b: RegionBuilder, plan: GpuColumnPlan) -> Kernel:
    """Lower reductions over leading axes to blocks of columns."""
    return _GpuColumnBlocks(b, plan).column_block_kernel()


class _GpuColumnBlocks:
    """Emit the reductions of a region over leading axes on a GPU."""

    def __init__(self, b: RegionBuilder, plan: GpuColumnPlan) -> None:
        """Divide the threads of a block, and allocate accumulators.

        A block has ``across`` threads in a row, each for ``width`` adjacent columns, and ``down`` such rows of threads,
        which share the elements of a column. ``accs`` are the partial results of a thread, ``partial`` those of the
        block in shared memory.
        """
        self.b, self.e = b, b.elements()
        adjacent = [k for k in plan.kept if k > max(plan.reduced)]
        self.outer = make_axes(b.shape, [(k,) for k in plan.kept if k not in adjacent])
        self.middle = make_axes(b.shape, [(k,) for k in plan.reduced])
        self.adjacent = make_axes(b.shape, [(k,) for k in adjacent])
        self.columns, self.work = (product(a.extent for a in axes) for axes in (self.adjacent, self.middle))
        self.ops = [op for loop in b.row_stages().loops for op in loop.ops]
        self.results = list(zip(b.outputs, b.function.body.results, strict=True))
        self.width, self.across, self.rows = plan.width, plan.across, plan.rows
        self.down = BLOCK_THREADS.value // self.across
        self.block = self.across * self.width
        self.name = b.fresh("t")
        self.thread = sym(self.name, 0, BLOCK_THREADS.value)
        self.accs = self._accumulator_buffers("acc", (BLOCK_THREADS.value, self.width), "private")
        self.partial = self._accumulator_buffers("partial", (self.down, self.block), "shared")

    def _accumulator_buffers(self, prefix: str, shape: tuple[int, int], space: str) -> Accumulators:
        """Return a buffer of ``shape`` for each result of each reduction."""
        def buffers_of_op(op: Op) -> list[Buffer]:
            return [Buffer(self.b.fresh(prefix), v.type.dtype, shape, space) for v in op.results]  # type: ignore[arg-type]

        return {op: buffers_of_op(op) for op in self.ops}

    def column_block_kernel(self) -> Kernel:
        """Return the reduction kernel over blocks of columns."""
        extents = [*(a.extent for a in self.outer), (self.columns + (self.block - 1)) // self.block]
        grid = product(extents)
        *self.at, column = delinearize(grid_item(grid), extents)
        self.first = column * self.block
        block: list[Stmt] = [Alloc(x) for row in (self.accs, self.partial) for buffers in row.values() for x in buffers]
        block += [self._sum_columns(), Barrier(), self._finish_columns()]
        return self.b.grid(grid, block, self.b.scalar_operations())

    def _element_index(self, rows: Sequence[Dim], column: Dim) -> Index:
        columns = delinearize(column, [a.extent for a in self.adjacent])
        axes = [*self.outer, *(self.middle if rows else ()), *self.adjacent]
        return substitute_loops(self.b.anchors.space, self.b.shape, axes, [*self.at, *rows, *columns])

    def _column_exists(self, column: Dim) -> list[Apply]:
        whole = mod(self.columns, self.block) == 0
        return [] if whole else [Apply("lt", (IndexScalar(column), IndexScalar(self.columns)), "i1")]

    # --- each thread: its rows of its columns ---

    def _sum_columns(self) -> Stmt:
        """Return the thread loop that accumulates a thread's rows and stores the sums to shared memory."""
        width, rows = self.width, self.rows
        mine = self.thread % self.across * width
        down = self.thread // self.across
        body: list[Stmt] = [self._loop_over_columns(1, self._initialize_accumulator)]
        iterations = self.work // (rows * self.down)
        q, r = self.b.fresh("q"), self.b.fresh("r")

        def accumulate_rows_from(first: Dim) -> Callable[[list[Stmt], Dim], None]:
            return lambda inside, n: self._accumulate_element(
                inside, first + n // width * self.down + down, mine, n % width
            )

        if iterations != 0:
            many = self._loop_over_columns(rows, accumulate_rows_from(sym(q, 0, iterations) * (rows * self.down)))
            body.append(For(q, 0, iterations, (many,)))
        if mod(self.work, rows * self.down) != 0:
            begin = iterations * (rows * self.down) + down
            one = self._loop_over_columns(1, accumulate_rows_from(sym(r, 0, self.work) - down))
            body.append(For(r, begin, self.work, (one,), step=self.down))
        body.append(self._loop_over_columns(1, self._store_partial_sum(down, mine)))
        for test in self._column_exists(self.first + mine):
            body = [If(test, tuple(body))]
        return For(self.name, 0, BLOCK_THREADS.value, tuple(body), "thread")

    def _loop_over_columns(self, rows: int, element: Callable[[list[Stmt], Dim], None]) -> Stmt:
        """Return a loop over neighbouring columns of some rows; serial if it reads the accumulators that it writes."""
        name = self.b.fresh("u")
        count = rows * self.width
        inside: list[Stmt] = []
        element(inside, sym(name, 0, count))
        own = {acc.name for buffers in self.accs.values() for acc in buffers}
        written = any(isinstance(s, Store) and s.buffer.name in own for s in inside)
        loads = [x for s in walk(tuple(inside)) for x in loads_and_indices(statement_scalars(s)) if isinstance(x, Load)]
        chained = written and any(x.buffer.name in own for x in loads)
        return For(name, 0, count, tuple(inside), "unroll" if chained else "lanes")

    def _initialize_accumulator(self, inside: list[Stmt], number: Dim) -> None:
        """Emit the initial values of the accumulators of lane ``number``."""
        self.e.anchored.clear()
        self.e.enter(inside)
        for op in self.ops:
            inside += [
                Store(acc, (self.thread, number), self.e.at(init, ()))
                for acc, init in zip(self.accs[op], op.inits, strict=True)
            ]

    def _accumulate_element(self, inside: list[Stmt], row: Dim, mine: Dim, lane: Dim) -> None:
        """Emit the addition of one element to the accumulators of lane ``lane``."""
        b, e = self.b, self.e
        e.enter(inside)
        index = self._element_index(delinearize(row, [a.extent for a in self.middle]), self.first + mine + lane)
        join_transposed(b, e, index)
        store_elements(
            e, [(out, v, index_of_value_at_anchor(b, v, index)) for out, v in self.results if not b.anchors.is_row(v)]
        )
        for op in self.ops:
            store_combined(b, e, op, self.accs[op], reduction_operands_at(b, e, op, index), [], (self.thread, lane))

    def _store_partial_sum(self, down: Dim, mine: Dim) -> Callable[[list[Stmt], Dim], None]:
        """Return the function that stores an accumulator to the thread's row in shared memory."""

        def store_element(inside: list[Stmt], number: Dim) -> None:
            for op in self.ops:
                pairs = zip(self.partial[op], self.accs[op], strict=True)
                inside += [Store(p, (down, mine + number), Load(acc, (self.thread, number))) for p, acc in pairs]

        return store_element

    # --- a thread for each column: the results of all rows together ---

    def _finish_columns(self) -> Stmt:
        """Return the thread loop that combines the partial results of each column and stores the results."""
        b, e = self.b, self.e
        t, g = sym(self.name, 0, self.block), b.fresh("g")
        body: list[Stmt] = []
        sums = {op: [Buffer(b.fresh("sum"), p.dtype, (), "private") for p in row] for op, row in self.partial.items()}
        for op, accs in sums.items():
            for s, p in zip(accs, self.partial[op], strict=True):
                body += [Alloc(s), Store(s, (), Load(p, (0, t)))]
        inside: list[Stmt] = []
        e.enter(inside)
        for op, accs in sums.items():
            store_combined(b, e, op, accs, [Load(p, (sym(g, 1, self.down), t)) for p in self.partial[op]], [])
        if self.down > 1:
            body.append(For(g, 1, self.down, tuple(inside), "unroll"))
        e.enter(body)
        anchor_results(e, sums)
        store_rows(b, e, self._element_index((), self.first + t))
        for test in self._column_exists(self.first + t):
            body = [If(test, tuple(body))]
        return For(self.name, 0, self.block, tuple(body), "thread")
