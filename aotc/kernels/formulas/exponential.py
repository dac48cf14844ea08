"""The exponential and functions based on it: expm1, tanh and logistic, over the scalar algebra of ``formulas.math``.

Sources: Cephes (f32).
"""

from __future__ import annotations

import math
from typing import Any

from aotc.kernels.formulas import limits
from aotc.kernels.formulas.forms import (
    LN2_HIGH,
    LN2_LOW,
    polynomial,
    polynomial_by_squares,
    power_of_two,
    real_function,
)
from aotc.kernels.formulas.llvm_algebra import Algebra

# Coefficients of (e**r - 1 - r) / r**2 for |r| <= ln 2 / 2: interpolation at Chebyshev nodes, error 2**-61 in e**r.
EXP_CURVE = (2.0914686968086876e-09, 2.5105217004720745e-08, 2.75572736431103e-07, 2.7557255400206422e-06,
             2.4801587325547743e-05, 0.00019841269874820627, 0.0013888888888883748, 0.008333333333326136,
             0.04166666666666667, 0.1666666666666667, 0.5)  # fmt: skip
_CEPHES = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_MAGIC, _SHIFTED_OUT = (1.5 * 2.0**23, 1.5 * 2.0**52), (2.0**9, 2.0**12)
_USUAL = (2 * 127, 2 * 1023)  # twice the exponent of 1
_RAISED = (32, 64)
_LN2 = ((0.693359375, -2.12194440e-4), (LN2_HIGH, LN2_LOW))


def reduced(m: Algebra, x: Any, low: float | None, high: float | None, more: int | None = None) -> tuple[Any, Any, Any]:
    """Reduce the argument of exp: return ``(word, r, rest)`` with ``x == k ln 2 + r + rest``.

    Adding 1.5 * 2**23 (in 64 bits 1.5 * 2**52) rounds to an integer and leaves it in the low bits, which saves two
    conversions. These bits of ``word`` are ``k + more``; by default ``more`` is twice the exponent of 1. The bits above
    them vanish when ``word`` is shifted to an exponent's position. NaN passes through.
    """
    c = x if high is None else m.select(x > high, m.const(high), x)
    c = c if low is None else m.select(c < low, m.const(low), c)
    word, n, above = _reduced_by_first(m, c, more)
    second = m.const(-_LN2[m.bits == 64][1])
    r = m.multiply_add(n, second, above)
    return word, r, m.multiply_add(n, second, above - r)


def _reduced_by_first(m: Algebra, x: Any, more: int | None = None) -> tuple[Any, Any, Any]:
    """Return the word of :func:`reduced`, k, and ``x`` minus k times the first word of ln 2, which is exact."""
    magic = _MAGIC[m.bits == 64] + (_USUAL[m.bits == 64] if more is None else more)
    t = m.multiply_add(x, m.const(1.4426950408889634), m.const(magic))
    n = t - magic
    return m.to_bits(t), n, m.multiply_add(n, m.const(-_LN2[m.bits == 64][0]), x)


def _exponent_of(m: Algebra, word: Any) -> Any:
    """Return ``k`` of a word of :func:`reduced` with the default ``more``."""
    return word - m.to_bits(m.const(_MAGIC[m.bits == 64] + _USUAL[m.bits == 64]))


def _exp_second_order_part(m: Algebra, r: Any) -> Any:
    """Return ``(e**r - 1 - r) / r**2``."""
    return polynomial_by_squares(m, r, _CEPHES if m.bits == 32 else EXP_CURVE)


def _power(m: Algebra, r: Any) -> Any:
    return m.multiply_add(_exp_second_order_part(m, r), r * r, r) + 1.0


def _word_as_exponent(m: Algebra, word: Any) -> Any:
    """Return ``word``, shifted to the position of a float's exponent."""
    return word << (23 if m.bits == 32 else 52)


def times_power(m: Algebra, y: Any, word: Any) -> Any:
    """Return ``y * 2**k`` in two steps, so that subnormal results are rounded once."""
    half = word >> 1
    return y * m.from_bits(_word_as_exponent(m, half)) * m.from_bits(_word_as_exponent(m, word - half))


def less_one_of_two_words(m: Algebra, high: Any, low: Any) -> tuple[Any, Any]:
    """Return a word of :func:`times_power` and ``p`` with ``e**(high + low) == 2**k * (1 + p)``.

    ``high`` is between EXP_LOW and 0, ``low`` less than a unit in its last place.
    """
    word, n, above = _reduced_by_first(m, high)
    r = m.multiply_add(n, m.const(-_LN2[m.bits == 64][1]), above + low)
    return word, m.multiply_add(_exp_second_order_part(m, r), r * r, r)


@real_function(f32=1, f64=1.5)
def exp(m: Algebra, x: Any) -> Any:
    """Return ``e**x`` as ``2**n * e**r``."""
    wide = m.bits == 64
    word, r, _ = reduced(m, x, limits.EXP_LOW[wide], limits.EXP_HIGH[wide])
    return times_power(m, _power(m, r), word)


# x of exponentials that are known not to be large (decay): at most this, so that the exponent, raised by 32 (64), stays
# in its range. 95 ln 2 is 65.8, 958 ln 2 is 664.
DECAY_HIGH = (60.0, 600.0)


@real_function(f32=1, f64=1.5)
def decay(m: Algebra, x: Any) -> Any:
    """Return ``e**x`` for x of at most :data:`DECAY_HIGH`.

    It has the same bits as :func:`exp`, in a quarter fewer operations: the power of two is added to the exponent,
    raised above the subnormal range, and a multiplication lowers the result again. For NaN nothing is added.
    """
    wide = m.bits == 64
    word, r, _ = reduced(m, x, limits.EXP_LOW[wide], None, _RAISED[wide])
    whole, none = m.from_bits(word), _MAGIC[wide] + _SHIFTED_OUT[wide]
    added = _word_as_exponent(m, m.to_bits(m.select(whole < none, whole, m.const(none))))
    return m.from_bits(m.to_bits(_power(m, r)) + added) * 2.0 ** -_RAISED[wide]


def _exp_minus_one_part(m: Algebra, r: Any, rest: Any, whole: Any) -> Any:
    """Return ``whole + e**(r + rest) - 1`` where ``whole`` is 0 or larger than r."""
    total = whole + r
    lost = (whole - total) + r
    return total + (lost + m.multiply_add(_exp_second_order_part(m, r), r * r, rest))


# x of expm1: below, the result rounds to -1. 2**-n would be too large for exact integers next to it. exp(-20) is less
# than 2**-28, exp(-40) less than 2**-57.
EXPM1_LOW = (-20.0, -40.0)


@real_function(f32=1, f64=1)
def expm1(m: Algebra, x: Any) -> Any:
    """Return ``e**x - 1`` as ``2**n * ((e**r - 1) + (1 - 2**-n))``."""
    word, r, rest = reduced(m, x, EXPM1_LOW[m.bits == 64], limits.EXP_HIGH[m.bits == 64])
    k, top = _exponent_of(m, word), 1022 if m.bits == 64 else 126
    scale = power_of_two(m, m.select(k > top, -top, -k))
    y = times_power(m, _exp_minus_one_part(m, r, rest, 1.0 - scale), word)
    return m.select(x == 0.0, x, y)


# |x| of tanh: above, the argument is clamped, as the power of two would leave its range. 1 - tanh(x) is about
# 2 exp(-2x), which is less than half a unit in the last place in 32 bits, less than one unit in 64.
TANH_ONE = (9.25, 22.0)
# Coefficients of (2**f - 1) / f for |f| <= 1/2, highest power first: Chebyshev nodes, error 4e-9 in 2**f.
_EXP2 = (0.0001545316294512069, 0.0013390863364671234, 0.009618082557277852, 0.05550357114219078, 0.24022650760568126,
         0.6931471880262288)  # fmt: skip


@real_function(f32=4, f64=3)
def tanh(m: Algebra, x: Any) -> Any:
    """Return ``tanh x`` as ``(e**2x - 1) / (e**2x + 1)``; in 64 bits both are scaled by the power of two."""
    if m.bits == 32:
        return _tanh32(m, x)
    a = m.abs(x)
    word, r, rest = reduced(m, a + a, None, 2.0 * TANH_ONE[1])
    scale = power_of_two(m, -_exponent_of(m, word))
    curve = m.multiply_add(_exp_second_order_part(m, r), r * r, rest)
    above, below = 1.0 - scale, scale + 1.0
    total = above + r
    lost = (above - total) + r
    y = (total + (lost + curve)) / (below + (r + curve))
    return m.copysign(m.select(y > 1.0, m.const(1.0), y), x)  # the rounded quotient may exceed 1


def _tanh32(m: Algebra, x: Any) -> Any:
    """Return ``tanh x`` in 32 bits.

    With ``e**2|x| = 2**(n + f)``, ``e**2|x| - 1 = 2**n (2**f - 1) + (2**n - 1)`` does not cancel for n >= 0.
    """
    a = m.abs(x)
    c = m.select(a > TANH_ONE[0], m.const(TANH_ONE[0]), a)
    magic, by = m.const(_MAGIC[0] + 127), m.const(2.0 / math.log(2.0))
    t = m.multiply_add(c, by, magic)
    f = m.multiply_add(c, by, magic - t)
    scale = m.from_bits(_word_as_exponent(m, m.to_bits(t)))
    above = m.multiply_add(f * polynomial(m, f, _EXP2), scale, scale - 1.0)
    return m.copysign(m.ratio(above, above + 2.0), x)


@real_function(f32=3, f64=3)
def logistic(m: Algebra, x: Any) -> Any:
    """Return ``1 / (1 + exp(-x))``; for negative x ``exp(x) / (1 + exp(x))``, which does not overflow."""
    power = decay(m, -m.abs(x))
    return m.select(x < 0.0, power, m.const(1.0)) / (power + 1.0)
