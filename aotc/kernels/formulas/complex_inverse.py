"""Inverse trigonometric and hyperbolic functions of complex numbers, with the branch cuts of C99's annex G.

W. Kahan, "Branch Cuts for Complex Elementary Functions": the roots of ``1 - z`` and ``1 + z`` carry the signs of zeros
to the correct side of each cut, and no addition cancels. Above :data:`~aotc.kernels.formulas.INVERSE_LARGE` the
logarithm of the size and the angle are enough.
"""

from __future__ import annotations

import math
from typing import Any

from aotc.kernels.formulas import limits
from aotc.kernels.formulas import math as real
from aotc.kernels.formulas.complex_forms import (
    Pair,
    in_either_width,
    is_infinite,
    is_moderate,
    magnitude_of,
    root_of_moderate,
)
from aotc.kernels.formulas.llvm_algebra import Algebra

_HALF_TURN = math.pi / 2


def _root(m: Algebra, from_32_bits: bool, x: Any, y: Any) -> Pair:
    """Return the square root of ``x + iy``, even if its squares overflow in 64 bits."""
    found = root_of_moderate(m, (x, y))
    if from_32_bits:
        return found
    usual = is_moderate(m, (x, y))
    return m.rarely(~usual, "root", (x, y, 0), found[0]), m.rarely(~usual, "root", (x, y, 1), found[1])


# The larger of |re z| and |im z| in inverse functions of complex numbers in 64 bits. Above, 1 + z rounds to z and z**-2
# is below a unit in the last place: the result needs only the logarithm of 2 |z| and the angle. It lies below the
# square root of the largest number and above 2**53, the precision of a double.
INVERSE_LARGE = 2.0**60


def _is_large(m: Algebra, from_32_bits: bool, a: Pair) -> Any:
    """Return True where ``1 + z`` rounds to z and its squares may overflow; from 32 bits, where a part is infinite."""
    if from_32_bits:
        return is_infinite(m, a)
    return (m.abs(a[0]) > INVERSE_LARGE) | (m.abs(a[1]) > INVERSE_LARGE)


def _arc(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    """Return ``(Re sqrt(1 - z*z), |Im asin z|)``.

    With ``sqrt(1 - z) = p + iq`` and ``sqrt(1 + z) = r + is``, where q and s have opposite signs, these are
    ``pr + |qs|`` and the inverse hyperbolic sine of ``p|s| + |q|r``.
    """
    x, y = a
    large = _is_large(m, from_32_bits, a)
    (p, q), (r, s) = _root(m, from_32_bits, 1.0 - x, -y), _root(m, from_32_bits, x + 1.0, y)
    q, s = m.abs(q), m.abs(s)
    side = m.select(large, m.abs(y), m.multiply_add(p, r, q * s))
    sine = m.multiply_add(p, s, q * r)
    square = sine * sine
    power = sine + square / (m.sqrt(square + 1.0) + 1.0)  # e**eta - 1
    half = magnitude_of(m, from_32_bits, (x * 0.5, y * 0.5))  # the size itself may overflow
    eta = real.log1p(m, m.select(large, half, power))
    return side, eta + m.select(large, m.const(2.0 * math.log(2.0)), m.const(0.0))


@in_either_width
def arc_sine(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    """Return the complex arc sine: ``atan(x / Re sqrt(1 - z*z)) + i eta``."""
    side, eta = _arc(m, from_32_bits, a)
    return m.select(a[0] == 0.0, a[0], real.atan2(m, a[0], side)), m.copysign(eta, a[1])


@in_either_width
def arc_cosine(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    """Return the complex arc cosine: the complement of the arc sine, without cancellation near pi/2."""
    return _arc_cosine(m, from_32_bits, a)


def _arc_cosine(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    side, eta = _arc(m, from_32_bits, a)
    xi = m.select(a[0] == 0.0, m.const(_HALF_TURN), real.atan2(m, side, a[0]))
    return xi, m.copysign(eta, -a[1])


@in_either_width
def hyperbolic_arc_cosine(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    """Return the complex arcosh: ``i acos z`` or ``-i acos z``, with non-negative real part."""
    xi, eta = _arc_cosine(m, from_32_bits, a)
    return m.abs(eta), m.copysign(xi, a[1])


@in_either_width
def hyperbolic_arc_sine(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    """Return the complex arsinh: ``-i asin iz``."""
    side, eta = _arc(m, from_32_bits, (-a[1], a[0]))
    return m.copysign(eta, a[0]), m.select(a[1] == 0.0, a[1], real.atan2(m, a[1], side))


@in_either_width
def hyperbolic_arc_tangent(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    """Return the complex artanh: ``log(1 + 4 x / |1 - z|**2) / 4 + i atan2(2 y, 1 - |z|**2) / 2``."""
    return _hyperbolic_arc_tangent(m, from_32_bits, a)


@in_either_width
def arc_tangent(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    """Return the complex arc tangent: ``-i atanh iz``."""
    x, y = _hyperbolic_arc_tangent(m, from_32_bits, (-a[1], a[0]))
    return y, -x


def _hyperbolic_arc_tangent(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    x, y = m.abs(a[0]), a[1]
    less, large, infinite = 1.0 - x, _is_large(m, from_32_bits, a), is_infinite(m, a)
    ratio = x / m.multiply_add(less, less, y * y)
    factor, shift = m.const(0.25), m.const(0.0)
    if not from_32_bits:
        size = magnitude_of(m, from_32_bits, a)
        ratio = m.select(large, x / size / size, ratio)
        # next to the poles the square of y underflows: log(2 / |y|) / 2
        near_pole = (x == 1.0) & (m.abs(y) < limits.SQUARE_SMALL)
        ratio = m.select(near_pole, 2.0**-102 / m.abs(y), ratio)
        factor = m.select(near_pole, m.const(0.5), factor)
        shift = m.select(near_pole, m.const(50.5 * math.log(2.0)), shift)
    eta = m.multiply_add(real.log1p(m, ratio * 4.0), factor, shift)
    eta = m.select(infinite, m.const(0.0), eta)
    xi = real.atan2(m, y + y, m.multiply_add(less, x + 1.0, -(y * y))) * 0.5
    xi = m.select(large & ((x == x) | infinite), m.copysign(m.const(_HALF_TURN), y), xi)
    xi = m.select(y != y, y, xi)
    return m.select(x == 0.0, a[0], m.copysign(eta, a[0])), xi
