"""Regions with reductions: scalars per row, or a block of columns at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aotc.ir.dims import Dim, product
from aotc.ir.loop_ir import Alloc, Buffer, For, Kernel, Load, Scalar, Stmt, Store
from aotc.ir.opset import OPS
from aotc.ir.tensor_ir import Function, Op, Value
from aotc.lowering.analysis.cost import ITEM_ELEMENTS, REDUCED_COLUMNS, REPEATED_STAGE_WORK, ROW_SCRATCH, SHORT_ROW
from aotc.lowering.analysis.cost_work import LOAD_WORK
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.regions.elemental import Elements, provide
from aotc.lowering.regions.nests import NestAxis, addresses, grid_loop, make_axes, mergeable, place, serial, split_grid
from aotc.lowering.regions.region import RegionBuilder, combine, relocate, store_all
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of


def lower_reduction(function: Function, target: Target) -> Kernel:
    """Regions with reductions: scalars per row, or a block of columns at a time."""
    b = RegionBuilder(function, target)
    reduced = sorted(b.anchors.reduced or ())
    kept = [k for k, s in enumerate(b.anchors.space) if s != 0 and k not in reduced]
    if function.attrs["kind"] == "reduce" and kept and kept[-1] > max(reduced):
        return _lower_columns(b, kept, reduced)
    return Rows(b, kept, reduced).lower()


def _stages(b: RegionBuilder) -> list[list[Op]]:
    """Return the reductions by level, first level first."""
    levels: dict[int, list[Op]] = {}
    for op in b.function.body.ops:
        if op.name == "reduce" and op.results[0] in b.index and b.anchors.levels[op.results[0]] > 0:
            levels.setdefault(b.anchors.levels[op.results[0]], []).append(op)
    return [levels[n] for n in sorted(levels)]


def operands_at(b: RegionBuilder, e: Elements, op: Op, here: Index) -> list[Scalar]:
    """Return the elements that a reduction combines when the anchor is at ``here``."""
    at = b.anchors.move(b.anchors.reads[op], here)
    return [e.at(v, at) for v in op.inputs]


Accumulators = dict[Op, list[Buffer]]


@dataclass(frozen=True, slots=True)
class RowStage:
    """What one loop over a row does.

    Attributes
    ----------
    ops : list of Op
        The reductions that it computes.
    stores : list of (Buffer, Value)
        The results that it writes an element of at each step.
    keep : list of Value
        What it keeps for later loops.
    """

    ops: list[Op]
    stores: list[tuple[Buffer, Value]]
    keep: list[Value]


class Rows:
    """Rows in the grid; each stage is one loop over the reduced axes of a row."""

    def __init__(self, b: RegionBuilder, kept: list[int], reduced: list[int]) -> None:
        self.b, self.kept, self.reduced = b, kept, reduced
        self.stages = _stages(b)
        self.e = b.elements()
        self.scratch: dict[Value, Buffer] = {}
        results = b.function.body.results
        self.full = [(out, v) for out, v in zip(b.outputs, results, strict=True) if not b.anchors.is_row(v)]
        self.rows = [(out, v) for out, v in zip(b.outputs, results, strict=True) if b.anchors.is_row(v)]

    def lower(self) -> Kernel:
        b = self.b
        self.inner = self._inner_axes()
        self._choose_scratch()
        outer, tail = self._split(make_axes(b.shape, [(k,) for k in self.kept]))

        def item(block: list[Stmt], syms: list[Dim], begin: Dim, end: Dim) -> None:
            serial(
                tail, syms, lambda blk, s: self._row(blk, place(b.anchors.space, b.shape, [*outer, *tail], s)), block
            )

        grid, body = grid_loop(outer, None, item)
        return b.kernel(grid, body, b.cost())

    def _split(self, axes: list[NestAxis]) -> tuple[list[NestAxis], list[NestAxis]]:
        """Return the axes of the grid, and those of the rows of one item: several if a row is short."""
        work = product(a.extent for a in self.inner)
        if axes and isinstance(work, int) and SHORT_ROW.holds(work):
            return split_grid(axes, max(ITEM_ELEMENTS.value // max(work, 1), 1))
        return axes, []

    def _inner_axes(self) -> list[NestAxis]:
        """Merge the reduced axes as far as all addresses of the body allow."""
        b = self.b
        trial: list[Stmt] = []
        self.e.enter(trial)
        for op in (op for stage in self.stages for op in stage):
            for v in op.results:
                acc = Buffer("acc", v.type.dtype, (), "private")
                self.e.anchor(v, provide(Load(acc, ())))
        for op in (op for stage in self.stages for op in stage):
            for v in op.inputs:
                self.e.bind(self.e.at(v, b.anchors.reads[op]))
        for out, v in self.full:
            trial.append(Store(out, b.index[v], self.e.at(v, b.index[v])))
        self.e.anchored.clear()
        return make_axes(b.shape, mergeable(b.anchors.space, b.shape, self.reduced, addresses(trial)))

    def _stage_of(self, value: Value) -> int:
        return self.b.anchors.levels[value]

    def _cone(self, roots: list[Value]) -> dict[Value, None]:
        """Return the values of the row computed for ``roots``, not looking through reductions."""
        found: dict[Value, None] = {}
        stack = list(roots)
        while stack:
            v = stack.pop()
            op = self.b.ops.get(v)
            if v in found or op is None or (v in self.b.index and self.b.anchors.is_row(v)):
                continue
            found[v] = None
            stack += op.operands
        return found

    def _stage_roots(self) -> list[list[Value]]:
        roots = [[v for op in stage for v in op.inputs] for stage in self.stages]
        roots.append([])
        for _, v in self.full:
            roots[min(self._stage_of(v), len(self.stages))].append(v)
        return roots

    def _choose_scratch(self) -> None:
        """Keep for later stages what is dear to compute twice and fits beside the cache."""
        b = self.b
        size = product(a.extent for a in self.inner)
        if not isinstance(size, int):
            return
        cones = [self._cone(r) for r in self._stage_roots()]
        used = 0
        for n, later in enumerate(cones):
            for v in later:
                first = next(k for k, cone in enumerate(cones) if v in cone)
                op = b.ops[v]
                if first == n or v in self.scratch or v not in b.index or len(op.operands) == 0:
                    continue
                if b.index[v] != b.anchors.space or not self._frontier(v, later, cones[first]):
                    continue
                bytes_ = size * size_of(v.type.dtype)
                if self._dear(v) and ROW_SCRATCH.holds(used + bytes_) and used + bytes_ <= b.target.l2 // 2:
                    used += bytes_
                    self.scratch[v] = Buffer(b.fresh("row"), v.type.dtype, (size,), "scratch")

    def _frontier(self, value: Value, later: dict[Value, None], first: dict[Value, None]) -> bool:
        """Is ``value`` read in the later stage by something that the first stage lacks?"""
        readers = [v for v in later if value in self.b.ops[v].operands]
        return not readers or any(v not in first for v in readers)

    def _dear(self, value: Value) -> bool:
        cone = self._cone([value])
        ops = [self.b.ops[v] for v in cone]
        loads = len({u for op in ops for u in op.operands if u not in self.b.ops})
        work = sum(max(OPS[op.name].work, 1) for op in ops) + LOAD_WORK.value * loads
        return not REPEATED_STAGE_WORK.holds(work)

    def _loops_of_row(self) -> list[RowStage]:
        """Return the loops over a row in their order; a value is kept by the first of them that computes it."""
        loops: list[RowStage] = []
        kept: set[Value] = set()
        for n, (ops, roots) in enumerate(zip([*self.stages, []], self._stage_roots(), strict=True)):
            stores = [(out, v) for out, v in self.full if min(self._stage_of(v), len(self.stages)) == n]
            cone = self._cone(roots)
            keep = [v for v in self.scratch if v in cone and v not in kept]
            kept.update(keep)
            loops.append(RowStage(ops, stores, keep))
        return [loop for loop in loops if loop.ops or loop.stores]

    def _row(self, block: list[Stmt], at: Index) -> None:
        """Write all stages of one row."""
        self.e.anchored.clear()
        block += [Alloc(buffer) for buffer in self.scratch.values()]
        for stage in self._loops_of_row():
            accs = self._accumulators(stage.ops, block)
            self._over_the_row(block, at, stage, accs)
            for op in stage.ops:
                for v, acc in zip(op.results, accs[op], strict=True):
                    self.e.anchor(v, provide(Load(acc, ())))
        self.e.enter(block)
        for out, v in self.rows:
            index = relocate(self.b, v, at)
            block.append(Store(out, index, self.e.at(v, index)))

    def _accumulators(self, ops: list[Op], block: list[Stmt]) -> Accumulators:
        self.e.enter(block)
        accs: Accumulators = {}
        for op in ops:
            accs[op] = []
            for v, init in zip(op.results, op.inits, strict=True):
                acc = Buffer(self.b.fresh("acc"), v.type.dtype, (), "private")
                block += [Alloc(acc), Store(acc, (), self.e.at(init, ()))]
                accs[op].append(acc)
        return accs

    def _over_the_row(self, block: list[Stmt], at: Index, stage: RowStage, accs: Accumulators) -> None:
        """Write the loop of one stage; a target may share its steps out."""

        def emit(inner: list[Stmt], syms: list[Dim]) -> None:
            self.e.enter(inner)
            self._element(inner, place(at, self.b.shape, self.inner, syms), self._flat(syms), stage, accs)

        serial(self.inner, [], emit, block)

    def _element(self, block: list[Stmt], here: Index, flat: Dim, stage: RowStage, accs: Accumulators) -> None:
        """Write what a stage does at one place of the row, the element ``flat`` of what is kept of it."""
        for v in stage.keep:
            scalar = self.e.bind(self.e.at(v, here))
            block.append(Store(self.scratch[v], (flat,), scalar))
            self.e.anchored[v] = provide(scalar)
        store_all(self.e, [(out, v, relocate(self.b, v, here)) for out, v in stage.stores])
        for op in stage.ops:
            combine(self.b, self.e, op, accs[op], operands_at(self.b, self.e, op, here), [])
        for v in stage.keep:
            self.e.anchored[v] = self._from_scratch(v)

    def _from_scratch(self, value: Value) -> Callable[[Index], Scalar]:
        return lambda index: Load(self.scratch[value], (self._flat_of(index),))

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


def _lower_columns(b: RegionBuilder, kept: list[int], reduced: list[int]) -> Kernel:
    """Reduce leading axes: a block of columns accumulates while rows stream by."""
    e = b.elements()
    column = kept[-1]
    extent = b.shape[column]
    width = min(extent, REDUCED_COLUMNS.value) if isinstance(extent, int) else REDUCED_COLUMNS.value
    (last,) = make_axes(b.shape, [(column,)])
    outer = make_axes(b.shape, [(k,) for k in kept[:-1]])
    middle = make_axes(b.shape, [(k,) for k in reduced])
    (stage,) = _stages(b)
    results = list(zip(b.outputs, b.function.body.results, strict=True))

    def item(block: list[Stmt], syms: list[Dim], begin: Dim, end: Dim) -> None:
        accs = {op: [Buffer(b.fresh("acc"), v.type.dtype, (width,), "private") for v in op.results] for op in stage}
        c = last.symbol()
        lane = c - begin if begin != 0 else c
        e.anchored.clear()
        start: list[Stmt] = []
        e.enter(start)
        for op in stage:
            for acc, init in zip(accs[op], op.inits, strict=True):
                block.append(Alloc(acc))
                start.append(Store(acc, (lane,), e.at(init, ())))
        block.append(For(last.name, begin, end, tuple(start)))

        def accumulate(blk: list[Stmt], rows: list[Dim]) -> None:
            inside: list[Stmt] = []
            e.enter(inside)
            here = place(b.anchors.space, b.shape, [*outer, *middle, last], [*syms, *rows, c])
            store_all(e, [(out, v, relocate(b, v, here)) for out, v in results if not b.anchors.is_row(v)])
            for op in stage:
                combine(b, e, op, accs[op], operands_at(b, e, op, here), [], (lane,))
            blk.append(For(last.name, begin, end, tuple(inside)))

        serial(middle, [], accumulate, block)
        finish: list[Stmt] = []
        e.enter(finish)
        for op in stage:
            for v, acc in zip(op.results, accs[op], strict=True):
                e.anchor(v, provide(Load(acc, (lane,))))
        here = place(b.anchors.space, b.shape, [*outer, last], [*syms, c])
        for out, v in results:
            if b.anchors.is_row(v):
                index = relocate(b, v, here)
                finish.append(Store(out, index, e.at(v, index)))
        block.append(For(last.name, begin, end, tuple(finish)))

    if width == extent:
        grid, body = grid_loop(outer, None, lambda block, syms, begin, end: item(block, syms, 0, extent))
    else:
        grid, body = grid_loop(outer, (last, width), item)
    return b.kernel(grid, body, b.cost())
