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

from collections.abc import Sequence

from aotc.ir.dims import Dim, product, sym
from aotc.ir.loop_ir import Alloc, Barrier, Buffer, For, Kernel, Load, Stmt, Store
from aotc.ir.tensor_ir import Function, Op
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.analysis.resources import row_threads
from aotc.lowering.analysis.row_stages import RowLoop
from aotc.lowering.regions.nests import NestAxis, grid_loop, make_axes, place
from aotc.lowering.regions.reduction import Accumulators, Rows
from aotc.lowering.regions.region import RegionBuilder, combine
from aotc.targets import Target


def lower_reduction_cuda(function: Function, target: Target) -> Kernel:
    """Reduce with one block per row if rows are contiguous and long, else with one thread per row."""
    b = RegionBuilder(function, target)
    reduced = sorted(b.anchors.reduced or ())
    kept = [k for k, s in enumerate(b.anchors.space) if s != 0 and k not in reduced]
    threads = row_threads(b.row_stages(), target)
    if threads > 1:
        return _BlockRows(b, kept, reduced, threads).lower()
    return _ThreadRows(b, kept, reduced).lower()


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
        self._keep_for_later("shared")

        def item(block: list[Stmt], syms: list[Dim], begin: Dim, end: Dim) -> None:
            row: list[Stmt] = []
            self._row(row, place(b.anchors.space, b.shape, outer, syms))
            for stmt in row:
                alone = isinstance(stmt, Store) and stmt.buffer.space == "global"
                block.append(For(b.fresh("z"), 0, 1, (stmt,), "thread") if alone else stmt)

        grid, body = grid_loop(outer, None, item)
        return b.kernel(grid, body, b.cost())

    def _accumulators(self, ops: Sequence[Op], block: list[Stmt]) -> Accumulators:
        """Make the results of a stage: every thread of the block has a copy."""
        accs = {op: [Buffer(self.b.fresh("acc"), v.type.dtype, (), "private") for v in op.results] for op in ops}
        block += [Alloc(acc) for held in accs.values() for acc in held]
        return accs

    def _over_the_row(self, block: list[Stmt], at: Index, loop: RowLoop, accs: Accumulators) -> None:
        partial = {
            op: [Buffer(self.b.fresh("partial"), acc.dtype, (self.threads,), "shared") for acc in held]
            for op, held in accs.items()
        }
        block += [Alloc(p) for buffers in partial.values() for p in buffers]
        self._thread_part(block, at, loop, partial)
        if partial:
            self._tree(block, partial)
        for op, held in accs.items():
            block += [Store(acc, (), Load(p, (0,))) for acc, p in zip(held, partial[op], strict=True)]

    def _thread_part(self, block: list[Stmt], at: Index, loop: RowLoop, partial: Accumulators) -> None:
        """Write what one thread does: every T-th element of the row."""
        b = self.b
        t = sym(b.fresh("t"), 0, self.threads)
        size = product(a.extent for a in self.inner)
        each: list[Stmt] = []
        self._enter(each)
        own: Accumulators = {}
        for op in loop.ops:
            own[op] = [Buffer(b.fresh("own"), p.dtype, (), "private") for p in partial[op]]
            for acc, init in zip(own[op], op.inits, strict=True):
                each += [Alloc(acc), Store(acc, (), self.e.at(init, ()))]
        flat = sym(b.fresh("f"), 0, size)
        inside: list[Stmt] = []
        self._enter(inside)
        here = place(at, b.shape, self.inner, delinearize(flat, [a.extent for a in self.inner]))
        self._element(inside, here, flat, loop, own)
        each.append(For(_name(flat), t, size, tuple(inside), step=self.threads))
        each += [Store(p, (t,), Load(acc, ())) for op in loop.ops for p, acc in zip(partial[op], own[op], strict=True)]
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
