"""Complex functions of infinities and NaN, and at poles: C99's annex G, and what follows from it, in long double.

NumPy's functions of ``clongdouble`` are the C library's, which follow annex G. What C does not have is built of them:
``expm1(z)`` is ``exp(z) - 1``, ``log1p(z)`` is ``log(1 + z)``, ``rsqrt(z)`` is ``1 / sqrt(z)``, ``logistic(z)`` is
``1 / (1 + exp(-z))``, ``sign(z)`` is ``z / abs(z)`` part by part as in XLA, and ``pow(a, b)`` is ``exp(b log a)``,
which annex G allows: products with an exact 0 are 0, and an exponent beyond the range of the type is infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

LONG = np.longdouble
INF, NAN = LONG(np.inf), LONG(np.nan)


def pair(real: Any, imag: Any) -> np.clongdouble:
    """Return a complex number of two parts; ``real + 1j * imag`` would multiply infinities by 0."""
    found = np.empty((), np.clongdouble)
    found.real, found.imag = real, imag
    return found[()]


def divide(z: Any, w: Any) -> np.clongdouble:
    """Return ``z / w`` as the example of annex G does (G.5.1); long double has the range that it scales for."""
    a, b, c, d = (LONG(v) for v in (z.real, z.imag, w.real, w.imag))
    below = c * c + d * d
    x, y = (a * c + b * d) / below, (b * c - a * d) / below
    if not (np.isnan(x) and np.isnan(y)):
        return pair(x, y)
    if below == 0 and not (np.isnan(a) and np.isnan(b)):
        return pair(np.copysign(INF, c) * a, np.copysign(INF, c) * b)
    if (np.isinf(a) or np.isinf(b)) and np.isfinite(c) and np.isfinite(d):
        a, b = (np.copysign(LONG(np.isinf(v)), v) for v in (a, b))
        return pair(INF * (a * c + b * d), INF * (b * c - a * d))
    if (np.isinf(c) or np.isinf(d)) and np.isfinite(a) and np.isfinite(b):
        c, d = (np.copysign(LONG(np.isinf(v)), v) for v in (c, d))
        return pair(LONG(0) * (a * c + b * d), LONG(0) * (b * c - a * d))
    return pair(x, y)


def power(a: Any, b: Any, limit: float) -> np.clongdouble:
    """Return ``exp(b log a)``, and 1 for an exponent of 0; beyond ``limit`` exponentials leave the type's range."""
    if b == 0:
        return pair(1, 0)
    log = np.log(a)
    c, d = b.real, b.imag
    turn_is_exact = a.imag == 0 and log.imag == 0
    by_size = [LONG(0) if v == 0 or log.real == 0 else v * log.real for v in (c, d)]
    by_turn = [LONG(0) if v == 0 or turn_is_exact else v * log.imag for v in (c, d)]
    exponent, phase = by_size[0] - by_turn[1], by_turn[0] + by_size[1]
    exponent = exponent if not abs(exponent) > limit else np.copysign(INF, exponent)
    return pair(exponent, phase) if phase == 0 and exponent == INF else np.exp(pair(exponent, phase))


def _sign(z: Any) -> np.clongdouble:
    return z if z == 0 else pair(z.real / np.abs(z), z.imag / np.abs(z))


def _multiply(z: Any, w: Any) -> np.clongdouble:
    return pair(z.real * w.real - z.imag * w.imag, z.real * w.imag + z.imag * w.real)


def _square(z: Any) -> np.clongdouble:
    return pair((z.real - z.imag) * (z.real + z.imag), 2 * z.real * z.imag)


RULES: dict[str, Callable[..., Any]] = {
    "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos, "tan": np.tan, "tanh": np.tanh,
    "abs": np.abs, "add": np.add, "sub": np.subtract, "cosh": np.cosh, "sinh": np.sinh, "acos": np.arccos,
    "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh, "atan": np.arctan, "atanh": np.arctanh,
    "expm1": lambda z: pair(np.exp(z).real - 1, np.exp(z).imag),
    "log1p": lambda z: np.log(pair(z.real + 1, z.imag)),
    "rsqrt": lambda z: divide(pair(1, 0), np.sqrt(z)),
    "logistic": lambda z: divide(pair(1, 0), pair(1 + np.exp(-z).real, np.exp(-z).imag)),
    "sign": _sign, "square": _square, "mul": _multiply, "div": divide,
}  # fmt: skip


def by_rule(name: str, args: Sequence[Any]) -> Any:
    """Return the value of a function by its rule; None for one without."""
    wide = [np.clongdouble(x) for x in args]
    if name == "pow":
        return power(*wide, 150.0 if args[0].dtype == np.complex64 else 1500.0)
    return RULES[name](*wide) if name in RULES else None
