"""Ops that update part of an array in place (see ``in_place``): dynamic_update_slice and scatter."""

from __future__ import annotations

from aotc.ir.dims.algebra import Dim, minimum, product, sym
from aotc.ir.loop.ir import For, If, Kernel, Store
from aotc.ir.tensor.ir import Function
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.analysis.parallel_scatters import is_side_by_side
from aotc.lowering.cost_model.work import SCATTER_WORK
from aotc.lowering.elements.builder import RegionBuilder, grid_item, nest
from aotc.lowering.elements.elements import all_of
from aotc.lowering.regions.scatter.gpu import lower_scatter_cuda
from aotc.lowering.regions.scatter.places import combine_into, place_of_update
from aotc.lowering.threshold import BlockSize
from aotc.targets import Target


def lower_dynamic_update_slice(function: Function, target: Target) -> Kernel:
    """Write the update at the clamped start; one grid item per row of the update."""
    b = RegionBuilder(function, target)
    x, update, *starts = b.the_op("dynamic_update_slice").operands
    e = b.elements()
    shape = update.type.shape
    body = e.new_block()
    outer, width = shape[:-1], shape[-1] if shape else 1
    if target.kind == "cuda":  # one thread per element
        outer, width = shape, 1
    rows = product(outer)
    p = grid_item(rows)
    j: Dim = sym("j", 0, width) if width != 1 else 0
    at = [e.clamp(e.at(s, ()), d - u) for s, d, u in zip(starts, x.type.shape, shape, strict=True)]
    where: Index = (*delinearize(p, outer), j)[: len(shape)]
    inner = e.new_block()
    value = e.at(update, where)
    inner.append(Store(b.outputs[0], tuple(s + i for s, i in zip(at, where, strict=True)), value))
    body += [For("j", 0, width, tuple(inner))] if width != 1 else inner
    return b.grid(rows, body, product(shape))


def lower_update_cuda(function: Function, target: Target) -> Kernel:
    """Lower an update of part of an array, with the ops that compute it."""
    scatters = any(op.name == "scatter" for op in function.body.ops)
    return (lower_scatter if scatters else lower_dynamic_update_slice)(function, target)


UPDATE_WINDOW = BlockSize(
    64,
    "elements of a scatter's last window dim that one CPU grid item writes",
    "four cache lines of f32",
)


def lower_scatter(function: Function, target: Target) -> Kernel:
    """Apply the updates in order, so that duplicates combine deterministically.

    Parallel over blocks of the update window, never over updates: two updates may hit the same element. An update whose
    window leaves the array is dropped. On a GPU updates run in parallel where the order does not matter: see
    ``passes/parallelize_gpu/scatter.py``.
    """
    b = RegionBuilder(function, target)
    op = b.the_op("scatter")
    if target.kind == "cuda" and is_side_by_side(op):
        return lower_scatter_cuda(b, op)
    _, *updates = op.operands[len(op.inputs) :]
    shape = updates[0].type.shape
    window = op.attrs["update_window_dims"]
    loops = [d for d in range(len(shape)) if d not in window]
    last = window[-1] if window else None
    width = shape[last] if last is not None else 1
    each = UPDATE_WINDOW.value if target.kind == "cpu" else 1
    blocked = last is not None and isinstance(width, int) and width > each
    blocks = -(-width // each) if blocked else 1
    at: list[Dim] = [sym(f"u{d}", 0, s) if s != 1 else 0 for d, s in enumerate(shape)]
    emit = b.elements()
    body = emit.new_block()
    where, tests = place_of_update(emit, op, at)
    inner = emit.new_block()
    combine_into(b, emit, op, where, [emit.bind(emit.at(u, tuple(at))) for u in updates])
    for d in (d for d in reversed(window) if shape[d] != 1):
        begin = sym("p", 0, blocks) * each if blocked and d == last else 0
        end = minimum(begin + each, width) if blocked and d == last else shape[d]
        inner = [For(f"u{d}", begin, end, tuple(inner))]
    body += [If(all_of(tests), tuple(inner))] if tests else inner
    nothing = 0 in op.operands[0].type.shape  # every update misses an array without elements
    serial = [] if nothing else nest([(f"u{d}", shape[d]) for d in loops if shape[d] != 1], body)
    return b.grid(blocks, serial, product(shape) * SCATTER_WORK.value)
