"""Elementary functions as branch-free formulas over an abstract scalar algebra.

``m`` is the algebra: :class:`aotc.kernels.formulas.llvm_algebra.Algebra` emits LLVM IR for
CPU and CUDA; the tests run the same source on NumPy arrays. Values have Python's
operators; ``m.bits`` is 32 or 64. What is hard to get right in 32 bits is computed
in 64 (``m.wide``): half the lanes, but no tables and no double-word arithmetic.

Sources: exp, log: Cephes (f32), fdlibm (f64). tanh, erf: the rational
approximations of Eigen (f32); fdlibm (f64). sin, cos: fdlibm. atan: Cephes. erf_inv: M. Giles,
"Approximating the erfinv function", with Newton steps in f64.

The largest error seen against float64 (for f32) and long double (for f64) on the
whole range, in units in the last place, stands at each formula (:data:`MAX_ULP`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from aotc.kernels.formulas import limits
from aotc.kernels.formulas.erf import erf64, erf_tail
from aotc.kernels.formulas.forms import (
    FUNCTIONS,
    INF,
    LN2_HIGH,
    LN2_LOW,
    MAX_ULP,
    NAN,
    function,
    in_wide,
    polynomial,
    power_of_two,
    with_sign_of_first,
)
from aotc.kernels.formulas.log_gamma import log_gamma_of_positive
from aotc.kernels.formulas.power import exp_of_two_words, log_in_two_words
from aotc.kernels.formulas.trig import atan2, cos, sin, tan


@function(f32=1, f64=1.5)
def exp(m: Any, x: Any) -> Any:
    """``2**n * e**r``; the scale is applied in two steps so that subnormal results round once.

    Adding 1.5 * 2**23 (2**52) rounds to an integer and leaves it in the low bits,
    which saves the conversions. NaN passes through every step.
    """
    wide = int(m.bits == 64)
    low, high = limits.EXP_LOW[wide], limits.EXP_HIGH[wide]
    magic, magic_bits = (12582912.0, 0x4B400000) if m.bits == 32 else (6755399441055744.0, 0x4338000000000000)
    c = m.select(x > high, m.const(high), x)
    c = m.select(c < low, m.const(low), c)
    t = m.multiply_add(c, m.const(1.4426950408889634), m.const(magic))
    n = t - magic
    k = m.to_bits(t) - magic_bits
    if m.bits == 32:
        r = m.multiply_add(n, m.const(-0.693359375), c)
        r = m.multiply_add(n, m.const(2.12194440e-4), r)
        p = polynomial(m, r, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5))
    else:
        r = m.multiply_add(n, m.const(-LN2_HIGH), c)
        r = m.multiply_add(n, m.const(-LN2_LOW), r)
        p = polynomial(m, r, tuple(1.0 / math.factorial(k) for k in range(13, 1, -1)))
    p = m.multiply_add(p, r * r, r) + 1.0
    half = k >> 1
    return p * power_of_two(m, half) * power_of_two(m, k - half)


def _log_parts(m: Any, x: Any) -> tuple[Any, Any]:
    """Return ``(e, f)`` with ``x == 2**e * (1 + f)`` and ``sqrt(1/2) <= 1 + f < sqrt(2)``, for positive finite x."""
    tiny, scale, power = (1.17549435e-38, 8388608.0, 23) if m.bits == 32 else (2.2250738585072014e-308, 2.0**54, 54)
    subnormal = x < tiny
    scaled = m.select(subnormal, x * scale, x)
    bits = m.to_bits(scaled)
    shift, bias, mask = (23, 126, 0x007FFFFF) if m.bits == 32 else (52, 1022, (1 << 52) - 1)
    exponent = m.to_float((bits >> shift) - bias) - m.select(subnormal, m.const(float(power)), m.const(0.0))
    half = 0x3F000000 if m.bits == 32 else 0x3FE0000000000000
    mantissa = m.from_bits((bits & mask) | half)
    low = mantissa < 0.70710678118654752
    exponent = m.select(low, exponent - 1.0, exponent)
    return exponent, m.select(low, mantissa + mantissa, mantissa) - 1.0


def _log_special(m: Any, x: Any, y: Any) -> Any:
    y = m.select(x == INF, x, y)
    y = m.select(x == 0.0, m.const(-INF), y)
    return m.select(x >= 0.0, y, m.const(NAN))


_LOG32 = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
          2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)  # fmt: skip
_LOG64 = (1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
          2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01)  # fmt: skip


def _log64_correction(m: Any, f: Any) -> Any:
    """Return ``log(1 + f) - f``."""
    s = f / (f + 2.0)
    z = s * s
    r = z * polynomial(m, z, _LOG64)
    square = f * f * 0.5
    return s * (square + r) - square


@function(f32=1, f64=1.5)
def log(m: Any, x: Any) -> Any:
    """``e * ln 2 + log(1 + f)``."""
    e, f = _log_parts(m, x)
    if m.bits == 32:
        z = f * f
        y = f * z * polynomial(m, f, _LOG32)
        y = m.multiply_add(e, m.const(-2.12194440e-4), y)
        y = m.multiply_add(m.const(-0.5), z, y)
        return _log_special(m, x, m.multiply_add(e, m.const(0.693359375), f + y))
    low = m.multiply_add(e, m.const(LN2_LOW), _log64_correction(m, f))
    return _log_special(m, x, m.multiply_add(e, m.const(LN2_HIGH), f + low))


@function(f32=1, f64=4)
@in_wide
def expm1(m: Any, x: Any) -> Any:
    """Kahan's form: the rounding of ``exp(x)`` is divided out."""
    u = exp(m, x)
    less = u - 1.0
    y = less * x / log(m, u)
    y = m.select(m.abs(x) < limits.EXPM1_SERIES, x + x * x * 0.5 + x * x * x * (1.0 / 6.0), y)
    y = m.select(x < limits.EXPM1_LOW, m.const(-1.0), y)
    y = m.select(x > limits.EXPM1_HIGH, less, y)
    return m.select(x == 0.0, x, y)


def log1p_series(m: Any, x: Any) -> Any:
    """Return ``log(1 + x)`` for x below LOG1P_SERIES."""
    return x - x * x * 0.5 + x * x * x * (1.0 / 3.0)


@function(f32=1, f64=4)
@in_wide
def log1p(m: Any, x: Any) -> Any:
    """Kahan's form: the rounding of ``1 + x`` is divided out."""
    u = x + 1.0
    y = log(m, u) * (x / (u - 1.0))
    y = m.select(m.abs(x) < limits.LOG1P_SERIES, log1p_series(m, x), y)
    y = m.select(u == 0.0, m.const(-INF), y)
    return m.select(u == INF, x, y)


@function(f32=5, f64=4)
def tanh(m: Any, x: Any) -> Any:
    """An odd rational function (f32); ``expm1(2x) / (expm1(2x) + 2)`` (f64)."""
    if m.bits == 64:
        t = expm1(m, m.select(m.abs(x) > limits.TANH_ONE[1], m.const(2.0 * limits.TANH_ONE[1]), m.abs(x) * 2.0))
        return m.select(x != x, x, m.copysign(t / (t + 2.0), x))
    limit = limits.TANH_CLAMP
    y = m.select(x > limit, m.const(limit), x)
    y = m.select(y < -limit, m.const(-limit), y)
    s = y * y
    p = polynomial(m, s, (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
                          1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03))  # fmt: skip
    q = polynomial(m, s, (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03))
    r = m.select(m.abs(x) > limits.TANH_ONE[0], m.copysign(m.const(1.0), x), y * p / q)
    r = m.select(m.abs(x) < limits.TANH_LINEAR, x, r)
    return m.select(x != x, x, r)


@function(f32=3, f64=3)
def logistic(m: Any, x: Any) -> Any:
    """``1 / (1 + exp(-x))``, on the left ``exp(x) / (1 + exp(x))``, which does not overflow below."""
    power = exp(m, -m.abs(x))
    return m.select(x < 0.0, power, m.const(1.0)) / (power + 1.0)


@function(f32=6, f64=2)
def erf(m: Any, x: Any) -> Any:
    """An odd rational function (f32); fdlibm's pieces (f64)."""
    if m.bits == 64:
        return erf64(m, x, exp)
    y = m.select(x > limits.ERF_CLAMP, m.const(limits.ERF_CLAMP), x)
    y = m.select(y < -limits.ERF_CLAMP, m.const(-limits.ERF_CLAMP), y)
    s = y * y
    p = polynomial(m, s, (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
                          -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02))  # fmt: skip
    q = polynomial(m, s, (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03,
                          -7.37332916720468e-03, -1.42647390514189e-02))  # fmt: skip
    r = m.select(m.abs(x) < limits.ERF_LINEAR, x * 1.1283791670955126, y * p / q)
    return m.select(x != x, x, r)


@function(f32=2, f64=9)
@in_wide
def erfc(m: Any, x: Any) -> Any:
    """``1 - erf(x)`` where that is exact enough, the tail's own form elsewhere."""
    a = m.abs(x)
    tail = erf_tail(m, a, exp)
    y = m.select(x < 0.0, 2.0 - tail, tail)
    y = m.select(a < limits.ERF_NEAR, 1.0 - erf64(m, x, exp), y)
    y = m.select(x > limits.ERFC_ZERO, m.const(0.0), y)
    y = m.select(x < -limits.ERF_ONE, m.const(2.0), y)
    return m.select(x != x, x, y)


_GILES_SMALL = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503,
                -0.00417768164, 0.246640727, 1.50140941)  # fmt: skip
_GILES_LARGE = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613,
                0.00943887047, 1.00167406, 2.83297682)  # fmt: skip


@function(f32=4, f64=16)
@with_sign_of_first
def erf_inv(m: Any, x: Any) -> Any:
    """Giles' polynomials, then two Newton steps on the tail probability; in 64 bits an asymptotic start, Halley's."""
    if m.bits == 32:
        w = m.wide
        return m.narrow(_erf_inv(w, m.widen(x), False))
    return _erf_inv(m, x, True)


def _erf_inv(m: Any, x: Any, long: bool) -> Any:
    a = m.abs(x)
    w = -log(m, (1.0 - a) * (a + 1.0))
    small = polynomial(m, w - 2.5, _GILES_SMALL)
    tail = limits.ERF_INV_TAIL
    large = polynomial(m, m.sqrt(m.select(w < tail, m.const(tail), w)) - 3.0, _GILES_LARGE)
    y = m.select(w < tail, small, large) * a
    if long:
        q = -log(m, 1.0 - a)
        y = m.select(w > limits.ERF_INV_FAR, m.sqrt(q - log(m, q * math.pi) * 0.5), y)
    for _ in range(2):
        error = m.select(a < limits.ERF_INV_NEWTON, erf64(m, y, exp) - a, (1.0 - a) - erfc(m, y))
        slope = exp(m, -(y * y)) * 1.1283791670955126
        y = y - error / (m.multiply_add(error, y, slope) if long else slope)
    y = m.select(a < limits.ERF_INV_LINEAR, a * 0.8862269254527580, y)
    y = m.select(a == 1.0, m.const(INF), y)
    return m.select(a <= 1.0, y, m.const(NAN))


@function(f32=1, f64=4)
@in_wide
def lgamma(m: Any, x: Any) -> Any:
    """``log |gamma(x)|``; poles are infinite."""
    y = log_gamma_of_positive(m, m.abs(x), log)
    return m.rarely(x < 0.0, "log_gamma_of_negative", (x, y), y)


@function(f32=1.5, f64=1.5)
def rsqrt(m: Any, x: Any) -> Any:
    """``1 / sqrt(x)``."""
    return m.const(1.0) / m.sqrt(x)


@function(f32=1, f64=2)
@with_sign_of_first
def cbrt(m: Any, x: Any) -> Any:
    """``exp(log|x| / 3)`` and one Newton step; in 64 bits 2**54 times larger below the normal range."""
    a = m.abs(x)
    if m.bits == 32:
        return m.narrow(_cube_root(m.wide, m.widen(a)))
    small = a < limits.CBRT_SMALL
    y = _cube_root(m, m.select(small, a * 2.0**54, a))
    return m.select(small, y * 2.0**-18, y)


def _cube_root(m: Any, a: Any) -> Any:
    y = exp(m, log(m, a) * (1.0 / 3.0))
    y = y - (y * y * y - a) / (y * y * 3.0)
    y = m.select(a == 0.0, a, y)
    y = m.select(a == INF, a, y)
    return m.select(a != a, a, y)


@function(f32=1, f64=1)
def pow(m: Any, x: Any, y: Any) -> Any:
    """``exp(y * log|x|)``, in 64 bits with the logarithm in two words; C's special cases."""
    if m.bits == 32:
        w = m.wide
        return m.narrow(_power(w, m.widen(x), m.widen(y), _short_power))
    return _power(m, x, y, _long_power)


def _short_power(m: Any, a: Any, y: Any) -> Any:
    return exp(m, y * log(m, a))


def _long_power(m: Any, a: Any, y: Any) -> Any:
    e, f = _log_parts(m, a)
    high, low = log_in_two_words(m, e, f)
    p = y * _log_special(m, a, high)
    rest = m.fma(y, high, -p) + y * low
    return exp_of_two_words(m, p, m.select(m.abs(p) < limits.POW_USUAL, rest, m.const(0.0)))


def _power(m: Any, x: Any, y: Any, of_size: Callable[..., Any]) -> Any:
    """Return ``x**y`` where ``of_size`` gives it for sizes of x; C's special cases."""
    a = m.abs(x)
    r = of_size(m, a, y)
    whole = m.trunc(y) == y
    half = m.trunc(y * 0.5) * 2.0 != y
    odd = whole & half & (m.abs(y) < limits.POW_ODD)
    negative = m.copysign(m.const(1.0), x) < 0.0
    r = m.select(negative & odd, -r, r)
    r = m.select((x < 0.0) & (a < INF) & ~whole, m.const(NAN), r)
    r = m.select((a == 1.0) & (m.abs(y) == INF), m.const(1.0), r)
    r = m.select((x != x) | (y != y), x + y, r)
    return m.select((y == 0.0) | (x == 1.0), m.const(1.0), r)


@function(f32=0, f64=0)
@with_sign_of_first
def rem(m: Any, x: Any, y: Any) -> Any:
    """The remainder of truncated division; every step takes off 52 bits of the quotient, exactly.

    Six are enough for any two numbers of 32 bits; in 64 bits it is one, or long division where that is not enough.
    """
    if m.bits == 32:
        return m.narrow(_short_remainder(m.wide, m.widen(x), m.widen(y)))
    return _long_remainder(m, x, y)


def _short_remainder(m: Any, x: Any, y: Any) -> Any:
    a, b = m.abs(x), m.abs(y)
    r = a
    for _ in range(limits.REM_STEPS):
        r = m.fma(-m.trunc(r / b), b, r)
    r = m.select(r < 0.0, r + b, r)
    r = m.select(r >= b, r - b, r)
    return m.select((b == INF) & (a < INF), a, r)


def _long_remainder(m: Any, x: Any, y: Any) -> Any:
    a, b = m.abs(x), m.abs(y)
    quotient = a / b
    r = m.fma(-m.trunc(quotient), b, a)
    r = m.select(r < 0.0, r + b, r)
    r = m.select((b == INF) & (a < INF), a, r)
    large = (quotient >= limits.REM_LARGE) & (a < INF) & (b > 0.0)
    return m.rarely(large, "remainder", (a, b), r)


def reduce_precision(m: Any, x: Any, exponent: int, mantissa: int) -> Any:
    """Round to nearest even at ``mantissa`` bits; overflow to infinity, underflow to signed zero."""
    width, bias = (23, 127) if m.bits == 32 else (52, 1023)
    nan = x != x
    bits = m.to_bits(x)
    if mantissa < width:
        drop = width - mantissa
        last = m.shift_right_logical(bits, drop) & 1
        bits = (bits + last + ((1 << (drop - 1)) - 1)) & -(1 << drop)
    y = m.select(m.abs(x) < INF, m.from_bits(bits), x)
    top = (1 << (exponent - 1)) - 1
    if top < bias:
        limit = 2.0 ** (top + 1)
        small = 2.0 ** (1 - top)
        y = m.select(m.abs(y) >= limit, m.copysign(m.const(INF), x), y)
        y = m.select(m.abs(y) < small, m.copysign(m.const(0.0), x), y)
    return m.select(nan, x, y)


__all__ = ["FUNCTIONS", "MAX_ULP", "atan2", "cos", "reduce_precision", "sin", "tan"]
