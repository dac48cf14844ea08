"""Reductions over leading axes on a CPU: columns are accumulated in parallel while rows stream by.

A grid item has as many columns as accumulators fit the L1 cache. So it reads long pieces of each row, which the
processor prefetches. Several rows are added at a time, so that an accumulator is loaded and stored once for these. If
an operand is constant along another axis, as in a matrix times a few rows, all indices of that axis are accumulated in
the same pass::

    for q in range(0, k // 4):
        for n in range(0, 1024):
            acc0[n] += x[0, 4*q] * w[4*q, n]
            acc0[n] += x[0, 4*q + 1] * w[4*q + 1, n]
            ...
            acc1[n] += x[1, 4*q] * w[4*q, n]
            ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product as product_of

from aotc.ir.dims.algebra import Dim, minimum, static, sym
from aotc.ir.loop.ir import Alloc, Buffer, For, Kernel, Stmt, Store
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import (
    RegionBuilder,
    anchor_results,
    index_of_value_at_anchor,
    join_transposed,
    reduction_operands_at,
    store_combined,
    store_elements,
    store_rows,
)
from aotc.lowering.elements.nests import append_serial_loops, grid_loop, loop_in_steps, make_axes, substitute_loops
from aotc.lowering.plans.cpu_columns import ColumnPlan
from aotc.lowering.plans.operand_reuse import ReductionReads
from aotc.lowering.plans.thresholds import FETCH_LINE
from aotc.vmfb.dtypes import size_of


def lower_columns(b: RegionBuilder, plan: ColumnPlan) -> Kernel:
    """Lower reductions over leading axes: a block of columns accumulates while rows stream by."""
    return _ColumnBlocks(b, plan).column_block_kernel()


class _ColumnBlocks:
    """Emit the reductions of a region over leading axes on a CPU."""

    def __init__(self, b: RegionBuilder, plan: ColumnPlan) -> None:
        """Divide the axes by the plan: outer ones, those reduced together, the reduced ones, the columns."""
        self.b, self.e, self.plan = b, b.elements(), plan
        self.ops = [op for loop in b.row_stages().loops for op in loop.ops]
        self.results = list(zip(b.outputs, b.function.body.results, strict=True))
        self.reads = ReductionReads(b, self.ops)
        (self.last,) = make_axes(b.shape, [plan.kept[-1:]])
        self.outer = make_axes(b.shape, [(k,) for k in plan.kept[:-1] if k not in plan.together])
        self.together = make_axes(b.shape, [(k,) for k in plan.together])
        self.middle = make_axes(b.shape, [(k,) for k in plan.reduced])
        self.adjacent = list(product_of(*(range(static(a.extent)) for a in self.together)))
        self.streams = [b.inputs[n] for n in plan.streams]

    def column_block_kernel(self) -> Kernel:
        """Return the kernel whose grid items each reduce a block of columns."""
        extent, width = self.last.extent, self.plan.width
        if width == extent:
            grid, body = grid_loop(
                self.outer, None, lambda block, at, *_: self._column_block_item(block, at, 0, extent)
            )
        else:
            grid, body = grid_loop(self.outer, (self.last, width), self._column_block_item)
        return self.b.kernel(grid, body, self.b.scalar_operations())

    # --- an item ---

    def _column_block_item(self, block: list[Stmt], at: list[Dim], begin: Dim, end: Dim) -> None:
        """Emit the statements of one item: accumulators of columns, the loop over rows, and the stores."""
        b, e, c = self.b, self.e, self.last.symbol()
        lane = c - begin if begin != 0 else c
        accs = [
            {op: [Buffer(b.fresh("acc"), v.type.dtype, (self.plan.width,), "private") for v in op.results]
             for op in self.ops}
            for _ in self.adjacent
        ]  # fmt: skip
        e.anchored.clear()
        start: list[Stmt] = []
        e.enter(start)
        for each in accs:
            for op in self.ops:
                for acc, init in zip(each[op], op.inits, strict=True):
                    block.append(Alloc(acc))
                    start.append(Store(acc, (lane,), e.at(init, ())))
        block.append(For(self.last.name, begin, end, tuple(start)))

        def add_rows_in_column(inner: list[Stmt], rows: Sequence[list[Dim]], column: Dim) -> None:
            """Add the terms of some rows to all accumulators, in one column."""
            e.enter(inner)
            for adjacent, each in zip(self.adjacent, accs, strict=True):
                for row in rows:
                    index = self._anchor_index([*at, *adjacent], row, column)
                    join_transposed(b, e, index)
                    store_elements(
                        e,
                        [
                            (o, v, index_of_value_at_anchor(b, v, index))
                            for o, v in self.results
                            if not b.anchors.is_row(v)
                        ],
                    )
                    for op in self.ops:
                        terms = reduction_operands_at(b, e, op, index)
                        store_combined(b, e, op, each[op], terms, [], (column - begin,))

        def loop_over_columns(inner: list[Stmt], rows: Sequence[list[Dim]]) -> None:
            self._loop_over_item_columns(inner, at, (begin, end), rows, add_rows_in_column)

        append_serial_loops(
            self.middle[:-1],
            [],
            lambda inner, rows: self._loop_over_reduced_terms(inner, rows, loop_over_columns),
            block,
        )
        self._store_column_results(block, at, lane, begin, end, accs)

    def _anchor_index(self, at: list[Dim], row: list[Dim], column: Dim | None = None) -> Index:
        """Return the anchor's index at ``row`` of the reduced axes, and at ``column`` or the loop's column."""
        axes = [*self.outer, *self.together, *(self.middle if row else ()), self.last]
        column = self.last.symbol() if column is None else column
        return substitute_loops(self.b.anchors.space, self.b.shape, axes, [*at, *row, column])

    def _loop_over_item_columns(
        self, block: list[Stmt], at: list[Dim], ends: tuple[Dim, Dim], rows: Sequence[list[Dim]],
        add: Callable[[list[Stmt], Sequence[list[Dim]], Dim], None],
    ) -> None:  # fmt: skip
        """Emit the loop over the columns of an item, by strips of a cache line if later rows are prefetched."""
        name, (begin, end) = self.last.name, ends
        strip = FETCH_LINE.value // min((size_of(x.dtype) for x in self.streams), default=1)
        whole = (end - begin) // strip if self.streams else 0
        if self.streams:
            first = begin + sym("m", 0, whole) * strip
            body: list[Stmt] = []
            for row in rows:
                later = [*row[:-1], minimum(row[-1] + len(rows), self.middle[-1].extent - 1)]
                body += self.reads.prefetches_of_step(
                    self.streams, self._anchor_index([*at, *self.adjacent[0]], later, first)
                )
            inside: list[Stmt] = []
            add(inside, rows, first + sym(name, 0, strip))
            block.append(For("m", 0, whole, (*dict.fromkeys(body), For(name, 0, strip, tuple(inside)))))
        if not self.streams or self.last.extent % strip != 0 or self.plan.width % strip:
            rest: list[Stmt] = []
            add(rest, rows, self.last.symbol())
            block.append(For(name, begin + whole * strip, end, tuple(rest)))

    def _loop_over_reduced_terms(
        self, block: list[Stmt], rows: list[Dim], add: Callable[[list[Stmt], list[list[Dim]]], None]
    ) -> None:
        """Emit the loop over the last reduced axis, several terms at a time, and a loop over the remainder."""
        axis, terms = self.middle[-1], self.plan.terms
        loop_in_steps(block, axis.name, 0, axis.extent, terms, lambda inner, at: add(inner, [[*rows, k] for k in at]))

    def _store_column_results(
        self, block: list[Stmt], at: list[Dim], lane: Dim, begin: Dim, end: Dim, accs: list[dict[Op, list[Buffer]]]
    ) -> None:
        """Emit the stores of the results, which depend on the accumulators."""
        for adjacent, each in zip(self.adjacent, accs, strict=True):
            finish: list[Stmt] = []
            self.e.anchored.clear()
            self.e.enter(finish)
            anchor_results(self.e, each, (lane,))
            store_rows(self.b, self.e, self._anchor_index([*at, *adjacent], []))
            block.append(For(self.last.name, begin, end, tuple(finish)))
