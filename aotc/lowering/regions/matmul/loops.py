"""Matmuls and convolutions as plain loops: any dtype, grouped and depthwise convolutions, tiny sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product as taps_of

from aotc.ir.dims.algebra import Dim, product, static, sym
from aotc.ir.loop.forms.conv import padded_element
from aotc.ir.loop.ir import Alloc, Apply, Buffer, For, Kernel, Load, Scalar, Stmt, Store
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.anchors import axis_of
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.elements.builder import RegionBuilder, grid_item, store_results
from aotc.lowering.elements.elements import Elements, constant_scalar, provide
from aotc.lowering.elements.nests import NestAxis, serial
from aotc.lowering.plans.gpu_conv import conv_padding
from aotc.lowering.plans.loops import LOOP_PLANNERS
from aotc.lowering.plans.matmul import UNROLLED_TERMS
from aotc.lowering.regions.loop.any_loops import any_loops_by
from aotc.lowering.threshold import BlockSize
from aotc.vmfb.abi import ALIGNMENT
from aotc.vmfb.dtypes import DTYPES, kind_of, size_of, to_numpy


def lower_contract_loops(b: RegionBuilder) -> Kernel:
    """Lower to one element at a time; short sums are unrolled, so that the loop around them vectorises."""
    e, op = b.elements(), b.root
    terms = _conv_terms if op.name == "conv" else _matmul_terms

    def emit(block: list[Stmt], at: Index) -> None:
        e.anchored.pop(op.result, None)  # other anchors stay, such as a tile of a GPU
        e.enter(block)
        total = terms(b, e, op, at)
        e.anchor(op.result, lambda _: total)
        store_results(b, e, at)

    if _is_depthwise(b):
        grid, body = _channels_apart(b, e)
    else:
        grid, body = any_loops_by(b, e, LOOP_PLANNERS[b.target.kind](b, emit), emit)
    k = product(op.operands[0].type.shape[-1:])
    return b.kernel(grid, body, product(b.shape) * 2 * k)


def _is_depthwise(b: RegionBuilder) -> bool:
    """Return True for a depthwise convolution on a CPU with whole vectors of channels, and pixels as results."""
    op, lanes = b.root, ALIGNMENT // size_of(sum_dtype(b.root))
    if op.name != "conv" or b.target.kind != "cpu" or b.shape != op.result.type.shape or any(b.turned):
        return False
    channels = op.result.type.shape[-1]
    known = op.attrs["feature_groups"] == channels == op.operands[0].type.shape[-1]
    few = UNROLLED_TERMS.holds(product(op.operands[1].type.shape[:-1]))
    return known and few and channels % lanes == 0 and all(axis_of(s) is not None for s in b.anchors.space[-2:])


def _channels_apart(b: RegionBuilder, e: Elements) -> tuple[Dim, tuple[Stmt, ...]]:
    """Return loops in which a vector of channels moves along a row of pixels, several pixels at a time.

    Each weight, and each input pixel, is loaded once for these pixels; few weights stay in registers. ::

        for p in parallel(0, rows):
            for v in range(0, channels // 16):
                for i2 in range(0, pixels // 7):
                    for i3 in range(0, 16):      # one vector
                        ...                      # 7 pixels
    """
    *rows, pixels, channels = b.shape
    lanes = ALIGNMENT // size_of(sum_dtype(b.root))
    grid, beside = product(rows), _pixels_beside(b, pixels)
    turns = pixels // beside
    first = sym("i", 0, turns) * beside if turns != 1 else 0
    vector, channel = sym("v", 0, channels // lanes), sym("c", 0, lanes)
    row = delinearize(grid_item(grid), rows)
    block: list[Stmt] = []
    _beside(b, e, block, [(*row, first + n, vector * lanes + channel) for n in range(beside)])
    along = For("i", 0, turns, (For("c", 0, lanes, tuple(block)),))
    body: tuple[Stmt, ...] = (For("v", 0, channels // lanes, (along,)),)
    return grid, body if grid == 1 else (For("p", 0, grid, body, "parallel"),)


HELD_WEIGHTS = BlockSize(
    25,
    "filter taps of a channel that stay in registers along a row, given 32 registers",
    "AVX-512, time of 8 pixels at once relative to one at a time: 9 and 25 taps 0.86 to 1.05, 31 taps 0.61, 49 taps "
    "0.5 to 0.58",
)
BESIDE_PIXELS = BlockSize(
    8,
    "pixels of a row that a depthwise convolution with more taps than HELD_WEIGHTS computes at once",
    "as HELD_WEIGHTS, with 49 taps: 2 pixels 0.75 to 0.83, 4 pixels 0.65 to 0.78, 7 pixels 0.52 to 0.58, 8 pixels 0.5 "
    "to 0.58",
)


def _pixels_beside(b: RegionBuilder, pixels: Dim) -> int:
    """Return how many pixels of a row are computed at a time: a divisor of their number, or 1 with few weights."""
    taps = static(product(b.root.operands[1].type.shape[:-1]))
    if not isinstance(pixels, int) or taps <= b.target.registers * HELD_WEIGHTS.value // 32:
        return 1
    most = min(BESIDE_PIXELS.value, (b.target.registers - 2) // 2)
    return next(n for n in range(most, 0, -1) if pixels % n == 0)


def _beside(b: RegionBuilder, e: Elements, block: list[Stmt], places: Sequence[Index]) -> None:
    """Write the results at ``places`` term by term, so that loads which two of them share are done once."""
    op = b.root
    e.anchored.clear()
    e.enter(block)
    terms = [_conv_term(e, op, at) for at in places]
    start = _first_sum(b, sum_dtype(op))
    sums: list[Scalar] = [] if start is None else [start] * len(places)
    for tap in taps_of(*(range(static(n)) for n in op.operands[1].type.shape[:-1])):
        values = [term(tap) for term in terms]
        added = [Apply("add", pair, sum_dtype(op)) for pair in zip(sums, values, strict=True)] if sums else values
        sums = [e.bind(x) for x in added]
    for at, total in zip(places, sums, strict=True):
        rounded = _rounded(op, total)
        e.anchor(op.result, provide(rounded))
        store_results(b, e, at)


def _sum(b: RegionBuilder, e: Elements, op: Op, axes: list[NestAxis], term: object) -> Scalar:
    """Return the sum over ``axes`` of ``term(symbols)``, rounded once to the result's dtype."""
    return _rounded(op, _wide_sum(b, e, axes, term, sum_dtype(op)))


def _rounded(op: Op, total: Scalar) -> Scalar:
    dtype = op.result.type.dtype
    return total if total.dtype == dtype else Apply("convert", (total,), dtype)


def sum_dtype(op: Op) -> str:
    """Return the dtype to multiply and add in: short floats are summed in f32."""
    dtype = op.result.type.dtype
    return "f32" if kind_of(dtype) == "f" and DTYPES[dtype].bits < 32 else dtype


def _wide_sum(b: RegionBuilder, e: Elements, axes: list[NestAxis], term: object, dtype: str) -> Scalar:
    extent = product(a.extent for a in axes)
    if isinstance(extent, int) and UNROLLED_TERMS.holds(extent):
        total = _first_sum(b, dtype)
        for flat in range(extent):
            at: list[Dim] = []
            for axis in reversed(axes):
                at.insert(0, flat % static(axis.extent))
                flat //= static(axis.extent)
            x = term(at)  # type: ignore[operator]
            total = e.bind(x if total is None else Apply("add", (total, x), dtype))
        return total if total is not None else constant_scalar(to_numpy(dtype).type(0), dtype)
    acc = Buffer(b.fresh("acc"), dtype, (), "private")
    outer = e.block
    outer += [Alloc(acc), Store(acc, (), constant_scalar(to_numpy(dtype).type(0), dtype))]

    def emit(block: list[Stmt], at: list[Dim]) -> None:
        e.enter(block)
        reduce = "add" if kind_of(dtype) != "b" else ""
        x = term(at)  # type: ignore[operator]
        block.append(Store(acc, (), x, reduce) if reduce else Store(acc, (), Apply("or", (Load(acc, ()), x), dtype)))

    serial(axes, [], emit, outer)
    e.enter(outer)
    return Load(acc, ())


def _first_sum(b: RegionBuilder, dtype: str) -> Scalar | None:
    """Return the initial value of a sum, or None if the sum begins with its first term.

    CPU tiles begin with 0.0 and add each product by an FMA. ``x0 * y0 + x1 * y1`` differs: LLVM may round either
    product, and -0.0 would stay -0.0.
    """
    known = b.target.kind == "cpu" and kind_of(dtype) in "fc"
    return constant_scalar(to_numpy(dtype).type(0), dtype) if known else None


def _times(e: Elements, op: Op, a: Scalar, b: Scalar) -> Scalar:
    dtype = sum_dtype(op)
    a, b = (x if x.dtype == dtype else Apply("convert", (x,), dtype) for x in (a, b))
    return Apply("and" if dtype == "i1" else "mul", (a, b), dtype)


def _matmul_terms(b: RegionBuilder, e: Elements, op: Op, at: Index) -> Scalar:
    lhs, rhs = op.operands
    *batch, m, n = at
    k = lhs.type.shape[-2 if op.attrs["lhs_transposed"] else -1]

    def term(s: list[Dim]) -> Scalar:
        x = e.at(lhs, (*batch, s[0], m) if op.attrs["lhs_transposed"] else (*batch, m, s[0]))
        y = e.at(rhs, (*batch, n, s[0]) if op.attrs["rhs_transposed"] else (*batch, s[0], n))
        return _times(e, op, x, y)

    return _sum(b, e, op, [NestAxis((0,), k, b.fresh("k"))], term)


def conv_element(e: Elements, op: Op, place: Index) -> Scalar:
    """Return the element at ``place`` of the input of a ``conv``, which is 0 in its padding."""
    lhs = op.operands[0]
    return padded_element(lambda at: e.at(lhs, at), place, lhs.type.shape, conv_padding(op), lhs.type.dtype)


def _conv_terms(b: RegionBuilder, e: Elements, op: Op, at: Index) -> Scalar:
    axes = [NestAxis((d,), x, b.fresh("k")) for d, x in enumerate(op.operands[1].type.shape[:-1])]
    return _sum(b, e, op, axes, _conv_term(e, op, at))


def _conv_term(e: Elements, op: Op, at: Index) -> Callable[[Sequence[Dim]], Scalar]:
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
