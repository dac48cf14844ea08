"""The forms of a ``Tile`` statement: the kinds of matmul that register tiles of a CPU compute."""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.loop.forms.records import TextRecord
from aotc.vmfb.dtypes import DTYPES


@dataclass(frozen=True, slots=True, repr=False)
class TileForm(TextRecord):
    """A kind of matmul, by its dtypes and the layout of the right operand.

    Attributes
    ----------
    left : str
        The dtype in which the left operand is multiplied. In memory it may also be ``u8`` for ``i8``, and ``f32`` for
        ``bf16``.
    right : str
        The dtype of the right operand; tiles convert it to ``left``, if it differs.
    out : str
        The dtype of the result and of its accumulators.
    group : int
        Number of consecutive k that one step of the innermost level processes.
    scaled : bool
        True if the right operand is quantized: scales of the columns precede its groups
        (:mod:`aotc.ir.loop.forms.quantized`).
    offset : int
        Number added to the elements of the right operand, only if that is not packed.
    """

    left: str
    right: str
    out: str
    group: int = 1
    scaled: bool = False
    offset: int = 0

    @property
    def bits(self) -> int:
        """Return the bits of a quantized element of the right operand; 0 if that is not quantized."""
        return DTYPES[self.right].bits if self.scaled else 0

    @property
    def dot_product_dtype(self) -> str:
        """Return the dtype whose dot-product instructions may compute the tile (:attr:`aotc.targets.Target.units`).

        An empty string: the tile needs multiply-adds of single elements.
        """
        return self.left if self.group > 1 and not self.scaled and not self.offset else ""

    @property
    def name(self) -> str:
        """Return the name of the form in :data:`FORMS`, which is a part of the symbols of tile functions."""
        return _NAMES.get(self, "unknown")


F32 = TileForm("f32", "f32", "f32")
F64 = TileForm("f64", "f64", "f64")
I32 = TileForm("i32", "i32", "i32")
I64 = TileForm("i64", "i64", "i64")
F32_BF16, F32_F16, F32_I8 = (TileForm("f32", right, "f32") for right in ("bf16", "f16", "i8"))
"""Plain FMA; elements of the right operand are widened in registers."""
BF16_PAIRS = TileForm("bf16", "bf16", "f32", group=2)
I8_QUADS = TileForm("i8", "i8", "i32", group=4)
I8_OFFSET = TileForm("i8", "i8", "i32", group=4, offset=128)
"""``i8`` by ``i8`` where the instruction needs an unsigned operand."""

FORMS = {
    "f32": F32,
    "f32_bf16": F32_BF16,
    "f32_f16": F32_F16,
    "f32_s8": F32_I8,
    "f32_i8": TileForm("f32", "i8", "f32", scaled=True),
    "f32_i4": TileForm("f32", "i4", "f32", group=2, scaled=True),
    "bf16_i8": TileForm("bf16", "i8", "f32", group=2, scaled=True),
    "bf16_i4": TileForm("bf16", "i4", "f32", group=2, scaled=True),
    "f64": F64,
    "bf16": BF16_PAIRS,
    "i8": I8_QUADS,
    "i32": I32,
    "i64": I64,
    "i8_o8": I8_OFFSET,
}
"""The forms that register tiles have, by name."""
_NAMES = {form: name for name, form in FORMS.items()}
_BY_OPERANDS = {(f.left, f.right): f for f in FORMS.values() if not f.scaled and not f.offset}
_SCALED = {(f.left, f.bits): f for f in FORMS.values() if f.scaled}


def find_form(lhs: str, rhs: str) -> TileForm | None:
    """Return the form of the tile that multiplies operands of two dtypes, or None if there is none."""
    return _BY_OPERANDS.get(("i8" if (lhs, rhs) == ("u8", "i8") else lhs, rhs))


def form_of_operands(lhs: str, rhs: str, bits: int = 0) -> TileForm:
    """Return the form for operands of two dtypes; with ``bits``, the right operand is quantized weights of that width.

    Raises
    ------
    ValueError
        If there is none.
    """
    form = _SCALED.get((lhs, bits)) if bits else find_form(lhs, rhs)
    if form is None:
        raise ValueError(f"no register tile multiplies {lhs} by {f'weights of {bits} bits' if bits else rhs}")
    return form
