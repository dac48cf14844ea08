"""Bit layouts of all float formats of fewer than 16 bits, for decoding and rounding.

The names are those of StableHLO. ``ml_dtypes`` and LLVM's APFloat define the same formats; where the two differ
(conversion of NaN to a format without NaN), the rows follow XLA on the CPU.
"""

from __future__ import annotations

from typing import NamedTuple


class FloatFormat(NamedTuple):
    """Bit layout and special values of one small float format.

    ``special`` defines the codes that are not numbers:

    - ``ieee``: the largest exponent encodes infinity and NaN;
    - ``fn``: one NaN of each sign, all ones; no infinity; overflow gives NaN;
    - ``fnuz``: one NaN in place of -0; no infinity; overflow gives NaN;
    - ``finite``: neither; overflow gives the largest number, NaN becomes -0;
    - ``power``: powers of two without sign and zero; all ones is NaN.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    special: str

    @property
    def sign(self) -> int:
        """Return the mask of the sign bit; all lower bits encode the magnitude."""
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @property
    def infinity(self) -> int:
        """Return the code (bit pattern) of infinity in an ``ieee`` format."""
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def nan(self) -> int:
        """Return the code (bit pattern) to which a NaN is rounded, the positive one if there are two."""
        match self.special:
            case "ieee":
                return self.infinity | 1 << (self.mantissa_bits - 1)
            case "fnuz" | "finite":
                return self.sign
        return self.sign - 1

    @property
    def largest(self) -> int:
        """Return the code (bit pattern) of the largest finite number."""
        match self.special:
            case "ieee":
                return self.infinity - 1
            case "fn" | "power":
                return self.sign - 2
        return self.sign - 1

    @property
    def overflow(self) -> int:
        """Return the code, without the sign bit, to which numbers above the largest one are rounded."""
        match self.special:
            case "ieee":
                return self.infinity
            case "finite":
                return self.largest
        return self.nan

    @property
    def least_exponent(self) -> int:
        """Return the exponent of the smallest normal number.

        Subnormals are multiples of ``2**(exponent - mantissa_bits)``.
        """
        return 1 - self.bias


SMALL_FLOATS = {
    "f4E2M1FN": FloatFormat(2, 1, 1, "finite"),
    "f6E2M3FN": FloatFormat(2, 3, 1, "finite"),
    "f6E3M2FN": FloatFormat(3, 2, 3, "finite"),
    "f8E3M4": FloatFormat(3, 4, 3, "ieee"),
    "f8E4M3": FloatFormat(4, 3, 7, "ieee"),
    "f8E4M3FN": FloatFormat(4, 3, 7, "fn"),
    "f8E4M3FNUZ": FloatFormat(4, 3, 8, "fnuz"),
    "f8E4M3B11FNUZ": FloatFormat(4, 3, 11, "fnuz"),
    "f8E5M2": FloatFormat(5, 2, 15, "ieee"),
    "f8E5M2FNUZ": FloatFormat(5, 2, 16, "fnuz"),
    "f8E8M0FNU": FloatFormat(8, 0, 127, "power"),
}
