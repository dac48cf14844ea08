"""Reductions along rows: some scalars for each row."""

from __future__ import annotations

from collections.abc import Sequence

from aotc.ir.dims.algebra import Dim, product
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Kernel, Load, Scalar, Space, Stmt, Store, Var
from aotc.ir.opset import ELEMENTWISE
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.cost_model.row_stages import RowLoop
from aotc.lowering.elements.builder import RegionBuilder, combine, join_turned, operands_at, relocate, store_all
from aotc.lowering.elements.elements import Provide, provide
from aotc.lowering.elements.nests import (
    NestAxis,
    addresses,
    grid_loop,
    make_axes,
    mergeable,
    place,
    serial,
    split_grid,
)
from aotc.lowering.plans.cpu_transpose import loads_of
from aotc.lowering.plans.region_work import kept_values
from aotc.lowering.plans.thresholds import ITEM_ELEMENTS
from aotc.lowering.threshold import Limit

Accumulators = dict[Op, list[Buffer]]


SHORT_ROW = Limit(
    63,
    "elements of a reduced row, up to which a grid item takes several rows",
    "claiming an item would cost more than reducing one row",
)


class Rows:
    """Rows in the grid; each stage is one loop over the reduced axes of a row."""

    unroll: Limit | None = None  # loops over reduced axes that are unrolled

    def __init__(self, b: RegionBuilder, kept: list[int], reduced: list[int]) -> None:
        self.b, self.kept, self.reduced = b, kept, reduced
        self.e = b.elements()
        self.scratch: dict[Value, Buffer] = {}
        self.replaced: dict[Value, Value] = {}  # for values stored in the place of a result: that result
        self.part: Index = ()  # index of the accumulators for the current steps
        results = b.function.body.results
        self.outs = {v: out for out, v in zip(b.outputs, results, strict=True) if not b.anchors.is_row(v)}
        self.rows = [(out, v) for out, v in zip(b.outputs, results, strict=True) if b.anchors.is_row(v)]
        self.stages = b.row_stages()
        self.known: dict[Value, tuple[Index, Scalar]] = {}

    def lower(self) -> Kernel:
        b = self.b
        self.inner = self._inner_axes()
        self._keep_for_later("private" if self.unroll else "scratch")
        outer, tail = self._split(make_axes(b.shape, [(k,) for k in self.kept]))
        grid, body = grid_loop(outer, None, lambda block, syms, begin, end: self._item_of(block, outer, tail, syms))
        return b.kernel(grid, body, b.cost())

    def _item_of(self, block: list[Stmt], outer: list[NestAxis], tail: list[NestAxis], syms: list[Dim]) -> None:
        """Write the rows of one item: all along the axes ``tail``."""
        b, axes = self.b, [*outer, *tail]
        serial(tail, syms, lambda inner, s: self._row(inner, place(b.anchors.space, b.shape, axes, s)), block)

    def _split(self, axes: list[NestAxis]) -> tuple[list[NestAxis], list[NestAxis]]:
        """Return the axes of the grid, and those of the rows of one item: several rows if a row is short."""
        work = product(a.extent for a in self.inner)
        if axes and isinstance(work, int) and SHORT_ROW.holds(work):
            return split_grid(axes, max(ITEM_ELEMENTS.value // max(work, 1), 1))
        return axes, []

    def _inner_axes(self) -> list[NestAxis]:
        """Merge the reduced axes as far as all addresses of the body allow."""
        b = self.b
        trial: list[Stmt] = []
        self.e.enter(trial)
        reductions = [op for loop in self.stages.loops for op in loop.ops]
        for op in reductions:
            for v in op.results:
                acc = Buffer("acc", v.type.dtype, (), "private")
                self.e.anchor(v, provide(Load(acc, ())))
        for op in reductions:
            for v in op.inputs:
                self.e.bind(self.e.at(v, b.anchors.reads[op]))
        for v, out in self.outs.items():
            trial.append(Store(out, b.index[v], self.e.at(v, b.index[v])))
        self.e.anchored.clear()
        self.loads = loads_of(trial)
        return make_axes(b.shape, mergeable(b.anchors.space, b.shape, self.reduced, addresses(trial)))

    def _keep_for_later(self, space: Space) -> None:
        """Allocate buffers for values that their first loop stores for later loops."""
        b = self.b
        for v in kept_values(self.stages, b.target):
            result = self._last_reader(v) if space == "scratch" and b.target.kind == "cpu" else None
            if result is None:
                self.scratch[v] = Buffer(b.fresh("row"), v.type.dtype, (self.stages.elements,), space)
            else:
                self.scratch[v], self.replaced[v] = self.outs[result], result

    def _last_reader(self, kept: Value) -> Value | None:
        """Return the result that is stored, alone, by the last loop that reads a stored value of the same size.

        The value may occupy the place of that result meanwhile; the nearest cache then holds only a row and its result.
        """
        b, last = self.b, self.stages.loops[-1]
        if last.ops or len(last.stores) != 1:
            return None
        (result,) = last.stores
        between = self.stages.cone(last.stores, (kept,))
        moved = [v for v in between if b.ops[v].name not in ELEMENTWISE and {kept, *between} & {*b.ops[v].operands}]
        fits = result.type.dtype == kept.type.dtype and b.index[result] == b.anchors.space
        return result if fits and not moved and result not in (kept, *self.replaced.values()) else None

    def _row(self, block: list[Stmt], at: Index) -> None:
        """Write all stages of one row."""
        self.e.anchored.clear()
        block += [Alloc(buffer) for v, buffer in self.scratch.items() if v not in self.replaced]
        kept: set[Value] = set()
        self.known = {}
        for loop in self.stages.loops:
            accs = self._accumulators(loop.ops, block)
            self.keep = [v for v in self.scratch if v in loop.cone and v not in kept]
            self._compute_numbers(block, at, self.stages.numbers_before(loop, kept))
            kept.update(self.keep)
            self._over_the_row(block, at, loop, accs)
            for op in loop.ops:
                for v, acc in zip(op.results, accs[op], strict=True):
                    self.e.anchor(v, provide(Load(acc, ())))
        self._enter(block)
        for out, v in self.rows:
            index = relocate(self.b, v, at)
            block.append(Store(out, index, self.e.at(v, index)))

    def _enter(self, block: list[Stmt]) -> None:
        """Continue in a block in which the row's scalars computed so far are known."""
        self.e.enter(block)
        for v, (index, scalar) in self.known.items():
            self.e.keep(v, index, scalar)

    def _compute_numbers(self, block: list[Stmt], at: Index, values: Sequence[Value]) -> None:
        """Compute, before a loop, values that are constant in it."""
        self._enter(block)
        for v in values:
            index = relocate(self.b, v, at)
            scalar = self.e.at(v, index)
            if isinstance(scalar, Apply | Var):
                self.known[v] = index, self.e.bind(scalar) if isinstance(scalar, Apply) else scalar
                self.e.keep(v, *self.known[v])

    def _accumulators(self, ops: Sequence[Op], block: list[Stmt]) -> Accumulators:
        self._enter(block)
        accs: Accumulators = {}
        for op in ops:
            accs[op] = []
            for v, init in zip(op.results, op.inits, strict=True):
                acc = Buffer(self.b.fresh("acc"), v.type.dtype, (), "private")
                block += [Alloc(acc), Store(acc, (), self.e.at(init, ()))]
                accs[op].append(acc)
        return accs

    def _over_the_row(self, block: list[Stmt], at: Index, loop: RowLoop, accs: Accumulators) -> None:
        """Write the loop of one stage; a target may distribute its steps."""

        def emit(inner: list[Stmt], syms: list[Dim]) -> None:
            self._enter(inner)
            self._element(inner, place(at, self.b.shape, self.inner, syms), self._flat(syms), loop, accs)

        serial(self.inner, [], emit, block, self.unroll)

    def _element(self, block: list[Stmt], here: Index, flat: Dim, loop: RowLoop, accs: Accumulators) -> None:
        """Write one step of a stage, at element ``flat`` of the row's stored values."""
        join_turned(self.b, self.e, here)
        for v in self.keep:
            self.e.anchored.pop(v, None)  # another part of this loop, written before, stores it as well
            scalar = self.e.at(v, here)
            scalar = scalar if isinstance(scalar, Var) else self.e.bind(scalar)
            place = self._replaced_at(v, here) if v in self.replaced else self._kept_at(flat)
            block.append(Store(self.scratch[v], place, scalar))
            self.e.anchored[v] = provide(scalar, here)
        store_all(self.e, [(self.outs[v], v, relocate(self.b, v, here)) for v in loop.stores])
        for op in loop.ops:
            combine(self.b, self.e, op, accs[op], operands_at(self.b, self.e, op, here), [], self.part)
        for v in self.keep:
            self.e.anchored[v] = self._from_scratch(v, here)

    def _replaced_at(self, kept: Value, here: Index) -> Index:
        return relocate(self.b, self.replaced[kept], here)

    def _kept_at(self, flat: Dim) -> Index:
        """Return the index at which element ``flat`` of a row is stored."""
        return (flat,)

    def _from_scratch(self, value: Value, here: Index) -> Provide:
        """Return a function that loads stored elements of the row of ``here``; it returns None for other rows."""

        def load(index: Index) -> Scalar | None:
            kept = all(index[k] == here[k] for k in range(len(here)) if k not in self.reduced)
            place = self._replaced_at(value, index) if value in self.replaced else (self._flat_of(index),)
            return Load(self.scratch[value], place) if kept else None

        return load

    def _flat(self, syms: list[Dim]) -> Dim:
        flat: Dim = 0
        for axis, s in zip(self.inner, syms, strict=True):
            flat = flat * axis.extent + s
        return flat

    def _flat_of(self, index: Index) -> Dim:
        flat: Dim = 0
        for k in self.reduced:
            flat = flat * self.b.shape[k] + index[k]
        return flat
