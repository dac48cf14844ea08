"""Reductions over leading axes on a CPU: columns are accumulated in parallel while rows stream by.

An item has as many columns as the L1 cache has room for their accumulators. It then reads long pieces of each row,
which the processor prefetches. It adds several rows at a time, so that an accumulator is loaded and stored once for
these. If an operand does not change along another axis, as in a matrix times a few rows, all steps of that axis are
accumulated in the same pass::

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
from dataclasses import dataclass
from itertools import product as product_of

from aotc.ir.dims.algebra import Dim, Expr, minimum, product, static, sym
from aotc.ir.loop.ir import Alloc, Buffer, For, Kernel, Load, Stmt, Store
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import RegionBuilder, combine, join_turned, operands_at, relocate, store_all
from aotc.lowering.elements.elements import provide
from aotc.lowering.elements.nests import grid_loop, make_axes, place, serial, some_at_a_time
from aotc.lowering.plans.operand_reuse import Reads, is_light
from aotc.lowering.plans.thresholds import COLUMN_ITEMS, COLUMN_TERMS, FETCH_LINE
from aotc.lowering.threshold import BlockSize, Limit
from aotc.vmfb.dtypes import size_of

REDUCED_COLUMNS = BlockSize(
    128,
    "columns that a grid item reduces at once; wider items have a multiple of it",
    "8 vectors of 16 f32, which stay in registers",
)


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """The partition of a region: axes that an item has as a whole, its columns, and the terms added at a time."""

    together: tuple[int, ...]
    width: int
    terms: int


def lower_columns(b: RegionBuilder, kept: list[int], reduced: list[int]) -> Kernel:
    """Reduce leading axes: a block of columns accumulates while rows stream by."""
    return _ColumnBlocks(b, kept, reduced).lower()


NARROW_CPU_COLUMNS = Limit(
    128,
    "columns of a grid item to which one row is added at a time",
    "their accumulators stay in registers",
)
ACCUMULATOR_PERCENT = BlockSize(
    75,
    "percent of the L1 cache for the accumulators of a grid item's columns, at most",
    "Zen 5, one core, 1 row x 4096 x 4096 of f32, GB/s: 128 columns 28, 512 columns 38, 1024 columns 53, all columns "
    "51",
)


class _ColumnBlocks:
    """Emitter of the reductions of a region over leading axes."""

    def __init__(self, b: RegionBuilder, kept: list[int], reduced: list[int]) -> None:
        self.b, self.e = b, b.elements()
        self.ops = [op for loop in b.row_stages().loops for op in loop.ops]
        self.results = list(zip(b.outputs, b.function.body.results, strict=True))
        self.reads = Reads(b, self.ops)
        self.plan = self._plan(kept, reduced)
        (self.last,) = make_axes(b.shape, [(kept[-1],)])
        self.outer = make_axes(b.shape, [(k,) for k in kept[:-1] if k not in self.plan.together])
        self.together = make_axes(b.shape, [(k,) for k in self.plan.together])
        self.middle = make_axes(b.shape, [(k,) for k in reduced])
        self.beside = list(product_of(*(range(static(a.extent)) for a in self.together)))
        self.streams = self.reads.streams([*reduced, kept[-1]]) if self.plan.terms > 1 else []

    def lower(self) -> Kernel:
        extent, width = self.last.extent, self.plan.width
        if width == extent:
            grid, body = grid_loop(self.outer, None, lambda block, at, *_: self._item(block, at, 0, extent))
        else:
            grid, body = grid_loop(self.outer, (self.last, width), self._item)
        return self.b.kernel(grid, body, self.b.cost())

    # --- the plan ---

    def _plan(self, kept: list[int], reduced: list[int]) -> ColumnPlan:
        shape, column, target = self.b.shape, kept[-1], self.b.target
        light = is_light(self.b, self.ops)
        together = self.reads.few(kept[:-1], [*reduced, kept[-1]]) if light else ()
        rows = static(product(shape[k] for k in together))
        bytes_each = rows * sum(size_of(v.type.dtype) for op in self.ops for v in op.results)
        most = target.l1 * ACCUMULATOR_PERCENT.value // 100 // bytes_each // REDUCED_COLUMNS.value
        most = max(most, 1) * REDUCED_COLUMNS.value
        others = product(shape[k] for k in kept[:-1] if k not in together)
        width = _width(shape[column], most if light else REDUCED_COLUMNS.value, others, product(shape))
        if not light or (rows == 1 and NARROW_CPU_COLUMNS.holds(width)):
            return ColumnPlan(together, width, 1)
        room = COLUMN_TERMS.value * min(target.registers, 32) // 32
        sums = rows * len(self.ops)
        terms = max(min(room // 3, room // sums), room // 6) if sums > 1 else room // 6
        extent = shape[reduced[-1]]
        even = (t for t in range(terms, terms // 2, -1) if isinstance(extent, int) and extent % t == 0)
        return ColumnPlan(together, width, next(even, terms))

    # --- an item ---

    def _item(self, block: list[Stmt], at: list[Dim], begin: Dim, end: Dim) -> None:
        b, e, c = self.b, self.e, self.last.symbol()
        lane = c - begin if begin != 0 else c
        accs = [
            {op: [Buffer(b.fresh("acc"), v.type.dtype, (self.plan.width,), "private") for v in op.results]
             for op in self.ops}
            for _ in self.beside
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

        def add(inner: list[Stmt], rows: Sequence[list[Dim]], column: Dim) -> None:
            """Add the terms of some rows to all accumulators, in one column."""
            e.enter(inner)
            for beside, each in zip(self.beside, accs, strict=True):
                for row in rows:
                    here = self._place([*at, *beside], row, column)
                    join_turned(b, e, here)
                    store_all(e, [(o, v, relocate(b, v, here)) for o, v in self.results if not b.anchors.is_row(v)])
                    for op in self.ops:
                        combine(b, e, op, each[op], operands_at(b, e, op, here), [], (column - begin,))

        def across(inner: list[Stmt], rows: Sequence[list[Dim]]) -> None:
            self._across(inner, at, (begin, end), rows, add)

        serial(self.middle[:-1], [], lambda inner, rows: self._terms(inner, rows, across), block)
        self._finish(block, at, lane, begin, end, accs)

    def _place(self, at: list[Dim], row: list[Dim], column: Dim | None = None) -> Index:
        """Return the anchor's index: in a row of the reduced axes, if one is passed, and in the column of the loop."""
        axes = [*self.outer, *self.together, *(self.middle if row else ()), self.last]
        column = self.last.symbol() if column is None else column
        return place(self.b.anchors.space, self.b.shape, axes, [*at, *row, column])

    def _across(
        self, block: list[Stmt], at: list[Dim], ends: tuple[Dim, Dim], rows: Sequence[list[Dim]],
        add: Callable[[list[Stmt], Sequence[list[Dim]], Dim], None],
    ) -> None:  # fmt: skip
        """Write the loop over the columns of an item, in strips of a cache line if later rows are prefetched."""
        name, (begin, end) = self.last.name, ends
        strip = FETCH_LINE.value // min((size_of(x.dtype) for x in self.streams), default=1)
        whole = (end - begin) // strip if self.streams else 0
        if self.streams:
            first = begin + sym("m", 0, whole) * strip
            body: list[Stmt] = []
            for row in rows:
                there = [*row[:-1], minimum(row[-1] + len(rows), self.middle[-1].extent - 1)]
                body += self.reads.ahead(self.streams, self._place([*at, *self.beside[0]], there, first))
            inside: list[Stmt] = []
            add(inside, rows, first + sym(name, 0, strip))
            block.append(For("m", 0, whole, (*dict.fromkeys(body), For(name, 0, strip, tuple(inside)))))
        if not self.streams or self.last.extent % strip != 0 or self.plan.width % strip:
            rest: list[Stmt] = []
            add(rest, rows, self.last.symbol())
            block.append(For(name, begin + whole * strip, end, tuple(rest)))

    def _terms(self, block: list[Stmt], rows: list[Dim], add: Callable[[list[Stmt], list[list[Dim]]], None]) -> None:
        """Write the loop over the last reduced axis, some terms at a time, and one over the remainder."""
        axis, terms = self.middle[-1], self.plan.terms
        some_at_a_time(block, axis.name, 0, axis.extent, terms, lambda inner, at: add(inner, [[*rows, k] for k in at]))

    def _finish(
        self, block: list[Stmt], at: list[Dim], lane: Dim, begin: Dim, end: Dim, accs: list[dict[Op, list[Buffer]]]
    ) -> None:
        """Store the results that depend on the accumulators."""
        b, e = self.b, self.e
        for beside, each in zip(self.beside, accs, strict=True):
            finish: list[Stmt] = []
            e.anchored.clear()
            e.enter(finish)
            for op in self.ops:
                for v, acc in zip(op.results, each[op], strict=True):
                    e.anchor(v, provide(Load(acc, (lane,))))
            here = self._place([*at, *beside], [])
            for out, v in self.results:
                if b.anchors.is_row(v):
                    index = relocate(b, v, here)
                    finish.append(Store(out, index, e.at(v, index)))
            block.append(For(self.last.name, begin, end, tuple(finish)))


COLUMN_ITEM_ELEMENTS = BlockSize(
    1 << 14,
    "elements per grid item of columns, at least",
    "some microseconds of one core",
)
UNKNOWN_COLUMNS = BlockSize(
    512,
    "columns per grid item, at most, where only a call knows their number",
    "long contiguous reads, and still items for several cores",
)


def _width(extent: Dim, most: int, others: Dim, elements: Dim) -> int:
    """Return the columns per item: long pieces of rows, but enough items with enough elements for all cores."""
    if not isinstance(extent, int):
        return min(most, UNKNOWN_COLUMNS.value)
    if most == REDUCED_COLUMNS.value:
        return min(extent, most)
    wanted = COLUMN_ITEMS.value if isinstance(others, Expr) else -(-COLUMN_ITEMS.value // max(others, 1))
    if isinstance(elements, int) and isinstance(others, int):
        wanted = min(wanted, elements // max(others, 1) // COLUMN_ITEM_ELEMENTS.value)
    chunks = max(-(-extent // most), min(wanted, extent // REDUCED_COLUMNS.value), 1)
    step = REDUCED_COLUMNS.value // 2
    return min(extent, -(-extent // chunks // step) * step)
