"""Lower ``select_and_scatter``: the gradient of max pooling."""

from __future__ import annotations

from aotc.ir.dims.algebra import Dim, product, sym
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, If, Kernel, Load, Scalar, Stmt, Store
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.opset.dim_attributes import dims_of, pairs_of
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.elements.builder import RegionBuilder, grid_item, serial_nest
from aotc.lowering.elements.elements import Elements, test_index
from aotc.lowering.plans.single_ops import SelectAndScatterPlan


def lower_select_and_scatter(b: RegionBuilder, plan: SelectAndScatterPlan) -> Kernel:
    """Lower ``select_and_scatter``: find the selected element of each window, and combine the window's source element
    into the result at that position.

    Windows overlap, so a loop runs over them serially. The grid is over the dims along which windows have size 1.
    """
    op = b.region_root_op("select_and_scatter")
    x, source, init = op.operands
    e = b.elements()
    a = op.attrs
    shape, sources = x.type.shape, source.type.shape
    widths = zip(dims_of(a, "window"), a["strides"], pairs_of(a), strict=True)
    windowless = [
        d for d, (length, stride, padding) in enumerate(widths) if length == stride == 1 and padding == (0, 0)
    ]
    spanned = [d for d in range(len(shape)) if d not in windowless]
    rows = product(shape[d] for d in windowless)
    row = delinearize(grid_item(rows), [shape[d] for d in windowless])
    fixed = dict(zip(windowless, row, strict=True))
    body = e.new_block()
    at = {**fixed, **{d: sym(f"c{d}", 0, shape[d]) for d in spanned}}
    filled: list[Stmt] = [Store(b.outputs[0], tuple(at[d] for d in range(len(shape))), e.at(init, ()))]
    body += serial_nest([(f"c{d}", shape[d]) for d in spanned], filled)
    where = {**fixed, **{d: sym(f"s{d}", 0, sources[d]) for d in spanned}}
    one: list[Stmt] = []
    _scatter_window(b, e, op, tuple(where[d] for d in range(len(shape))), spanned, one)
    body += serial_nest([(f"s{d}", sources[d]) for d in spanned], one)
    return b.grid(rows, body, product(sources) * product(dims_of(a, "window")) * 4)


def _scatter_window(b: RegionBuilder, e: Elements, op: Op, at: Index, spanned: list[int], block: list[Stmt]) -> None:
    """Emit the selection in the window of source element ``at``; elements in the padding are never selected."""
    x, source, _ = op.operands
    a, shape = op.attrs, x.type.shape
    best = Buffer("best", x.type.dtype, (), "private")
    is_selected = Buffer("found", "i1", (), "private")
    chosen = {d: Buffer(f"chosen{d}", "i64", (), "private") for d in spanned}
    block += [Alloc(buffer) for buffer in (best, is_selected, *chosen.values())]
    block.append(Store(is_selected, (), Const(False, "i1")))
    tests: list[Scalar] = []
    read: list[Dim] = list(at)
    for d in spanned:
        read[d] = at[d] * a["strides"][d] + sym(f"w{d}", 0, dims_of(a, "window")[d]) - pairs_of(a)[d][0]
        tests += test_index(read[d], 0, "ge") + test_index(read[d], shape[d], "lt")
    inside = e.new_block()
    value = e.bind(e.at(x, tuple(read)))
    (keep,) = e.inline_region(op.regions[0], (e.bind(Load(best, ())), value))
    # The first element inside the array is selected without a comparison.
    better = Apply("not", (Apply("and", (Load(is_selected, ()), keep), "i1"),), "i1")
    select: list[Stmt] = [Store(best, (), value), Store(is_selected, (), Const(True, "i1"))]
    select += [Store(chosen[d], (), IndexScalar(read[d])) for d in spanned]
    inside.append(If(better, tuple(select)))
    for t in reversed(tests):
        inside = [If(t, tuple(inside))]
    if x.type.dtype != "i1":
        block.append(Store(best, (), Const(0 if x.type.dtype[0] in "iu" else 0.0, x.type.dtype)))
    block += serial_nest([(f"w{d}", dims_of(a, "window")[d]) for d in spanned], inside)
    combined = e.new_block()
    place = list(at)
    for d in spanned:
        place[d] = sym(e.bind(Load(chosen[d], ()), "n").name, 0, shape[d])
    old = e.bind(Load(b.outputs[0], tuple(place)))
    (new,) = e.inline_region(op.regions[1], (old, e.bind(e.at(source, at))))
    combined.append(Store(b.outputs[0], tuple(place), new))
    block.append(If(Load(is_selected, ()), tuple(combined)))
