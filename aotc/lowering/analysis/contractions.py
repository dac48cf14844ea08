"""Describe matmuls and convolutions as sums of products: sizes, and the operand elements of each term."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, product
from aotc.ir.loop.forms.conv import patch_place
from aotc.ir.opset.dim_attributes import padding_of
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.vmfb.dtypes import DTYPES, kind_of


def sum_dtype(op: Op) -> str:
    """Return the dtype in which ``op`` multiplies and adds: f32 for short floats."""
    dtype = op.result.type.dtype
    return "f32" if kind_of(dtype) == "f" and DTYPES[dtype].bits < 32 else dtype


def contraction_terms(op: Op) -> Dim:
    """Return the number of terms of each sum of a ``matmul`` or a ``conv``."""
    if op.name == "conv":
        return product(op.operands[1].type.shape[:-1])
    return op.operands[0].type.shape[-2 if op.attrs["lhs_transposed"] else -1]


def kernel_sizes(op: Op) -> tuple[tuple[Dim, ...], Dim, Dim]:
    """Return the taps, the input channels and the output channels (columns) of the weights of a ``conv``."""
    *taps, channels, columns = op.operands[1].type.shape
    if op.attrs.get("rhs_transposed", False):
        *taps, columns, last, channels = op.operands[1].type.shape
        taps.append(last)
    return tuple(taps), channels, columns


def conv_pixels(op: Op) -> tuple[Dim, ...]:
    """Return the number of images, and the pixels of the result of a ``conv`` along each spatial dim."""
    return op.result.type.shape[1 if "parts" in op.attrs else 0 : -1]


def conv_padding(op: Op) -> tuple[tuple[Dim, Dim], ...]:
    """Return the low and the high padding of each spatial dim of a ``conv``."""
    return padding_of(op.attrs, op.operands[0].type.rank - 2)


@dataclass(frozen=True, slots=True)
class Contraction:
    """A matmul or a convolution as sums of products.

    Attributes
    ----------
    batch : tuple of Dim
        Extents of the loops before rows and columns: one, or none.
    m, n, k : Dim
        Rows and columns of the result, and the terms of a sum.
    lhs, rhs, result : callable
        Indices of an element: ``lhs(batch, row, term)``, ``rhs(batch, term, column)``, ``result(batch, row, column)``.
    lhs_by_terms, rhs_by_terms : bool
        Are neighbouring terms neighbours in memory?
    """

    batch: tuple[Dim, ...]
    m: Dim
    n: Dim
    k: Dim
    lhs: Callable[[Index, Dim, Dim], Index]
    rhs: Callable[[Index, Dim, Dim], Index]
    result: Callable[[Index, Dim, Dim], Index]
    lhs_by_terms: bool
    rhs_by_terms: bool


def contraction_of(op: Op) -> Contraction:
    """Return a ``matmul`` or ungrouped ``conv`` in the common form of rows, columns and terms."""
    return _contraction_of_conv(op) if op.name == "conv" else _contraction_of_matmul(op)


def _contraction_of_matmul(op: Op) -> Contraction:
    """Describe a matmul: its batch, rows, columns and terms, with the indices of its operands' elements."""
    *batch, m, n = op.result.type.shape
    lhs_transposed, rhs_transposed = op.attrs["lhs_transposed"], op.attrs["rhs_transposed"]
    return Contraction(
        tuple(batch), m, n, contraction_terms(op),
        lambda at, row, k: (*at, k, row) if lhs_transposed else (*at, row, k),
        lambda at, k, column: (*at, column, k) if rhs_transposed else (*at, k, column),
        lambda at, row, column: (*at, row, column),
        not lhs_transposed, rhs_transposed,
    )  # fmt: skip


def _contraction_of_conv(op: Op) -> Contraction:
    """Describe a convolution: rows are the output pixels of all images, terms the taps and input channels.

    If its terms are in ``parts`` (split-K), each element of the batch has one part.
    """
    taps, channels, n = kernel_sizes(op)
    pixels, low = conv_pixels(op), [before for before, _ in conv_padding(op)]
    parts, transposed = op.attrs.get("parts", 1), op.attrs.get("rhs_transposed", False)
    depth = product((*taps, channels)) // parts

    def number_of_term(at: Index, k: Dim) -> Dim:
        return at[0] * depth + k if at else k

    def left_index(at: Index, row: Dim, k: Dim) -> Index:
        return patch_place(
            taps, op.attrs["strides"], op.attrs["rhs_dilation"], low, pixels, channels, row, number_of_term(at, k)
        )

    def right_index(at: Index, k: Dim, column: Dim) -> Index:
        *tap, channel = delinearize(number_of_term(at, k), (*taps, channels))
        return (*tap[:-1], column, tap[-1], channel) if transposed else (*tap, channel, column)

    return Contraction(
        () if parts == 1 else (parts,), product(pixels), n, depth, left_index, right_index,
        lambda at, row, column: (*at, *delinearize(row, pixels), column),
        True, transposed,
    )  # fmt: skip
