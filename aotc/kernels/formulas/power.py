"""Logarithm and exponential of ``pow`` in 64 bits: in two words: an exponent multiplies errors.

No tables: ``log(1 + f) = 2 s + 2/3 s**3 + 2/5 s**5 + ...`` with ``s = f / (2 + f)``, the first two terms in two words.
"""

from __future__ import annotations

import math
from typing import Any

from aotc.kernels.formulas import limits
from aotc.kernels.formulas.forms import LN2_HIGH, LN2_LOW, polynomial, power_of_two

_TWO_THIRDS = (0.66666666666666662966, 3.7007434154171882626e-17)
_REST = tuple(2.0 / (2 * k + 3) for k in range(12, 0, -1))  # of s**2, from the term of s**5 on
_EXP = tuple(1.0 / math.factorial(k) for k in range(13, 1, -1))


def log_in_two_words(m: Any, e: Any, f: Any) -> tuple[Any, Any]:
    """Return ``e log 2 + log(1 + f)`` for an integer ``e`` and ``sqrt(1/2) <= 1 + f < sqrt(2)``."""
    below = f + 2.0
    lost = (2.0 - below) + f
    s = f / below
    s_low = (m.fma(-s, below, f) - s * lost) / below
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


def exp_of_two_words(m: Any, high: Any, low: Any) -> Any:
    """Return ``e**(high + low)`` with an error of little more than half a unit."""
    c = m.select(high > limits.EXP_HIGH[1], m.const(limits.EXP_HIGH[1]), high)
    c = m.select(c < limits.EXP_LOW[1], m.const(limits.EXP_LOW[1]), c)
    n = m.rint(c * 1.4426950408889634)
    exact = m.fma(n, m.const(-LN2_HIGH), c)
    r = m.fma(n, m.const(-LN2_LOW), exact)
    lost = m.fma(n, m.const(-LN2_LOW), exact - r) + low
    h = r + 1.0
    h_low = (1.0 - h) + r
    curve = r * r * polynomial(m, r, _EXP)
    tail = m.multiply_add(lost, h + curve, curve + h_low)
    k = m.to_int(n)
    half = k >> 1
    return (h + tail) * power_of_two(m, half) * power_of_two(m, k - half)
