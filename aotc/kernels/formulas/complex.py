"""Functions of complex numbers, as pairs of scalars of the algebra of ``formulas.math``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aotc.kernels.formulas import math as real
from aotc.kernels.formulas.limits import LOG1P_NEAR

COMPLEX: dict[str, Callable[..., Any]] = {}
Pair = tuple[Any, Any]


def function(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a formula to :data:`COMPLEX` as the op ``name``."""

    def add(formula: Callable[..., Any]) -> Callable[..., Any]:
        assert name not in COMPLEX
        COMPLEX[name] = formula
        return formula

    return add


COMPLEX.update({
    "add": lambda m, a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda m, a, b: (a[0] - b[0], a[1] - b[1]),
    "mul": lambda m, a, b: (a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]),
    "neg": lambda m, a: (-a[0], -a[1]),
    "conj": lambda m, a: (a[0], -a[1]),
    "real": lambda m, a: a[0],
    "imag": lambda m, a: a[1],
    "eq": lambda m, a, b: (a[0] == b[0]) & (a[1] == b[1]),
    "ne": lambda m, a, b: (a[0] != b[0]) | (a[1] != b[1]),
})  # fmt: skip


@function("div")
def divide(m: Any, a: Pair, b: Pair) -> Pair:
    """Smith's method: the divisor is scaled by its larger part."""
    size = m.select(m.abs(b[0]) < m.abs(b[1]), m.abs(b[1]), m.abs(b[0]))
    c, d = b[0] / size, b[1] / size
    below = b[0] * c + b[1] * d
    return (a[0] * c + a[1] * d) / below, (a[1] * c - a[0] * d) / below


@function("abs")
def absolute(m: Any, a: Pair) -> Any:
    """The hypotenuse, scaled so that squares neither overflow nor vanish."""
    x, y = m.abs(a[0]), m.abs(a[1])
    large, small = m.select(x < y, y, x), m.select(x < y, x, y)
    t = small / large
    h = large * m.sqrt(m.multiply_add(t, t, m.const(1.0)))
    h = m.select(large == 0.0, large, h)
    h = m.select((x != x) | (y != y), x + y, h)
    return m.select((x == real.INF) | (y == real.INF), m.const(real.INF), h)


@function("exp")
def exponential(m: Any, a: Pair) -> Pair:
    """``e**x * (cos y + i sin y)``."""
    size = real.exp(m, a[0])
    return size * real.cos(m, a[1]), m.select(a[1] == 0.0, a[1], size * real.sin(m, a[1]))


@function("log")
def logarithm(m: Any, a: Pair) -> Pair:
    """``log |z| + i arg z``."""
    return real.log(m, absolute(m, a)), real.atan2(m, a[1], a[0])


@function("expm1")
def exponential_minus_one(m: Any, a: Pair) -> Pair:
    """``e**x cos y - 1`` without cancellation: ``(e**x - 1) cos y - 2 sin(y/2)**2``."""
    half = real.sin(m, a[1] * 0.5)
    x = m.fma(real.expm1(m, a[0]), real.cos(m, a[1]), half * half * -2.0)
    return x, exponential(m, a)[1]


@function("log1p")
def logarithm_of_one_plus(m: Any, a: Pair) -> Pair:
    """``log |1 + z|`` from ``|1 + z|**2 - 1`` where z is small, else from the size."""
    x = a[0] + 1.0
    near = real.log1p(m, m.fma(a[0], a[0] + 2.0, a[1] * a[1])) * 0.5
    small = (m.abs(a[0]) < LOG1P_NEAR) & (m.abs(a[1]) < LOG1P_NEAR)
    return m.select(small, near, real.log(m, absolute(m, (x, a[1])))), real.atan2(m, a[1], x)


@function("logistic")
def logistic(m: Any, a: Pair) -> Pair:
    """``1 / (1 + exp(-z))``, which is ``(1 + tanh(z/2)) / 2`` and so cannot overflow."""
    x, y = hyperbolic_tangent(m, (a[0] * 0.5, a[1] * 0.5))
    left = exponential(m, a)  # where e**z is small, 1 + tanh(z/2) cancels; there e**z / (1 + e**z) does not
    below = divide(m, left, (left[0] + 1.0, left[1]))
    negative = a[0] < 0.0
    return m.select(negative, below[0], (x + 1.0) * 0.5), m.select(negative, below[1], y * 0.5)


@function("sqrt")
def root(m: Any, a: Pair) -> Pair:
    """The root with a real part that is not negative; no cancellation on either side."""
    t = m.sqrt((absolute(m, a) + m.abs(a[0])) * 0.5)
    other = m.select(t == 0.0, m.const(0.0), m.abs(a[1]) / (t + t))
    right = a[0] >= 0.0
    return m.select(right, t, other), m.copysign(m.select(right, other, t), a[1])


@function("rsqrt")
def reciprocal_root(m: Any, a: Pair) -> Pair:
    """``1 / sqrt(z)``."""
    return divide(m, (m.const(1.0), m.const(0.0)), root(m, a))


def _hyperbolic(m: Any, x: Any) -> Pair:
    """Return (sinh x, cosh x)."""
    less = real.expm1(m, m.abs(x))
    e = less + 1.0
    return m.copysign((less + less / e) * 0.5, x), (e + 1.0 / e) * 0.5


@function("sin")
def sine(m: Any, a: Pair) -> Pair:
    """``sin x cosh y + i cos x sinh y``."""
    s, c = _hyperbolic(m, a[1])
    return real.sin(m, a[0]) * c, real.cos(m, a[0]) * s


@function("cos")
def cosine(m: Any, a: Pair) -> Pair:
    """``cos x cosh y - i sin x sinh y``."""
    s, c = _hyperbolic(m, a[1])
    return real.cos(m, a[0]) * c, -(real.sin(m, a[0]) * s)


@function("tanh")
def hyperbolic_tangent(m: Any, a: Pair) -> Pair:
    """``(t + iu) / (1 + itu)`` with ``t = tanh x, u = tan y``."""
    t, u = real.tanh(m, a[0]), real.tan(m, a[1])
    return divide(m, (t, u), (m.const(1.0), t * u))


def _after(m: Any, a: Pair, b: Pair) -> Any:
    """Tell whether ``a`` is above ``b``, by the real part and then the imaginary one; NaN is above all."""
    unordered = (a[0] != a[0]) | (a[1] != a[1])
    return unordered | (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] > b[1]))


@function("max")
def maximum(m: Any, a: Pair, b: Pair) -> Pair:
    """The later pair in lexicographic order."""
    first = _after(m, a, b)
    return m.select(first, a[0], b[0]), m.select(first, a[1], b[1])


@function("min")
def minimum(m: Any, a: Pair, b: Pair) -> Pair:
    """The earlier pair in lexicographic order."""
    nan = (a[0] != a[0]) | (a[1] != a[1])
    first = nan | ((b[0] == b[0]) & (b[1] == b[1]) & _after(m, b, a))
    return m.select(first, a[0], b[0]), m.select(first, a[1], b[1])


@function("tan")
def tangent(m: Any, a: Pair) -> Pair:
    """``-i tanh(iz)``."""
    x, y = hyperbolic_tangent(m, (-a[1], a[0]))
    return y, -x


@function("cbrt")
def cube_root(m: Any, a: Pair) -> Pair:
    """The principal one of the three roots."""
    size, angle = real.cbrt(m, absolute(m, a)), real.atan2(m, a[1], a[0]) / 3.0
    return size * real.cos(m, angle), size * real.sin(m, angle)


@function("atan2")
def angle(m: Any, a: Pair, b: Pair) -> Pair:
    """``-i log((b + ia) / sqrt(a*a + b*b))``."""
    square = COMPLEX["add"](m, COMPLEX["mul"](m, a, a), COMPLEX["mul"](m, b, b))
    x, y = logarithm(m, divide(m, (b[0] - a[1], b[1] + a[0]), root(m, square)))
    return y, -x


@function("sign")
def sign(m: Any, a: Pair) -> Pair:
    """``z / |z|``, and 0 for 0."""
    size = absolute(m, a)
    zero = size == 0.0
    return m.select(zero, a[0], a[0] / size), m.select(zero, a[1], a[1] / size)


@function("pow")
def power(m: Any, a: Pair, b: Pair) -> Pair:
    """``exp(b log a)``; a base of 0 gives 0, and 1 to the power of 0.

    The size is ``|a|**x * exp(-y arg a)`` for ``b = x + iy``: a power carries its logarithm in two words, where the
    error of a rounded one would grow with the exponent; so would that of the product in ``exp``.
    """
    size, turn = absolute(m, a), real.atan2(m, a[1], a[0])
    drop = b[1] * turn
    lost = m.fma(b[1], turn, -drop)
    lost = m.select(lost == lost, lost, m.const(0.0))
    shrink = real.exp(m, -drop)
    scale = real.pow(m, size, b[0]) * m.multiply_add(shrink, -lost, shrink)
    phase = m.fma(b[0], turn, b[1] * real.log(m, size))
    x, y = scale * real.cos(m, phase), scale * real.sin(m, phase)
    zero = (a[0] == 0.0) & (a[1] == 0.0)
    one = m.select((b[0] == 0.0) & (b[1] == 0.0), m.const(1.0), m.const(0.0))
    return m.select(zero, one, x), m.select(zero, m.const(0.0), y)
