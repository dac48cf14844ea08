"""Products on the tensor cores of a GPU: the loops that they mean, and the tiles in which a template computes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from aotc.ir.dims import Dim, product, sym
from aotc.ir.loop_ir import Alloc, Apply, Buffer, Const, For, Kernel, Load, Scalar, Stmt, Store
from aotc.ir.loop_products import TF32_BITS, read_product
from aotc.ir.tensor_ir import Op
from aotc.lowering.analysis.gpu.tensor_tiles import best_tiling, is_for_tensor_cores
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.regions.elemental import constant_scalar, provide
from aotc.lowering.regions.region import RegionBuilder, store_results
from aotc.targets import Target
from aotc.vmfb.dtypes import to_numpy

_SUMS = {("bf16", "bf16"): "f32", ("f16", "f16"): "f32", ("f32", "f32"): "f32", ("i8", "i8"): "i32"}


def lower_contract_tensor(b: RegionBuilder, op: Op, target: Target) -> Kernel | None:
    """Return the kernel of a product or a convolution that tensor cores are for, else None."""
    dtype = _SUMS.get((op.operands[0].type.dtype, op.operands[1].type.dtype))
    if dtype is None or not _may_round(op, dtype) or op.attrs.get("feature_groups", 1) != 1:
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
    tiling = best_tiling(read_product(kernel), target)
    return None if tiling is None else replace(kernel, tiling=tiling)


def _may_round(op: Op, dtype: str) -> bool:
    """Has the sum the result's dtype, or one that it is rounded to; and f32, may it be rounded to TF32?"""
    lhs, result = op.operands[0].type.dtype, op.result.type.dtype
    if dtype == "i32":
        return result == "i32"
    if result not in ("f32", "bf16", "f16"):
        return False
    return lhs != "f32" or op.attrs.get("precision", "DEFAULT") == "DEFAULT"


@dataclass(frozen=True, slots=True)
class _ProductLoops:
    """The loops of a product, its terms, and the indices of operands and result: of the loops', and of the term's."""

    loops: tuple[tuple[str, Dim], ...]
    k: Dim
    lhs: Callable[[Index, Dim], Index]
    rhs: Callable[[Index, Dim], Index]
    result: Callable[[Index], Index]


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
    """Rows are the output pixels of all images, terms the taps and input channels."""
    *taps, n = op.operands[1].type.shape
    *pixels, _ = op.result.type.shape
    strides, gaps = op.attrs["strides"], op.attrs["rhs_dilation"]

    def lhs_at(at: Index, k: Dim) -> Index:
        image, *pixel = delinearize(at[0], pixels)
        *tap, channel = delinearize(k, taps)
        where = (i * stride + t * gap for i, stride, t, gap in zip(pixel, strides, tap, gaps, strict=True))
        return (image, *where, channel)

    return _ProductLoops(
        (("row", product(pixels)), ("col", n)),
        product(taps),
        lhs_at,
        lambda at, k: (*delinearize(k, taps), at[1]),
        lambda at: (*delinearize(at[0], pixels), at[1]),
    )


def _element(b: RegionBuilder, op: Op, form: _ProductLoops, at: Index, term: Dim, dtype: str) -> list[Stmt]:
    """Return the statements of one element: its sum, and what is fused behind it."""
    e = b.elements()
    inner: list[Stmt] = []
    e.enter(inner)
    places = form.lhs(at, term), form.rhs(at, term)
    left, right = (_as_taken(e.at(x, i), dtype) for x, i in zip(op.operands, places, strict=True))
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


def _as_taken(x: Scalar, dtype: str) -> Scalar:
    """Return an operand's element as tensor cores take it: widened, or f32 rounded to TF32."""
    if x.dtype != dtype:
        return Apply("convert", (x,), dtype)
    exponent, significand = TF32_BITS
    return Apply("reduce_precision", (x, Const(exponent, "i32"), Const(significand, "i32")), dtype)
