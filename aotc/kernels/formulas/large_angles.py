"""Sine and cosine of very large angles, for which pi/2 in a few words is not exact enough: a slow path.

Source: M. Payne and R. Hanek, "Radian reduction for trigonometric functions" (1983). Of the product of the angle and
1/(2 pi), only the bits below one revolution are computed, from a table of the digits.
"""

from __future__ import annotations

from llvmlite import ir

from aotc.kernels.formulas.llvm_algebra import Algebra
from aotc.kernels.formulas.llvm_values import ScalarValue
from aotc.kernels.formulas.trig import sine_and_cosine
from aotc.kernels.llvm_types import F64, I64, I128, i64

_TABLE = "aotc.turns"
_AHEAD = 64  # zero bits before the point, for exponents below that of an integer mantissa
_WORDS = 20  # those, the 971 bits that the largest f64 skips, and the 192 that it uses


def _arctangent_of_inverse(n: int, scale: int) -> int:
    """Return ``scale * atan(1 / n)`` by its series."""
    total, power, k = 0, scale // n, 1
    while power:
        total += power // k if k % 4 == 1 else -(power // k)
        power //= n * n
        k += 2
    return total


def _digits_of_inverse_period() -> list[int]:
    """Return the bits of ``1 / (2 pi)``, in words of 64; pi by Machin's formula."""
    bits = 64 * _WORDS - _AHEAD
    scale = 1 << (bits + 64)
    pi = 16 * _arctangent_of_inverse(5, scale) - 4 * _arctangent_of_inverse(239, scale)
    inverse_period = (scale << bits) // (2 * pi)
    return [(inverse_period >> (64 * (_WORDS - 1 - n))) & (2**64 - 1) for n in range(_WORDS)]


def emit_sine_of_large(function: ir.Function) -> None:
    """Emit ``f64 f(f64 x, i64 n)``, the sine of ``x + n pi / 2`` for finite ``|x| > 1``."""
    _LargeAngleSine(function).emit()


class _LargeAngleSine:
    """Emitter of the sine of a very large angle."""

    def __init__(self, function: ir.Function) -> None:
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        self.m = Algebra(self.builder, 64)
        self.x, self.turns = (ScalarValue(self.builder, a) for a in function.args)
        digits = ir.ArrayType(I64, _WORDS)
        self.table = ir.GlobalVariable(function.module, digits, _TABLE)
        self.table.linkage, self.table.global_constant = "internal", True
        self.table.initializer = ir.Constant(digits, _digits_of_inverse_period())

    def emit(self) -> None:
        m = self.m
        quadrant, fraction = self._reduced_angle()
        negative = self.x < 0.0
        r = fraction * 1.5707963267948966
        sine, cosine = sine_and_cosine(m, m.select(negative, -r, r))
        n = m.select(negative, -quadrant, quadrant) + self.turns
        y = m.select((n & 1) != 0, cosine, sine)
        self.builder.ret(m.select((n & 2) != 0, -y, y).raw)

    def _reduced_angle(self) -> tuple[ScalarValue, ScalarValue]:
        """Return the nearest multiple of pi/2 to ``|x|``, modulo 4, and the remainder in units of pi/2."""
        m = self.m
        bits = m.to_bits(self.x)
        mantissa = (bits & ((1 << 52) - 1)) | (1 << 52)
        skipped = (m.shift_right_logical(bits, 52) & 0x7FF) - (1075 - _AHEAD)
        high, middle, low = self._inverse_period_window(skipped)
        low_low, low_high = self._wide_product(mantissa, low)
        middle_low, middle_high = self._wide_product(mantissa, middle)
        p1 = low_high + middle_low
        carried = self.builder.icmp_unsigned("<", p1.raw, middle_low.raw)
        carry = ScalarValue(self.builder, self.builder.zext(carried, I64))
        p2 = middle_high + mantissa * high + carry
        first = (p2 << 2) | m.shift_right_logical(p1, 62)
        second = (p1 << 2) | m.shift_right_logical(low_low, 62)
        rounded_up = m.shift_right_logical(first, 63)
        rest = ScalarValue(self.builder, self.builder.uitofp(second.raw, F64))
        fraction = m.multiply_add(m.to_float(first), m.const(2.0**-64), rest * 2.0**-128)
        return m.shift_right_logical(p2, 62) + rounded_up, fraction

    def _inverse_period_window(self, skipped: ScalarValue) -> list[ScalarValue]:
        """Return 192 bits of the table, after the first ``skipped`` bits, in three words."""
        first, shift = skipped >> 6, skipped & 63
        words = [self._inverse_period_word(first + n) for n in range(4)]
        fill = [self.m.shift_right_logical(self.m.shift_right_logical(w, 1), 63 - shift) for w in words[1:]]
        return [(w << shift) | f for w, f in zip(words, fill)]

    def _inverse_period_word(self, n: ScalarValue) -> ScalarValue:
        place = self.builder.gep(self.table, [i64(0), n.raw], inbounds=True)
        return ScalarValue(self.builder, self.builder.load(place))

    def _wide_product(self, a: ScalarValue, b: ScalarValue) -> tuple[ScalarValue, ScalarValue]:
        """Return the low and the high word of an unsigned product."""
        wide = self.builder.mul(*(self.builder.zext(v.raw, I128) for v in (a, b)))
        high = self.builder.lshr(wide, ir.Constant(I128, 64))
        low, top = (ScalarValue(self.builder, self.builder.trunc(v, I64)) for v in (wide, high))
        return low, top
