"""The kinds of product that register tiles compute: what a ``Tile`` of the loop IR names as its form."""

from __future__ import annotations

from typing import NamedTuple


class Form(NamedTuple):
    """A kind of product: dtype of the result (and its accumulators), k in one step of the innermost level."""

    out: str
    group: int


FORMS = {
    "f32": Form("f32", 1),
    "f32_bf16": Form("f32", 1),
    "f32_f16": Form("f32", 1),
    "f64": Form("f64", 1),
    "bf16": Form("f32", 2),
    "i8": Form("i32", 4),
}


def operands_of_form(form: str) -> tuple[str, str]:
    """Return the dtypes of the operands of a form; the left one of ``i8`` may be ``u8``, that of ``bf16`` f32."""
    left, _, right = form.partition("_")
    return left, right or left


def form_of_operands(lhs: str, rhs: str) -> str:
    """Return the form of the tile that multiplies operands of two dtypes."""
    return rhs if lhs == rhs or (lhs, rhs) == ("u8", "i8") else f"{lhs}_{rhs}"
