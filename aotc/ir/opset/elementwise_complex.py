"""Complex functions on arrays that NumPy lacks, or that differ from NumPy at infinities, NaN and poles.

All follow C99's annex G: division as in its example (G.5.1), the others as compositions. They compute in long double,
in whose range products of parts do not overflow.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def _complex_in_64_bits(x: Array) -> tuple[Array, Array]:
    return x.real.astype(np.longdouble), x.imag.astype(np.longdouble)


def _complex_of_parts(real: Array, imag: Array, dtype: np.dtype) -> Array:
    found = np.empty(np.broadcast(real, imag).shape, dtype)
    found.real, found.imag = real, imag
    return found


def _complex_exp(exponent: Array, phase: Array) -> Array:
    return np.exp(_complex_of_parts(exponent, phase, np.dtype(np.clongdouble)))


def _is_infinite(a: Array, b: Array) -> Array:
    return np.isinf(a) | np.isinf(b)


def _is_finite(a: Array, b: Array) -> Array:
    return np.isfinite(a) & np.isfinite(b)


def divide(z: Array, w: Array) -> Array:
    """Return ``z / w``; where both parts of the quotient would be NaN, return C99's infinity or zero instead."""
    (a, b), (c, d) = _complex_in_64_bits(z), _complex_in_64_bits(w)
    below = c * c + d * d
    x, y = (a * c + b * d) / below, (b * c - a * d) / below
    lost, by_zero = np.isnan(x) & np.isnan(y), (c == 0) & (d == 0)
    grows = lost & ~by_zero & _is_infinite(a, b) & _is_finite(c, d)
    fades = lost & _is_finite(a, b) & _is_infinite(c, d)
    e, f, g, h = (np.copysign(np.isinf(v).astype(v.dtype), v) for v in (a, b, c, d))
    pole = np.copysign(np.inf, c)
    kinds = [by_zero & lost, grows, fades]
    x = np.select(kinds, [pole * a, np.inf * (e * c + f * d), 0 * (a * g + b * h)], x)
    y = np.select(kinds, [pole * b, np.inf * (f * c - e * d), 0 * (b * g - a * h)], y)
    return _complex_of_parts(x, y, z.dtype)


def power(a: Array, b: Array) -> Array:
    """Return ``exp(b log a)``, and 1 for an exponent of 0; a product with an exact 0 is 0."""
    size, rotation = _complex_in_64_bits(np.log(a.astype(np.clongdouble)))
    x, y = _complex_in_64_bits(b)
    rotation_is_0 = (a.imag == 0) & (rotation == 0)
    exponent = _product_with_log(x, size, size == 0) - _product_with_log(y, rotation, rotation_is_0)
    phase = _product_with_log(x, rotation, rotation_is_0) + _product_with_log(y, size, size == 0)
    size_of_power = np.exp(exponent)
    value, flat, unknown = _complex_exp(exponent, phase), phase == 0, ~np.isfinite(phase)
    x, y = np.where(flat, size_of_power, value.real), np.where(flat, phase, value.imag)
    rounded = size_of_power.astype(np.float64)  # as in kernels: 0 or infinity in an unknown direction
    x = np.where(unknown, np.where((rounded == 0) | np.isinf(rounded), rounded, np.nan), x)
    y = np.where(unknown & (rounded == 0), 0, y)
    return np.where(b == 0, 1, _complex_of_parts(x, y, a.dtype)).astype(a.dtype)


def _product_with_log(x: Array, log: Array, is_exact: Array) -> Array:
    """Return ``x * log``, but 0 where ``x`` is 0, and where ``log`` is 0 and exact."""
    return np.where((x == 0) | is_exact, 0, x * log)


def cube_root(z: Array) -> Array:
    """Return the principal cube root."""
    return power(z, np.full(z.shape, 1 / np.longdouble(3), np.clongdouble))


def atan2(a: Array, b: Array) -> Array:
    """Return the complex ``atan2(a, b)``: ``-i log((b + i a) / sqrt(a**2 + b**2))``."""
    above = _complex_of_parts(b.real - a.imag, b.imag + a.real, a.dtype)
    value = np.log(divide(above, np.sqrt(a * a + b * b)))
    return _complex_of_parts(value.imag, -value.real, a.dtype)


def exponential_minus_one(z: Array) -> Array:
    """Return ``exp(z) - 1``, without cancellation near 0."""
    x, y = _complex_in_64_bits(z)
    value = _complex_exp(x, y)
    near = np.expm1(x) * np.cos(y) - 2 * np.sin(y / 2) ** 2
    return _complex_of_parts(np.where(np.abs(x) < 1, near, value.real - 1), value.imag, z.dtype)


def logarithm_of_one_plus(z: Array) -> Array:
    """Return ``log(1 + z)``, without cancellation near 0."""
    x, y = _complex_in_64_bits(z)
    value = np.log(_complex_of_parts(x + 1, y, np.dtype(np.clongdouble)))
    near = np.log1p(2 * x + (x * x + y * y)) / 2
    return _complex_of_parts(np.where(x * x + y * y < 0.25, near, value.real), value.imag, z.dtype)


def reciprocal_root(z: Array) -> Array:
    """Return ``1 / sqrt(z)``: 0 at infinity, ``inf + nan i`` at 0."""
    root = np.sqrt(z.astype(np.clongdouble))
    x, y = root.real / np.abs(z.astype(np.clongdouble)), -root.imag / np.abs(z.astype(np.clongdouble))
    gone = _is_infinite(z.real, z.imag)
    x, y = np.where(gone, 0.0, x), np.where(gone, np.copysign(0.0, -z.imag), y)
    return _complex_of_parts(np.where(z == 0, np.inf, x), np.where(z == 0, np.nan, y), z.dtype)


def logistic(z: Array) -> Array:
    """Return ``1 / (1 + exp(-z))``, computed as ``exp(z) / (1 + exp(z))`` for negative real parts."""
    left = z.real < 0
    x, y = _complex_in_64_bits(np.where(left, z, -z))
    value = _complex_exp(x, y)
    below = _complex_of_parts(value.real + 1, value.imag, value.dtype)
    return divide(np.where(left, value, 1), below).astype(z.dtype)


def sign(z: Array) -> Array:
    """Return ``z / abs(z)``, each part divided separately; 0 gives ``z`` itself."""
    size = np.abs(z.astype(np.clongdouble))
    unit = _complex_of_parts(z.real / size, z.imag / size, z.dtype)
    return np.where(z == 0, z, np.where(np.isnan(z), complex(np.nan, np.nan), unit)).astype(z.dtype)
