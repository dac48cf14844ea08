"""Reductions on a GPU: one thread per row, or one block of threads per row.

A row's reduction is a loop over the threads of a block, each of which combines
every T-th element, then a tree over the threads' results in shared memory::

    for t in thread(0, 256):
        acc = init
        for f in range(t, 4096, 256):
            acc = combine(acc, x[row, f])
        partial[t] = acc
    barrier()
    for t in thread(0, 128): partial[t] = combine(partial[t], partial[t + 128])
    ...
"""

from __future__ import annotations

from dataclasses import replace

from aotc.ir.dims import Dim, product, sym
from aotc.ir.loop_ir import Alloc, Barrier, Buffer, For, Kernel, Load, Stmt, Store
from aotc.ir.tensor_ir import Function, Op
from aotc.lowering.analysis.cost import (
    GPU_FEW_ROWS,
    GPU_ROW_MEDIUM,
    GPU_ROW_SHORT,
    GPU_ROW_THREADS,
    SHARED_ROW,
    THREAD_ROW,
    THREAD_ROW_OF_MANY,
)
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.regions.nests import NestAxis, grid_loop, make_axes, place
from aotc.lowering.regions.reduction import Accumulators, Rows, RowStage
from aotc.lowering.regions.region import RegionBuilder, combine
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of


def lower_reduction_cuda(function: Function, target: Target) -> Kernel:
    """Reduce with one block per row if rows are contiguous and long, else with one thread per row."""
    b = RegionBuilder(function, target)
    reduced = sorted(b.anchors.reduced or ())
    kept = [k for k, s in enumerate(b.anchors.space) if s != 0 and k not in reduced]
    work = product(b.shape[k] for k in reduced)
    rows = product(b.shape[k] for k in kept)
    contiguous = max(reduced, default=0) > max(kept, default=-1)
    plenty = not GPU_FEW_ROWS.holds(rows) and THREAD_ROW_OF_MANY.holds(work)
    if contiguous and not plenty and not THREAD_ROW.holds(work):
        return _BlockRows(b, kept, reduced, _threads(work)).lower()
    return _ThreadRows(b, kept, reduced).lower()


def _threads(work: Dim) -> int:
    least = GPU_ROW_THREADS.value
    if GPU_ROW_SHORT.holds(work):
        return least
    return 2 * least if GPU_ROW_MEDIUM.holds(work) else 4 * least


class _ThreadRows(Rows):
    """Rows in the grid, one thread per row."""

    def _split(self, axes: list[NestAxis]) -> tuple[list[NestAxis], list[NestAxis]]:
        return axes, []


class _BlockRows(Rows):
    """Rows in the grid, ``threads`` threads per row."""

    def __init__(self, b: RegionBuilder, kept: list[int], reduced: list[int], threads: int) -> None:
        super().__init__(b, kept, reduced)
        self.threads = threads

    def lower(self) -> Kernel:
        """Return the kernel."""
        b = self.b
        outer = make_axes(b.shape, [(k,) for k in self.kept])
        self.inner = self._inner_axes()
        self._choose_scratch()
        self._keep_in_shared()

        def item(block: list[Stmt], syms: list[Dim], begin: Dim, end: Dim) -> None:
            row: list[Stmt] = []
            self._row(row, place(b.anchors.space, b.shape, outer, syms))
            for stmt in row:
                alone = isinstance(stmt, Store) and stmt.buffer.space == "global"
                block.append(For(b.fresh("z"), 0, 1, (stmt,), "thread") if alone else stmt)

        grid, body = grid_loop(outer, None, item)
        return b.kernel(grid, body, b.cost())

    def _keep_in_shared(self) -> None:
        """Keep in shared memory what fits of the values that a later stage needs again."""
        used = 0
        for v, buffer in list(self.scratch.items()):
            bytes_ = int(product(buffer.shape)) * size_of(buffer.dtype)  # type: ignore[arg-type]
            del self.scratch[v]
            if SHARED_ROW.holds(used + bytes_):
                used += bytes_
                self.scratch[v] = replace(buffer, space="shared")

    def _accumulators(self, ops: list[Op], block: list[Stmt]) -> Accumulators:
        """Make the results of a stage: every thread of the block has a copy."""
        accs = {op: [Buffer(self.b.fresh("acc"), v.type.dtype, (), "private") for v in op.results] for op in ops}
        block += [Alloc(acc) for held in accs.values() for acc in held]
        return accs

    def _over_the_row(self, block: list[Stmt], at: Index, stage: RowStage, accs: Accumulators) -> None:
        partial = {
            op: [Buffer(self.b.fresh("partial"), acc.dtype, (self.threads,), "shared") for acc in held]
            for op, held in accs.items()
        }
        block += [Alloc(p) for buffers in partial.values() for p in buffers]
        self._thread_part(block, at, stage, partial)
        if partial:
            self._tree(block, partial)
        for op, held in accs.items():
            block += [Store(acc, (), Load(p, (0,))) for acc, p in zip(held, partial[op], strict=True)]

    def _thread_part(self, block: list[Stmt], at: Index, stage: RowStage, partial: Accumulators) -> None:
        """Write what one thread does: every T-th element of the row."""
        b = self.b
        t = sym(b.fresh("t"), 0, self.threads)
        size = product(a.extent for a in self.inner)
        each: list[Stmt] = []
        self.e.enter(each)
        own: Accumulators = {}
        for op in stage.ops:
            own[op] = [Buffer(b.fresh("own"), p.dtype, (), "private") for p in partial[op]]
            for acc, init in zip(own[op], op.inits, strict=True):
                each += [Alloc(acc), Store(acc, (), self.e.at(init, ()))]
        flat = sym(b.fresh("f"), 0, size)
        inside: list[Stmt] = []
        self.e.enter(inside)
        here = place(at, b.shape, self.inner, delinearize(flat, [a.extent for a in self.inner]))
        self._element(inside, here, flat, stage, own)
        each.append(For(_name(flat), t, size, tuple(inside), step=self.threads))
        each += [Store(p, (t,), Load(acc, ())) for op in stage.ops for p, acc in zip(partial[op], own[op], strict=True)]
        block += [For(_name(t), 0, self.threads, tuple(each), "thread"), Barrier()]

    def _tree(self, block: list[Stmt], partial: Accumulators) -> None:
        half = self.threads // 2
        while half:
            t = sym(self.b.fresh("t"), 0, half)
            each: list[Stmt] = []
            self.e.enter(each)
            for op, buffers in partial.items():
                combine(self.b, self.e, op, buffers, [Load(p, (t + half,)) for p in buffers], [], (t,))
            block += [For(_name(t), 0, half, tuple(each), "thread"), Barrier()]
            half //= 2


def _name(s: Dim) -> str:
    """Return the name of an expression that is one symbol."""
    return str(s)
