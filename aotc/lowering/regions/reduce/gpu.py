"""Reductions on a GPU: a group of threads per row, blocks of columns, or one thread per row.

Each thread of a group combines its part of a row; the threads take vectors round-robin. The threads of a warp then
exchange results in a butterfly over half of them, a quarter, and so on, so that all have the total::

    for t in thread(0, 128):                       # 4 rows, a warp each
        acc[t] = init
        for e in lanes(0, 32): acc[t] += x[4*p + t // 32, 128*(e // 4) + 4*(t % 32) + e % 4]
    shuffle(other, acc, mask=16)
    for t in thread(0, 128): acc[t] += other[t]
    ...

The results of several warps pass through shared memory once. Elements that several loops over a row read stay in
registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aotc.ir.dims.algebra import Dim, mod, product, static, sym
from aotc.ir.loop.access import loads_and_indices, statement_scalars
from aotc.ir.loop.ir import (
    WARP,
    Alloc,
    Apply,
    Barrier,
    Buffer,
    Const,
    For,
    If,
    Kernel,
    Load,
    LoopKind,
    Shuffle,
    Stmt,
    Store,
    walk,
)
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.cost_model.row_stages import RowLoop
from aotc.lowering.elements.builder import RegionBuilder, anchor_results, grid_item, store_combined, store_rows
from aotc.lowering.elements.elements import Provide, provide_scalar
from aotc.lowering.elements.nests import make_axes, substitute_loops
from aotc.lowering.plans.gpu_reductions import GroupRowPlan, ThreadRowPlan, row_reads
from aotc.lowering.regions.reduce.rows import Accumulators, RowReductions
from aotc.lowering.threshold import BlockSize, Limit


def lower_thread_rows(b: RegionBuilder, plan: ThreadRowPlan) -> Kernel:
    """Lower reductions to a thread per row."""
    return RowReductions(b, plan).kernel_of_row_items(0)


def lower_group_rows(b: RegionBuilder, plan: GroupRowPlan) -> Kernel:
    """Lower reductions to a group of threads per row."""
    return _GroupRows(b, plan).group_row_kernel()


ROW_STATEMENTS = Limit(
    128,
    "statements of a thread that computes its whole part of a row at once",
    "each named value needs a register; longer parts are computed vector by vector",
)
UNROLLED_VECTORS = BlockSize(
    4,
    "vectors of a row that a thread has in flight at once, where it does not keep them",
    "NVIDIA H200: with one vector per thread, the memory queues are full only if there are many threads",
)


class _GroupRows(RowReductions):
    """Emit reductions with several rows per block, and a group of threads per row."""

    def __init__(self, b: RegionBuilder, plan: GroupRowPlan) -> None:
        """Divide the threads of a block into groups, one per row; find the inputs that stay in registers."""
        super().__init__(b, plan)
        self.threads, self.name = plan.threads, b.fresh("t")
        self.thread = sym(self.name, 0, self.threads.threads)
        self.member = mod(self.thread, self.threads.group)
        self.part = (self.thread,)
        reads = list(row_reads(b, self.stages, plan.reduced, list(self.stored))) if plan.held else []
        self.read_again = [reads[n] for n in plan.held]
        self.held: dict[Buffer, tuple[Value, Index]] = {}  # input elements by the registers that hold them

    def group_row_kernel(self) -> Kernel:
        """Return the reduction kernel with a group of threads per row."""
        b, plan = self.b, self.threads
        outer = make_axes(b.shape, [(k,) for k in self.kept])
        extents = [a.extent for a in outer]
        rows = product(extents)
        grid = (rows + (plan.rows - 1)) // plan.rows
        row = grid_item(grid) * plan.rows + self.thread // plan.group
        self.exists = [Apply("lt", (IndexScalar(row), IndexScalar(rows)), "i1")] if mod(rows, plan.rows) != 0 else []
        block: list[Stmt] = []
        self._allocate_row_values()
        self._emit_row_stages(block, substitute_loops(b.anchors.space, b.shape, outer, delinearize(row, extents)))
        return b.grid(grid, block, b.scalar_operations())

    # --- what stays from one loop to the next ---

    def _allocate_row_values(self) -> None:
        """Emit the allocation of row values that several loops share: registers, or shared memory."""
        b, threads = self.b, self.threads
        shape = (threads.threads, threads.steps * threads.width)
        for v in self.stored:
            if threads.steps:
                self.scratch[v] = Buffer(b.fresh("row"), v.type.dtype, shape, "private")
            else:
                self.scratch[v] = Buffer(b.fresh("row"), v.type.dtype, (self.stages.elements,), "shared")
        for value, index in self.read_again:
            self.held[Buffer(b.fresh("x"), value.type.dtype, shape, "private")] = value, index

    def _rows_of_block(self, flat: Dim) -> Index:
        return (self.thread, flat) if self.threads.steps else (flat,)

    def _load_of_stored_row(self, value: Value, iteration: Index) -> Provide:
        if not self.threads.steps:
            return super()._load_of_stored_row(value, iteration)
        return provide_scalar(Load(self.scratch[value], (self.thread, self.at_hand)), iteration)

    # --- the loops ---

    def _emit_row_stages(self, block: list[Stmt], at: Index) -> None:
        """Emit all stages of the rows of a block."""
        e = self.e
        block += [Alloc(buffer) for buffer in (*self.scratch.values(), *self.held)]
        stored: set[Value] = set()
        self.ready: set[Value] = set()
        for n, loop in enumerate(self.stages.loops):
            accs = self._private_accumulators(loop.ops, "acc")
            block += [Alloc(acc) for buffers in accs.values() for acc in buffers]
            # A value is stored by the first loop that computes it; later loops read it.
            self.keep = [v for v in self.scratch if v in loop.cone and v not in stored]
            body: list[Stmt] = []
            if n == 0 and self.held:
                self._thread_steps_along_row(body, self._load_to_registers(at), True)
            self.known = {}
            self._compute_row_scalars(body, at, self.stages.row_scalars_before(loop, stored))
            self._enter_row_block(body)
            body += [
                Store(acc, self.part, e.at(init, ()))
                for op, buffers in accs.items()
                for acc, init in zip(buffers, op.inits, strict=True)
            ]
            stored.update(self.keep)
            self._loop_over_row(body, at, loop, accs)
            self.ready.update(self.keep)
            block.append(self._thread_loop(body))
            self._reduce_across_threads(block, accs)
            anchor_results(e, accs, self.part)
        self._store_rows(block, at)

    def _store_rows(self, block: list[Stmt], at: Index) -> None:
        """Emit the stores of values that have one element per row."""
        body: list[Stmt] = []
        self.known = {}
        self._enter_row_block(body)
        store_rows(self.b, self.e, at)
        if body:
            block.append(self._thread_loop(body, self.member))

    def _thread_loop(self, body: Sequence[Stmt], alone: Dim = 0) -> For:
        """Return a loop over the block's threads, restricted to rows that exist and to threads where ``alone`` is 0."""
        if alone != 0:
            body = [If(Apply("eq", (IndexScalar(alone), Const(0, "i64")), "i1"), tuple(body))]
        for test in self.exists:
            body = [If(test, tuple(body))]
        return For(self.name, 0, self.threads.threads, tuple(body), "thread")

    def _loop_over_row(self, block: list[Stmt], at: Index, loop: RowLoop, accs: Accumulators) -> None:
        """Emit the loop of one stage: each thread of a group combines its part of the row."""

        def emit_element(inside: list[Stmt], flat: Dim, number: Dim) -> None:
            """Emit one step: element ``flat`` of the row, which is element ``number`` of the thread's part."""
            self._enter_row_block(inside)
            place = delinearize(flat, [a.extent for a in self.inner])
            iteration = substitute_loops(at, self.b.shape, self.inner, place)
            self.at_hand = number
            if self.threads.steps:
                for v in self.ready:
                    self.e.anchored[v] = self._load_of_stored_row(v, iteration)
            inputs: dict[Value, dict[Index, Load]] = {}
            for buffer, (v, index) in self.held.items():
                inputs.setdefault(v, {})[self.b.anchors.index_at_iteration(index, iteration)] = Load(
                    buffer, (self.thread, number)
                )
            for v, of_index in inputs.items():
                self.e.anchored[v] = of_index.get
            self._emit_stage_element(inside, iteration, number if self.threads.steps else flat, loop, accs)

        used = {acc.name for buffers in accs.values() for acc in buffers}
        trial: list[Stmt] = []
        emit_element(trial, sym(self.b.fresh("f"), 0, self.stages.elements), 0)
        loads = [x for s in walk(tuple(trial)) for x in loads_and_indices(statement_scalars(s)) if isinstance(x, Load)]
        chained = any(x.buffer.name in used for x in loads) or any(isinstance(s, Alloc | For) for s in trial)
        few = ROW_STATEMENTS.holds(max(self.threads.steps, 1) * self.threads.width * len(trial))
        self._thread_steps_along_row(block, emit_element, few, "unroll" if chained else "lanes")

    def _load_to_registers(self, at: Index) -> Callable[[list[Stmt], Dim, Dim], None]:
        """Return a function that loads an input element for registers that persist between loops."""

        def load_element(inside: list[Stmt], flat: Dim, number: Dim) -> None:
            """Emit the loads of element ``flat`` of the row, the thread's element ``number``."""
            position = substitute_loops(at, self.b.shape, self.inner, delinearize(flat, [a.extent for a in self.inner]))
            inside += [
                Store(
                    buffer,
                    (self.thread, number),
                    Load(self.b.buffers[v], self.b.anchors.index_at_iteration(index, position)),
                )
                for buffer, (v, index) in self.held.items()
            ]

        return load_element

    def _thread_steps_along_row(
        self, block: list[Stmt], element: Callable[[list[Stmt], Dim, Dim], None], few: bool, kind: LoopKind = "lanes"
    ) -> None:
        """Emit the steps of a thread over its part of the row.

        ``element(block, flat, number)`` writes one step, for element ``flat`` of the row and ``number`` of the part.
        """
        plan, work = self.threads, self.stages.elements
        width, stride = plan.width, plan.group * plan.width
        start = self.member * width
        # With a static number of steps, each element of a thread has a static number, and may stay in a register.
        if plan.steps:
            whole, end = divmod(static(work), stride)
            if whole and (few or kind == "unroll"):
                block.append(self._loop_over_group_lanes(element, whole * width, kind))
            elif whole:
                s = self.b.fresh("s")
                one = self._loop_over_group_lanes(element, width, kind, number=sym(s, 0, whole) * width)
                block.append(For(s, 0, whole, (one,), "unroll"))
            if end:
                rest = self._loop_over_group_lanes(element, width, kind, number=whole * width)
                exists = Apply("lt", (IndexScalar(start), IndexScalar(end)), "i1")
                block.append(If(exists, (rest,)))
            return
        count = UNROLLED_VECTORS.value
        iterations = work // (count * stride)
        q = self.b.fresh("q")
        first = sym(q, 0, iterations) * (count * stride)
        if iterations != 0:
            body = self._loop_over_group_lanes(element, count * width, kind, first)
            block.append(For(q, 0, iterations, (body,)))
        if mod(work, count * stride) == 0:
            return
        r = self.b.fresh("r")
        begin = iterations * (count * plan.group) + self.member
        vectors = work // width
        vector = sym(r, 0, vectors)
        tail = self._loop_over_group_lanes(element, width, kind, vector * width - start)
        block.append(For(r, begin, vectors, (tail,), step=plan.group))

    def _loop_over_group_lanes(
        self, element: Callable[[list[Stmt], Dim, Dim], None], count: int, kind: LoopKind, first: Dim = 0,
        number: Dim = 0,
    ) -> For:  # fmt: skip
        """Return the loop over elements of a thread's part from ``number`` on; the group's vectors are interleaved."""
        name, width = self.b.fresh("e"), self.threads.width
        number = number + sym(name, 0, count)
        inside: list[Stmt] = []
        flat = first + (number // width * self.threads.group + self.member) * width + number % width
        element(inside, flat, number)
        return For(name, 0, count, tuple(inside), kind)

    # --- the threads' results together ---

    def _private_accumulators(self, ops: Sequence[Op], prefix: str) -> Accumulators:
        shape = (self.threads.threads,)
        return {op: [Buffer(self.b.fresh(prefix), v.type.dtype, shape, "private") for v in op.results] for op in ops}

    def _reduce_across_threads(self, block: list[Stmt], accs: Accumulators) -> None:
        """Emit the reduction across threads: every thread of a group gets the result of the row."""
        plan, t = self.threads, self.thread
        others = self._private_accumulators(list(accs), "other") if plan.group > 1 else {}
        block += [Alloc(other) for buffers in others.values() for other in buffers]
        self._warp_butterfly(block, accs, others, min(plan.group, WARP))
        if plan.group <= WARP or not accs:
            return
        warps = plan.group // WARP
        buffers = [acc for row in accs.values() for acc in row]
        partial = [Buffer(self.b.fresh("partial"), acc.dtype, (plan.threads // WARP,), "shared") for acc in buffers]
        block += [Alloc(p) for p in partial]
        stores = [Store(p, (t // WARP,), Load(acc, self.part)) for p, acc in zip(partial, buffers, strict=True)]
        first = If(Apply("eq", (IndexScalar(t % WARP), Const(0, "i64")), "i1"), tuple(stores))
        block += [For(self.name, 0, plan.threads, (first,), "thread"), Barrier()]
        one = t // plan.group * warps + t % warps
        taken = [Store(acc, self.part, Load(p, (one,))) for p, acc in zip(partial, buffers, strict=True)]
        block.append(For(self.name, 0, plan.threads, tuple(taken), "thread"))
        self._warp_butterfly(block, accs, others, warps)

    def _warp_butterfly(self, block: list[Stmt], accs: Accumulators, others: Accumulators, threads: int) -> None:
        """Emit the combination of results within a warp by a butterfly, which begins half a group apart."""
        mask = threads // 2
        while mask and accs:
            body: list[Stmt] = []
            self.e.enter(body)
            for op, buffers in accs.items():
                pairs = zip(others[op], buffers, strict=True)
                block += [Shuffle(other, acc, mask) for other, acc in pairs]
                store_combined(self.b, self.e, op, buffers, [Load(x, self.part) for x in others[op]], [], self.part)
            block.append(For(self.name, 0, self.threads.threads, tuple(body), "thread"))
            mask //= 2
