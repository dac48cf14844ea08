"""Logarithms over the scalar algebra of ``formulas.math``. Sources: Cephes (f32), fdlibm (f64)."""

from __future__ import annotations

from typing import Any

from aotc.kernels.formulas import limits
from aotc.kernels.formulas.forms import INF, LN2_HIGH, LN2_LOW, NAN, function, polynomial


def log_parts(m: Any, x: Any) -> tuple[Any, Any]:
    """Return ``(e, f)`` with ``x == 2**e * (1 + f)`` and ``sqrt(1/2) <= 1 + f < sqrt(2)``, for positive finite x."""
    tiny, scale, power = (1.17549435e-38, 8388608.0, 23) if m.bits == 32 else (2.2250738585072014e-308, 2.0**54, 54)
    subnormal = x < tiny
    e, f = parts_of_normal(m, m.select(subnormal, x * scale, x))
    return e - m.select(subnormal, m.const(float(power)), m.const(0.0)), f


def parts_of_normal(m: Any, x: Any) -> tuple[Any, Any]:
    """Return the same for x that are normal."""
    bits = m.to_bits(x)
    shift, bias, mask = (23, 126, 0x007FFFFF) if m.bits == 32 else (52, 1022, (1 << 52) - 1)
    exponent = m.to_float((bits >> shift) - bias)
    half = 0x3F000000 if m.bits == 32 else 0x3FE0000000000000
    mantissa = m.from_bits((bits & mask) | half)
    low = mantissa < 0.70710678118654752
    exponent = m.select(low, exponent - 1.0, exponent)
    return exponent, m.select(low, mantissa + mantissa, mantissa) - 1.0


def log_special(m: Any, x: Any, y: Any) -> Any:
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
    e, f = log_parts(m, x)
    if m.bits == 32:
        return log_special(m, x, _log32(m, e, f, m.const(0.0)))
    low = m.multiply_add(e, m.const(LN2_LOW), _log64_correction(m, f))
    return log_special(m, x, m.multiply_add(e, m.const(LN2_HIGH), f + low))


def _log32(m: Any, e: Any, f: Any, rest: Any) -> Any:
    """Return ``e * ln 2 + log(1 + f) + rest``."""
    z = f * f
    y = m.multiply_add(f * z, polynomial(m, f, _LOG32), rest)
    y = m.multiply_add(e, m.const(-2.12194440e-4), y)
    y = m.multiply_add(m.const(-0.5), z, y)
    return m.multiply_add(e, m.const(0.693359375), f + y)


def log1p_series(m: Any, x: Any) -> Any:
    """Return ``log(1 + x)`` for x below LOG1P_SERIES."""
    return x - x * x * 0.5 + x * x * x * (1.0 / 3.0)


@function(f32=1, f64=4)
def log1p(m: Any, x: Any) -> Any:
    """``log(u)`` and the rounding of ``u = 1 + x``: added, by ``u`` (f32), divided out, Kahan's form (f64)."""
    u = x + 1.0
    if m.bits == 32:
        whole = u - 1.0
        lost = (x - whole) + (1.0 - (u - whole))
        y = log_special(m, u, _log32(m, *log_parts(m, u), lost / u))
        return m.select(x == 0.0, x, y)
    y = log(m, u) * (x / (u - 1.0))
    y = m.select(m.abs(x) < limits.LOG1P_SERIES, log1p_series(m, x), y)
    y = m.select(u == 0.0, m.const(-INF), y)
    return m.select(u == INF, x, y)
