"""Emit one element of a region of kind loop or window: windows become inner loops of the element."""

from __future__ import annotations

from aotc.ir.dims.algebra import Dim
from aotc.ir.loop.ir import Alloc, Buffer, Load, Scalar, Stmt, Store
from aotc.ir.opset.dim_attributes import dims_of, pairs_of
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.index_maps import Index, clamped_inside
from aotc.lowering.elements.builder import RegionBuilder, store_combined, store_results
from aotc.lowering.elements.elements import Elements, provide_scalar, test_index
from aotc.lowering.elements.nests import Emit, NestAxis, append_serial_loops
from aotc.lowering.threshold import Limit


def window_element_emitter(b: RegionBuilder, e: Elements) -> Emit:
    """Return the function that emits one result element of a windowed reduction region."""

    def emit_window_result(block: list[Stmt], at: Index) -> None:
        e.enter(block)
        _anchor_windows(b, e, at)
        store_results(b, e, at)

    return emit_window_result


def _anchor_windows(b: RegionBuilder, e: Elements, at: Index) -> None:
    """Emit the windowed reductions of the region at ``at``; later reads of their results use the accumulators."""
    for op in b.function.body.ops:
        if op.name == "reduce_window":
            for v, scalar in zip(op.results, _reduced_window(b, e, op, at), strict=True):
                e.anchor(v, provide_scalar(scalar))


UNROLLED_WINDOW = Limit(
    8,
    "extent of a window dim that is unrolled",
    "a window over two dims then is at most 64 terms",
)


def _reduced_window(b: RegionBuilder, e: Elements, op: Op, at: Index) -> list[Scalar]:
    """Return the accumulated elements of one window; elements in the padding are skipped."""
    a = op.attrs
    rank = op.results[0].type.rank
    inits = [e.at(v, ()) for v in op.inits]
    accs = [Buffer(e.names("acc"), v.type.dtype, (), "private") for v in op.results]
    for acc, init in zip(accs, inits, strict=True):
        e.block += [Alloc(acc), Store(acc, (), init)]
    outer = e.block
    axes = [NestAxis((d,), dims_of(a, "window")[d], e.names("w")) for d in range(rank) if dims_of(a, "window")[d] != 1]

    def combine_element(block: list[Stmt], syms: list[Dim]) -> None:
        """Emit the combination of one window element; elements in the padding are left out by tests."""
        e.enter(block)
        w = {axis.members[0]: s for axis, s in zip(axes, syms, strict=True)}
        where: list[Dim] = []
        tests: list[Scalar] = []
        for d in range(rank):
            pos = at[d] * a["strides"][d] + w.get(d, 0) * a["window_dilations"][d] - pairs_of(a)[d][0]
            extent = op.operands[0].type.shape[d]
            where.append(_window_input_index(pos, a["base_dilations"][d], extent, tests))
        values = [e.at(v, tuple(where)) for v in op.inputs]
        store_combined(b, e, op, accs, values, tests)

    append_serial_loops(axes, [], combine_element, outer, UNROLLED_WINDOW.holds)
    e.enter(outer)
    return [Load(acc, ()) for acc in accs]


def _window_input_index(pos: Dim, dilation: int, extent: Dim, tests: list[Scalar]) -> Dim:
    """Return the input index at padded position ``pos``, clamped; append tests that it is an element to ``tests``."""
    if dilation != 1:
        tests += test_index(pos % dilation, 0, "eq")
        pos = pos // dilation
    tests += test_index(pos, 0, "ge") + test_index(pos, extent, "lt")
    return clamped_inside(pos, extent)
