"""Emit one element of a matmul or convolution as a plain sum of terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aotc.ir.dims.algebra import Dim, product, static
from aotc.ir.loop.forms.conv import padded_element
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Load, Scalar, Stmt, Store
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.contractions import conv_padding, sum_dtype
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import RegionBuilder, store_results
from aotc.lowering.elements.elements import Elements, constant_scalar, provide_scalar
from aotc.lowering.elements.nests import Emit, NestAxis, append_serial_loops
from aotc.vmfb.dtypes import kind_of, to_numpy

Term = Callable[[Sequence[Dim]], Scalar]


def contraction_element(b: RegionBuilder, e: Elements, unrolled: bool, from_zero: bool) -> Emit:
    """Return the function that emits one result element of a matmul or convolution region.

    Parameters
    ----------
    b : RegionBuilder
        The builder of a region around a ``matmul`` or ``conv``.
    e : Elements
    unrolled : bool
        True if the terms of a sum are written out, without a loop.
    from_zero : bool
        True if a sum that is written out begins with 0, and not with its first term.
    """
    op = b.root
    terms = _conv_terms if op.name == "conv" else _matmul_terms

    def emit_result_element(block: list[Stmt], at: Index) -> None:
        """Emit the sum of the result element ``at``, and the stores of the values computed from it."""
        e.anchored.pop(op.result, None)  # other anchors stay, such as a tile of a GPU
        e.enter(block)
        axes, term = terms(e, op, at)
        total = _unrolled_sum(e, op, axes, term, from_zero) if unrolled else _looped_sum(e, op, axes, term)
        e.anchor(op.result, provide_scalar(rounded_sum(op, total)))
        store_results(b, e, at)

    return emit_result_element


def rounded_sum(op: Op, total: Scalar) -> Scalar:
    """Return a sum in the dtype of the result of ``op``."""
    dtype = op.result.type.dtype
    return total if total.dtype == dtype else Apply("convert", (total,), dtype)


def zero_scalar(dtype: str) -> Scalar:
    """Return 0 of a dtype."""
    return constant_scalar(to_numpy(dtype).type(0), dtype)


def _unrolled_sum(e: Elements, op: Op, axes: list[NestAxis], term: Term, from_zero: bool) -> Scalar:
    """Return the sum over ``axes`` of ``term(symbols)``, fully unrolled."""
    dtype = sum_dtype(op)
    total = zero_scalar(dtype) if from_zero else None
    for flat in range(static(product(a.extent for a in axes))):
        at: list[Dim] = []
        for axis in reversed(axes):
            at.insert(0, flat % static(axis.extent))
            flat //= static(axis.extent)
        x = term(at)
        total = e.bind(x if total is None else Apply("add", (total, x), dtype))
    return total if total is not None else zero_scalar(dtype)


def _looped_sum(e: Elements, op: Op, axes: list[NestAxis], term: Term) -> Scalar:
    """Return the sum over ``axes`` of ``term(symbols)``, from 0 and in a loop."""
    dtype = sum_dtype(op)
    acc = Buffer(e.names("acc"), dtype, (), "private")
    outer = e.block
    outer += [Alloc(acc), Store(acc, (), zero_scalar(dtype))]

    def emit_term(block: list[Stmt], at: list[Dim]) -> None:
        e.enter(block)
        reduce = "add" if kind_of(dtype) != "b" else ""
        x = term(at)
        block.append(Store(acc, (), x, reduce) if reduce else Store(acc, (), Apply("or", (Load(acc, ()), x), dtype)))

    append_serial_loops(axes, [], emit_term, outer)
    e.enter(outer)
    return Load(acc, ())


def _multiply_terms(e: Elements, op: Op, a: Scalar, b: Scalar) -> Scalar:
    dtype = sum_dtype(op)
    a, b = (x if x.dtype == dtype else Apply("convert", (x,), dtype) for x in (a, b))
    return Apply("and" if dtype == "i1" else "mul", (a, b), dtype)


def _matmul_terms(e: Elements, op: Op, at: Index) -> tuple[list[NestAxis], Term]:
    """Return the loop axis over the terms of element ``at``, and the function that computes one term."""
    lhs, rhs = op.operands
    *batch, m, n = at
    k = lhs.type.shape[-2 if op.attrs["lhs_transposed"] else -1]

    def multiply_pair(s: Sequence[Dim]) -> Scalar:
        x = e.at(lhs, (*batch, s[0], m) if op.attrs["lhs_transposed"] else (*batch, m, s[0]))
        y = e.at(rhs, (*batch, n, s[0]) if op.attrs["rhs_transposed"] else (*batch, s[0], n))
        return _multiply_terms(e, op, x, y)

    return [NestAxis((0,), k, e.names("k"))], multiply_pair


def conv_element(e: Elements, op: Op, place: Index) -> Scalar:
    """Return the element at ``place`` of the input of a ``conv``, which is 0 in its padding."""
    lhs = op.operands[0]
    return padded_element(lambda at: e.at(lhs, at), place, lhs.type.shape, conv_padding(op), lhs.type.dtype)


def _conv_terms(e: Elements, op: Op, at: Index) -> tuple[list[NestAxis], Term]:
    axes = [NestAxis((d,), x, e.names("k")) for d, x in enumerate(op.operands[1].type.shape[:-1])]
    return axes, conv_term(e, op, at)


def conv_term(e: Elements, op: Op, at: Index) -> Term:
    """Return the function that computes the term of a tap and channel for the output element ``at``.

    ``at`` is (image, output pixel..., output channel). A group reads its own input channels.
    """
    rhs = op.operands[1]
    *_, per_group, n = rhs.type.shape
    groups = op.attrs["feature_groups"]
    image, *pixel, channel = at
    first = (channel // (n // groups)) * per_group if groups > 1 else 0

    def multiply_tap(s: Sequence[Dim]) -> Scalar:
        *tap, c = s
        steps = zip(pixel, op.attrs["strides"], tap, op.attrs["rhs_dilation"], conv_padding(op), strict=True)
        where = [i * stride + t * gap - low for i, stride, t, gap, (low, _) in steps]
        return _multiply_terms(e, op, conv_element(e, op, (image, *where, first + c)), e.at(rhs, (*tap, c, channel)))

    return multiply_tap
