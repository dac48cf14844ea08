"""Matmuls on tensor cores: the loops that define them, and the tiling with which a template computes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from aotc.ir.dims.algebra import Dim, product, sym
from aotc.ir.loop.forms.conv import padded_element, patch_place
from aotc.ir.loop.forms.matmul import TF32_BITS, read_product
from aotc.ir.loop.forms.offsets import delinearize
from aotc.ir.loop.forms.tiling import FP8
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, For, Kernel, Load, Scalar, Stmt, Store
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import RegionBuilder, store_results
from aotc.lowering.elements.elements import constant_scalar, provide
from aotc.lowering.plans.gpu_conv import conv_padding, conv_pixels, kernel_sizes, sum_dtype_of, window_of
from aotc.lowering.plans.gpu_matmul_tiles import best_tiling, is_for_tensor_cores
from aotc.targets import Target
from aotc.vmfb.dtypes import to_numpy


def lower_contract_tensor(b: RegionBuilder, op: Op, target: Target) -> Kernel | None:
    """Return the kernel of a matmul or convolution for which tensor cores have a tiling, else None."""
    dtype = sum_dtype_of(op)
    if dtype is None or (op.operands[0].type.dtype in FP8 and not target.has_fp8):
        return None
    form = _conv(op) if op.name == "conv" else _matmul(op)
    *batch, m, n = (extent for _, extent in form.loops)
    if not is_for_tensor_cores(batch, m, n, form.k):
        return None
    names = [b.fresh(name) for name, _ in form.loops]  # dims may have any name
    extents = [extent for _, extent in form.loops]
    at = tuple(sym(name, 0, extent) for name, extent in zip(names, extents, strict=True))
    body = _element(b, op, form, at, sym(b.fresh("k"), 0, form.k), dtype)
    for name, extent in reversed(list(zip(names, extents, strict=True))):
        body = [For(name, 0, extent, tuple(body))]
    kernel = b.kernel(1, tuple(body), product((*extents, form.k)) * 2)
    window = window_of(op, target) if op.name == "conv" else None
    tiling = best_tiling(read_product(kernel), target, window, b.function.attrs.get("concurrent", 1))
    return None if tiling is None else replace(kernel, tiling=tiling)


@dataclass(frozen=True, slots=True)
class _ProductLoops:
    """The loops of a matmul, its terms, and the indices of operands and result from loop and term indices.

    ``padding`` is that of the left operand of a convolution.
    """

    loops: tuple[tuple[str, Dim], ...]
    k: Dim
    lhs: Callable[[Index, Dim], Index]
    rhs: Callable[[Index, Dim], Index]
    result: Callable[[Index], Index]
    padding: tuple[tuple[Dim, Dim], ...] = ()


def _matmul(op: Op) -> _ProductLoops:
    lhs_turned, rhs_turned = op.attrs["lhs_transposed"], op.attrs["rhs_transposed"]
    shape = op.result.type.shape
    names = ("z", "row", "col")[-len(shape) :]
    return _ProductLoops(
        tuple(zip(names, shape, strict=True)),
        op.operands[0].type.shape[-2 if lhs_turned else -1],
        lambda at, k: (*at[:-2], k, at[-2]) if lhs_turned else (*at[:-2], at[-2], k),
        lambda at, k: (*at[:-2], at[-1], k) if rhs_turned else (*at[:-2], k, at[-1]),
        lambda at: at,
    )


def _conv(op: Op) -> _ProductLoops:
    """Describe a convolution: rows are the output pixels of all images, terms the taps and input channels."""
    taps, channels, n = kernel_sizes(op)
    pixels, padding = conv_pixels(op), conv_padding(op)
    parts, turned = op.attrs.get("parts", 1), op.attrs.get("rhs_transposed", False)
    depth = product((*taps, channels)) // parts
    low = [before for before, _ in padding]

    def term(at: Index, k: Dim) -> Dim:
        return k if parts == 1 else at[0] * depth + k

    def lhs_at(at: Index, k: Dim) -> Index:
        gaps = op.attrs["rhs_dilation"]
        return patch_place(taps, op.attrs["strides"], gaps, low, pixels, channels, at[-2], term(at, k))

    def rhs_at(at: Index, k: Dim) -> Index:
        *tap, channel = delinearize(term(at, k), (*taps, channels))
        return (*tap[:-1], at[-1], tap[-1], channel) if turned else (*tap, channel, at[-1])

    part: tuple[tuple[str, Dim], ...] = () if parts == 1 else (("part", parts),)
    return _ProductLoops(
        (*part, ("row", product(pixels)), ("col", n)),
        depth,
        lhs_at,
        rhs_at,
        lambda at: (*at[:-2], *delinearize(at[-2], pixels), at[-1]),
        padding,
    )


def _element(b: RegionBuilder, op: Op, form: _ProductLoops, at: Index, term: Dim, dtype: str) -> list[Stmt]:
    """Return the statements of one element: its sum, and the fused epilogue."""
    e = b.elements()
    inner: list[Stmt] = []
    e.enter(inner)
    lhs, rhs = op.operands
    element = padded_element(lambda i: e.at(lhs, i), form.lhs(at, term), lhs.type.shape, form.padding, lhs.type.dtype)
    left, right = as_taken(element, dtype), as_taken(e.at(rhs, form.rhs(at, term)), dtype)
    total = Buffer(b.fresh("total"), dtype, (), "private")
    inner.append(Store(total, (), Apply("mul", (left, right), dtype), "add"))
    zero = constant_scalar(to_numpy(dtype).type(0), dtype)
    body: list[Stmt] = [Alloc(total), Store(total, (), zero), For(str(term), 0, form.k, tuple(inner))]
    e.anchored.clear()
    e.enter(body)
    found: Scalar = Load(total, ())
    result = op.result.type.dtype
    e.anchor(op.result, provide(found if result == dtype else Apply("convert", (found,), result)))
    store_results(b, e, form.result(at))
    return body


def as_taken(x: Scalar, dtype: str) -> Scalar:
    """Return an operand's element as tensor cores read it: widened, f32 rounded to TF32, or f64."""
    if x.dtype != dtype:
        return Apply("convert", (x,), dtype)
    if dtype == "f64":
        return x
    exponent, significand = TF32_BITS
    return Apply("reduce_precision", (x, Const(exponent, "i32"), Const(significand, "i32")), dtype)
