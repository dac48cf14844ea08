"""The layout of every float of fewer than 16 bits: the facts that decoding and rounding follow.

Names are those of StableHLO. ``ml_dtypes`` and LLVM's APFloat define the same formats; where the two
differ (NaN as a number without NaN), the rows follow XLA on the CPU.
"""

from __future__ import annotations

from typing import NamedTuple


class FloatFormat(NamedTuple):
    """One row of :data:`SMALL_FLOATS`.

    ``special`` says which codes are not numbers:

    - ``ieee``: the largest exponent holds infinity and NaN;
    - ``fn``: one NaN of each sign, all ones; no infinity; too large becomes NaN;
    - ``fnuz``: one NaN in place of -0; no infinity; too large becomes NaN;
    - ``finite``: neither; too large becomes the largest, NaN becomes -0;
    - ``power``: powers of two without sign and zero, all ones is NaN.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    special: str

    @property
    def sign(self) -> int:
        """The sign bit; all lower ones are the magnitude."""
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @property
    def infinity(self) -> int:
        """The code of infinity in an ``ieee`` format."""
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def nan(self) -> int:
        """The code that a NaN is rounded to (of the positive sign, where there is one of each)."""
        match self.special:
            case "ieee":
                return self.infinity | 1 << (self.mantissa_bits - 1)
            case "fnuz" | "finite":
                return self.sign
        return self.sign - 1

    @property
    def largest(self) -> int:
        """The code of the largest number."""
        match self.special:
            case "ieee":
                return self.infinity - 1
            case "fn" | "power":
                return self.sign - 2
        return self.sign - 1

    @property
    def overflow(self) -> int:
        """The code of the magnitude of what is too large."""
        match self.special:
            case "ieee":
                return self.infinity
            case "finite":
                return self.largest
        return self.nan

    @property
    def least_exponent(self) -> int:
        """The exponent of the least normal number; subnormal ones are its multiples by ``2**-mantissa_bits``."""
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
