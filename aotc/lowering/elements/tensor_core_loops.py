"""Emit the plain loops that define a matmul on tensor cores: planners read them, and kernels have them as body."""

from __future__ import annotations

from aotc.ir.dims.algebra import Dim, sym
from aotc.ir.loop.forms.conv import padded_element
from aotc.ir.loop.forms.matmul import TF32_BITS
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, For, Load, Scalar, Stmt, Store
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.contractions import Contraction, contraction_of, conv_padding
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import RegionBuilder, serial_nest, store_results
from aotc.lowering.elements.elements import Elements, constant_scalar, provide_scalar
from aotc.vmfb.dtypes import to_numpy


def tensor_core_loops(b: RegionBuilder, e: Elements, dtype: str) -> tuple[Stmt, ...]:
    """Return the loops of a matmul or convolution that adds in ``dtype``, in the form for :func:`read_product`."""
    c = contraction_of(b.root)
    extents = (*c.batch, c.m, c.n)
    names = [e.names(name) for name in ("z", "row", "col")[-len(extents) :]]  # dims may have any name
    loops = list(zip(names, extents, strict=True))
    *batch, row, column = (sym(name, 0, extent) for name, extent in loops)
    element = _tensor_core_result_element(b, e, c, (tuple(batch), row, column), sym(e.names("k"), 0, c.k), dtype)
    return tuple(serial_nest(loops, element))


def _tensor_core_result_element(
    b: RegionBuilder, e: Elements, c: Contraction, at: tuple[Index, Dim, Dim], term: Dim, dtype: str
) -> list[Stmt]:
    """Return the statements of one element: its sum, and the fused epilogue."""
    op, (batch, row, column) = b.root, at
    inner = e.new_block()
    left = as_tensor_core_operand(_left_operand_element(e, op, c.lhs(batch, row, term)), dtype)
    right = as_tensor_core_operand(e.at(op.operands[1], c.rhs(batch, term, column)), dtype)
    total = Buffer(e.names("total"), dtype, (), "private")
    inner.append(Store(total, (), Apply("mul", (left, right), dtype), "add"))
    zero = constant_scalar(to_numpy(dtype).type(0), dtype)
    body: list[Stmt] = [Alloc(total), Store(total, (), zero), For(str(term), 0, c.k, tuple(inner))]
    e.anchored.clear()
    e.enter(body)
    accumulated: Scalar = Load(total, ())
    result = op.result.type.dtype
    e.anchor(op.result, provide_scalar(accumulated if result == dtype else Apply("convert", (accumulated,), result)))
    store_results(b, e, c.result(*at))
    return body


def _left_operand_element(e: Elements, op: Op, place: Index) -> Scalar:
    """Return an element of the left operand; for a convolution 0 in the padding."""
    lhs = op.operands[0]
    padding = conv_padding(op) if op.name == "conv" else ()
    return padded_element(lambda at: e.at(lhs, at), place, lhs.type.shape, padding, lhs.type.dtype)


def as_tensor_core_operand(x: Scalar, dtype: str) -> Scalar:
    """Return an operand's element in the form for tensor cores: widened, f32 rounded to TF32, or f64."""
    if x.dtype != dtype:
        return Apply("convert", (x,), dtype)
    if dtype == "f64":
        return x
    exponent, significand = TF32_BITS
    return Apply("reduce_precision", (x, Const(exponent, "i32"), Const(significand, "i32")), dtype)
