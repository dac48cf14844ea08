"""Sums along rows on a CPU, some rows at a time: what they are multiplied with is read once for all of these.

A matrix times a vector, or a few of them; the loop over the row becomes vectors of each sum::

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
from itertools import product as product_of

from aotc.ir.dims import Dim, minimum, product, static, sym
from aotc.ir.loop_ir import Alloc, Buffer, Const, For, Kernel, Load, Stmt, Store
from aotc.ir.tensor_ir import Function
from aotc.lowering.analysis.costs.table_columns import (
    BLOCK_ROWS,
    COLUMN_ITEMS,
    COLUMN_TERMS,
    FETCHED_BYTES,
    FEW_BLOCK_ROWS,
    ROW_BLOCK_ELEMENTS,
    SHORT_BLOCK_ROW,
    UNFETCHED_COLUMNS,
)
from aotc.lowering.analysis.costs.work import UNKNOWN_TERMS
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.analysis.scan_windows import combiner
from aotc.lowering.regions.columns import lower_columns
from aotc.lowering.regions.elemental import provide
from aotc.lowering.regions.nests import grid_loop, make_axes, place, serial, some_at_a_time
from aotc.lowering.regions.reduction import Accumulators, Rows
from aotc.lowering.regions.region import RegionBuilder, combine, join_turned, operands_at, relocate
from aotc.lowering.regions.shared_axes import Reads, is_light
from aotc.lowering.regions.short_rows import ShortRows
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of


def lower_reduction(function: Function, target: Target) -> Kernel:
    """Lower a region with reductions for a CPU: scalars per row, or a block of rows or columns at a time."""
    b = RegionBuilder(function, target)
    reduced = sorted(b.anchors.reduced or ())
    kept = [k for k, s in enumerate(b.anchors.space) if s != 0 and k not in reduced]
    if function.attrs["kind"] == "reduce" and kept and kept[-1] > max(reduced):
        return lower_columns(b, kept, reduced)
    rows = _RowBlocks(b, kept, reduced)
    return rows.lower() if rows.block is not None else ShortRows(b, kept, reduced).lower()


class _RowBlocks(Rows):
    """A loop over rows of the axis ``block``, some at a time, each with all of the axes ``together``."""

    def __init__(self, b: RegionBuilder, kept: list[int], reduced: list[int]) -> None:
        super().__init__(b, kept, reduced)
        self.block: int | None = None
        if self.outs or len(self.stages.loops) != 1:
            return
        self.ops = self.stages.loops[0].ops
        self.length = product(b.shape[k] for k in reduced)
        if SHORT_BLOCK_ROW.holds(self.length) or not is_light(b, self.ops):
            return
        reads = self.reads = Reads(b, self.ops)
        self.together = reads.few(kept, reduced)
        large = [k for k in kept if k not in self.together and not FEW_BLOCK_ROWS.holds(b.shape[k])]
        few = static(product(b.shape[k] for k in self.together)) * len(self.ops)
        if few == 1 and reads.size < size_of("f32"):
            return  # one row of short floats at a time was faster: see block_rows
        room = COLUMN_TERMS.value * min(b.target.registers, 32) // 32
        self.at_once = max(min(BLOCK_ROWS.value, room // few), 1)
        self.block = next((k for k in reversed(large) if reads.share(k, reduced)), None)

    def lower(self) -> Kernel:
        b = self.b
        assert self.block is not None
        self.inner = self._inner_axes()
        self.streams = self._streams()
        self.outer = make_axes(b.shape, [(k,) for k in self.kept if k not in self.together and k != self.block])
        self.beside = make_axes(b.shape, [(k,) for k in self.together])
        (self.rows_axis,) = make_axes(b.shape, [(self.block,)])
        grid, body = grid_loop(self.outer, (self.rows_axis, self._rows_of_item()), self._item)
        return b.kernel(grid, body, b.cost())

    def _streams(self) -> list[Buffer]:
        """Return the operands that are fetched ahead of sums along rows, if vectors of these can be written."""
        few = static(product(self.b.shape[k] for k in self.together)) * len(self.ops)
        floats = all(combiner(op) == "add" and op.result.type.dtype in ("f32", "f64") for op in self.ops)
        short = isinstance(self.length, int) and self.length * self.reads.size <= FETCHED_BYTES.value
        if UNFETCHED_COLUMNS.holds(few) or short or not floats or len(self.inner) != 1:
            return []
        assert self.block is not None
        return self.reads.streams([*self.reduced, self.block])

    def _rows_of_item(self) -> int:
        """Return the rows of an item, a multiple of those that a loop takes: enough elements, and enough items."""
        length = self.length if isinstance(self.length, int) else UNKNOWN_TERMS.value
        rows = max(ROW_BLOCK_ELEMENTS.value // max(length, 1), self.at_once)
        extent, others = self.rows_axis.extent, product(a.extent for a in self.outer)
        if isinstance(extent, int) and isinstance(others, int):
            rows = min(rows, max(extent * others // COLUMN_ITEMS.value, self.at_once))
        return rows // self.at_once * self.at_once

    def _item(self, block: list[Stmt], at: list[Dim], begin: Dim, end: Dim) -> None:
        name = self.rows_axis.name
        some_at_a_time(block, name, begin, end - begin, self.at_once, lambda inner, rows: self._some(inner, at, rows))

    def _some(self, block: list[Stmt], at: list[Dim], rows: list[Dim]) -> None:
        """Write the loop over some rows at a time and what is stored of them."""
        b, e = self.b, self.e
        axes = [*self.outer, self.rows_axis, *self.beside]
        few = product_of(*(range(static(a.extent)) for a in self.beside))
        places = [place(b.anchors.space, b.shape, axes, [*at, row, *x]) for x in few for row in rows]
        e.anchored.clear()
        accs = [self._accumulators(self.ops, block) for _ in places]

        def emit(inner: list[Stmt], syms: list[Dim], sums: Sequence[Accumulators] = accs, lane: Index = ()) -> None:
            e.enter(inner)
            for there, each in zip(places, sums, strict=True):
                here = place(there, b.shape, self.inner, syms)
                join_turned(b, e, here)
                for op in self.ops:
                    combine(b, e, op, each[op], operands_at(b, e, op, here), [], lane)

        if self.streams:
            self._in_vectors(block, places, accs, emit)
        else:
            serial(self.inner, [], emit, block)
        for there, sums in zip(places, accs, strict=True):
            e.enter(block)
            for op in self.ops:
                for v, acc in zip(op.results, sums[op], strict=True):
                    e.anchor(v, provide(Load(acc, ())))
            for out, v in self.rows:
                index = relocate(b, v, there)
                block.append(Store(out, index, e.at(v, index)))

    def _in_vectors(
        self, block: list[Stmt], places: Sequence[Index], accs: Sequence[Accumulators], emit: Callable[..., None]
    ) -> None:
        """Write the loop along the rows with a vector of sums for each sum, while what comes later is fetched."""
        b, (axis,) = self.b, self.inner
        lanes = b.target.vector_bytes // max(size_of(v.type.dtype) for op in self.ops for v in op.results)
        vectors: list[Accumulators] = [
            {op: [Buffer(b.fresh("sums"), v.type.dtype, (lanes,), "private") for v in op.results] for op in self.ops}
            for _ in places
        ]
        pairs = [(v, a) for x, y in zip(vectors, accs) for op in self.ops for v, a in zip(x[op], y[op])]
        lane, whole = sym("l", 0, lanes), axis.extent // lanes
        first = sym(axis.name, 0, whole) * lanes
        block += [Alloc(v) for v, _ in pairs]
        block.append(For("l", 0, lanes, tuple(Store(v, (lane,), Const(-0.0, v.dtype)) for v, _ in pairs)))
        step: list[Stmt] = []
        ahead = minimum(first + FETCHED_BYTES.value // self.reads.size, axis.extent - 1)
        for there in places:
            step += self.reads.ahead(self.streams, place(there, b.shape, self.inner, [ahead]))
        inside: list[Stmt] = []
        emit(inside, [first + lane], vectors, (lane,))
        block.append(For(axis.name, 0, whole, (*dict.fromkeys(step), For("l", 0, lanes, tuple(inside)))))
        if axis.extent % lanes != 0:
            rest: list[Stmt] = []
            emit(rest, [axis.symbol()])
            block.append(For(axis.name, whole * lanes, axis.extent, tuple(rest)))
        block.append(For("l", 0, lanes, tuple(Store(a, (), Load(v, (lane,)), "add") for v, a in pairs)))
