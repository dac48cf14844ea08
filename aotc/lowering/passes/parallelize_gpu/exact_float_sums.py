"""Sums of floats that do not depend on the order: integer sums, scaled by the largest term of each sum.

All terms of a sum are rounded to multiples of one power of two and added as integers. The power is the smallest for
which ``n`` terms of the largest magnitude fit into 64 bits. Only that rounding makes the sum inexact. For a million f32
terms the error is at most ``2**-23`` of the largest term, less than that of an f32 sum in any order. f64 uses a second
integer for the remainders of the first rounding. (Demmel and Nguyen, "Fast Reproducible Floating-Point Summation",
2013, bin terms in the same way.)

Infinities and NaN cannot be scaled: if the largest term is not finite, the integer counts infinities of either sign.
"""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim
from aotc.ir.tensor.ir import TensorType, Value
from aotc.lowering.passes.parallelize_gpu.elementwise_dsl import ElementwiseBuilder
from aotc.lowering.passes.rewrite import Builder
from aotc.vmfb.dtypes import DTYPES

_MANTISSA = {"f32": 23, "f64": 52}
_BIAS = {"f32": 127, "f64": 1023}
_INFINITY = {"f32": 0x7F800000, "f64": 0x7FF0000000000000}
_COUNT = 31
"""Bits of the number of positive infinities; those of the number of negative ones are above them."""


@dataclass(frozen=True, slots=True)
class ExactSum:
    """Convert terms of a sum to fixed-point integers, and sums of such integers to floats.

    Attributes
    ----------
    dtype : str
        ``f32`` or ``f64``.
    terms : Dim
        The largest number of terms of a sum.
    """

    dtype: str
    terms: Dim
    b: Builder

    @property
    def words(self) -> int:
        """Return the number of 64-bit integers that represent a sum: 1 for f32, 2 for f64."""
        return 1 if self.dtype == "f32" else 2

    @property
    def bits(self) -> int:
        """Return the number of bits of a term in each integer; the other bits are for carries of the sum."""
        return 62 - (self.terms.bit_length() if isinstance(self.terms, int) else _COUNT)

    def absolute_value_bits(self, x: Value) -> Value:
        """Return the bits of ``|x|`` as unsigned integers, which order like the absolute values.

        Their maximum over the terms of a sum is the argument ``largest`` of the other methods.
        """
        width = DTYPES[self.dtype].bits
        m = ElementwiseBuilder(self.b)
        return m("and", m.bits(x, f"u{width}"), 2 ** (width - 1) - 1)

    def fixed_point_terms(self, x: Value, largest: Value) -> list[Value]:
        """Return the fixed-point integers of each term, scaled by the largest magnitude among the terms of its sum."""
        m = ElementwiseBuilder(self.b)
        wide = self.b.convert(x, "f64")
        scaled = self._scaled_below_limit(wide, largest, up=True)
        special = m("ge", largest, _INFINITY[self.dtype])
        infinite = m("eq", wide, float("inf")), m("eq", wide, float("-inf"))
        count = TensorType("i64", x.type.shape)
        counted = m.select(infinite[0], m.filled(1, count), m.select(infinite[1], 1 << _COUNT, m.filled(0, count)))
        words = []
        for word in range(self.words):
            whole = m("round_even", scaled)
            words.append(m.select(special, counted if not word else 0, self.b.convert(whole, "i64")))
            scaled = m("mul", m("sub", scaled, whole), 2.0**self.bits)
        return words

    def float_of_integer_sums(self, words: list[Value], largest: Value) -> Value:
        """Return the float sums: sums of the integers, scaled back; infinities and NaN follow IEEE 754."""
        m = ElementwiseBuilder(self.b)
        special = m("ge", largest, _INFINITY[self.dtype])
        scale = m.select(special, 0, largest)  # later ops read one value, and are one kernel
        first = m.select(special, words[0], m.filled(0, words[0].type))
        sum_ = self.b.convert(m.select(special, 0, words[0]), "f64")
        for number, word in enumerate(words[1:], start=1):
            sum_ = m("add", sum_, m("mul", self.b.convert(word, "f64"), 2.0 ** (-self.bits * number)))
        finite = self.b.convert(self._scaled_below_limit(sum_, scale, up=False), self.dtype)
        above = m("ne", m("and", first, (1 << _COUNT) - 1), 0)
        below = m("ne", m("shr_arith", first, _COUNT), 0)
        signed = m.select(above, float("inf"), m.filled(float("-inf"), finite.type))
        nan = m("or", m("gt", largest, _INFINITY[self.dtype]), m("and", above, below))
        return m.select(special, m.select(nan, float("nan"), signed), finite)

    def _scaled_below_limit(self, x: Value, largest: Value, up: bool) -> Value:
        """Return ``x`` scaled by the power of two that brings the largest term below ``2**bits``.

        ``x`` is multiplied by the power if ``up``, else divided.
        """
        m = ElementwiseBuilder(self.b)
        exponent = self.b.convert(m("shr_logic", largest, _MANTISSA[self.dtype]), "i64")  # |x| < 2**(it - bias + 1)
        power = m("add", m("mul", exponent, -1), self.bits + _BIAS[self.dtype] - 1)
        if not up:
            power = m("mul", power, -1)
        first = m("shr_arith", power, 1)  # a power of two outside the range of f64 is a product of two
        for part in (first, m("sub", power, first)):
            x = m("mul", x, m.bits(m("shl", m("add", part, _BIAS["f64"]), _MANTISSA["f64"]), "f64"))
        return x
