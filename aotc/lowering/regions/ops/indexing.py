"""Ops that change part of an array in place (see ``in_place``): dynamic_update_slice and scatter."""

from __future__ import annotations

from aotc.ir.dims import Dim, minimum, product, sym
from aotc.ir.loop_ir import Apply, Const, For, If, Kernel, Load, Scalar, Stmt, Store
from aotc.ir.loop_ir import Index as IndexScalar
from aotc.ir.opset import ACCUMULATED
from aotc.ir.tensor_ir import Function, Op
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.regions.elemental import Elements
from aotc.lowering.regions.region import RegionBuilder
from aotc.targets import Target

WINDOW_BLOCK = 64


def lower_dynamic_update_slice(function: Function, target: Target) -> Kernel:
    """Write the update at the clamped start; one grid item a row of the update."""
    op = next(op for op in function.body.ops if op.results[0] is function.body.results[0])
    x, update, *starts = op.operands
    b = RegionBuilder(function, target, skip=1)
    e = b.elements()
    shape = update.type.shape
    body: list[Stmt] = []
    e.enter(body)
    outer, width = shape[:-1], shape[-1] if shape else 1
    if target.kind == "cuda":  # a thread an element
        outer, width = shape, 1
    rows = product(outer)
    p = sym("p", 0, rows) if rows != 1 else 0
    j: Dim = sym("j", 0, width) if width != 1 else 0
    at = [e.clamp(e.at(s, ()), d - u) for s, d, u in zip(starts, x.type.shape, shape, strict=True)]
    where: Index = (*delinearize(p, outer), j)[: len(shape)]
    inner: list[Stmt] = []
    e.enter(inner)
    value = e.at(update, where)
    inner.append(Store(b.outputs[0], tuple(s + i for s, i in zip(at, where, strict=True)), value))
    body += [For("j", 0, width, tuple(inner))] if width != 1 else inner
    wrapped = tuple(body) if rows == 1 else (For("p", 0, rows, tuple(body), "parallel"),)
    return b.kernel(rows, wrapped, product(shape))


def lower_scatter(function: Function, target: Target) -> Kernel:
    """Apply the updates in order, so that duplicates combine deterministically.

    Parallel over blocks of the update window, never over updates: two updates
    may hit the same element. An update whose window leaves the array is dropped.
    """
    (op,) = function.body.ops
    n = op.attrs["inputs"]
    b = RegionBuilder(function, target, skip=n)
    updates = op.operands[n + 1 :]
    shape = updates[0].type.shape
    window = op.attrs["update_window_dims"]
    loops = [d for d in range(len(shape)) if d not in window]
    last = window[-1] if window else None
    width = shape[last] if last is not None else 1
    each = WINDOW_BLOCK if target.kind == "cpu" else 1
    blocked = last is not None and isinstance(width, int) and width > each
    blocks = -(-width // each) if blocked else 1
    at: list[Dim] = [sym(f"u{d}", 0, s) if s != 1 else 0 for d, s in enumerate(shape)]
    emit = b.elements()
    body: list[Stmt] = []
    emit.enter(body)
    where, tests = _place_of_update(emit, op, at)
    inner: list[Stmt] = []
    emit.enter(inner)
    _combine_into(b, emit, op, where, tuple(at), inner)
    for d in (d for d in reversed(window) if shape[d] != 1):
        begin = sym("p", 0, blocks) * each if blocked and d == last else 0
        end = minimum(begin + each, width) if blocked and d == last else shape[d]
        inner = [For(f"u{d}", begin, end, tuple(inner))]
    body += [If(_all(tests), tuple(inner))] if tests else inner
    for d in (d for d in reversed(loops) if shape[d] != 1):
        body = [For(f"u{d}", 0, shape[d], tuple(body))]
    wrapped = (For("p", 0, blocks, tuple(body), "parallel"),) if blocks != 1 else tuple(body)
    return b.kernel(blocks, wrapped, product(shape) * 4)


def _place_of_update(e: Elements, op: Op, at: list[Dim]) -> tuple[Index, list[Scalar]]:
    """Return where update element ``at`` goes, and what must hold for its whole window to lie inside."""
    a, n = op.attrs, op.attrs["inputs"]
    indices = op.operands[n]
    target_shape = op.operands[0].type.shape
    window = a["update_window_dims"]
    batch = [i for d, i in enumerate(at) if d not in window]
    skipped = {*a["inserted_window_dims"], *a["input_batching_dims"]}
    offsets = iter([at[d] for d in window])
    sizes = iter([op.operands[n + 1].type.shape[d] for d in window])
    where: list[Dim] = [0 if d in skipped else next(offsets) for d in range(len(target_shape))]
    extent: list[Dim] = [1 if d in skipped else next(sizes) for d in range(len(target_shape))]
    tests: list[Scalar] = []
    vector = a["index_vector_dim"]
    for k, d in enumerate(a["scatter_dims_to_operand_dims"]):
        place = list(batch)
        if vector < indices.type.rank:
            place.insert(vector, k)
        raw = e.at(indices, tuple(place))
        wide = e.bind(raw if raw.dtype == "i64" else Apply("convert", (raw,), "i64"), "s")
        room = target_shape[d] - extent[d]
        tests += [
            Apply("ge", (wide, Const(0, "i64")), "i1"),
            Apply("le", (wide, IndexScalar(room)), "i1"),
        ]
        where[d] = where[d] + sym(wide.name, 0, room + 1)
    for d, k in zip(a["input_batching_dims"], a["scatter_indices_batching_dims"], strict=True):
        where[d] = batch[k if k < vector else k - 1]
    return tuple(where), tests


def _all(tests: list[Scalar]) -> Scalar:
    cond = tests[0]
    for t in tests[1:]:
        cond = Apply("and", (cond, t), "i1")
    return cond


def _combine_into(b: RegionBuilder, e: Elements, op: Op, where: Index, at: Index, block: list[Stmt]) -> None:
    n = op.attrs["inputs"]
    region = op.regions[0]
    new = [e.bind(e.at(u, at)) for u in op.operands[n + 1 :]]
    simple = region.ops[0] if len(region.ops) == 1 and n == 1 else None
    if simple is not None and simple.name in ACCUMULATED and set(simple.operands) == set(region.params):
        block.append(Store(b.outputs[0], where, Apply(simple.name, (Load(b.outputs[0], where), new[0]), new[0].dtype)))
        return
    old = [e.bind(Load(out, where)) for out in b.outputs]
    held = [e.bind(r) if isinstance(r, Apply) else r for r in e.region(region, (*old, *new))]
    block += [Store(out, where, r) for out, r in zip(b.outputs, held, strict=True)]


