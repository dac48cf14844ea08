"""Lower ops that update part of an array in place (see ``in_place``): dynamic_update_slice and scatter."""

from __future__ import annotations

from aotc.ir.dims.algebra import Dim, minimum, product, sym
from aotc.ir.loop.ir import For, If, Kernel, Store
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.cost_model.work import SCATTER_WORK
from aotc.lowering.elements.builder import RegionBuilder, grid_item, serial_nest
from aotc.lowering.elements.elements import conjunction_of_tests
from aotc.lowering.plans.scatters import SerialScatterPlan, SliceUpdatePlan
from aotc.lowering.regions.scatter.places import combine_updates_into, place_of_update


def lower_slice_update(b: RegionBuilder, plan: SliceUpdatePlan) -> Kernel:
    """Lower a ``dynamic_update_slice`` at its clamped start, with a grid item per row or element of the update."""
    x, update, *starts = b.region_root_op("dynamic_update_slice").operands
    e = b.elements()
    shape = update.type.shape
    body = e.new_block()
    outer, width = (shape[:-1], shape[-1]) if shape and plan.by_rows else (shape, 1)
    rows = product(outer)
    p = grid_item(rows)
    j: Dim = sym("j", 0, width) if width != 1 else 0
    at = [e.clamp_index(e.at(s, ()), d - u) for s, d, u in zip(starts, x.type.shape, shape, strict=True)]
    where: Index = (*delinearize(p, outer), j)[: len(shape)]
    inner = e.new_block()
    value = e.at(update, where)
    inner.append(Store(b.outputs[0], tuple(s + i for s, i in zip(at, where, strict=True)), value))
    body += [For("j", 0, width, tuple(inner))] if width != 1 else inner
    return b.grid(rows, body, product(shape))


def lower_serial_scatter(b: RegionBuilder, plan: SerialScatterPlan) -> Kernel:
    """Lower a scatter whose updates are applied in order, so that duplicates combine deterministically.

    Items are blocks of the update window, never updates, as two updates may write the same element. An update whose
    window is partly outside of the array is dropped. ``passes/parallelize_gpu/scatter.py`` rewrites scatters on GPUs so
    that the order does not matter.
    """
    op = b.region_root_op("scatter")
    _, *updates = op.operands[len(op.inputs) :]
    shape = updates[0].type.shape
    window = op.attrs["update_window_dims"]
    loops = [d for d in range(len(shape)) if d not in window]
    last = window[-1] if window else None
    width, each = shape[last] if last is not None else 1, plan.width
    blocks = -(-width // each) if each else 1
    at: list[Dim] = [sym(f"u{d}", 0, s) if s != 1 else 0 for d, s in enumerate(shape)]
    emit = b.elements()
    body = emit.new_block()
    where, tests = place_of_update(emit, op, at)
    inner = emit.new_block()
    combine_updates_into(b, emit, op, where, [emit.bind(emit.at(u, tuple(at))) for u in updates])
    for d in (d for d in reversed(window) if shape[d] != 1):
        begin = sym("p", 0, blocks) * each if each and d == last else 0
        end = minimum(begin + each, width) if each and d == last else shape[d]
        inner = [For(f"u{d}", begin, end, tuple(inner))]
    body += [If(conjunction_of_tests(tests), tuple(inner))] if tests else inner
    nothing = 0 in op.operands[0].type.shape  # every update misses an array without elements
    serial = [] if nothing else serial_nest([(f"u{d}", shape[d]) for d in loops if shape[d] != 1], body)
    return b.grid(blocks, serial, product(shape) * SCATTER_WORK.value)
