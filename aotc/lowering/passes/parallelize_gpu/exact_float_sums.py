"""Sums of floats whose bits do not depend on the order: as integers, scaled by the largest term of each sum.

All terms of a sum are rounded to multiples of one power of two, so small that ``n`` terms below the largest
just fit into 64 bits, and added as integers. The sum is exact but for that rounding: for a million f32 it is off by at
most ``2**-23`` of the largest term, and mostly by far less; a sum in any order of f32 would be off by more. f64 takes a
second integer for what the first has rounded away. (Demmel and Nguyen, "Fast Reproducible Floating-Point Summation",
2013, bin terms in the same way.)

Infinities and NaN cannot be scaled: where the largest term is one, the integer counts infinities of either sign.
"""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim
from aotc.ir.tensor.ir import TensorType, Value
from aotc.lowering.passes.parallelize_gpu.elementwise_dsl import Maths
from aotc.lowering.passes.rewrite import Builder
from aotc.vmfb.dtypes import DTYPES

_MANTISSA = {"f32": 23, "f64": 52}
_BIAS = {"f32": 127, "f64": 1023}
_INFINITY = {"f32": 0x7F800000, "f64": 0x7FF0000000000000}
_COUNT = 31
"""Bits of the number of infinities above 0, below those of the number of others."""


@dataclass(frozen=True, slots=True)
class ExactSum:
    """How terms of ``dtype`` become integers and their sums floats again.

    Attributes
    ----------
    dtype : str
        ``f32`` or ``f64``.
    terms : Dim
        How many a sum may have.
    """

    dtype: str
    terms: Dim
    b: Builder

    @property
    def words(self) -> int:
        """How many integers a sum is."""
        return 1 if self.dtype == "f32" else 2

    @property
    def bits(self) -> int:
        """The bits of a term in each of them."""
        return 62 - (self.terms.bit_length() if isinstance(self.terms, int) else _COUNT)

    def magnitudes(self, x: Value) -> Value:
        """Return unsigned integers that order like the absolute values of terms: their largest is for the rest."""
        width = DTYPES[self.dtype].bits
        m = Maths(self.b)
        return m("and", m.bits(x, f"u{width}"), 2 ** (width - 1) - 1)

    def parts(self, x: Value, largest: Value) -> list[Value]:
        """Return the integers of each term, given the largest magnitude of its sum."""
        m = Maths(self.b)
        wide = self.b.convert(x, "f64")
        scaled = self._scaled(wide, largest, up=True)
        special = m("ge", largest, _INFINITY[self.dtype])
        infinite = m("eq", wide, float("inf")), m("eq", wide, float("-inf"))
        count = TensorType("i64", x.type.shape)
        counted = m.select(infinite[0], m.filled(1, count), m.select(infinite[1], 1 << _COUNT, m.filled(0, count)))
        found = []
        for word in range(self.words):
            whole = m("round_even", scaled)
            found.append(m.select(special, counted if not word else 0, self.b.convert(whole, "i64")))
            scaled = m("mul", m("sub", scaled, whole), 2.0**self.bits)
        return found

    def total(self, words: list[Value], largest: Value) -> Value:
        """Return the sums of which ``words`` are the sums of integers."""
        m = Maths(self.b)
        special = m("ge", largest, _INFINITY[self.dtype])
        scale = m.select(special, 0, largest)  # what follows reads one value, and is one kernel
        first = m.select(special, words[0], m.filled(0, words[0].type))
        sum_ = self.b.convert(m.select(special, 0, words[0]), "f64")
        for number, word in enumerate(words[1:], start=1):
            sum_ = m("add", sum_, m("mul", self.b.convert(word, "f64"), 2.0 ** (-self.bits * number)))
        finite = self.b.convert(self._scaled(sum_, scale, up=False), self.dtype)
        above = m("ne", m("and", first, (1 << _COUNT) - 1), 0)
        below = m("ne", m("shr_arith", first, _COUNT), 0)
        signed = m.select(above, float("inf"), m.filled(float("-inf"), finite.type))
        nan = m("or", m("gt", largest, _INFINITY[self.dtype]), m("and", above, below))
        return m.select(special, m.select(nan, float("nan"), signed), finite)

    def _scaled(self, x: Value, largest: Value, up: bool) -> Value:
        """Return ``x`` times the power of two that takes what is below the largest to below ``2**bits``, or back."""
        m = Maths(self.b)
        exponent = self.b.convert(m("shr_logic", largest, _MANTISSA[self.dtype]), "i64")  # |x| < 2**(it - bias + 1)
        power = m("add", m("mul", exponent, -1), self.bits + _BIAS[self.dtype] - 1)
        if not up:
            power = m("mul", power, -1)
        first = m("shr_arith", power, 1)  # a power of two that f64 does not have is a product of two
        for part in (first, m("sub", power, first)):
            x = m("mul", x, m.bits(m("shl", m("add", part, _BIAS["f64"]), _MANTISSA["f64"]), "f64"))
        return x
