"""Functions of complex numbers, which are pairs of scalars of the algebra of ``formulas.math``.

c64 is computed in 64-bit floats, except for sums, products and moves: squares then neither overflow nor underflow, and
cancellation has 29 bits to spare. For c128, operands are scaled by powers of two first. The parameter ``from_32_bits``
of all formulas is True for operands that came from 32 bits, whose squares cannot overflow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aotc.kernels.formulas import limits
from aotc.kernels.formulas import math as real
from aotc.kernels.formulas.complex_forms import (
    Pair,
    in_either_width,
    is_infinite,
    is_moderate,
    larger,
    log_of_size,
    log_of_size_in_two_words,
    magnitude_of,
    root_of_moderate,
    scale_by_power_of_four,
    scale_to_one,
    split_exponent,
    square_less_one,
    two_sum,
)
from aotc.kernels.formulas.complex_inverse import (
    arc_cosine,
    arc_sine,
    arc_tangent,
    hyperbolic_arc_cosine,
    hyperbolic_arc_sine,
    hyperbolic_arc_tangent,
)
from aotc.kernels.formulas.exponential import decay
from aotc.kernels.formulas.forms import power_of_two
from aotc.kernels.formulas.llvm_algebra import Algebra
from aotc.kernels.formulas.power import exp_of_two_words

COMPLEX: dict[str, Callable[..., Any]] = {}


def complex_function(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds a formula to :data:`COMPLEX` as the op ``name``."""

    def add(formula: Callable[..., Any]) -> Callable[..., Any]:
        assert name not in COMPLEX
        COMPLEX[name] = formula
        return formula

    return add


COMPLEX.update({
    "add": lambda m, a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda m, a, b: (a[0] - b[0], a[1] - b[1]),
    "neg": lambda m, a: (-a[0], -a[1]),
    "conj": lambda m, a: (a[0], -a[1]),
    "real": lambda m, a: a[0],
    "imag": lambda m, a: a[1],
    "eq": lambda m, a, b: (a[0] == b[0]) & (a[1] == b[1]),
    "ne": lambda m, a, b: (a[0] != b[0]) | (a[1] != b[1]),
    "acos": arc_cosine,
    "acosh": hyperbolic_arc_cosine,
    "asin": arc_sine,
    "asinh": hyperbolic_arc_sine,
    "atan": arc_tangent,
    "atanh": hyperbolic_arc_tangent,
})  # fmt: skip


@complex_function("mul")
def multiply(m: Algebra, a: Pair, b: Pair) -> Pair:
    """Return the complex product by fused multiply-adds, as in XLA, except that parts which cancel when rounded give 0.

    So a number times its conjugate is real; otherwise the rounding error of a product would remain.
    """
    left, right = a[0] * b[1], a[1] * b[0]
    y = m.select(left == -right, left + right, m.multiply_add(a[1], b[0], left))
    return m.multiply_add(a[0], b[0], -(a[1] * b[1])), y


@complex_function("div")
@in_either_width
def divide(m: Algebra, from_32_bits: bool, a: Pair, b: Pair) -> Pair:
    """Return the complex quotient ``a conj(b) / |b|**2``, with infinities, NaN and zero divisors as in C99 (G.5.1).

    XLA differs where products of parts overflow.
    """
    (x, y), (c, d) = a, b
    p, q = y * d, -(x * d)
    inverse = 1.0 / m.multiply_add(c, c, d * d)
    if from_32_bits:
        found = (m.multiply_add(x, c, p) * inverse, m.multiply_add(y, c, q) * inverse)
        return _usual_or_rare_pair(m, _is_nan(m, found), "quotient_of_narrow", (*a, *b), found)
    # Kahan: an error of two units. The rounding errors are subtracted: a difference that is 0 is +0, and -0 stays -0
    lost = m.multiply_add(-y, d, p), m.multiply_add(x, d, q)
    found = ((m.multiply_add(x, c, p) - lost[0]) * inverse, (m.multiply_add(y, c, q) - lost[1]) * inverse)
    usual = is_moderate(m, a) & is_moderate(m, b)
    return _usual_or_rare_pair(m, ~usual | _is_nan(m, found), "quotient", (*a, *b), found)


def _is_nan(m: Algebra, a: Pair) -> Any:
    return (a[0] != a[0]) | (a[1] != a[1])


def _usual_or_rare_pair(m: Algebra, condition: Any, name: str, args: tuple[Any, ...], usual: Pair) -> Pair:
    """Return ``usual``, or where the condition holds, both parts of the result of the slow path ``name``."""
    return m.rarely(condition, name, (*args, 0), usual[0]), m.rarely(condition, name, (*args, 1), usual[1])


@complex_function("abs")
@in_either_width
def absolute(m: Algebra, from_32_bits: bool, a: Pair) -> Any:
    """Return the absolute value of a complex number, the hypotenuse of its parts."""
    return magnitude_of(m, from_32_bits, a)


@complex_function("exp")
@in_either_width
def exponential(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    """Return the complex exponential ``e**x * (cos y + i sin y)``; an overflow of ``e**x`` alone does no harm."""
    return _exponential(m, from_32_bits, a)


def _exponential(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    cosine, sine = real.cos(m, a[1]), m.select(a[1] == 0.0, a[1], real.sin(m, a[1]))
    if from_32_bits:
        size, rest = real.exp(m, a[0]), m.const(1.0)
    else:
        exponent, rest = split_exponent(m, a[0])
        size = real.exp(m, exponent)
    x, y = size * cosine * rest, size * sine * rest
    # e**-inf is 0 in any direction; e**inf times 0 is 0, and infinite in an unknown direction
    gone = a[0] == -real.INF
    x, y = (m.select(gone, m.copysign(m.const(0.0), v), v) for v in (x, y))
    x = m.select((a[0] == real.INF) & (x != x), a[0], x)
    return x, m.select(a[1] == 0.0, a[1], y)


def _log_of_size(m: Algebra, from_32_bits: bool, a: Pair) -> Any:
    x, y = m.abs(a[0]), m.abs(a[1])
    large, small = larger(m, x, y), m.select(x < y, x, y)
    return log_of_size(m, from_32_bits, a, square_less_one(m, large - 1.0, small))


@complex_function("log")
@in_either_width
def logarithm(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    """Return the complex logarithm ``log |z| + i arg z``."""
    return _log_of_size(m, from_32_bits, a), real.atan2(m, a[1], a[0])


@complex_function("expm1")
@in_either_width
def exponential_minus_one(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    """Return the complex ``e**z - 1`` without cancellation near 0.

    Its real part is ``(e**x - 1) cos y - 2 sin(y/2)**2``.
    """
    half = real.sin(m, a[1] * 0.5)
    near = m.multiply_add(real.expm1(m, a[0]), real.cos(m, a[1]), half * half * -2.0)
    x, y = _exponential(m, from_32_bits, a)
    return m.select(m.abs(a[0]) < 1.0, near, x - 1.0), y


@complex_function("log1p")
@in_either_width
def logarithm_of_one_plus(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    """Return the complex ``log(1 + z)``; near the unit circle its real part is computed from ``|1 + z|**2 - 1``."""
    x = a[0] + 1.0
    return log_of_size(m, from_32_bits, (x, a[1]), square_less_one(m, a[0], a[1])), real.atan2(m, a[1], x)


@complex_function("logistic")
@in_either_width
def logistic(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    """Return the complex logistic function: ``e**z / (1 + e**z)`` for negative x, else ``1 / (1 + e**-z)``.

    In both forms the magnitude of the exponential is at most 1.
    """
    left = a[0] < 0.0
    x, y = _exponential(m, from_32_bits, (m.select(left, a[0], -a[0]), m.select(left, a[1], -a[1])))
    near = x + 1.0
    if not from_32_bits:  # next to poles, where the exponential is -1, the sum would lose all digits
        half = real.cos(m, a[1] * 0.5)
        exact = m.multiply_add(real.expm1(m, -m.abs(a[0])), real.cos(m, a[1]), half * half * 2.0)
        near = m.select((m.abs(a[0]) < 1.0) & (x < -0.5), exact, near)
    below = m.multiply_add(near, near, y * y)
    return m.select(left, m.multiply_add(x, near, y * y), near) / below, m.select(left, y, -y) / below


@complex_function("sqrt")
@in_either_width
def root(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    """Return the complex square root with a non-negative real part, without cancellation in either half plane."""
    found = root_of_moderate(m, a)
    if from_32_bits:
        return _usual_or_rare_pair(m, _is_nan(m, found), "root_of_narrow", a, found)
    return _usual_or_rare_pair(m, ~is_moderate(m, a), "root", a, found)


@complex_function("rsqrt")
@in_either_width
def reciprocal_root(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    """Return the complex ``1 / sqrt z``: ``conj(sqrt z) / |z|``; infinite for 0, 0 for infinity."""
    inner, n = scale_by_power_of_four(m, from_32_bits, a)
    x, y = root_of_moderate(m, inner)
    size = m.sqrt(m.multiply_add(inner[0], inner[0], inner[1] * inner[1]))
    x, y = x / size, -y / size
    if n is not None:
        x, y = (v * power_of_two(m, n >> 1) for v in (x, y))
    gone, pole = is_infinite(m, a), (a[0] == 0.0) & (a[1] == 0.0)
    x, y = m.select(pole, m.const(real.INF), x), m.select(pole, m.const(real.NAN), y)
    return m.select(gone, m.const(0.0), x), m.select(gone, m.copysign(m.const(0.0), -a[1]), y)


def _hyperbolic(m: Algebra, x: Any) -> Pair:
    """Return ``(sinh x, cosh x)`` of a real number."""
    less = real.expm1(m, m.abs(x))
    e = less + 1.0
    sinh = m.select(e < real.INF, (less + less / e) * 0.5, e)
    return m.copysign(sinh, x), (e + 1.0 / e) * 0.5


def _sine_and_cosine(m: Algebra, from_32_bits: bool, x: Any, y: Any) -> tuple[Pair, Pair]:
    """Return ``(sin x, cos x)`` times cosh y, and ``(sin x, cos x)`` times sinh y.

    0 times infinity is 0, and infinity times the cosine of an unknown angle is infinite, as in C99's annex G.
    """
    sine, cosine = real.sin(m, x), real.cos(m, x)
    if from_32_bits:
        s, c = _hyperbolic(m, y)
        rest = m.const(1.0)
    else:
        far = m.abs(y) > limits.EXP_SPLIT
        s, c = _hyperbolic(m, m.select(far, y - m.copysign(m.const(limits.EXP_SPLIT), y), y))
        rest = m.select(far, m.const(limits.EXP_OF_SPLIT), m.const(1.0))
        # beyond the split both are e**|y| / 2
        half = real.exp(m, m.abs(y) - limits.EXP_SPLIT) * 0.5
        s, c = m.select(far, m.copysign(half, y), s), m.select(far, half, c)
    one = m.const(1.0)
    by_cosh, by_sinh = (
        [m.select(u == 0.0, u * m.copysign(one, v), u * v * rest) for u in (sine, cosine)] for v in (c, s)
    )
    unknown = (cosine != cosine) & (m.abs(y) == real.INF)
    return (by_cosh[0], m.select(unknown, c, by_cosh[1])), (by_sinh[0], m.select(unknown, s, by_sinh[1]))


def _zero_on_axis(m: Algebra, a: Pair, y: Any) -> Any:
    """Return ``y``, an odd function of the imaginary part: 0 where the imaginary part is 0, even next to NaN."""
    return m.select(a[1] == 0.0, m.copysign(m.const(0.0), y), y)


@complex_function("sin")
@in_either_width
def sine(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    """Return the complex sine: ``sin x cosh y + i cos x sinh y``."""
    by_cosh, by_sinh = _sine_and_cosine(m, from_32_bits, a[0], a[1])
    return by_cosh[0], _zero_on_axis(m, a, by_sinh[1])


@complex_function("cos")
@in_either_width
def cosine(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    """Return the complex cosine: ``cos x cosh y - i sin x sinh y``."""
    by_cosh, by_sinh = _sine_and_cosine(m, from_32_bits, a[0], a[1])
    return by_cosh[1], _zero_on_axis(m, a, -by_sinh[0])


@complex_function("tanh")
@in_either_width
def hyperbolic_tangent(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    """Return the complex hyperbolic tangent by Kahan's form.

    With ``t = tan y``, ``s = sinh x`` and ``b = 1 + t*t`` it is ``(b r s + i t) / (1 + b s*s)``, where ``r = cosh x``.
    """
    return _hyperbolic_tangent(m, a)


# |re z| of the complex tanh: above, the real part rounds to 1 and one term gives the imaginary part. e**-40 is less
# than 2**-53.
COMPLEX_TANH_ONE = 20.0


def _hyperbolic_tangent(m: Algebra, a: Pair) -> Pair:
    far = m.abs(a[0]) > COMPLEX_TANH_ONE
    t = real.tan(m, a[1])
    s, r = _hyperbolic(m, m.select(far, m.const(0.0), a[0]))
    b = m.multiply_add(t, t, m.const(1.0))
    below = m.multiply_add(b * s, s, m.const(1.0))
    x, y = b * r * s / below, t / below
    # for large |x| it is +-1 + 4i sin y cos y e**-2|x|; NaN in an unknown direction, except at infinity
    drop = decay(m, -m.abs(a[0]))
    tail = t / b * drop * drop * 4.0
    endless = m.abs(a[0]) == real.INF
    tail = m.select(endless, m.copysign(m.const(0.0), t), tail)
    x = m.select(a[0] == 0.0, a[0], x)
    x = m.select(far, m.copysign(tail - tail + 1.0, a[0]), x)
    return x, m.select(a[1] == 0.0, a[1], m.select(far, tail, y))


def _is_lexicographically_larger(m: Algebra, a: Pair, b: Pair) -> Any:
    """Return True where ``a`` is above ``b``, by the real part and then by the imaginary part."""
    return (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] > b[1]))


@complex_function("max")
def maximum(m: Algebra, a: Pair, b: Pair) -> Pair:
    """Return the larger complex number in lexicographic order; NaN if an operand has a NaN part."""
    first = _is_nan(m, a) | (~_is_nan(m, b) & _is_lexicographically_larger(m, a, b))
    return m.select(first, a[0], b[0]), m.select(first, a[1], b[1])


@complex_function("min")
def minimum(m: Algebra, a: Pair, b: Pair) -> Pair:
    """Return the smaller complex number in lexicographic order; NaN if an operand has a NaN part."""
    first = _is_nan(m, a) | (~_is_nan(m, b) & _is_lexicographically_larger(m, b, a))
    return m.select(first, a[0], b[0]), m.select(first, a[1], b[1])


@complex_function("tan")
@in_either_width
def tangent(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    """Return the complex tangent: ``-i tanh(iz)``."""
    x, y = _hyperbolic_tangent(m, (-a[1], a[0]))
    return y, -x


def _polar_product(m: Algebra, size: Any, rest: Any, phase: Any) -> Pair:
    """Return ``size * rest * (cos phase + i sin phase)``; a zero or infinite size outweighs a NaN phase."""
    cosine, sine, whole = real.cos(m, phase), real.sin(m, phase), size * rest
    x, y = size * cosine * rest, size * sine * rest
    x, y = (m.select(whole == 0.0, m.copysign(m.const(0.0), v), v) for v in (x, y))
    x = m.select((whole == real.INF) & (cosine != cosine), whole, x)
    return x, m.select(phase == 0.0, phase, y)


@complex_function("cbrt")
@in_either_width
def cube_root(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    """Return the principal complex cube root."""
    size, quadrant = real.cbrt(m, magnitude_of(m, from_32_bits, a)), real.atan2(m, a[1], a[0]) / 3.0
    return _polar_product(m, size, m.const(1.0), quadrant)


@complex_function("atan2")
def angle(m: Algebra, a: Pair, b: Pair) -> Pair:
    """Return the complex atan2 of ``a`` and ``b``: ``-i log((b + ia) / sqrt(a*a + b*b))``."""
    square = COMPLEX["add"](m, COMPLEX["mul"](m, a, a), COMPLEX["mul"](m, b, b))
    x, y = logarithm(m, divide(m, (b[0] - a[1], b[1] + a[0]), root(m, square)))
    return y, -x


@complex_function("sign")
@in_either_width
def sign(m: Algebra, from_32_bits: bool, a: Pair) -> Pair:
    """Return the complex sign ``z / |z|``, and 0 for 0."""
    zero = (a[0] == 0.0) & (a[1] == 0.0)
    if not from_32_bits:
        scale, _ = scale_to_one(m, larger(m, m.abs(a[0]), m.abs(a[1])))
        a = a[0] * scale, a[1] * scale
    size = m.sqrt(m.multiply_add(a[0], a[0], a[1] * a[1]))
    inverse = 1.0 / size
    x, y = (a[0] * inverse, a[1] * inverse) if from_32_bits else (a[0] / size, a[1] / size)
    return m.select(zero, a[0], x), m.select(zero, a[1], y)


def _exponent_product(m: Algebra, b: Any, log: Any, exact: Any) -> Any:
    """Return ``b * log``, the product of a part of an exponent and a part of a logarithm.

    A part that is 0 contributes nothing, even next to an infinity; a zero of the logarithm only where it is ``exact``.
    """
    return m.select((b == 0.0) | ((log == 0.0) & exact), m.const(0.0), b * log)


@complex_function("pow")
@in_either_width
def power(m: Algebra, from_32_bits: bool, a: Pair, b: Pair) -> Pair:
    """Return the complex power ``exp(b log a)``, with the exponential of C99's annex G.

    Anything to the power of 0 is 1. A part of ``b log a`` that is a product with 0 is 0, so that real operands have the
    powers of real numbers. An infinite size in an unknown direction is ``inf + nan i``. XLA has NaN for all of these.

    The size is ``|a|**x * exp(-y arg a)`` for ``b = x + iy``. In 64 bits its logarithm is in two words, as the exponent
    would multiply the error of a rounded logarithm.
    """
    quadrant, flat, always = real.atan2(m, a[1], a[0]), a[1] == 0.0, m.true()
    if from_32_bits:
        log_size = _log_of_size(m, from_32_bits, a)
        size = real.exp(m, _exponent_product(m, b[0], log_size, always) - _exponent_product(m, b[1], quadrant, flat))
        rest = m.const(1.0)
    else:
        log_size, low = log_of_size_in_two_words(m, a)
        size, rest = _size_of_power(m, (log_size, low), quadrant, flat, b)
    phase = _exponent_product(m, b[0], quadrant, flat) + _exponent_product(m, b[1], log_size, always)
    x, y = _polar_product(m, size, rest, phase)
    one = (b[0] == 0.0) & (b[1] == 0.0)
    return m.select(one, m.const(1.0), x), m.select(one, m.const(0.0), y)


def _size_of_power(m: Algebra, log_size: Pair, quadrant: Any, flat: Any, b: Pair) -> Pair:
    """Return two factors of ``exp(x log_size - y turn)`` for ``b = x + iy``; ``log_size`` is a sum of two words.

    Where both products overflow, their difference would be NaN. Only its sign matters then, and ``b`` is scaled down,
    which keeps the sign.
    """
    high, low = log_size

    def products(x: Any, y: Any) -> Pair:
        return _exponent_product(m, x, high, m.true()), -_exponent_product(m, y, quadrant, flat)

    beyond = [m.abs(v) == real.INF for v in products(*b)]
    x, y = (m.select(beyond[0] & beyond[1], v * 2.0**-16, v) for v in b)
    grown, shrunk = products(x, y)
    exponent, lost = two_sum(grown, shrunk)
    lost = lost + (m.fma(x, high, -grown) + x * low) - m.fma(y, quadrant, shrunk)
    exponent, rest = split_exponent(m, exponent)
    # it is meaningless for exponents beyond the range, and NaN for infinite ones
    return exp_of_two_words(m, exponent, m.select(m.abs(lost) < 1.0, lost, m.const(0.0))), rest
