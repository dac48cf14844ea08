"""Matmuls and convolutions as plain loops: any dtype, grouped and depthwise convolutions, tiny sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product as taps_of

from aotc.ir.dims.algebra import Dim, product, static, sym
from aotc.ir.loop.forms.conv import padded_element
from aotc.ir.loop.ir import Alloc, Apply, Buffer, For, Kernel, Load, Scalar, Stmt, Store
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.contractions import conv_padding, sum_dtype
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.elements.builder import RegionBuilder, grid_item, store_results
from aotc.lowering.elements.elements import Elements, constant_scalar, provide
from aotc.lowering.elements.nests import NestAxis, serial
from aotc.lowering.plans.contract_loops import DepthwisePlan, ElementLoopsPlan
from aotc.lowering.plans.loops import LOOP_PLANNERS
from aotc.lowering.regions.loop.any_loops import any_loops_by
from aotc.vmfb.dtypes import kind_of, to_numpy

Term = Callable[[Sequence[Dim]], Scalar]


def lower_element_loops(b: RegionBuilder, plan: ElementLoopsPlan) -> Kernel:
    """Lower to one element at a time."""
    e, op = b.elements(), b.root
    terms = _conv_terms if op.name == "conv" else _matmul_terms

    def emit(block: list[Stmt], at: Index) -> None:
        e.anchored.pop(op.result, None)  # other anchors stay, such as a tile of a GPU
        e.enter(block)
        axes, term = terms(b, e, op, at)
        total = _written_out(b, e, axes, term, plan.from_zero) if plan.is_unrolled else _summed(b, e, axes, term)
        e.anchor(op.result, provide(_rounded(op, total)))
        store_results(b, e, at)

    return _kernel(b, *any_loops_by(b, e, LOOP_PLANNERS[b.target.kind](b, emit), emit))


def _kernel(b: RegionBuilder, grid: Dim, body: tuple[Stmt, ...]) -> Kernel:
    return b.kernel(grid, body, product(b.shape) * 2 * product(b.root.operands[0].type.shape[-1:]))


def lower_depthwise(b: RegionBuilder, plan: DepthwisePlan) -> Kernel:
    """Lower to loops in which a vector of channels moves along a row of pixels, several pixels at a time.

    Each weight, and each input pixel, is loaded once for these pixels; few weights stay in registers. ::

        for p in parallel(0, rows):
            for v in range(0, channels // 16):
                for i2 in range(0, pixels // 7):
                    for i3 in range(0, 16):      # one vector
                        ...                      # 7 pixels
    """
    *rows, pixels, channels = b.shape
    grid, turns = product(rows), pixels // plan.pixels
    first = sym("i", 0, turns) * plan.pixels if turns != 1 else 0
    vector, channel = sym("v", 0, channels // plan.lanes), sym("c", 0, plan.lanes)
    row = delinearize(grid_item(grid), rows)
    places = [(*row, first + n, vector * plan.lanes + channel) for n in range(plan.pixels)]
    along = For("i", 0, turns, (For("c", 0, plan.lanes, tuple(_pixels_at_once(b, places, plan.from_zero))),))
    body: tuple[Stmt, ...] = (For("v", 0, channels // plan.lanes, (along,)),)
    return _kernel(b, grid, body if grid == 1 else (For("p", 0, grid, body, "parallel"),))


def _pixels_at_once(b: RegionBuilder, places: Sequence[Index], from_zero: bool) -> list[Stmt]:
    """Return the results at ``places`` term by term, so that loads which two of them share are done once."""
    e, op, dtype = b.elements(), b.root, sum_dtype(b.root)
    block = e.new_block()
    terms = [_conv_term(e, op, at) for at in places]
    sums: list[Scalar] = [_zero(dtype)] * len(places) if from_zero else []
    for tap in taps_of(*(range(static(n)) for n in op.operands[1].type.shape[:-1])):
        values = [term(tap) for term in terms]
        added = [Apply("add", pair, dtype) for pair in zip(sums, values, strict=True)] if sums else values
        sums = [e.bind(x) for x in added]
    for at, total in zip(places, sums, strict=True):
        rounded = _rounded(op, total)
        e.anchor(op.result, provide(rounded))
        store_results(b, e, at)
    return block


def _rounded(op: Op, total: Scalar) -> Scalar:
    dtype = op.result.type.dtype
    return total if total.dtype == dtype else Apply("convert", (total,), dtype)


def _zero(dtype: str) -> Scalar:
    return constant_scalar(to_numpy(dtype).type(0), dtype)


def _written_out(b: RegionBuilder, e: Elements, axes: list[NestAxis], term: Term, from_zero: bool) -> Scalar:
    """Return the sum over ``axes`` of ``term(symbols)``, term by term."""
    dtype = sum_dtype(b.root)
    total = _zero(dtype) if from_zero else None
    for flat in range(static(product(a.extent for a in axes))):
        at: list[Dim] = []
        for axis in reversed(axes):
            at.insert(0, flat % static(axis.extent))
            flat //= static(axis.extent)
        x = term(at)
        total = e.bind(x if total is None else Apply("add", (total, x), dtype))
    return total if total is not None else _zero(dtype)


def _summed(b: RegionBuilder, e: Elements, axes: list[NestAxis], term: Term) -> Scalar:
    """Return the sum over ``axes`` of ``term(symbols)``, from 0 and in a loop."""
    dtype = sum_dtype(b.root)
    acc = Buffer(b.fresh("acc"), dtype, (), "private")
    outer = e.block
    outer += [Alloc(acc), Store(acc, (), _zero(dtype))]

    def emit(block: list[Stmt], at: list[Dim]) -> None:
        e.enter(block)
        reduce = "add" if kind_of(dtype) != "b" else ""
        x = term(at)
        block.append(Store(acc, (), x, reduce) if reduce else Store(acc, (), Apply("or", (Load(acc, ()), x), dtype)))

    serial(axes, [], emit, outer)
    e.enter(outer)
    return Load(acc, ())


def _times(e: Elements, op: Op, a: Scalar, b: Scalar) -> Scalar:
    dtype = sum_dtype(op)
    a, b = (x if x.dtype == dtype else Apply("convert", (x,), dtype) for x in (a, b))
    return Apply("and" if dtype == "i1" else "mul", (a, b), dtype)


def _matmul_terms(b: RegionBuilder, e: Elements, op: Op, at: Index) -> tuple[list[NestAxis], Term]:
    """Return the axis of the terms of element ``at``, and the function that computes one."""
    lhs, rhs = op.operands
    *batch, m, n = at
    k = lhs.type.shape[-2 if op.attrs["lhs_transposed"] else -1]

    def term(s: Sequence[Dim]) -> Scalar:
        x = e.at(lhs, (*batch, s[0], m) if op.attrs["lhs_transposed"] else (*batch, m, s[0]))
        y = e.at(rhs, (*batch, n, s[0]) if op.attrs["rhs_transposed"] else (*batch, s[0], n))
        return _times(e, op, x, y)

    return [NestAxis((0,), k, b.fresh("k"))], term


def conv_element(e: Elements, op: Op, place: Index) -> Scalar:
    """Return the element at ``place`` of the input of a ``conv``, which is 0 in its padding."""
    lhs = op.operands[0]
    return padded_element(lambda at: e.at(lhs, at), place, lhs.type.shape, conv_padding(op), lhs.type.dtype)


def _conv_terms(b: RegionBuilder, e: Elements, op: Op, at: Index) -> tuple[list[NestAxis], Term]:
    axes = [NestAxis((d,), x, b.fresh("k")) for d, x in enumerate(op.operands[1].type.shape[:-1])]
    return axes, _conv_term(e, op, at)


def _conv_term(e: Elements, op: Op, at: Index) -> Term:
    """Return the function that computes the term of a tap and channel for the output element ``at``.

    ``at`` is (image, output pixel..., output channel). A group reads its own input channels.
    """
    rhs = op.operands[1]
    *_, per_group, n = rhs.type.shape
    groups = op.attrs["feature_groups"]
    image, *pixel, channel = at
    first = (channel // (n // groups)) * per_group if groups > 1 else 0

    def term(s: Sequence[Dim]) -> Scalar:
        *tap, c = s
        steps = zip(pixel, op.attrs["strides"], tap, op.attrs["rhs_dilation"], conv_padding(op), strict=True)
        where = [i * stride + t * gap - low for i, stride, t, gap, (low, _) in steps]
        return _times(e, op, conv_element(e, op, (image, *where, first + c)), e.at(rhs, (*tap, c, channel)))

    return term
