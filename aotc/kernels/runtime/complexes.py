"""Scalar functions on complex numbers, computed in c128; a kernel casts the results to its type."""

from __future__ import annotations

import cmath
import math

from numba import complex128, njit


@njit
def complex_abs(z):
    """Return the absolute value."""
    z = complex128(z)
    return math.hypot(z.real, z.imag)


@njit
def _is_larger(z, w):
    return z.real > w.real or (z.real == w.real and z.imag > w.imag)


@njit
def complex_max(z, w):
    """Return the larger number in lexicographic order, NaN if one is NaN."""
    if z != z or w != w:
        return z if z != z else w
    return w if _is_larger(w, z) else z


@njit
def complex_min(z, w):
    """Return the smaller number in lexicographic order, NaN if one is NaN."""
    if z != z or w != w:
        return z if z != z else w
    return w if _is_larger(z, w) else z


@njit
def conjugate(z):
    """Return the complex conjugate."""
    return complex(z.real, -z.imag)


@njit
def complex_sign(z):
    """Return ``z / abs(z)``; ``z`` for 0."""
    z = complex128(z)
    size = math.hypot(z.real, z.imag)
    return z if size == 0 else complex(z.real / size, z.imag / size)


@njit
def _scaled(size, x, y):
    """Return the complex number with parts ``size * x`` and ``size * y``, where a product with an exact 0 is 0."""
    return complex(0.0 if x == 0 else size * x, y if y == 0 else size * y)


@njit
def complex_exp(z):
    """Return e**z."""
    z = complex128(z)
    if z.imag == 0:
        return complex(math.exp(z.real), z.imag)
    return _scaled(math.exp(z.real), math.cos(z.imag), math.sin(z.imag))


@njit
def complex_expm1(z):
    """Return e**z - 1."""
    z = complex128(z)
    if abs(z.real) >= 1:
        return complex_exp(z) - 1
    half = math.sin(z.imag / 2)
    return complex(math.expm1(z.real) * math.cos(z.imag) - 2 * half * half, complex_exp(z).imag)


@njit
def complex_log(z):
    """Return the principal logarithm."""
    z = complex128(z)
    x, y = abs(z.real), abs(z.imag)
    size = math.hypot(x, y)
    large, small = max(x, y), min(x, y)
    if 0.5 < size < 2:
        real = math.log1p((large - 1) * (large + 1) + small * small) / 2
    else:
        real = math.log(size)
    return complex(real, math.atan2(z.imag, z.real))


@njit
def complex_log1p(z):
    """Return log(1 + z)."""
    z = complex128(z)
    if z.real * z.real + z.imag * z.imag < 0.25:
        real = math.log1p(2 * z.real + (z.real * z.real + z.imag * z.imag)) / 2
    else:
        real = complex_log(z + 1).real
    return complex(real, math.atan2(z.imag, 1 + z.real))


@njit
def complex_sqrt(z):
    """Return the principal square root."""
    return cmath.sqrt(complex128(z))


@njit
def _unit_of_infinity(x):
    """Return 1 for an infinity and 0 for a finite number, with the sign of ``x``."""
    return math.copysign(1.0 if abs(x) == math.inf else 0.0, x)


@njit
def complex_div(z, w):
    """Return ``z / w``: by powers of two in range, infinities as in C99's annex G."""
    z, w = complex128(z), complex128(w)
    a, b, c, d = z.real, z.imag, w.real, w.imag
    scale = 1.0
    size = max(abs(c), abs(d))
    if 0 < size < math.inf and (size > 1e150 or size < 1e-150):
        scale = 1e-200 if size > 1 else 1e200
        c, d = c * scale, d * scale
    below = c * c + d * d
    x, y = (a * c + b * d) / below * scale, (b * c - a * d) / below * scale
    if x != x and y != y:
        if c == 0 and d == 0:
            pole = math.copysign(math.inf, c)
            return complex(pole * a, pole * b)
        if (abs(a) == math.inf or abs(b) == math.inf) and abs(c) < math.inf and abs(d) < math.inf:
            e, f = _unit_of_infinity(a), _unit_of_infinity(b)
            return complex(math.inf * (e * c + f * d), math.inf * (f * c - e * d))
        if abs(a) < math.inf and abs(b) < math.inf and (abs(c) == math.inf or abs(d) == math.inf):
            g, h = _unit_of_infinity(c), _unit_of_infinity(d)
            return complex(0.0 * (a * g + b * h), 0.0 * (b * g - a * h))
    return complex(x, y)


@njit
def complex_rsqrt(z):
    """Return 1 / sqrt(z)."""
    z = complex128(z)
    if z == 0:
        return complex(math.inf, math.nan)
    if abs(z.real) == math.inf or abs(z.imag) == math.inf:
        return complex(0.0, math.copysign(0.0, -z.imag))
    return complex_div(complex(1.0, 0.0), cmath.sqrt(z))


@njit
def complex_pow(z, w):
    """Return ``exp(w log z)``; 1 for an exponent of 0."""
    z, w = complex128(z), complex128(w)
    if w == 0:
        return complex(1.0, 0.0)
    log = complex_log(z)
    real = z.imag == 0 and log.imag == 0
    x, y, size, angle = w.real, w.imag, log.real, log.imag
    exponent = (0.0 if x == 0 or size == 0 else x * size) - (0.0 if y == 0 or real else y * angle)
    phase = (0.0 if x == 0 or real else x * angle) + (0.0 if y == 0 or size == 0 else y * size)
    value = math.exp(exponent)
    if phase == 0:
        return complex(value, phase)
    if not abs(phase) < math.inf:
        known = value == 0 or value == math.inf
        return complex(value if known else math.nan, 0.0 if value == 0 else math.nan)
    return _scaled(value, math.cos(phase), math.sin(phase))


@njit
def complex_cbrt(z):
    """Return the principal cube root."""
    return complex_pow(z, complex(1.0 / 3.0, 0.0))


@njit
def complex_logistic(z):
    """Return 1 / (1 + e**-z)."""
    z = complex128(z)
    left = z.real < 0
    value = complex_exp(z if left else -z)
    return complex_div(value if left else complex(1.0, 0.0), complex(value.real + 1, value.imag))


@njit
def complex_sin(z):
    """Return the sine."""
    z = complex128(z)
    return complex(math.sin(z.real) * math.cosh(z.imag), math.cos(z.real) * math.sinh(z.imag))


@njit
def complex_cos(z):
    """Return the cosine."""
    z = complex128(z)
    return complex(math.cos(z.real) * math.cosh(z.imag), -math.sin(z.real) * math.sinh(z.imag))


@njit
def complex_tanh(z):
    """Return the hyperbolic tangent (W. Kahan)."""
    z = complex128(z)
    if abs(z.real) > 20:
        decay = 4 * math.sin(z.imag) * math.cos(z.imag) * math.exp(-2 * abs(z.real))
        return complex(math.copysign(1.0, z.real), decay)
    t, s = math.tan(z.imag), math.sinh(z.real)
    beta, rho = 1 + t * t, math.sqrt(1 + s * s)
    below = 1 + beta * s * s
    return complex(beta * rho * s / below, t / below)


@njit
def _times_i(z):
    """Return ``i z``."""
    return complex(-z.imag, z.real)


@njit
def _over_i(z):
    """Return ``z / i``."""
    return complex(z.imag, -z.real)


@njit
def complex_tan(z):
    """Return the tangent."""
    z = complex128(z)
    return _over_i(complex_tanh(_times_i(z)))


@njit
def _roots_of_one_minus_and_plus(z):
    """Return the square roots of ``1 - z`` and ``1 + z``."""
    return cmath.sqrt(complex(1 - z.real, -z.imag)), cmath.sqrt(complex(1 + z.real, z.imag))


@njit
def complex_acos(z):
    """Return the inverse cosine (W. Kahan, "Branch cuts for complex elementary functions", 1987)."""
    z = complex128(z)
    below, above = _roots_of_one_minus_and_plus(z)
    imag = math.asinh(above.real * below.imag - above.imag * below.real)
    return complex(2 * math.atan2(below.real, above.real), imag)


@njit
def complex_acosh(z):
    """Return the inverse hyperbolic cosine (Kahan)."""
    z = complex128(z)
    below, above = cmath.sqrt(complex(z.real - 1, z.imag)), cmath.sqrt(complex(z.real + 1, z.imag))
    real = math.asinh(below.real * above.real + below.imag * above.imag)
    return complex(real, 2 * math.atan2(below.imag, above.real))


@njit
def complex_asin(z):
    """Return the inverse sine (Kahan)."""
    z = complex128(z)
    below, above = _roots_of_one_minus_and_plus(z)
    imag = math.asinh(below.real * above.imag - below.imag * above.real)
    return complex(math.atan2(z.real, below.real * above.real - below.imag * above.imag), imag)


@njit
def complex_asinh(z):
    """Return the inverse hyperbolic sine."""
    z = complex128(z)
    return _over_i(complex_asin(_times_i(z)))


@njit
def complex_atanh(z):
    """Return the complex inverse hyperbolic tangent."""
    z = complex128(z)
    x, y = z.real, z.imag
    rest = 1 - abs(x)
    real = math.log1p(4 * abs(x) / (rest * rest + y * y)) / 4
    return complex(math.copysign(real, x), math.atan2(2 * y, rest * (1 + abs(x)) - y * y) / 2)


@njit
def complex_atan(z):
    """Return the inverse tangent."""
    z = complex128(z)
    return _over_i(complex_atanh(_times_i(z)))


@njit
def complex_atan2(a, b):
    """Return ``-i log((b + i a) / sqrt(a**2 + b**2))``."""
    a, b = complex128(a), complex128(b)
    above = complex(b.real - a.imag, b.imag + a.real)
    return _over_i(complex_log(complex_div(above, cmath.sqrt(a * a + b * b))))
