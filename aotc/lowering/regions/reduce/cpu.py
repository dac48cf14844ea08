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
from aotc.ir.tensor.ir import Function
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.analysis.prefix_scans import combiner
from aotc.lowering.cost_model.work import UNKNOWN_TERMS
from aotc.lowering.elements.builder import RegionBuilder, combine, join_turned, operands_at, relocate
from aotc.lowering.elements.elements import provide
from aotc.lowering.elements.nests import grid_loop, make_axes, place, serial, some_at_a_time
from aotc.lowering.plans.operand_reuse import Reads, is_light
from aotc.lowering.plans.thresholds import COLUMN_ITEMS, COLUMN_TERMS, FETCH_LINE
from aotc.lowering.regions.reduce.cpu_columns import lower_columns
from aotc.lowering.regions.reduce.cpu_short_rows import ShortRows
from aotc.lowering.regions.reduce.cpu_transposed_rows import TurnedRows
from aotc.lowering.regions.reduce.rows import Accumulators, Rows
from aotc.lowering.threshold import BlockSize, Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of


def lower_reduction(function: Function, target: Target) -> Kernel:
    """Lower a region with reductions for a CPU: row by row, or a block of rows or columns at a time."""
    b = RegionBuilder(function, target)
    reduced = sorted(b.anchors.reduced or ())
    kept = [k for k, s in enumerate(b.anchors.space) if s != 0 and k not in reduced]
    turned = _lower_turned(b, kept, reduced) if any(op.name == "transpose" for op in function.body.ops) else None
    if turned is not None:
        return turned
    if function.attrs["kind"] == "reduce" and kept and kept[-1] > max(reduced):
        return lower_columns(b, kept, reduced)
    return _lower_rows(b, kept, reduced)


def _lower_rows(b: RegionBuilder, kept: list[int], reduced: list[int]) -> Kernel:
    rows = _RowBlocks(b, kept, reduced)
    return rows.lower() if rows.block is not None else ShortRows(b, kept, reduced).lower()


def _lower_turned(b: RegionBuilder, kept: list[int], reduced: list[int]) -> Kernel | None:
    """Reduce along the contiguous axis of the operands, whatever the order of axes, or transpose some rows first."""
    near = _nearest(b, kept)
    if near in kept:
        return lower_columns(b, _ending_with(near, kept), reduced)
    if near is not None:
        return _lower_rows(b, kept, _ending_with(near, reduced))
    if kept and kept[-1] > max(reduced):
        return None
    rows = TurnedRows(b, kept, reduced)
    return rows.lower() if rows.height else None


def _nearest(b: RegionBuilder, kept: Sequence[int]) -> int | None:
    """Return the contiguous axis of the reads, if the region has a single loop over its rows.

    A kept axis also qualifies for reductions without a plain combiner, such as ``argmax``: these go by columns.
    """
    loops = b.row_stages().loops
    near = Reads(b, loops[0].ops).nearest() if len(loops) == 1 and not loops[0].stores else None
    return near if near in kept or all(map(combiner, loops[0].ops)) else None


def _ending_with(axis: int | None, axes: Sequence[int]) -> list[int]:
    return sorted(axes, key=lambda k: k == axis)


BLOCK_ROWS = BlockSize(
    4,
    "rows reduced at a time with the operand that they share",
    "Zen 5, 4096 x 4096, with 1, 2, 4, 8 rows at a time: times 1 column 2.19, 1.85, 1.73, 1.95 ms; times 4 columns "
    "16, 20, 29 GB/s; bf16 times 1 column 0.92, 1.61, 1.42 ms",
)
FEW_BLOCK_ROWS = Limit(3, "rows that are reduced one by one", "fewer than BLOCK_ROWS")
SHORT_BLOCK_ROW = Limit(
    63,
    "elements of a row, up to which rows are reduced one by one",
    "Zen 5, one core, time in blocks relative to one by one: 1000 rows of 64 to 100 elements times a column 0.64, in "
    "batches 0.74 to 0.97",
)
ROW_BLOCK_ELEMENTS = BlockSize(
    1 << 15,
    "elements of the rows of a grid item that reduces them in blocks",
    "some microseconds of one core",
)
UNFETCHED_COLUMNS = Limit(
    2,
    "columns multiplied with a matrix, up to which its rows are not prefetched",
    "Zen 5, one core, 4096 x 4096, ms without and with prefetch: 1 column (in C) 1.38 and 1.71, 2 columns 1.91 and "
    "1.83, 8 columns 4.3 and 3.7",
)
FETCHED_BYTES = BlockSize(
    2048,
    "prefetch distance in bytes along the rows of a matrix that is multiplied with some columns",
    "Zen 5, one core, 4096 x 4096 times 8 columns, ms: distance 512 3.89, 1024 3.70, 2048 3.73, 4096 3.74, none 4.25",
)
WHOLE_COLUMNS = Limit(
    4,
    "columns multiplied with a matrix, up to which its rows are reduced whole, not in parts",
    "one core of a busy Zen 5, time in parts relative to whole rows: 4096 x 4096 times 3 columns 1.05, 4 columns "
    "1.03, 8 columns 0.81; 2048 x 2048 times 5 columns 0.80",
)
PART_BYTES = BlockSize(
    2048,
    "bytes of a part of a row",
    "Zen 5, one core, in C, 4096 x 4096 times 8 columns, ms: parts of 1024 bytes 1.94, 2048 1.67, 4096 1.86, whole "
    "rows 3.3",
)
PART_ROWS = BlockSize(
    96,
    "rows per grid item, at least, where rows are reduced in parts",
    "as PART_BYTES: 24 rows 1.78 ms, 96 rows 1.67 ms; their sums are 48 KiB with 8 columns",
)
FETCHED_TURNS = BlockSize(
    1,
    "blocks of rows between the prefetch of a part and its reduction",
    "as PART_BYTES, on a busy core, throughput relative to a plain read: 0 blocks 0.47, 1 block 0.75, 2 blocks 0.64",
)


class _RowBlocks(Rows):
    """A loop over rows of the axis ``block``, several at a time, each with all steps of the axes ``together``."""

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
        few = self._sums_of_row()
        if few == 1 and reads.size < size_of("f32"):
            return  # one row of short floats at a time is faster
        room = COLUMN_TERMS.value * min(b.target.registers, 32) // 32
        self.at_once = max(min(BLOCK_ROWS.value, room // few), 1)
        self.block = next((k for k in reversed(large) if reads.share(k, reduced)), None)

    def lower(self) -> Kernel:
        b = self.b
        assert self.block is not None
        self.inner = self._inner_axes()
        self.streams = self._streams()
        self.parts = bool(self.streams) and not WHOLE_COLUMNS.holds(self._sums_of_row())
        self.lanes = b.target.vector_bytes // max(size_of(v.type.dtype) for op in self.ops for v in op.results)
        self.outer = make_axes(b.shape, [(k,) for k in self.kept if k not in self.together and k != self.block])
        self.beside = make_axes(b.shape, [(k,) for k in self.together])
        (self.rows_axis,) = make_axes(b.shape, [(self.block,)])
        grid, body = grid_loop(self.outer, (self.rows_axis, self._rows_of_item()), self._item)
        return b.kernel(grid, body, b.cost())

    def _sums_of_row(self) -> int:
        return static(product(self.b.shape[k] for k in self.together)) * len(self.ops)

    def _streams(self) -> list[Buffer]:
        """Return the operands to prefetch during sums along rows, if these can be written as vectors."""
        floats = all(combiner(op) == "add" and op.result.type.dtype in ("f32", "f64") for op in self.ops)
        short = isinstance(self.length, int) and self.length * self.reads.size <= FETCHED_BYTES.value
        if UNFETCHED_COLUMNS.holds(self._sums_of_row()) or short or not floats or len(self.inner) != 1:
            return []
        assert self.block is not None
        return self.reads.streams([*self.reduced, self.block])

    def _rows_of_item(self) -> int:
        """Return the rows per item, a multiple of the rows at a time: enough elements, and enough items."""
        length = self.length if isinstance(self.length, int) else UNKNOWN_TERMS.value
        rows = max(ROW_BLOCK_ELEMENTS.value // max(length, 1), PART_ROWS.value if self.parts else self.at_once)
        extent, others = self.rows_axis.extent, product(a.extent for a in self.outer)
        if isinstance(extent, int) and isinstance(others, int):
            rows = min(rows, max(extent * others // COLUMN_ITEMS.value, self.at_once))
        return max(rows // self.at_once, 1) * self.at_once

    def _item(self, block: list[Stmt], at: list[Dim], begin: Dim, end: Dim) -> None:
        if self.parts:
            self._in_parts(block, at, begin, end)
            return
        self._some_rows(block, begin, end, lambda inner, rows: self._some(inner, at, rows))

    def _some_rows(
        self, block: list[Stmt], begin: Dim, end: Dim, emit: Callable[[list[Stmt], list[Dim]], None]
    ) -> None:
        some_at_a_time(block, self.rows_axis.name, begin, end - begin, self.at_once, emit)

    def _places(self, at: list[Dim], rows: list[Dim]) -> list[tuple[int, int, Index]]:
        """Return, for each sum, the number of its row, the number of its shared operand, and the anchor's index."""
        axes = [*self.outer, self.rows_axis, *self.beside]
        return [
            (i, c, place(self.b.anchors.space, self.b.shape, axes, [*at, row, *x]))
            for c, x in enumerate(product_of(*(range(static(a.extent)) for a in self.beside)))
            for i, row in enumerate(rows)
        ]

    def _some(self, block: list[Stmt], at: list[Dim], rows: list[Dim]) -> None:
        """Write the loop over some rows at a time, and the stores of their results."""
        places = [there for _, _, there in self._places(at, rows)]
        self.e.anchored.clear()
        accs = [self._accumulators(self.ops, block) for _ in places]

        def emit(inner: list[Stmt], syms: list[Dim]) -> None:
            self.e.enter(inner)
            for there, each in zip(places, accs, strict=True):
                self._add(there, syms, each)

        if self.streams:
            self._in_vectors(block, places, accs)
        else:
            serial(self.inner, [], emit, block)
        self._store(block, places, accs)

    def _vectors(self, block: list[Stmt], places: Sequence[object]) -> list[Accumulators]:
        """Allocate a vector for each sum of the rows at ``places``."""
        b = self.b
        vectors: list[Accumulators] = [
            {o: [Buffer(b.fresh("sums"), v.type.dtype, (self.lanes,), "private") for v in o.results] for o in self.ops}
            for _ in places
        ]
        block += [Alloc(x) for each in vectors for op in self.ops for x in each[op]]
        return vectors

    def _in_vectors(self, block: list[Stmt], places: Sequence[Index], accs: Sequence[Accumulators]) -> None:
        """Write the loop along the rows with a vector for each sum, and prefetch later elements."""
        b, (axis,) = self.b, self.inner
        vectors = self._vectors(block, places)
        pairs = [(v, a) for x, y in zip(vectors, accs) for op in self.ops for v, a in zip(x[op], y[op])]
        lane, whole = sym("l", 0, self.lanes), axis.extent // self.lanes
        first = sym(axis.name, 0, whole) * self.lanes
        block.append(For("l", 0, self.lanes, tuple(Store(v, (lane,), Const(-0.0, v.dtype)) for v, _ in pairs)))
        step: list[Stmt] = []
        ahead = minimum(first + FETCHED_BYTES.value // self.reads.size, axis.extent - 1)
        for there in places:
            step += self.reads.ahead(self.streams, place(there, b.shape, self.inner, [ahead]))
        inside: list[Stmt] = []
        self.e.enter(inside)
        for there, sums in zip(places, vectors, strict=True):
            self._add(there, [first + lane], sums, (lane,))
        block.append(For(axis.name, 0, whole, (*dict.fromkeys(step), For("l", 0, self.lanes, tuple(inside)))))
        self._rest(block, places, accs)
        block.append(For("l", 0, self.lanes, tuple(Store(a, (), Load(v, (lane,)), "add") for v, a in pairs)))

    def _rest(self, block: list[Stmt], places: Sequence[Index], accs: Sequence[Accumulators]) -> None:
        """Add the elements of rows after the last whole vector."""
        (axis,) = self.inner
        if axis.extent % self.lanes == 0:
            return
        rest: list[Stmt] = []
        self.e.enter(rest)
        for there, each in zip(places, accs, strict=True):
            self._add(there, [axis.symbol()], each)
        block.append(For(axis.name, axis.extent // self.lanes * self.lanes, axis.extent, tuple(rest)))

    def _add(self, there: Index, syms: list[Dim], accs: Accumulators, lane: Index = ()) -> None:
        """Write one step of the sums of a row in the current block."""
        b, e = self.b, self.e
        here = place(there, b.shape, self.inner, syms)
        join_turned(b, e, here)
        for op in self.ops:
            combine(b, e, op, accs[op], operands_at(b, e, op, here), [], lane)

    def _store(self, block: list[Stmt], places: Sequence[Index], accs: Sequence[Accumulators]) -> None:
        """Write the stores of rows whose sums are complete."""
        b, e = self.b, self.e
        for there, sums in zip(places, accs, strict=True):
            e.enter(block)
            for op in self.ops:
                for v, acc in zip(op.results, sums[op], strict=True):
                    e.anchor(v, provide(Load(acc, ())))
            for out, v in self.rows:
                index = relocate(b, v, there)
                block.append(Store(out, index, e.at(v, index)))

    # --- in parts ---

    def _in_parts(self, block: list[Stmt], at: list[Dim], begin: Dim, end: Dim) -> None:
        """Write the sums of an item in parts: each part of all its rows, with a vector for each sum.

        The shared operand is copied for each part, so that it stays in the L1 cache, whatever its length and layout.
        """
        b, (axis,) = self.b, self.inner
        results = [v for op in self.ops for v in op.results]
        few = static(product(a.extent for a in self.beside))
        shape = (self._rows_of_item() * few, self.lanes)
        self.sums = {v: Buffer(b.fresh("sums"), v.type.dtype, shape, "scratch") for v in results}
        per = PART_BYTES.value // self.reads.size // self.lanes
        pitch = per * self.lanes + FETCH_LINE.value // self.reads.size
        near = [x.buffer for x in self.reads.beside(self.block, self.reduced)]
        self.near = {x: Buffer(b.fresh("near"), x.dtype, (few, pitch), "scratch") for x in near}
        block += [Alloc(x) for x in (*self.sums.values(), *self.near.values())]
        r, lane = sym("r", 0, shape[0]), sym("l", 0, self.lanes)
        zeros = tuple(Store(x, (r, lane), Const(-0.0, x.dtype)) for x in self.sums.values())
        block.append(For("r", 0, (end - begin) * few, (For("l", 0, self.lanes, zeros),)))
        whole = axis.extent // self.lanes
        parts = -(-whole // per)
        part = sym("m", 0, parts) * per
        count = minimum(per, whole - part)
        body = self._copies(at, begin, part * self.lanes, count * self.lanes)
        self._some_rows(
            body, begin, end, lambda inner, rows: self._part(inner, at, begin, rows, part * self.lanes, count)
        )
        block.append(For("m", 0, parts, tuple(body)))
        self._some_rows(block, begin, end, lambda inner, rows: self._total(inner, at, begin, rows))

    def _copies(self, at: list[Dim], row: Dim, first: Dim, count: Dim) -> list[Stmt]:
        """Return the copies of a part of the shared operands."""
        body: list[Stmt] = []
        step = sym("l", 0, count)
        for _, c, there in self._places(at, [row]):
            loads = self.reads.at(place(there, self.b.shape, self.inner, [first + step]))
            stores = [Store(self.near[x.buffer], (c, step), x) for x in loads if x.buffer in self.near]
            body += [For("l", 0, count, (store,)) for store in dict.fromkeys(stores)]
        return body

    def _part(self, block: list[Stmt], at: list[Dim], begin: Dim, rows: list[Dim], first: Dim, count: Dim) -> None:
        """Write the loop along a part of some rows, and prefetch the same part of later rows."""
        b, (axis,) = self.b, self.inner
        places = self._places(at, rows)
        vectors = self._vectors(block, places)
        lane, step = sym("l", 0, self.lanes), sym(axis.name, 0, count) * self.lanes
        loads, stores = self._moves(places, rows, begin, vectors, lane)
        block.append(For("l", 0, self.lanes, tuple(loads)))
        last = self.rows_axis.extent - 1
        later = [minimum(row + FETCHED_TURNS.value * len(rows), last) for row in rows]
        ahead: list[Stmt] = []
        for _, _, there in self._places(at, later):
            ahead += self.reads.ahead(self.streams, place(there, b.shape, self.inner, [first + step]))
        inside: list[Stmt] = []
        self.e.anchored.clear()
        self.e.enter(inside)
        for (_, c, there), sums in zip(places, vectors, strict=True):
            done = len(inside)
            self._add(there, [first + step + lane], sums, (lane,))
            inside[done:] = with_scalars(tuple(inside[done:]), partial(self._nearer, index=(c, step + lane)))
        block.append(For(axis.name, 0, count, (*dict.fromkeys(ahead), For("l", 0, self.lanes, tuple(inside)))))
        block.append(For("l", 0, self.lanes, tuple(stores)))

    def _nearer(self, s: Scalar, index: Index) -> Scalar:
        """Return ``s`` with loads of copies substituted for those of the shared operands."""
        match s:
            case Load(buffer=buffer) if buffer in self.near:
                return Load(self.near[buffer], index)
            case Apply(args=args):
                return replace(s, args=tuple(self._nearer(x, index) for x in args))
        return s

    def _moves(
        self, places: Sequence[tuple[int, int, Index]], rows: list[Dim], begin: Dim, vectors: Sequence[Accumulators],
        lane: Dim,
    ) -> tuple[list[Stmt], list[Stmt]]:  # fmt: skip
        """Return the loads of some rows' sums into vectors, and the stores of these."""
        few = len(places) // len(rows)
        loads: list[Stmt] = []
        stores: list[Stmt] = []
        for (i, c, _), each in zip(places, vectors, strict=True):
            for op in self.ops:
                for v, x in zip(op.results, each[op], strict=True):
                    kept = self.sums[v], ((rows[i] - begin) * few + c, lane)
                    loads.append(Store(x, (lane,), Load(*kept)))
                    stores.append(Store(*kept, Load(x, (lane,))))
        return loads, stores

    def _total(self, block: list[Stmt], at: list[Dim], begin: Dim, rows: list[Dim]) -> None:
        """Add up the lanes of the vectors and the remaining elements of the rows; store the results."""
        places = self._places(at, rows)
        theres = [there for _, _, there in places]
        self.e.anchored.clear()
        accs = [self._accumulators(self.ops, block) for _ in places]
        self._rest(block, theres, accs)
        lane = sym("l", 0, self.lanes)
        few = len(places) // len(rows)
        lanes = [
            Store(acc, (), Load(self.sums[v], ((rows[i] - begin) * few + c, lane)), "add")
            for (i, c, _), each in zip(places, accs, strict=True)
            for op in self.ops
            for v, acc in zip(op.results, each[op], strict=True)
        ]
        block.append(For("l", 0, self.lanes, tuple(lanes)))
        self._store(block, theres, accs)
