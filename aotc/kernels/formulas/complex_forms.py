"""Common parts of the complex functions: computation of c64 in 64-bit floats, scaling, absolute values, logarithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aotc.kernels.formulas import limits
from aotc.kernels.formulas import math as real
from aotc.kernels.formulas.forms import power_of_two
from aotc.kernels.formulas.llvm_algebra import Algebra
from aotc.kernels.formulas.logarithm import log_special, parts_of_normal
from aotc.kernels.formulas.power import log_in_two_words

Pair = tuple[Any, Any]


def in_either_width(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``formula(m, from_32_bits, *pairs)`` for operands of 32 bits, which it computes in 64, and of 64 bits."""

    def widened(m: Algebra, *args: Pair) -> Any:
        if m.bits == 64:
            return formula(m, False, *args)
        found = formula(m.wide, True, *((m.widen(a[0]), m.widen(a[1])) for a in args))
        return tuple(m.narrow(v) for v in found) if isinstance(found, tuple) else m.narrow(found)

    widened.__name__ = formula.__name__
    widened.__doc__ = formula.__doc__
    return widened


def larger(m: Algebra, x: Any, y: Any) -> Any:
    """Return the larger of two magnitudes; a NaN is never the larger one."""
    return m.select(x < y, y, x)


def is_infinite(m: Algebra, a: Pair) -> Any:
    return (m.abs(a[0]) == real.INF) | (m.abs(a[1]) == real.INF)


# The larger of |re z| and |im z| in divisions and roots of 64 bits. Between the two, squares, their products and their
# quotients neither overflow nor lose digits; outside, the operands are scaled. A quarter of the exponent range.
MODERATE = (2.0**-250, 2.0**250)


def is_moderate(m: Algebra, a: Pair) -> Any:
    """Return True where squares and quotients of ``a`` stay in the range of normal numbers."""
    size = larger(m, m.abs(a[0]), m.abs(a[1]))
    return ((size > MODERATE[0]) & (size < MODERATE[1])) | (size == 0.0)


def scale_to_one(m: Algebra, size: Any) -> tuple[Any, Any]:
    """Return a power of two that scales the magnitude ``size`` to about 1, and its logarithm."""
    exponent = m.shift_right_logical(m.to_bits(size), 52)
    exponent = m.select(exponent > 2045, 2045, exponent)
    exponent = m.select(exponent < 1, 1, exponent)
    n = -exponent + 1023
    return power_of_two(m, n), n


def scaled(m: Algebra, x: Any, n: Any) -> Any:
    """Return ``x * 2**n`` for an integer ``|n| <= 2044``, in two steps."""
    half = n >> 1
    return x * power_of_two(m, half) * power_of_two(m, n - half)


def two_sum(a: Any, b: Any) -> Pair:
    """Return the rounded ``a + b`` and its rounding error."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def sum_of_products(m: Algebra, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Return ``a b + c d`` with an error of two units (Kahan); infinite where the uncorrected sum is infinite."""
    p = c * d
    lost = m.fma(-c, d, p)  # subtracted, so that -0 stays -0
    return m.fma(a, b, p) - m.select(lost == lost, lost, m.const(0.0))


def magnitude_of(m: Algebra, from_32_bits: bool, a: Pair) -> Any:
    """Return the magnitude ``|a|`` of a complex number, infinite if a part is infinite."""
    if from_32_bits:
        size = m.sqrt(m.multiply_add(a[0], a[0], a[1] * a[1]))
    else:
        near_one, n = scale_to_one(m, larger(m, m.abs(a[0]), m.abs(a[1])))
        x, y = a[0] * near_one, a[1] * near_one
        size = scaled(m, m.sqrt(m.multiply_add(x, x, y * y)), -n)
    return m.select(is_infinite(m, a), m.const(real.INF), size)


# The larger of |re z| and |im z| in the complex logarithm: above, squares may overflow, and both parts are scaled by
# 2**-600. Half of the exponent range, rounded.
SQUARE_LARGE = 2.0**500
# What a scale of 2**600 adds to the logarithm: 600 log 2.
LOG_OF_SHIFT = 415.88830833596718565


def log_of_size(m: Algebra, from_32_bits: bool, a: Pair, above: Any) -> Any:
    """Return ``log |a|``; ``above`` is ``|a|**2 - 1`` without cancellation, which is used near 1."""
    if from_32_bits:
        scale, shift, unscaled = m.const(1.0), m.const(0.0), m.true()
    else:
        size = larger(m, m.abs(a[0]), m.abs(a[1]))
        big, small = size > SQUARE_LARGE, size < limits.SQUARE_SMALL
        scale = m.select(big, m.const(2.0**-600), m.select(small, m.const(2.0**600), m.const(1.0)))
        shift = m.select(small, m.const(-LOG_OF_SHIFT), m.const(0.0))
        shift = m.select(big, m.const(LOG_OF_SHIFT), shift)
        unscaled = ~(big | small)
    x, y = a[0] * scale, a[1] * scale
    square = m.multiply_add(x, x, y * y)
    near = unscaled & (square > limits.LOG_NEAR[0]) & (square < limits.LOG_NEAR[1])
    u = m.select(near, above + 1.0, square)
    value = real.log(m, u)
    near_one = m.select(m.abs(above) < limits.LOG1P_SERIES, real.log1p_series(m, above), value * (above / (u - 1.0)))
    value = m.multiply_add(m.select(near, near_one, value), m.const(0.5), shift)
    return m.select(is_infinite(m, a), m.const(real.INF), value)


def log_of_size_in_two_words(m: Algebra, a: Pair) -> tuple[Any, Any]:
    """Return ``log |a|`` in 64 bits as a sum of two words: half the logarithm of ``|a|**2``, which has two words."""
    scale, n = scale_to_one(m, larger(m, m.abs(a[0]), m.abs(a[1])))
    x, y = a[0] * scale, a[1] * scale
    p, q = x * x, y * y
    square, lost = two_sum(p, q)
    lost = lost + (m.fma(x, x, -p) + m.fma(y, y, -q))
    e, f = parts_of_normal(m, square)
    high, low = log_in_two_words(m, e - m.to_float(n + n), f)
    low = low + lost / square
    total = high + low
    low = (high - total) + low
    total = m.select(is_infinite(m, a), m.const(real.INF), log_special(m, square, total))
    return total * 0.5, m.select(m.abs(total) < real.INF, low * 0.5, m.const(0.0))


def split_exponent(m: Algebra, x: Any) -> tuple[Any, Any]:
    """Return an exponent and a factor with ``e**exponent * factor == e**x``, both in range where ``e**x`` is not."""
    far = m.abs(x) > limits.EXP_SPLIT
    beyond = m.select(x > 0.0, m.const(limits.EXP_OF_SPLIT), m.const(1.0 / limits.EXP_OF_SPLIT))
    near = m.select(far, x - m.copysign(m.const(limits.EXP_SPLIT), x), x)
    return near, m.select(far, beyond, m.const(1.0))


def square_less_one(m: Algebra, less: Any, y: Any) -> Any:
    """Return ``(1 + less)**2 + y**2 - 1``; terms that cancel are in two words."""
    p, q = less * less, y * y
    lost = m.fma(less, less, -p) + m.fma(y, y, -q)
    t = p + q
    back = t - p
    lost = lost + ((p - (t - back)) + (q - back))
    twice = less + less
    total = twice + t
    back = total - twice
    return total + (lost + ((twice - (total - back)) + (t - back)))


def root_of_moderate(m: Algebra, a: Pair) -> Pair:
    """Return the square root of a pair whose squares stay in the range."""
    size = m.sqrt(m.multiply_add(a[0], a[0], a[1] * a[1]))
    t = m.sqrt((size + m.abs(a[0])) * 0.5)
    other = m.select(t == 0.0, m.const(0.0), m.abs(a[1]) / (t + t))
    right = a[0] >= 0.0
    return m.select(right, t, other), m.copysign(m.select(right, other, t), a[1])


def scale_by_power_of_four(m: Algebra, from_32_bits: bool, a: Pair) -> tuple[Pair, Any]:
    """Return ``a`` times a power of 4 that scales it to about 1, and the exponent; unchanged if from 32 bits."""
    if from_32_bits:
        return a, None
    _, n = scale_to_one(m, larger(m, m.abs(a[0]), m.abs(a[1])))
    n = (n >> 1) << 1
    scale = power_of_two(m, n)
    return (a[0] * scale, a[1] * scale), n
