"""The builder that all lowerings of fused regions share: buffers, names, stores, combiners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from itertools import product as product_of

from aotc.diagnostics import CompileError
from aotc.ir.dims.algebra import Dim, product, sym
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.access import accesses, may_overwrite, statement_index_exprs
from aotc.ir.loop.ir import (
    Apply,
    Buffer,
    Const,
    ExternalCall,
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
from aotc.ir.opset import ACCUMULATED, PERMUTATIONS, SOURCES
from aotc.ir.tensor.ir import Function, Op, Value, use_counts
from aotc.lowering.analysis.anchors import anchors_of
from aotc.lowering.analysis.in_place import count_overwritten_parameters
from aotc.lowering.analysis.index_maps import Index, operand_index_of_movement
from aotc.lowering.analysis.prefix_scans import combiner_op_name
from aotc.lowering.analysis.softmax_facts import softmax_facts
from aotc.lowering.cost_model.row_stages import RowStages
from aotc.lowering.cost_model.work import scalar_work_of_op
from aotc.lowering.elements.elements import Elements, conjunction_of_tests, provide_scalar
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of


class RegionBuilder:
    """Builder that the lowerings of all kinds of regions share: buffers, names, ops and their anchors.

    Attributes
    ----------
    function : Function
        The outlined region.
    inputs, outputs : tuple of Buffer
        One buffer for each parameter that is not overwritten in place, and for each result.
    root : Op
        The op from which fusion grew the region; for a region around an op with its own lowering there is none.
    anchors : Anchors
        The index of each value of the region in its iteration space, as fusion determined it.
    known : mapping of Value to str
        Cheaper functions of the loop IR that proven facts allow (:mod:`~aotc.lowering.analysis.softmax_facts`).
    """

    def __init__(self, function: Function, target: Target) -> None:
        """Name the buffers of ``function``; derive its iteration space from the root, unless it is a single op."""
        self.function, self.target = function, target
        body, skip = function.body, count_overwritten_parameters(function)
        self.ops: dict[Value, Op] = {v: op for op in body.ops for v in op.results}
        self.named = {v.name: v for v in self.ops}
        named = [Buffer(f"a{n}", v.type.dtype, v.type.shape) for n, v in enumerate(body.params)]
        self.inputs = tuple(named[skip:])
        self.outputs = tuple(Buffer(f"o{n}", v.type.dtype, v.type.shape) for n, v in enumerate(body.results))
        self.buffers = dict(zip(body.params[skip:], self.inputs, strict=True))
        self.known = softmax_facts(body) if target.kind == "cpu" else {}
        self._count = count()
        self._stages: RowStages | None = None
        if function.attrs["kind"] in ("single", "update"):
            self.shape = body.results[0].type.shape if body.results else ()
            return
        self.root = next(op for v, op in self.ops.items() if v.name == function.attrs["root"])
        self.anchors = anchors_of(self.root, body.ops)
        self.shape = self.anchors.anchor.type.shape
        self.index = {v: i for v in self.ops if (i := self.anchors.index.get(v)) is not None}
        self.transposed = [op for op in body.ops if op.name in PERMUTATIONS and self._is_transposed(op)]

    def _is_transposed(self, op: Op) -> bool:
        """Return True if the index of a movement op's operand is not the one that the op's index map gives."""
        source = self.anchors.source_of(op)
        return source is not None and operand_index_of_movement(op, self.index[op.result]) != source

    def fresh(self, prefix: str) -> str:
        """Return an identifier not used before in this kernel."""
        return f"{prefix}{next(self._count)}"

    def elements(self) -> Elements:
        """Return a new emitter that computes elements of the region's values as scalars."""
        return self._element_emitter(self.fresh)

    def trial_elements(self) -> Elements:
        """Return an element emitter for a planner's trial statements, which are discarded."""
        numbers = count()
        return self._element_emitter(lambda prefix: f"{prefix}{next(numbers)}")

    def _element_emitter(self, names: Callable[[str], str]) -> Elements:
        e = Elements(self.ops, self.buffers, names, self.function.body.results)
        e.known = self.known
        return e

    def row_stages(self) -> RowStages:
        """Return the loops along a row of a region with reductions, shared by planner and lowering."""
        if self._stages is None:
            stored = [v for v in self.function.body.results if not self.anchors.is_row(v)]
            self._stages = RowStages(self.ops, self.anchors, stored)
        return self._stages

    def region_root_op(self, name: str) -> Op:
        """Return the op ``name`` around which the region was formed."""
        return next(op for op in self.function.body.ops if op.name == name)

    def output_buffer_of(self, value: Value) -> Buffer | None:
        """Return the buffer of a result, or None if it is not read."""
        return next((out for out, v in zip(self.outputs, self.function.body.results, strict=True) if v is value), None)

    def unsupported_error(self, op: Op, what: str, hint: str) -> CompileError:
        """Return the error that the target does not support ``what`` of ``op``."""
        return CompileError.at(op.loc, f"{what} is not supported on target {self.target.name}", hint=hint)

    def grid(self, items: Dim, body: Sequence[Stmt], flops: Dim, name: str = "p") -> Kernel:
        """Return the kernel that runs ``body`` in parallel for each :func:`grid_item` below ``items``."""
        loop = body if items == 1 else (For(name, 0, items, tuple(body), "parallel"),)
        return self.kernel(items, tuple(loop), flops)

    def kernel(self, grid: Dim, body: tuple[Stmt, ...], flops: Dim) -> Kernel:
        """Assemble the kernel; ``flops`` is the work of the whole grid."""
        shapes = [*(b.shape for b in (*self.inputs, *self.outputs)), (grid,), self.shape]
        dims = sorted({s.name for shape in shapes for d in shape for s in symbols(d)} | _free_symbols(body))
        traffic = sum((product(b.shape) * size_of(b.dtype) for b in (*self.inputs, *self.outputs)), 0)
        return Kernel(
            self.function.name,
            self.inputs,
            self.outputs,
            tuple(dims),
            grid,
            body,
            self._aliased_buffers(body),
            flops,
            traffic,
        )

    def _aliased_buffers(self, body: tuple[Stmt, ...]) -> tuple[tuple[int, int], ...]:
        """Return pairs of output and input that may share memory.

        An output may overwrite an input if each element of the input is read only where the output is then written.
        """
        if self.function.attrs["kind"] not in ("loop", "contract"):
            return ()
        pairs = product_of(enumerate(self.outputs), enumerate(self.inputs))
        touched = list(accesses(body))
        return tuple((n, m) for (n, out), (m, a) in pairs if _have_same_size(a, out) and may_overwrite(touched, a, out))

    def scalar_operations(self) -> Dim:
        """Return a rough count of scalar operations of the whole region."""
        ops = [op for op in self.function.body.ops if op.name not in SOURCES or op.name == "dim"]
        each = sum(scalar_work_of_op(op) for op in ops)
        return product(self.shape) * max(each, 1)


def grid_item(items: Dim, name: str = "p") -> Dim:
    """Return the index of a grid item: 0 where there is only one."""
    return sym(name, 0, items) if items != 1 else 0


def serial_nest(levels: Sequence[tuple[str, Dim]], body: Sequence[Stmt]) -> list[Stmt]:
    """Return serial loops around ``body``: pairs of name and extent, the outermost first."""
    for name, extent in reversed(levels):
        body = [For(name, 0, extent, tuple(body))]
    return list(body)


def _free_symbols(body: tuple[Stmt, ...]) -> set[str]:
    """Return the names of the symbols in ``body`` that it does not bind itself."""
    bound: set[str] = set()
    mentioned: set[Dim] = set()
    for stmt in walk(body):
        mentioned.update(statement_index_exprs(stmt))
        match stmt:
            case For(var=var) | Let(var=Var(name=var)):
                bound.add(var)
            case ExternalCall(args=places):
                mentioned.update(e for _, index in places for e in index)
    return {s.name for e in mentioned for s in symbols(e)} - bound


def _have_same_size(a: Buffer, b: Buffer) -> bool:
    return a.shape == b.shape and size_of(a.dtype) == size_of(b.dtype)


# --- loop and window ---------------------------------------------------------


def store_elements(e: Elements, stores: Sequence[tuple[Buffer, Value, Index]]) -> None:
    """Store values at indices; all are computed before the first store, which may overwrite an input."""
    block = e.block
    scalars = []
    for _, v, index in stores:
        scalar = e.at(v, index)
        if len(stores) > 1 and not isinstance(scalar, Const | Var):
            scalar = e.bind(scalar)
            e.cache_element(v, index, scalar)
        scalars.append(scalar)
    block += [Store(out, index, scalar) for (out, _, index), scalar in zip(stores, scalars, strict=True)]


def index_of_value_at_anchor(b: RegionBuilder, value: Value, at: Index) -> Index:
    """Return the index of ``value`` at the iteration ``at`` of the region."""
    return b.anchors.index_at_iteration(b.index[value], at)


def anchor_results(e: Elements, accumulators: Mapping[Op, Sequence[Buffer]], index: Index = ()) -> None:
    """Let elements that read a reduction's result load it from its accumulator, at ``index``."""
    for op, buffers in accumulators.items():
        for v, buffer in zip(op.results, buffers, strict=True):
            e.anchor(v, provide_scalar(Load(buffer, index)))


def store_rows(b: RegionBuilder, e: Elements, at: Index) -> None:
    """Emit the stores of the region's per-row results at index ``at``."""
    for out, v in zip(b.outputs, b.function.body.results, strict=True):
        if b.anchors.is_row(v):
            index = index_of_value_at_anchor(b, v, at)
            e.block.append(Store(out, index, e.at(v, index)))


def join_transposed(b: RegionBuilder, e: Elements, at: Index) -> None:
    """Make ``e`` read transposed values of the region at iteration ``at``."""
    for op in b.transposed:
        e.sources[op.result, index_of_value_at_anchor(b, op.result, at)] = index_of_value_at_anchor(
            b, op.operands[0], at
        )


def reduction_operands_at(b: RegionBuilder, e: Elements, op: Op, iteration: Index) -> list[Scalar]:
    """Return the scalars that reduction ``op`` combines at iteration ``iteration``."""
    at = b.anchors.index_at_iteration(b.anchors.reads[op], iteration)
    return [e.at(v, at) for v in op.inputs]


def store_results(b: RegionBuilder, e: Elements, at: Index) -> None:
    """Emit the stores of all results of the region at iteration ``at``."""
    join_transposed(b, e, at)
    results = zip(b.outputs, b.function.body.results, strict=True)
    store_elements(e, [(out, v, index_of_value_at_anchor(b, v, at)) for out, v in results])


def store_combined(
    b: RegionBuilder, e: Elements, op: Op, accs: Sequence[Buffer], values: Sequence[Scalar], tests: Sequence[Scalar],
    at: Index = (),
) -> None:  # fmt: skip
    """Emit ``acc = combiner(acc, value)`` for every accumulator, under ``tests``."""
    block = e.block
    if tests:
        inner = e.new_block()
        store_combined(b, e, op, accs, values, [], at)
        block.append(If(conjunction_of_tests(tests), tuple(inner)))
        e.enter(block)
        return
    name = b.known.get(op.results[0], combiner_op_name(op))
    if name in ACCUMULATED and accs[0].dtype != "i1":
        block.append(Store(accs[0], at, values[0], name))
        return
    (region,) = op.regions
    arguments, read = (*(Load(acc, at) for acc in accs), *values), use_counts(region)
    bound = [
        e.bind(x) if p in read and not isinstance(x, Const | Var) else x
        for p, x in zip(region.params, arguments, strict=True)
    ]
    results = e.inline_region(region, tuple(bound))
    totals = [e.bind(r) if isinstance(r, Apply) else r for r in results]
    block += [Store(acc, at, r) for acc, r in zip(accs, totals, strict=True)]
