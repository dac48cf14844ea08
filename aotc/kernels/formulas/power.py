"""Powers: in 64 bits the logarithm has two words, because the exponent multiplies its error.

Without tables: ``log(1 + f) = 2 s + 2/3 s**3 + 2/5 s**5 + ...`` with ``s = f / (2 + f)``; the first two terms are in
two words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aotc.kernels.formulas import limits
from aotc.kernels.formulas.exponential import EXP_CURVE, exp, reduced, times_power
from aotc.kernels.formulas.forms import INF, LN2_HIGH, LN2_LOW, NAN, polynomial, polynomial_by_squares, real_function
from aotc.kernels.formulas.llvm_algebra import Algebra
from aotc.kernels.formulas.logarithm import log, log_parts, log_special, parts_of_normal

_TWO_THIRDS = (0.66666666666666662966, 3.7007434154171882626e-17)
# Coefficients in z = s**2 of 2/5 + 2/7 z + ...: interpolation at Chebyshev nodes, error 2**-66 of the logarithm.
_REST = (0.11723689023649227, 0.11706187519978793, 0.133348065173055, 0.1538459492898411, 0.1818181833570672,
         0.222222222216545, 0.2857142857142937, 0.4)  # fmt: skip


def log_in_two_words(m: Algebra, e: Any, f: Any) -> tuple[Any, Any]:
    """Return ``e log 2 + log(1 + f)`` for an integer ``e`` and ``sqrt(1/2) <= 1 + f < sqrt(2)``."""
    below = f + 2.0
    lost = (2.0 - below) + f
    inverse = 1.0 / below
    s = f * inverse
    s_low = (m.fma(-s, below, f) - s * lost) * inverse
    z = s * s
    z_low = m.fma(s, s, -z) + s * s_low * 2.0
    q = z * polynomial(m, z, _REST)
    c = q + _TWO_THIRDS[0]
    c_low = (_TWO_THIRDS[0] - c) + q + _TWO_THIRDS[1]
    t = z * c
    t_low = m.fma(z, c, -t) + m.fma(z, c_low, z_low * c)
    v = s * t
    v_low = m.fma(s, t, -v) + m.fma(s, t_low, s_low * t)
    twice, whole = s + s, e * LN2_HIGH
    first = whole + twice
    first_low = m.select(e == 0.0, m.const(0.0), (whole - first) + twice)
    high = first + v
    high_low = (first - high) + v
    low = m.multiply_add(e, m.const(LN2_LOW), first_low + (high_low + (s_low + s_low + v_low)))
    total = high + low
    return total, low - (total - high)


def exp_of_two_words(m: Algebra, high: Any, low: Any) -> Any:
    """Return ``e**(high + low)`` with an error of little more than half a unit."""
    word, r, lost = reduced(m, high, limits.EXP_LOW[1], limits.EXP_HIGH[1])
    h = r + 1.0
    h_low = (1.0 - h) + r
    curve = r * r * polynomial_by_squares(m, r, EXP_CURVE)
    tail = m.multiply_add(lost + low, h + curve, curve + h_low)
    return times_power(m, h + tail, word)


# |x| of pow in 64 bits: below, x is subnormal, and its exponent is not in the bits of a normal number's. The smallest
# normal number.
POW_NORMAL = 2.0**-1022


@real_function(f32=1, f64=1)
def pow(m: Algebra, x: Any, y: Any) -> Any:
    """Return ``x**y`` as ``exp(y * log|x|)``, in 64 bits with the logarithm in two words; special cases as in C."""
    if m.bits == 32:
        w = m.wide
        return m.narrow(_power(w, m.widen(x), m.widen(y), _short_power))
    a = m.abs(x)
    high, low = log_in_two_words(m, *parts_of_normal(m, a))
    zero = (a == 0.0) & (y != 0.0)
    size = _power_of_logarithm(m, y, m.select(zero, m.const(-INF), high), low)
    usual = ((a >= POW_NORMAL) | zero) & (a < INF) & (m.abs(y) < INF)
    return m.rarely(~usual, "power", (x, y), _power_with_sign(m, x, y, size))


def power_of_any(m: Algebra, x: Any, y: Any) -> Any:
    """Return ``x**y`` in 64 bits for all numbers."""
    return _power(m, x, y, _long_power)


def _short_power(m: Algebra, a: Any, y: Any) -> Any:
    return exp(m, y * log(m, a))


def _long_power(m: Algebra, a: Any, y: Any) -> Any:
    high, low = log_in_two_words(m, *log_parts(m, a))
    return _power_of_logarithm(m, y, log_special(m, a, high), low)


# |y log x| of pow: above, the result is 0 or infinite, and the correction of its last digits would be NaN. The
# logarithm of the smallest subnormal.
POW_USUAL = 745.0


def _power_of_logarithm(m: Algebra, y: Any, high: Any, low: Any) -> Any:
    p = y * high
    rest = m.fma(y, high, -p) + y * low
    return exp_of_two_words(m, p, m.select(m.abs(p) < POW_USUAL, rest, m.const(0.0)))


def _power_with_sign(m: Algebra, x: Any, y: Any, size: Any) -> Any:
    """Return ``size``, the absolute value of the power, with the power's sign; NaN if the power is not real."""
    whole = m.trunc(y) == y
    half = y * 0.5
    odd = whole & (m.trunc(half) != half)
    negative = m.copysign(m.const(1.0), x) < 0.0
    r = m.select(negative & odd, -size, size)
    return m.select((x < 0.0) & (m.abs(x) < INF) & ~whole, m.const(NAN), r)


def _power(m: Algebra, x: Any, y: Any, of_size: Callable[..., Any]) -> Any:
    """Return ``x**y``, where ``of_size`` computes it for ``|x|``; special cases as in C."""
    a = m.abs(x)
    r = _power_with_sign(m, x, y, of_size(m, a, y))
    r = m.select((a == 1.0) & (m.abs(y) == INF), m.const(1.0), r)
    r = m.select((x != x) | (y != y), x + y, r)
    return m.select((y == 0.0) | (x == 1.0), m.const(1.0), r)
