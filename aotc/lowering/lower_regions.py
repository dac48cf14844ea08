"""Fused regions of kind loop, window, row and reduce become loop-IR kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count, pairwise

from aotc.frontend.dims import Dim, Expr, maximum, minimum, product, substitute, sym, symbols
from aotc.frontend.tensor_ir import Function, Op, Value
from aotc.lowering.anchors import Anchors
from aotc.lowering.elemental import Elements, provide, test_index
from aotc.lowering.fuse import EXPENSIVE
from aotc.lowering.index_maps import Index
from aotc.lowering.loop_ir import (
    Alloc,
    Apply,
    Buffer,
    Const,
    For,
    If,
    Kernel,
    Let,
    Load,
    Scalar,
    Stmt,
    Store,
    Var,
    walk,
)
from aotc.lowering.nests import (
    Axis,
    addresses,
    coefficient,
    grid_loop,
    make_axes,
    mergeable,
    place,
    serial,
    split_grid,
)
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of

ITEM_WORK = 1024
CHUNK = 4096
SCRATCH_LIMIT = 1 << 18
COLUMN_BLOCK = 128
SEGMENT_LIMIT = 9


class RegionBuilder:
    """What all region kinds share: buffers, names, the ops and their anchors.

    Attributes
    ----------
    function : Function
        The outlined region.
    inputs, outputs : tuple of Buffer
        One per parameter and per result.
    anchors : Anchors
        The index maps from the region's anchor, extended over all its ops.
    """

    def __init__(self, function: Function, target: Target, skip: int = 0) -> None:
        self.function, self.target = function, target
        body = function.body
        self.ops: dict[Value, Op] = {v: op for op in body.ops for v in op.results}
        named = [Buffer(f"a{n}", v.type.dtype, v.type.shape) for n, v in enumerate(body.params)]
        self.inputs = tuple(named[skip:])
        self.outputs = tuple(Buffer(f"o{n}", v.type.dtype, v.type.shape) for n, v in enumerate(body.results))
        self.buffers = dict(zip(body.params[skip:], self.inputs, strict=True))
        self._count = count()
        if function.attrs["kind"] in ("single", "update"):
            self.shape = body.results[0].type.shape
            return
        anchor = next(v for v in [*self.ops, *body.params] if v.name == function.attrs["anchor"])
        self.anchors = Anchors(anchor, self.ops)
        self.shape = anchor.type.shape
        members = frozenset(body.ops)
        self._settle(members)
        self.index = {v: i for v in self.ops if (i := self.anchors.index.get(v)) is not None}

    def _settle(self, members: frozenset[Op]) -> None:
        anchors = self.anchors
        for op in self.function.body.ops:
            if op.name == "reduce" and op.operands[0] not in self.ops and op.operands[0] is not anchors.anchor:
                for v in op.operands[: len(op.operands) // 2]:
                    if v.type.shape == self.shape:
                        anchors.index[v], anchors.levels[v] = anchors.space, 0
            if op.results[0] is not anchors.anchor and anchors.index.get(op.results[0]) is None:
                if op.name == "reduce":
                    for v in op.operands[: len(op.operands) // 2]:
                        if anchors.resolve(v, members) is None and v.type.shape == self.shape:
                            anchors.index[v], anchors.levels[v] = anchors.space, 0
                anchors.extend(op, members)

    def fresh(self, prefix: str) -> str:
        """Return an identifier not used before in this kernel."""
        return f"{prefix}{next(self._count)}"

    def elements(self) -> Elements:
        """Return an emitter of this region's values."""
        return Elements(self.ops, self.buffers, self.fresh)

    def kernel(self, grid: Dim, body: tuple[Stmt, ...], flops: Dim) -> Kernel:
        """Assemble the kernel; ``flops`` is the work of the whole grid."""
        shapes = [*(b.shape for b in (*self.inputs, *self.outputs)), (grid,), self.shape]
        dims = sorted({s.name for shape in shapes for d in shape for s in symbols(d)} | _free_symbols(body))
        traffic = sum((product(b.shape) * size_of(b.dtype) for b in (*self.inputs, *self.outputs)), 0)
        return Kernel(
            self.function.name, self.inputs, self.outputs, tuple(dims), grid, body, self._aliases(body), flops, traffic
        )

    def _aliases(self, body: tuple[Stmt, ...]) -> tuple[tuple[int, int], ...]:
        """An output may overwrite an input if the input is only read where the output is then written."""
        if self.function.attrs["kind"] not in ("loop", "contract"):
            return ()
        reads = reads_of(body)
        writes: dict[str, set[Index]] = {}
        for stmt in walk(body):
            if isinstance(stmt, Store):
                writes.setdefault(stmt.buffer.name, set()).add(stmt.index)
        found = []
        for n, out in enumerate(self.outputs):
            at = writes.get(out.name, set())
            if len(at) != 1:
                continue
            for m, a in enumerate(self.inputs):
                same = a.shape == out.shape and size_of(a.dtype) == size_of(out.dtype)
                if same and reads.get(a.name) == at:
                    found.append((n, m))
        return tuple(found)

    def cost(self) -> Dim:
        """Return a rough count of scalar operations of the whole region."""
        each = sum(
            1 + 11 * (op.name in EXPENSIVE) for op in self.function.body.ops if op.name not in ("constant", "iota")
        )
        return product(self.shape) * max(each, 1)


def _free_symbols(body: tuple[Stmt, ...]) -> set[str]:
    """Return the dims that ``body`` mentions and does not bind itself."""
    bound = {s.var for s in walk(body) if isinstance(s, For)} | {s.var.name for s in walk(body) if isinstance(s, Let)}
    return {s.name for e in addresses(body) for s in symbols(e)} - bound


def reads_of(body: tuple[Stmt, ...]) -> dict[str, set[Index]]:
    """Return the indices at which each buffer is loaded."""
    found: dict[str, set[Index]] = {}
    stack: list[Scalar] = []
    for stmt in walk(body):
        match stmt:
            case Let(value=value) | Store(value=value) | If(cond=value):
                stack.append(value)
    while stack:
        match stack.pop():
            case Load(buffer=buffer, index=index):
                found.setdefault(buffer.name, set()).add(index)
            case Apply(args=args):
                stack += args
    return found


# --- loop and window ---------------------------------------------------------


def lower_loop(function: Function, target: Target) -> Kernel:
    """One pass over the anchor's space; windows become inner loops of their element."""
    b = RegionBuilder(function, target)
    e = b.elements()

    def emit(block: list[Stmt], at: Index) -> None:
        e.enter(block)
        _anchor_windows(b, e, at)
        store_all(e, [(out, v, relocate(b, v, at)) for out, v in zip(b.outputs, function.body.results, strict=True)])

    trial: list[Stmt] = []
    emit(trial, b.anchors.space)
    axes = [k for k, s in enumerate(b.anchors.space) if s != 0]
    merged = make_axes(b.shape, mergeable(b.shape, axes, addresses(trial)))
    grid, body = loops_over(b, merged, emit, trial)
    return b.kernel(grid, body, b.cost())


def store_all(e: Elements, stores: Sequence[tuple[Buffer, Value, Index]]) -> None:
    """Store values at indices; all are computed before the first store, which may overwrite an input."""
    block = e.block
    held = []
    for _, v, index in stores:
        scalar = e.at(v, index)
        if len(stores) > 1 and not isinstance(scalar, Const | Var):
            scalar = e.bind(scalar)
            e.keep(v, index, scalar)
        held.append(scalar)
    block += [Store(out, index, scalar) for (out, _, index), scalar in zip(stores, held, strict=True)]


def relocate(b: RegionBuilder, value: Value, at: Index) -> Index:
    """Return the index of ``value`` when the anchor is at ``at``."""
    index = b.index.get(value, b.anchors.space)
    names = {f"i{k}": e for k, e in enumerate(at)}
    return tuple(substitute(i, names) for i in index)


def loops_over(
    b: RegionBuilder, merged: list[Axis], emit: Callable[[list[Stmt], Index], None], trial: list[Stmt]
) -> tuple[Dim, tuple[Stmt, ...]]:
    if not merged:
        block: list[Stmt] = []
        emit(block, b.anchors.space)
        return 1, tuple(block)
    if b.target.kind == "cuda":
        return grid_loop(
            merged, None, lambda block, at, begin, end: emit(block, place(b.anchors.space, b.shape, merged, at))
        )
    outer, inner = split_grid(merged, ITEM_WORK)
    last = inner[-1]
    chunk = None
    if len(inner) == 1 and (not isinstance(last.extent, int) or last.extent >= 2 * CHUNK):
        chunk = (last, CHUNK)
    cuts = _cuts(last, trial) if chunk is None else []
    tail = inner[:-1]

    def item(block: list[Stmt], symbols_: list[Dim], begin: Dim, end: Dim) -> None:
        if chunk:
            i = sym(last.name, 0, last.extent)
            inside: list[Stmt] = []
            emit(inside, place(b.anchors.space, b.shape, [*outer, last], [*symbols_, i]))
            block.append(For(last.name, begin, end, tuple(inside)))
        else:
            serial(tail, symbols_, lambda blk, syms: _segments(blk, syms), block)

    def _segments(block: list[Stmt], syms: list[Dim]) -> None:
        for lo, hi in pairwise(cuts) if cuts else ((0, last.extent),):
            inside: list[Stmt] = []
            i = sym(last.name, lo, hi)
            emit(inside, place(b.anchors.space, b.shape, [*outer, *tail, last], [*syms, i]))
            block.append(For(last.name, lo, hi, tuple(inside)))

    return grid_loop(outer, chunk, item)


def _cuts(axis: Axis, trial: list[Stmt]) -> list[int]:
    """Return where tests on the innermost loop change their answer, ends included (empty: nowhere)."""
    if len(axis.members) != 1 or not isinstance(axis.extent, int):
        return []
    found = {0, axis.extent}
    stack: list[Scalar] = [s.value for s in walk(tuple(trial)) if isinstance(s, Let | Store)]
    while stack:
        s = stack.pop()
        if isinstance(s, Apply):
            stack += s.args
            if s.fn in ("ge", "lt") and s.args[0].dtype == "i64" and hasattr(s.args[0], "expr"):
                e = s.args[0].expr - s.args[1].expr  # type: ignore[union-attr]
                if (
                    isinstance(e, Expr)
                    and coefficient(e, axis.name) == 1
                    and len(e.terms) == 1
                    and 0 < -e.const < axis.extent
                ):
                    found.add(-e.const)
    cuts = sorted(found)
    return cuts if 2 < len(cuts) <= SEGMENT_LIMIT else []


def _anchor_windows(b: RegionBuilder, e: Elements, at: Index) -> None:
    for op in b.function.body.ops:
        if op.name == "reduce_window":
            for v, scalar in zip(op.results, _window(b, e, op, at), strict=True):
                e.anchor(v, provide(scalar))


def _window(b: RegionBuilder, e: Elements, op: Op, at: Index) -> list[Scalar]:
    """Accumulate one window; elements in the padding are skipped by using the initial value."""
    n = len(op.operands) // 2
    a = op.attrs
    rank = op.result.type.rank if n == 1 else op.results[0].type.rank
    inits = [e.at(v, ()) for v in op.operands[n:]]
    accs = [Buffer(b.fresh("acc"), v.type.dtype, (), "private") for v in op.results]
    for acc, init in zip(accs, inits, strict=True):
        e.block += [Alloc(acc), Store(acc, (), init)]
    outer = e.block
    axes = [Axis((d,), a["window"][d], b.fresh("w")) for d in range(rank) if a["window"][d] != 1]

    def emit(block: list[Stmt], syms: list[Dim]) -> None:
        e.enter(block)
        w = {axis.members[0]: s for axis, s in zip(axes, syms, strict=True)}
        where: list[Dim] = []
        tests: list[Scalar] = []
        for d in range(rank):
            pos = at[d] * a["strides"][d] + w.get(d, 0) * a["window_dilations"][d] - a["padding"][d][0]
            extent = op.operands[0].type.shape[d]
            where.append(_window_axis(pos, a["base_dilations"][d], extent, tests))
        values = [e.at(v, tuple(where)) for v in op.operands[:n]]
        combine(b, e, op, accs, values, tests)

    serial(axes, [], emit, outer, unroll=True)
    e.enter(outer)
    return [Load(acc, ()) for acc in accs]


def _window_axis(pos: Dim, dilation: int, extent: Dim, tests: list[Scalar]) -> Dim:
    if dilation != 1:
        tests += test_index(pos % dilation, 0, "eq")
        pos = pos // dilation
    tests += test_index(pos, 0, "ge") + test_index(pos, extent, "lt")
    return minimum(maximum(pos, 0), extent - 1)


FREE_ORDER = {"add": "add", "mul": "mul", "max": "max", "min": "min"}


def combine(
    b: RegionBuilder, e: Elements, op: Op, accs: list[Buffer], values: list[Scalar], tests: list[Scalar], at: Index = ()
) -> None:
    """Write ``acc = combiner(acc, value)`` for every accumulator, under ``tests``."""
    block = e.block
    if tests:
        cond = tests[0]
        for t in tests[1:]:
            cond = Apply("and", (cond, t), "i1")
        inner: list[Stmt] = []
        e.enter(inner)
        combine(b, e, op, accs, values, [], at)
        block.append(If(cond, tuple(inner)))
        e.enter(block)
        return
    region = op.regions[0]
    simple = region.ops[0] if len(region.ops) == 1 and len(accs) == 1 else None
    if simple is not None and simple.name in FREE_ORDER and set(simple.operands) == set(region.params):
        reduce = FREE_ORDER[simple.name] if accs[0].dtype != "i1" else ""
        if reduce:
            block.append(Store(accs[0], at, values[0], reduce))
            return
    old = tuple(Load(acc, at) for acc in accs)
    bound = [e.bind(x) if not isinstance(x, Const | Var) else x for x in (*old, *values)]
    results = e.region(region, tuple(bound))
    held = [e.bind(r) if isinstance(r, Apply) else r for r in results]
    block += [Store(acc, at, r) for acc, r in zip(accs, held, strict=True)]


# --- row and reduce ----------------------------------------------------------


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
        row_axes = make_axes(b.shape, [(k,) for k in self.kept])
        self.inner = self._inner_axes()
        self._choose_scratch()
        work = product(a.extent for a in self.inner)
        if isinstance(work, int) and work < 64 and row_axes and b.target.kind == "cpu":
            outer, tail = split_grid(row_axes, max(ITEM_WORK // max(work, 1), 1))
        else:
            outer, tail = row_axes, []

        def item(block: list[Stmt], syms: list[Dim], begin: Dim, end: Dim) -> None:
            serial(
                tail, syms, lambda blk, s: self._row(blk, place(b.anchors.space, b.shape, [*outer, *tail], s)), block
            )

        grid, body = grid_loop(outer, None, item)
        return b.kernel(grid, body, b.cost())

    def _inner_axes(self) -> list[Axis]:
        """Merge the reduced axes as far as all addresses of the body allow."""
        b = self.b
        trial: list[Stmt] = []
        self.e.enter(trial)
        for op in (op for stage in self.stages for op in stage):
            for v in op.results:
                acc = Buffer("acc", v.type.dtype, (), "private")
                self.e.anchor(v, provide(Load(acc, ())))
        for op in (op for stage in self.stages for op in stage):
            for v in op.operands[: len(op.operands) // 2]:
                self.e.bind(self.e.at(v, b.anchors.index[v]))  # type: ignore[arg-type]
        for out, v in self.full:
            trial.append(Store(out, b.index[v], self.e.at(v, b.index[v])))
        self.e.anchored.clear()
        return make_axes(b.shape, mergeable(b.shape, self.reduced, addresses(trial)))

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
        roots = [[v for op in stage for v in op.operands[: len(op.operands) // 2]] for stage in self.stages]
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
        room = min(SCRATCH_LIMIT, b.target.l2 // 2)
        for n, later in enumerate(cones):
            for v in later:
                first = next(k for k, cone in enumerate(cones) if v in cone)
                op = b.ops[v]
                if first == n or v in self.scratch or v not in b.index or len(op.operands) == 0:
                    continue
                if b.index[v] != b.anchors.space or not self._frontier(v, later, cones[first]):
                    continue
                bytes_ = size * size_of(v.type.dtype)
                if self._dear(v) and bytes_ <= room:
                    room -= bytes_
                    self.scratch[v] = Buffer(b.fresh("row"), v.type.dtype, (size,), "scratch")

    def _frontier(self, value: Value, later: dict[Value, None], first: dict[Value, None]) -> bool:
        """Is ``value`` read in the later stage by something that the first stage lacks?"""
        readers = [v for v in later if value in self.b.ops[v].operands]
        return not readers or any(v not in first for v in readers)

    def _dear(self, value: Value) -> bool:
        cone = self._cone([value])
        ops = [self.b.ops[v] for v in cone]
        loads = len({u for op in ops for u in op.operands if u not in self.b.ops})
        return sum(1 + 15 * (op.name in EXPENSIVE) for op in ops) + 2 * loads >= 8

    def _row(self, block: list[Stmt], at: Index) -> None:
        """Write all stages of one row."""
        self.e.anchored.clear()
        block += [Alloc(buffer) for buffer in self.scratch.values()]
        stored: set[Value] = set()
        roots = self._stage_roots()
        for n, stage in enumerate(self.stages):
            accs = self._accumulators(stage, block)
            self._stage_loop(block, at, stage, accs, n, roots, stored)
            for op in stage:
                for v, acc in zip(op.results, accs[op], strict=True):
                    self.e.anchor(v, provide(Load(acc, ())))
        self._stage_loop(block, at, [], {}, len(self.stages), roots, stored)
        self.e.enter(block)
        for out, v in self.rows:
            index = relocate(self.b, v, at)
            block.append(Store(out, index, self.e.at(v, index)))

    def _accumulators(self, stage: list[Op], block: list[Stmt]) -> dict[Op, list[Buffer]]:
        self.e.enter(block)
        accs: dict[Op, list[Buffer]] = {}
        for op in stage:
            accs[op] = []
            for v, init in zip(op.results, op.operands[len(op.operands) // 2 :], strict=True):
                acc = Buffer(self.b.fresh("acc"), v.type.dtype, (), "private")
                block += [Alloc(acc), Store(acc, (), self.e.at(init, ()))]
                accs[op].append(acc)
        return accs

    def _stage_loop(
        self,
        block: list[Stmt],
        at: Index,
        stage: list[Op],
        accs: dict[Op, list[Buffer]],
        n: int,
        roots: list[list[Value]],
        stored: set[Value],
    ) -> None:
        stores = [(out, v) for out, v in self.full if min(self._stage_of(v), len(self.stages)) == n]
        cone = self._cone(roots[n])
        keep = [v for v in self.scratch if v in cone and v not in stored]
        if not stage and not stores:
            return
        b = self.b

        def emit(inner: list[Stmt], syms: list[Dim]) -> None:
            self.e.enter(inner)
            here = place(at, b.shape, self.inner, syms)
            flat = self._flat(syms)
            for v in keep:
                held = self.e.bind(self.e.at(v, here))
                inner.append(Store(self.scratch[v], (flat,), held))
                self.e.anchored[v] = provide(held)
            store_all(self.e, [(out, v, relocate(b, v, here)) for out, v in stores])
            for op in stage:
                values = [self.e.at(v, self._at(v, here)) for v in op.operands[: len(op.operands) // 2]]
                combine(b, self.e, op, accs[op], values, [])
            for v in keep:
                self.e.anchored[v] = self._from_scratch(v)

        serial(self.inner, [], emit, block)
        stored.update(keep)
        self.e.enter(block)

    def _from_scratch(self, value: Value) -> Callable[[Index], Scalar]:
        return lambda index: Load(self.scratch[value], (self._flat_of(index),))

    def _at(self, value: Value, here: Index) -> Index:
        index = self.b.anchors.index[value]
        names = {f"i{k}": x for k, x in enumerate(here)}
        return tuple(substitute(i, names) for i in index)  # type: ignore[union-attr]

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
    width = extent if isinstance(extent, int) and extent <= COLUMN_BLOCK else COLUMN_BLOCK
    last = Axis((column,), extent, f"i{column}")
    outer = make_axes(b.shape, [(k,) for k in kept[:-1]])
    middle = make_axes(b.shape, [(k,) for k in reduced])
    (stage,) = _stages(b)
    results = list(zip(b.outputs, b.function.body.results, strict=True))

    def item(block: list[Stmt], syms: list[Dim], begin: Dim, end: Dim) -> None:
        accs = {op: [Buffer(b.fresh("acc"), v.type.dtype, (width,), "private") for v in op.results] for op in stage}
        c = sym(f"i{column}", 0, extent)
        lane = c - begin if begin != 0 else c
        e.anchored.clear()
        start: list[Stmt] = []
        e.enter(start)
        for op in stage:
            for acc, init in zip(accs[op], op.operands[len(op.operands) // 2 :], strict=True):
                block.append(Alloc(acc))
                start.append(Store(acc, (lane,), e.at(init, ())))
        block.append(For(last.name, begin, end, tuple(start)))

        def accumulate(blk: list[Stmt], rows: list[Dim]) -> None:
            inside: list[Stmt] = []
            e.enter(inside)
            here = place(b.anchors.space, b.shape, [*outer, *middle, last], [*syms, *rows, c])
            names = {f"i{k}": x for k, x in enumerate(here)}
            store_all(e, [(out, v, relocate(b, v, here)) for out, v in results if not b.anchors.is_row(v)])
            for op in stage:
                count_ = len(op.operands) // 2
                values = [
                    e.at(v, tuple(substitute(i, names) for i in b.anchors.index[v] or ())) for v in op.operands[:count_]
                ]
                combine(b, e, op, accs[op], values, [], (lane,))
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

        def whole(block: list[Stmt], syms: list[Dim], begin: Dim, end: Dim) -> None:
            item(block, syms, 0, extent)

        grid, body = grid_loop(outer, None, whole)
    else:
        grid, body = grid_loop(outer, (last, width), item)
    return b.kernel(grid, body, b.cost())
