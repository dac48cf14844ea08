"""The forms of a ``Tile``: kinds of matmul that register tiles compute."""

from __future__ import annotations

from typing import NamedTuple


class Form(NamedTuple):
    """A kind of matmul.

    Attributes
    ----------
    out : str
        The dtype of the result and of its accumulators.
    group : int
        k in one step of the innermost level.
    bits : int
        Bits of a quantized element of b, whose scales precede it (:mod:`aotc.ir.loop.forms.quantized`); else 0.
    """

    out: str
    group: int
    bits: int = 0


FORMS = {
    "f32": Form("f32", 1),
    "f32_bf16": Form("f32", 1),
    "f32_f16": Form("f32", 1),
    "f32_s8": Form("f32", 1),
    "f32_i8": Form("f32", 1, 8),
    "f32_i4": Form("f32", 2, 4),
    "bf16_i8": Form("f32", 2, 8),
    "bf16_i4": Form("f32", 2, 4),
    "f64": Form("f64", 1),
    "bf16": Form("f32", 2),
    "i8": Form("i32", 4),
    "i32": Form("i32", 1),
    "i64": Form("i64", 1),
    "i8_o8": Form("i32", 4),
}


UNPACKED = ("i8_o8",)
"""Forms that only support an unpacked right operand: ``i8_o8`` multiplies i8 by i8 with an offset of 128."""


def operands_of_form(form: str) -> tuple[str, str]:
    """Return the operand dtypes of a form; the left one of ``i8`` may be ``u8``, that of ``bf16`` f32."""
    left, _, right = form.partition("_")
    return left, {"s8": "i8", "o8": "i8"}.get(right, right) or left


def form_of_operands(lhs: str, rhs: str) -> str:
    """Return the form of the tile that multiplies operands of two dtypes."""
    return rhs if lhs == rhs or (lhs, rhs) == ("u8", "i8") else f"{lhs}_{rhs}"
