"""Complex division and roots of rare operands: infinities, NaN, zero divisors, and the ends of the range."""

from __future__ import annotations

from aotc.kernels.formulas.complex_forms import (
    Pair,
    is_infinite,
    larger,
    root_of_moderate,
    scale_by_power_of_four,
    scale_to_one,
    scaled,
    sum_of_products,
)
from aotc.kernels.formulas.forms import INF, power_of_two
from aotc.kernels.formulas.llvm_algebra import Algebra


def quotient(m: Algebra, a: Pair, b: Pair, *, from_32_bits: bool) -> Pair:
    """Return the complex quotient of any numbers, with infinities and zeros as in C99's annex G (G.5.1).

    An infinite dividend over a finite divisor is infinite, and a finite dividend over an infinite divisor is 0, even if
    the other part of the infinite number is NaN. Anything over 0 is infinite, except 0 and NaN.
    """
    x, y = _plain_quotient(m, a, b) if from_32_bits else _scaled_quotient(m, a, b)
    lost = (x != x) & (y != y)
    by_zero = (b[0] == 0.0) & (b[1] == 0.0)
    infinite, by_infinite = is_infinite(m, a), is_infinite(m, b)
    pole = m.copysign(m.const(INF), b[0])
    unit = [m.copysign(m.select(m.abs(v) == INF, m.const(1.0), m.const(0.0)), v) for v in (*a, *b)]
    finite_a, finite_b = ((m.abs(v[0]) < INF) & (m.abs(v[1]) < INF) for v in (a, b))
    grows = [unit[0] * b[0] + unit[1] * b[1], unit[1] * b[0] - unit[0] * b[1]]
    half = a[0] * 0.5, a[1] * 0.5  # whose sum does not overflow
    fades = [half[0] * unit[2] + half[1] * unit[3], half[1] * unit[2] - half[0] * unit[3]]
    x, y = (m.select(lost & infinite & finite_b & ~by_zero, g * INF, q) for g, q in zip(grows, (x, y)))
    x, y = (m.select(by_infinite & finite_a, f * 0.0, q) for f, q in zip(fades, (x, y)))
    return m.select(by_zero, pole * a[0], x), m.select(by_zero, pole * a[1], y)


def _plain_quotient(m: Algebra, a: Pair, b: Pair) -> Pair:
    """Divide numbers that came from 32 bits: their products stay in the range."""
    inverse = 1.0 / m.multiply_add(b[0], b[0], b[1] * b[1])
    return (a[0] * b[0] + a[1] * b[1]) * inverse, (a[1] * b[0] - a[0] * b[1]) * inverse


def _scaled_quotient(m: Algebra, a: Pair, b: Pair) -> Pair:
    """Return ``a / b`` of ordinary numbers."""
    to_a, n_a = scale_to_one(m, larger(m, m.abs(a[0]), m.abs(a[1])))
    to_b, n_b = scale_to_one(m, larger(m, m.abs(b[0]), m.abs(b[1])))
    (x, y), (c, d) = (a[0] * to_a, a[1] * to_a), (b[0] * to_b, b[1] * to_b)
    below, n = m.multiply_add(c, c, d * d), n_b - n_a
    above = sum_of_products(m, x, c, y, d), sum_of_products(m, y, c, -x, d)
    return scaled(m, above[0] / below, n), scaled(m, above[1] / below, n)


def root(m: Algebra, a: Pair, *, from_32_bits: bool) -> Pair:
    """Return the square root of any number; an infinite part determines the other."""
    inner, n = scale_by_power_of_four(m, from_32_bits, a)
    x, y = root_of_moderate(m, inner)
    if n is not None:
        x, y = (v * power_of_two(m, -(n >> 1)) for v in (x, y))
    upright, flat = m.abs(a[1]) == INF, m.abs(a[0]) == INF
    right = a[0] > 0.0
    x = m.select(flat, m.select(right, a[0], m.select(a[1] != a[1], a[1], m.const(0.0))), x)
    y = m.select(flat, m.select(right, m.select(a[1] != a[1], a[1], m.copysign(m.const(0.0), a[1])),
                                m.copysign(m.const(INF), a[1])), y)  # fmt: skip
    return m.select(upright, m.const(INF), x), m.select(upright, a[1], y)
