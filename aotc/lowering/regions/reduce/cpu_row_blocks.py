"""Reductions along rows on a CPU, several rows at a time: the operand that they share is read once for all of them.

The example is a matrix times one or a few vectors; the loop over the row becomes vectors of each sum::

    for q in range(0, 8):
        acc0 = 0; acc1 = 0; ...
        for k in range(0, 4096):
            acc0 += w[32*p + 4*q, k] * x[k]
            acc1 += w[32*p + 4*q + 1, k] * x[k]
            ...
        y[32*p + 4*q] = acc0; ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product as product_of

from aotc.ir.dims.algebra import Dim, minimum, product, static, sym
from aotc.ir.loop.access import with_scalars
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, For, Kernel, Load, Scalar, Stmt, Store
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import (
    RegionBuilder,
    anchor_results,
    join_transposed,
    reduction_operands_at,
    store_combined,
    store_rows,
)
from aotc.lowering.elements.nests import append_serial_loops, grid_loop, loop_in_steps, make_axes, substitute_loops
from aotc.lowering.plans.cpu_reductions import RowBlockPlan
from aotc.lowering.plans.operand_reuse import ReductionReads
from aotc.lowering.plans.thresholds import FETCH_LINE
from aotc.lowering.regions.reduce.rows import Accumulators, RowReductions
from aotc.lowering.threshold import BlockSize


def lower_row_blocks(b: RegionBuilder, plan: RowBlockPlan) -> Kernel:
    """Lower reductions along rows, several rows at a time with the operand that they share."""
    return _RowBlocks(b, plan).row_block_kernel()


FETCHED_TURNS = BlockSize(
    1,
    "blocks of rows between the prefetch of a part and its reduction",
    "as PART_BYTES, on a busy core, throughput relative to a plain read: 0 blocks 0.47, 1 block 0.75, 2 blocks 0.64",
)


class _RowBlocks(RowReductions):
    """Emit a loop over rows of axis ``block``, several at a time, with all indices of the axes ``together``."""

    def __init__(self, b: RegionBuilder, plan: RowBlockPlan) -> None:
        """Divide the axes by the plan: outer ones, rows that share an operand, rows of a block."""
        super().__init__(b, plan)
        self.plan, self.at_once, self.lanes = plan, plan.at_once, plan.lanes
        self.ops = self.stages.loops[0].ops
        self.reads = ReductionReads(b, self.ops)
        self.streams = [b.inputs[n] for n in plan.streams]
        self.outer = make_axes(b.shape, [(k,) for k in plan.kept if k not in (*plan.together, plan.block)])
        self.adjacent_loads = make_axes(b.shape, [(k,) for k in plan.together])
        (self.rows_axis,) = make_axes(b.shape, [(plan.block,)])

    def row_block_kernel(self) -> Kernel:
        grid, body = grid_loop(self.outer, (self.rows_axis, self.plan.rows), self._row_block_item)
        return self.b.kernel(grid, body, self.b.scalar_operations())

    def _row_block_item(self, block: list[Stmt], at: list[Dim], begin: Dim, end: Dim) -> None:
        """Emit the rows of an item, in parts along the rows if the plan has parts."""
        if self.plan.part:
            self._reduce_rows_in_parts(block, at, begin, end)
            return
        self._loop_over_row_blocks(block, begin, end, lambda inner, rows: self._reduce_rows_together(inner, at, rows))

    def _loop_over_row_blocks(
        self, block: list[Stmt], begin: Dim, end: Dim, emit: Callable[[list[Stmt], list[Dim]], None]
    ) -> None:
        loop_in_steps(block, self.rows_axis.name, begin, end - begin, self.at_once, emit)

    def _row_operand_indices(self, at: list[Dim], rows: list[Dim]) -> list[tuple[int, int, Index]]:
        """Return, for each sum, the number of its row, the number of its shared operand, and the anchor's index."""
        axes = [*self.outer, self.rows_axis, *self.adjacent_loads]
        return [
            (i, c, substitute_loops(self.b.anchors.space, self.b.shape, axes, [*at, row, *x]))
            for c, x in enumerate(product_of(*(range(static(a.extent)) for a in self.adjacent_loads)))
            for i, row in enumerate(rows)
        ]

    def _reduce_rows_together(self, block: list[Stmt], at: list[Dim], rows: list[Dim]) -> None:
        """Emit the loop over blocks of rows reduced together, and the stores of their results."""
        places = [index for _, _, index in self._row_operand_indices(at, rows)]
        self.e.anchored.clear()
        accs = [self._allocate_accumulators(self.ops, block) for _ in places]

        def add_element(inner: list[Stmt], syms: list[Dim]) -> None:
            self.e.enter(inner)
            for index, each in zip(places, accs, strict=True):
                self._add_row_element(index, syms, each)

        if self.streams:
            self._vector_loop_along_rows(block, places, accs)
        else:
            append_serial_loops(self.inner, [], add_element, block)
        self._store_row_results(block, places, accs)

    def _allocate_row_vectors(self, block: list[Stmt], places: Sequence[object]) -> list[Accumulators]:
        """Allocate a vector for each sum of the rows at ``places``."""
        b = self.b
        vectors: list[Accumulators] = [
            {o: [Buffer(b.fresh("sums"), v.type.dtype, (self.lanes,), "private") for v in o.results] for o in self.ops}
            for _ in places
        ]
        block += [Alloc(x) for each in vectors for op in self.ops for x in each[op]]
        return vectors

    def _vector_loop_along_rows(self, block: list[Stmt], places: Sequence[Index], accs: Sequence[Accumulators]) -> None:
        """Emit the loop along the rows with a vector for each sum, and prefetches of later elements."""
        b, (axis,) = self.b, self.inner
        vectors = self._allocate_row_vectors(block, places)
        pairs = [(v, a) for x, y in zip(vectors, accs) for op in self.ops for v, a in zip(x[op], y[op])]
        lane, whole = sym("l", 0, self.lanes), axis.extent // self.lanes
        first = sym(axis.name, 0, whole) * self.lanes
        block.append(For("l", 0, self.lanes, tuple(Store(v, (lane,), Const(-0.0, v.dtype)) for v, _ in pairs)))
        step: list[Stmt] = []
        ahead = minimum(first + self.plan.ahead, axis.extent - 1)
        for index in places:
            step += self.reads.prefetches_of_step(self.streams, substitute_loops(index, b.shape, self.inner, [ahead]))
        inside: list[Stmt] = []
        self.e.enter(inside)
        for index, sums in zip(places, vectors, strict=True):
            self._add_row_element(index, [first + lane], sums, (lane,))
        block.append(For(axis.name, 0, whole, (*dict.fromkeys(step), For("l", 0, self.lanes, tuple(inside)))))
        self._add_remaining_elements(block, places, accs)
        block.append(For("l", 0, self.lanes, tuple(Store(a, (), Load(v, (lane,)), "add") for v, a in pairs)))

    def _add_remaining_elements(self, block: list[Stmt], places: Sequence[Index], accs: Sequence[Accumulators]) -> None:
        """Emit the sums of the elements after the last whole vector."""
        (axis,) = self.inner
        if axis.extent % self.lanes == 0:
            return
        rest: list[Stmt] = []
        self.e.enter(rest)
        for index, each in zip(places, accs, strict=True):
            self._add_row_element(index, [axis.symbol()], each)
        block.append(For(axis.name, axis.extent // self.lanes * self.lanes, axis.extent, tuple(rest)))

    def _add_row_element(self, index: Index, syms: list[Dim], accs: Accumulators, lane: Index = ()) -> None:
        """Emit one step of the sums of a row in the current block."""
        b, e = self.b, self.e
        iteration = substitute_loops(index, b.shape, self.inner, syms)
        join_transposed(b, e, iteration)
        for op in self.ops:
            store_combined(b, e, op, accs[op], reduction_operands_at(b, e, op, iteration), [], lane)

    def _store_row_results(self, block: list[Stmt], places: Sequence[Index], accs: Sequence[Accumulators]) -> None:
        """Emit the stores of rows whose sums are complete."""
        for index, sums in zip(places, accs, strict=True):
            self.e.enter(block)
            anchor_results(self.e, sums)
            store_rows(self.b, self.e, index)

    # --- in parts ---

    def _reduce_rows_in_parts(self, block: list[Stmt], at: list[Dim], begin: Dim, end: Dim) -> None:
        """Emit the reductions of an item in parts along the rows, with a vector accumulator per row.

        The shared operand is copied for each part, so that it stays in the L1 cache, whatever its length and layout.
        """
        b, (axis,) = self.b, self.inner
        results = [v for op in self.ops for v in op.results]
        few = static(product(a.extent for a in self.adjacent_loads))
        shape = (self.plan.rows * few, self.lanes)
        self.sums = {v: Buffer(b.fresh("sums"), v.type.dtype, shape, "scratch") for v in results}
        per = self.plan.part
        pitch = per * self.lanes + FETCH_LINE.value // self.reads.size
        near = [x.buffer for x in self.reads.adjacent_loads(self.plan.block, self.reduced)]
        self.near = {x: Buffer(b.fresh("near"), x.dtype, (few, pitch), "scratch") for x in near}
        block += [Alloc(x) for x in (*self.sums.values(), *self.near.values())]
        r, lane = sym("r", 0, shape[0]), sym("l", 0, self.lanes)
        # -0.0 is neutral for float sums: it keeps the sign of a zero.
        zeros = tuple(Store(x, (r, lane), Const(-0.0, x.dtype)) for x in self.sums.values())
        block.append(For("r", 0, (end - begin) * few, (For("l", 0, self.lanes, zeros),)))
        whole = axis.extent // self.lanes
        parts = -(-whole // per)
        part = sym("m", 0, parts) * per
        count = minimum(per, whole - part)
        body = self._copy_shared_operands(at, begin, part * self.lanes, count * self.lanes)
        self._loop_over_row_blocks(
            body,
            begin,
            end,
            lambda inner, rows: self._reduce_row_part(inner, at, begin, rows, part * self.lanes, count),
        )
        block.append(For("m", 0, parts, tuple(body)))
        self._loop_over_row_blocks(
            block, begin, end, lambda inner, rows: self._total_of_row_vectors(inner, at, begin, rows)
        )

    def _copy_shared_operands(self, at: list[Dim], row: Dim, first: Dim, count: Dim) -> list[Stmt]:
        """Return the copies of a part of the shared operands."""
        body: list[Stmt] = []
        step = sym("l", 0, count)
        for _, c, index in self._row_operand_indices(at, [row]):
            loads = self.reads.loads_of_step(substitute_loops(index, self.b.shape, self.inner, [first + step]))
            stores = [Store(self.near[x.buffer], (c, step), x) for x in loads if x.buffer in self.near]
            body += [For("l", 0, count, (store,)) for store in dict.fromkeys(stores)]
        return body

    def _reduce_row_part(
        self, block: list[Stmt], at: list[Dim], begin: Dim, rows: list[Dim], first: Dim, count: Dim
    ) -> None:
        """Emit the loop along a part of some rows, and prefetches of the same part of later rows."""
        b, (axis,) = self.b, self.inner
        places = self._row_operand_indices(at, rows)
        vectors = self._allocate_row_vectors(block, places)
        lane, step = sym("l", 0, self.lanes), sym(axis.name, 0, count) * self.lanes
        loads, stores = self._load_and_store_accumulators(places, rows, begin, vectors, lane)
        block.append(For("l", 0, self.lanes, tuple(loads)))
        last = self.rows_axis.extent - 1
        later = [minimum(row + FETCHED_TURNS.value * len(rows), last) for row in rows]
        ahead: list[Stmt] = []
        for _, _, index in self._row_operand_indices(at, later):
            ahead += self.reads.prefetches_of_step(
                self.streams, substitute_loops(index, b.shape, self.inner, [first + step])
            )
        inside: list[Stmt] = []
        self.e.anchored.clear()
        self.e.enter(inside)
        for (_, c, index), sums in zip(places, vectors, strict=True):
            done = len(inside)
            self._add_row_element(index, [first + step + lane], sums, (lane,))
            inside[done:] = with_scalars(tuple(inside[done:]), partial(self._load_from_copies, index=(c, step + lane)))
        block.append(For(axis.name, 0, count, (*dict.fromkeys(ahead), For("l", 0, self.lanes, tuple(inside)))))
        block.append(For("l", 0, self.lanes, tuple(stores)))

    def _load_from_copies(self, s: Scalar, index: Index) -> Scalar:
        """Return ``s`` with loads of copies substituted for those of the shared operands."""
        match s:
            case Load(buffer=buffer) if buffer in self.near:
                return Load(self.near[buffer], index)
            case Apply(args=args):
                return replace(s, args=tuple(self._load_from_copies(x, index) for x in args))
        return s

    def _load_and_store_accumulators(
        self, places: Sequence[tuple[int, int, Index]], rows: list[Dim], begin: Dim, vectors: Sequence[Accumulators],
        lane: Dim,
    ) -> tuple[list[Stmt], list[Stmt]]:  # fmt: skip
        """Return the loads of vector accumulators for ``rows``, and their stores back."""
        few = len(places) // len(rows)
        loads: list[Stmt] = []
        stores: list[Stmt] = []
        for (i, c, _), each in zip(places, vectors, strict=True):
            for op in self.ops:
                for v, x in zip(op.results, each[op], strict=True):
                    cell = self.sums[v], ((rows[i] - begin) * few + c, lane)
                    loads.append(Store(x, (lane,), Load(*cell)))
                    stores.append(Store(*cell, Load(x, (lane,))))
        return loads, stores

    def _total_of_row_vectors(self, block: list[Stmt], at: list[Dim], begin: Dim, rows: list[Dim]) -> None:
        """Emit the sums of the vectors' lanes and of the remaining elements, and the stores of the results."""
        places = self._row_operand_indices(at, rows)
        indices = [index for _, _, index in places]
        self.e.anchored.clear()
        accs = [self._allocate_accumulators(self.ops, block) for _ in places]
        self._add_remaining_elements(block, indices, accs)
        lane = sym("l", 0, self.lanes)
        few = len(places) // len(rows)
        lanes = [
            Store(acc, (), Load(self.sums[v], ((rows[i] - begin) * few + c, lane)), "add")
            for (i, c, _), each in zip(places, accs, strict=True)
            for op in self.ops
            for v, acc in zip(op.results, each[op], strict=True)
        ]
        block.append(For("l", 0, self.lanes, tuple(lanes)))
        self._store_row_results(block, indices, accs)
