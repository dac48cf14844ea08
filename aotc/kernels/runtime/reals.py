"""Scalar functions on floats, by the C library and by formulas in plain Python.

The functions compute in f64; a kernel rounds the result to its type. They share no code with the formulas of
:mod:`aotc.kernels.formulas`, so that each can check the other.
"""

from __future__ import annotations

import math

from numba import float64, int64, njit

from aotc.kernels.runtime.formats import bits_as
from aotc.kernels.runtime.rounding import floor, round_even


@njit
def exp(x):
    """Return e**x."""
    return math.exp(float64(x))


@njit
def expm1(x):
    """Return e**x - 1."""
    return math.expm1(float64(x))


@njit
def log(x):
    """Return the natural logarithm; NaN below 0."""
    return math.log(float64(x))


@njit
def log1p(x):
    """Return log(1 + x)."""
    return math.log1p(float64(x))


@njit
def sqrt(x):
    """Return the square root."""
    return math.sqrt(float64(x))


@njit
def rsqrt(x):
    """Return 1 / sqrt(x)."""
    return 1.0 / math.sqrt(float64(x))


@njit
def cbrt(x):
    """Return the cube root: a power, and a step of Newton's method."""
    x = float64(x)
    if x == 0 or x != x or abs(x) == math.inf:
        return x
    root = abs(x) ** (1.0 / 3.0)
    root -= (root - abs(x) / (root * root)) / 3.0
    return math.copysign(root, x)


@njit
def sin(x):
    """Return the sine."""
    return math.sin(float64(x))


@njit
def cos(x):
    """Return the cosine."""
    return math.cos(float64(x))


@njit
def tan(x):
    """Return the tangent."""
    return math.tan(float64(x))


@njit
def tanh(x):
    """Return the hyperbolic tangent."""
    return math.tanh(float64(x))


@njit
def logistic(x):
    """Return 1 / (1 + e**-x)."""
    return 1.0 / (1.0 + math.exp(-float64(x)))


@njit
def erf(x):
    """Return the error function."""
    return math.erf(float64(x))


@njit
def erfc(x):
    """Return 1 - erf(x), without cancellation."""
    return math.erfc(float64(x))


@njit
def erf_inv(x):
    """Return the inverse of erf: an estimate by S. Winitzki, and steps of Newton's method on erf or erfc."""
    x = float64(x)
    if not abs(x) <= 1:
        return math.nan
    if x == 0 or abs(x) == 1:
        return x if x == 0 else math.copysign(math.inf, x)
    rest = 1 - abs(x)
    logarithm = math.log(rest * (1 + abs(x)))
    half = 2 / (math.pi * 0.147) + logarithm / 2
    y = math.sqrt(math.sqrt(half * half - logarithm / 0.147) - half)
    for _ in range(4):
        error = math.erf(y) - abs(x) if y < 0.5 else rest - math.erfc(y)
        step = error / (2 / math.sqrt(math.pi) * math.exp(-y * y))
        y -= step / (1 + y * step)  # Halley's correction
    return math.copysign(y, x)


@njit
def lgamma(x):
    """Return the logarithm of the absolute value of the gamma function."""
    x = float64(x)
    if abs(x) == math.inf or (x <= 0 and x == floor(x)):
        return math.inf
    return math.lgamma(x)


@njit
def digamma(x):
    """Return the derivative of lgamma: reflection, recurrence, then the asymptotic series."""
    x = float64(x)
    if x != x or x == -math.inf or (x <= 0 and x == floor(x)):
        return math.nan
    total = 0.0
    if x < 0:
        fraction = x - round_even(x)
        total = -math.pi / math.tan(math.pi * fraction)
        x = 1 - x
    while x < 12:
        total -= 1 / x
        x += 1
    inverse, series = 1 / (x * x), 0.0
    for coefficient in (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12):
        series = inverse * (coefficient + series)
    return total + math.log(x) - 0.5 / x - series


@njit
def sign(x):
    """Return -1 or 1 with the sign of ``x``; ``x`` itself for zeros and NaN."""
    x = float64(x)
    return x if x == 0 or x != x else math.copysign(1.0, x)


@njit
def is_finite(x):
    """Return True unless ``x`` is an infinity or NaN."""
    return abs(x) < math.inf


@njit
def power(x, y):
    """Return x**y."""
    return math.pow(float64(x), float64(y))


@njit
def remainder(x, y):
    """Return the remainder of a division rounded towards 0: long division, whose differences are exact."""
    rest, divisor = abs(float64(x)), abs(float64(y))
    if not rest < math.inf or not divisor > 0:
        return math.nan
    multiple = divisor
    while multiple <= rest / 2:
        multiple *= 2
    while multiple >= divisor and rest >= divisor:
        if rest >= multiple:
            rest -= multiple
        multiple /= 2
    return math.copysign(rest, float64(x))


@njit
def atan2(y, x):
    """Return the angle of the point (x, y)."""
    return math.atan2(float64(y), float64(x))


@njit
def maximum(a, b):
    """Return the larger number, NaN if one is NaN; +0 is larger than -0."""
    if a != a:
        return a
    if b != b:
        return b
    if a == b:
        return a + b if a == 0 else a
    return a if a > b else b


@njit
def minimum(a, b):
    """Return the smaller number, NaN if one is NaN; -0 is smaller than +0."""
    if a != a:
        return a
    if b != b:
        return b
    if a == b:
        return -(-a - b) if a == 0 else a
    return a if a < b else b


@njit
def max_number(a, b):
    """Return the larger number, and the other one if one is NaN."""
    if a != a:
        return b
    return a if b != b or a > b else b


@njit
def reduce_precision(x, exponent_bits, mantissa_bits, own_exponent):
    """Round an f32 or f64, a value of a float of ``own_exponent`` bits, to fewer bits of exponent and mantissa."""
    x = float64(x)
    if x != x:
        return x
    size = abs(x)
    exponent = (bits_as(size, int64) >> 52) - 1023
    least = -14 if own_exponent == 5 else -126 if own_exponent == 8 else -1022
    lowest = least if own_exponent == 5 else -1022
    if mantissa_bits < 52 and size < math.inf:
        unit = 2.0 ** max(exponent, lowest)
        scale = 2.0 ** (min(mantissa_bits, 10) if own_exponent == 5 and exponent < least else mantissa_bits)
        size = round_even(size / unit * scale) / scale * unit
    kept = min(exponent_bits, own_exponent)
    bias = (1 << (kept - 1)) - 1
    if exponent_bits < own_exponent and size < 2.0 ** (1 - bias):
        size = 0.0
    if size >= (2.0 ** bias) * 2.0:
        size = math.inf
    return math.copysign(size, x)
