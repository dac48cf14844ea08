"""Elementary functions as branch-free formulas over an abstract scalar algebra.

``m`` is the algebra: :class:`aotc.kernels.formulas.llvm_algebra.Algebra` emits LLVM IR for CPU and CUDA; the tests run
the same source on NumPy arrays. Values have Python's operators; ``m.bits`` is 32 or 64. Functions that are hard to
compute in 32 bits are computed in 64 (``m.wide``): half the lanes, but no tables and no double-word arithmetic.

Sources: exp: Cephes (f32), fdlibm (f64); log: N. Juffa (f32), fdlibm (f64). erf: fdlibm
(f64). sin, cos: fdlibm. atan: Cephes. erf_inv: M. Giles, "Approximating the erfinv function".

Each formula is decorated with its largest observed error (:data:`MAX_ULP`), in units in the last place, over the whole
range: against float64 for f32, against long double for f64.
"""

from __future__ import annotations

from typing import Any

from aotc.kernels.formulas.digamma import digamma
from aotc.kernels.formulas.erf import erf64, erf_inv, erfc_of_positive
from aotc.kernels.formulas.exponential import decay, exp, expm1, logistic, tanh
from aotc.kernels.formulas.forms import (
    FUNCTIONS,
    INF,
    MAX_ULP,
    NAN,
    polynomial,
    real_function,
    with_sign_of_first,
)
from aotc.kernels.formulas.llvm_algebra import Algebra
from aotc.kernels.formulas.log_gamma import log_gamma_of_narrow, log_gamma_of_positive
from aotc.kernels.formulas.logarithm import log, log1p, log1p_series
from aotc.kernels.formulas.power import pow
from aotc.kernels.formulas.trig import atan2, cos, sin, tan

# Coefficients of erf(x) / x in x**2 for |x| <= 4: nearly minimax, rounded to 32 bits, with an error of 7e-8.
_ERF32_P = (1.9082492030975118e-08, -1.9194339984096587e-06, 0.00014309576363302767, 0.0038332431577146053,
            0.051045894622802734, 0.2035573273897171, 1.128379225730896)  # fmt: skip
_ERF32_Q = (0.000981494435109198, 0.014646907337009907, 0.1164882704615593, 0.5137306451797485, 1.0)


# |x| of erf in 32 bits: above, the argument is clamped. The result rounds to 1, and the rational function would exceed
# it. 1 - erf(4) is less than 2**-25.
ERF_CLAMP = 4.0


@real_function(f32=8, f64=1.5)
def erf(m: Algebra, x: Any) -> Any:
    """Return the error function: an odd rational function (f32); fdlibm's near 0, else ``1 - erfc(x)`` (f64)."""
    if m.bits == 64:
        return erf64(m, x)
    a = m.abs(x)
    y = m.select(a > ERF_CLAMP, m.const(ERF_CLAMP), a)
    s = y * y
    r = y * polynomial(m, s, _ERF32_P) / polynomial(m, s, _ERF32_Q)
    return m.copysign(m.select(r > 1.0, m.const(1.0), r), x)  # the rounded quotient may exceed 1


@real_function(f32=7, f64=3)
def erfc(m: Algebra, x: Any) -> Any:
    """Return ``1 - erf(x)``: an exponential times a polynomial, of ``|x|``."""
    y = erfc_of_positive(m, m.abs(x))
    return m.select(x < 0.0, 2.0 - y, y)


@real_function(f32=1, f64=4)
def lgamma(m: Algebra, x: Any) -> Any:
    """Return ``log |gamma(x)|``; infinite at the poles."""
    if m.bits == 32:
        return m.narrow(log_gamma_of_narrow(m.wide, m.widen(x)))
    y = log_gamma_of_positive(m, m.abs(x), log)
    return m.rarely(x < 0.0, "log_gamma_of_negative", (x, y), y)


@real_function(f32=1.5, f64=1.5)
def rsqrt(m: Algebra, x: Any) -> Any:
    """Return ``1 / sqrt(x)``."""
    return m.inverse_root(x)


# |x| of cbrt in 64 bits: below, the argument is scaled, as the Newton step would have few digits. The smallest normal
# number.
CBRT_SMALL = 2.0**-1022


@real_function(f32=1, f64=2)
@with_sign_of_first
def cbrt(m: Algebra, x: Any) -> Any:
    """Return the cube root: ``exp(log|x| / 3)`` and one Newton step; in 64 bits subnormals are scaled by 2**54."""
    a = m.abs(x)
    if m.bits == 32:
        return m.narrow(_cube_root(m.wide, m.widen(a)))
    small = a < CBRT_SMALL
    y = _cube_root(m, m.select(small, a * 2.0**54, a))
    return m.select(small, y * 2.0**-18, y)


def _cube_root(m: Algebra, a: Any) -> Any:
    y = decay(m, log(m, a) * (1.0 / 3.0))
    y = y - (y * y * y - a) / (y * y * 3.0)
    y = m.select(a == 0.0, a, y)
    y = m.select(a == INF, a, y)
    return m.select(a != a, a, y)


@real_function(f32=0, f64=0)
@with_sign_of_first
def rem(m: Algebra, x: Any, y: Any) -> Any:
    """Return the remainder of truncated division; each step removes 52 bits of the quotient, exactly.

    In 32 bits six steps are enough for any two numbers. In 64 bits one step is enough unless the quotient is large;
    then a slow path does long division.
    """
    if m.bits == 32:
        return m.narrow(_short_remainder(m.wide, m.widen(x), m.widen(y)))
    return _long_remainder(m, x, y)


# Steps of rem in 32 bits, each of 52 bits of the quotient. Six are enough for any two f32: their quotient has at most
# 277 bits.
REM_STEPS = 6


def _short_remainder(m: Algebra, x: Any, y: Any) -> Any:
    a, b = m.abs(x), m.abs(y)
    r = a
    for _ in range(REM_STEPS):
        r = m.fma(-m.trunc(r / b), b, r)
    r = m.select(r < 0.0, r + b, r)
    r = m.select(r >= b, r - b, r)
    return m.select((b == INF) & (a < INF), a, r)


# Quotient of rem in 64 bits: below, one step is exact, as the rounded quotient is at most 1 too large; above, long
# division. A double has 53 significant bits.
REM_LARGE = 2.0**52


def _long_remainder(m: Algebra, x: Any, y: Any) -> Any:
    a, b = m.abs(x), m.abs(y)
    quotient = a / b
    r = m.fma(-m.trunc(quotient), b, a)
    r = m.select(r < 0.0, r + b, r)
    r = m.select((b == INF) & (a < INF), a, r)
    large = (quotient >= REM_LARGE) & (a < INF) & (b > 0.0)
    return m.rarely(large, "remainder", (a, b), r)


def reduce_precision(m: Algebra, x: Any, exponent: int, mantissa: int, own_exponent: int) -> Any:
    """Round the bits of ``x`` to nearest even at ``mantissa`` bits; overflow to infinity, underflow to signed zero.

    ``own_exponent`` is the number of exponent bits of the dtype of ``x``, which may be narrower than a register.
    """
    width = 23 if m.bits == 32 else 52
    nan = x != x
    bits = m.to_bits(x)
    if mantissa < width:
        drop = width - mantissa
        last = m.shift_right_logical(bits, drop) & 1
        bits = (bits + last + ((1 << (drop - 1)) - 1)) & -(1 << drop)
    y = m.select(m.abs(x) < INF, m.from_bits(bits), x)
    if own_exponent == 5 and mantissa < 10:  # subnormals of f16 are normal in a register: round to multiples
        magic = 1.5 * 2.0 ** (9 - mantissa)
        y = m.select(m.abs(x) < 2.0**-14, m.copysign((x + magic) - magic, x), y)
    top = (1 << (min(exponent, own_exponent) - 1)) - 1
    if top < (127 if m.bits == 32 else 1023):
        y = m.select(m.abs(y) >= 2.0 ** (top + 1), m.copysign(m.const(INF), x), y)
    if exponent < own_exponent:
        y = m.select(m.abs(y) < 2.0 ** (1 - top), m.copysign(m.const(0.0), x), y)
    return m.select(nan, x, y)


__all__ = [
    "FUNCTIONS", "INF", "MAX_ULP", "NAN", "atan2", "cos", "digamma", "erf_inv", "exp", "expm1", "log", "log1p",
    "log1p_series", "logistic", "pow", "reduce_precision", "sin", "tan", "tanh",
]  # fmt: skip
