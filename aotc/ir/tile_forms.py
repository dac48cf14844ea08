"""The kinds of product that register tiles compute: what a ``Tile`` of the loop IR names as its form."""

from __future__ import annotations

from typing import NamedTuple


class Form(NamedTuple):
    """A kind of product.

    Attributes
    ----------
    out : str
        The dtype of the result, and of its accumulators.
    group : int
        k in one step of the innermost level.
    bits : int
        Of an element of b that is quantised, whose scales lie before it (:mod:`aotc.ir.products.quantized`); else 0.
    """

    out: str
    group: int
    bits: int = 0


FORMS = {
    "f32": Form("f32", 1),
    "f32_bf16": Form("f32", 1),
    "f32_i8": Form("f32", 1, 8),
    "f32_i4": Form("f32", 2, 4),
    "f64": Form("f64", 1),
    "bf16": Form("f32", 2),
    "i8": Form("i32", 4),
}
