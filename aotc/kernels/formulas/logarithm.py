"""Logarithms over the scalar algebra of ``formulas.math``.

Sources: N. Juffa (f32: the reduction by integers, and log1p without a division), fdlibm (f64).
"""

from __future__ import annotations

from typing import Any

from aotc.kernels.formulas import limits
from aotc.kernels.formulas.forms import INF, LN2_HIGH, LN2_LOW, NAN, polynomial, polynomial_by_squares, real_function
from aotc.kernels.formulas.llvm_algebra import Algebra


def log_parts(m: Algebra, x: Any) -> tuple[Any, Any]:
    """Return ``(e, f)`` with ``x == 2**e * (1 + f)`` and ``sqrt(1/2) <= 1 + f < sqrt(2)``, for positive finite x."""
    subnormal = x < 2.2250738585072014e-308
    e, f = parts_of_normal(m, m.select(subnormal, x * 2.0**54, x))
    return e - m.select(subnormal, m.const(54.0), m.const(0.0)), f


def parts_of_normal(m: Algebra, x: Any) -> tuple[Any, Any]:
    """Return :func:`log_parts` of normal numbers."""
    bits = m.to_bits(x)
    above = bits - 0x3FE6A09E667F3BCD  # the bits of sqrt(1/2)
    return m.to_float(above >> 52), m.from_bits(bits - (above & -(1 << 52))) - 1.0


def log_special(m: Algebra, x: Any, y: Any) -> Any:
    """Return ``y``, the logarithm of ``x``, with the results for 0, negative numbers, infinity and NaN."""
    y = m.select(x == INF, x, y)
    y = m.select(x == 0.0, m.const(-INF), y)
    return m.select(x >= 0.0, y, m.const(NAN))


# Coefficients of (log(1 + f) - f) / f**2 for -1/4 < f <= 1/2: nearly minimax, error 2**-27.6 in log(1 + f).
_LOG32 = (-0.044909056, 0.10448274, -0.13162223, 0.14482068, -0.16647768,
          0.19990607, -0.25000054, 0.33333454, -0.5)  # fmt: skip
_LN2_32 = (0.693145751953125 * 2.0**-23, 1.42860682030941723e-06 * 2.0**-23)  # the first has 9 trailing zero bits
_LOG64 = (1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
          2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01)  # fmt: skip


def _log64_correction(m: Algebra, f: Any) -> Any:
    """Return ``log(1 + f) - f``."""
    s = f / (f + 2.0)
    z = s * s
    r = z * polynomial(m, z, _LOG64)
    square = f * f * 0.5
    return s * (square + r) - square


@real_function(f32=1, f64=1.5)
def log(m: Algebra, x: Any) -> Any:
    """Return the natural logarithm ``e * ln 2 + log(1 + f)`` of ``x = 2**e * (1 + f)``."""
    if m.bits == 32:
        return _log32(m, x)
    e, f = log_parts(m, x)
    low = m.multiply_add(e, m.const(LN2_LOW), _log64_correction(m, f))
    return log_special(m, x, m.multiply_add(e, m.const(LN2_HIGH), f + low))


def _log32(m: Algebra, x: Any) -> Any:
    subnormal = x < 2.0**-126
    normal = m.select(subnormal, x * 2.0**23, x)
    taken = _power_of_two_removed(m, normal)
    e = m.to_float(taken) + m.select(subnormal, m.const(23 * 2.0**23), m.const(0.0))
    y = _log_of_parts(m, e, m.from_bits(m.to_bits(normal) + taken) - 1.0)
    return m.select(x == 0.0, m.const(-INF), _log_of_positive(m, x, y))


def _power_of_two_removed(m: Algebra, x: Any) -> Any:
    """Return ``-k`` at the position of a float's exponent, where ``3/4 < x * 2**-k <= 3/2``.

    The result is 0 for ``1 + x`` with x up to 1/2: otherwise ``x / 2 - 1/2`` would be rounded there.
    """
    return (0x3FC00000 - m.to_bits(x)) & -(1 << 23)


def _log_of_parts(m: Algebra, taken: Any, f: Any) -> Any:
    """Return ``log(1 + f) - taken * 2**-23 * ln 2``; of f = -0.0 and taken = 0 it is -0.0."""
    high, low = _LN2_32
    curve = m.multiply_add(polynomial_by_squares(m, f, _LOG32[:-1]), f, m.const(_LOG32[-1]))
    y = m.multiply_add(curve, f * f, m.multiply_add(taken, m.const(-low), f))
    return m.multiply_add(taken, m.const(-high), y)


def _log_of_positive(m: Algebra, x: Any, y: Any) -> Any:
    """Return ``y`` where x is non-negative and finite; otherwise x, or NaN if x is negative."""
    bits = m.to_bits(x)
    return m.select((bits >= 0) & (bits < 0x7F800000), y, m.multiply_add(x, m.const(INF), m.const(INF)))


def log1p_series(m: Algebra, x: Any) -> Any:
    """Return ``log(1 + x)`` for ``|x|`` below LOG1P_SERIES."""
    return x - x * x * 0.5 + x * x * x * (1.0 / 3.0)


@real_function(f32=1, f64=4)
def log1p(m: Algebra, x: Any) -> Any:
    """Return ``log(1 + x)``; in 64 bits by Kahan's formula: ``log(u)``, corrected for the rounding of ``u = 1 + x``."""
    if m.bits == 32:
        return _log1p32(m, x)
    u = x + 1.0
    y = log(m, u) * (x / (u - 1.0))
    y = m.select(m.abs(x) < limits.LOG1P_SERIES, log1p_series(m, x), y)
    y = m.select(u == 0.0, m.const(-INF), y)
    return m.select(u == INF, x, y)


def _log1p32(m: Algebra, x: Any) -> Any:
    """Return ``log(1 + x)`` in 32 bits; ``1 + x`` only determines the power of two.

    ``f = x * 2**-k + (2**-k - 1)`` has all bits of x. At x = -1 the scaled x, built from bits, is -2**127, for which
    the polynomial yields the infinity. ``2**-k - 1`` is computed in quarters, since 2**-128 is subnormal.
    """
    u = x + 1.0
    taken = _power_of_two_removed(m, u)
    four = m.from_bits(taken + 0x40800000)
    f = m.from_bits(m.to_bits(x) + taken) - m.multiply_add(four, m.const(-0.25), m.const(1.0))
    return _log_of_positive(m, u, _log_of_parts(m, m.to_float(taken), f))
