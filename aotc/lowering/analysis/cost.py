"""Lowering's decisions by size: each is made by one function, which passes and regions ask.

A threshold has a unit, and says why it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from aotc.ir.dims import Dim, product
from aotc.ir.tensor_ir import Op
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of

STREAM_ROWS = 4
"""Rows of a product. Up to so many, all sums of a wide tile fit into registers, so that the right operand passes by
once; its memory bandwidth, not arithmetic, then bounds the product."""

TINY_FLOPS = 1 << 13
"""Floating-point operations of a whole product. Up to so many, plain loops are done before packing, a tile and its
epilogue's buffer would pay off."""

IN_PLACE_ELEMENTS = 1 << 16
"""Elements of a right operand that is no constant. Up to so many it stays in a core's second-level cache, where rows
are as good to read as panels, and packing it in every call would cost more than it saves."""

Strategy = Literal["loops", "dots", "in_place", "packed"]


def streams(m: Dim) -> bool:
    """Does a product of ``m`` rows read its right operand only once, all rows in one tile? (Unknown counts as many.)"""
    return isinstance(m, int) and m <= STREAM_ROWS


def is_tiny(shape: Sequence[Dim], k: Dim) -> bool:
    """Is a product of ``shape`` that sums ``k`` terms per element too small for tiles?"""
    flops = product((*shape, k)) * 2
    return isinstance(flops, int) and flops <= TINY_FLOPS


def matmul_strategy(op: Op, form: str, constant: bool, target: Target) -> Strategy:
    """Return how a CPU computes a ``matmul``.

    Parameters
    ----------
    op : Op
        The product.
    form : str
        The form of tile that fits its dtypes, or the empty string.
    constant : bool
        Is the right operand a constant, which is packed once and for all?
    target : Target
        The CPU.

    Returns
    -------
    str
        ``packed``: tiles over panels of the right operand; ``in_place``: tiles over the right operand as it lies;
        ``dots``: one dot product per element of the result; ``loops``: no tiles.
    """
    lhs, rhs = (v.type for v in op.operands)
    result = op.result.type
    m, n = result.shape[-2:]
    k = lhs.shape[-2 if op.attrs["lhs_transposed"] else -1]
    if not form or k == 0 or (form == "i8" and result.dtype != "i32"):
        return "loops"
    if op.attrs["rhs_transposed"] and form != "i8" and streams(m):
        return "dots"
    if is_tiny(result.shape, k):
        return "loops"
    lanes = target.vector_bytes // size_of(form)
    by_rows = not op.attrs["rhs_transposed"] and form != "i8" and isinstance(n, int) and n % lanes == 0
    small = isinstance(k, int) and isinstance(n, int) and k * n <= IN_PLACE_ELEMENTS
    if by_rows and not constant and (streams(m) or small):
        return "in_place"
    if isinstance(n, int) and isinstance(k, int):
        return "packed"
    return "in_place" if by_rows and {lhs.dtype, rhs.dtype, result.dtype} == {form} else "loops"


def conv_strategy(op: Op, form: str) -> Strategy:
    """Return how a CPU computes a ``conv``: ``packed``, by tiles over panels of the kernel, or ``loops``."""
    size = product(op.operands[1].type.shape)
    plain = form in ("f32", "f64") and op.attrs["feature_groups"] == 1
    return "packed" if plain and isinstance(size, int) and size else "loops"
