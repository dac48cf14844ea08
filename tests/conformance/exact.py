"""Functions of 64-bit floats with more digits, by mpmath or in long double, to measure XLA and aotc with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np

DIGITS = 60

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(mpmath, name)
        for name in (
            "acos",
            "acosh",
            "asin",
            "asinh",
            "atan",
            "atan2",
            "atanh",
            "cbrt",
            "cos",
            "cosh",
            "erf",
            "erfc",
            "exp",
            "expm1",
            "log",
            "log1p",
            "sin",
            "sinh",
            "sqrt",
            "tan",
            "tanh",
            "digamma",
        )
    },
    "erf_inv": mpmath.erfinv,
    "lgamma": lambda x: mpmath.log(abs(mpmath.gamma(x))),
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
    "logistic": lambda x: 1 / (1 + mpmath.exp(-x)),
    "pow": mpmath.power,
    "div": lambda a, b: a / b,
    "mul": lambda a, b: a * b,
    "bessel_i0e": lambda x: mpmath.besseli(0, x) * mpmath.exp(-abs(x)),
    "bessel_i1e": lambda x: mpmath.besseli(1, x) * mpmath.exp(-abs(x)),
    "igamma": lambda a, x: mpmath.gammainc(a, 0, x, True),
    "igammac": lambda a, x: mpmath.gammainc(a, x, mpmath.inf, True),
    "regularized_incomplete_beta": lambda a, b, x: mpmath.betainc(a, b, 0, x, True),
}


def run_exact(group: str, args: list[np.ndarray], out: np.ndarray) -> list[np.ndarray] | None:
    """Return the results of an elementwise function rounded from :data:`DIGITS` digits, or None for others.

    Where mpmath has no value (poles, arguments outside the domain) the given result ``out`` stands. A Cholesky factor
    is one of long double.
    """
    if group == "cholesky" and out.dtype.itemsize >= np.dtype("c16" if out.dtype.kind == "c" else "f8").itemsize:
        return [_cholesky(args[0]).astype(out.dtype)]
    function = FUNCTIONS.get(group)
    if function is None or not args or any(a.dtype.kind not in "fc" for a in args):
        return None
    full = [np.broadcast_to(a, out.shape).ravel() for a in args]
    values = [_value(function, xs, own) for *xs, own in zip(*full, out.ravel(), strict=True)]
    return [np.array(values, out.dtype).reshape(out.shape)]


def _cholesky(matrices: np.ndarray) -> np.ndarray:
    """Return the lower factors by columns: Golub and Van Loan, "Matrix Computations", 4.2."""
    wide = matrices.astype(np.clongdouble if matrices.dtype.kind == "c" else np.longdouble)
    lower = np.zeros_like(wide)
    for n in range(wide.shape[-1]):
        done = lower[..., n:, :n] @ lower[..., n, :n, None].conj()
        column = wide[..., n:, n] - done[..., 0]
        lower[..., n:, n] = column / np.sqrt(column[..., :1].real)
    return lower


def _value(function: Callable[..., Any], xs: list[Any], own: Any) -> Any:
    if not all(np.isfinite(x) for x in xs):
        return own
    with mpmath.workdps(DIGITS):
        try:
            result = function(*(mpmath.mpmathify(x.item()) for x in xs))
            return complex(result) if isinstance(own, np.complexfloating) else float(result)
        except (ValueError, ZeroDivisionError, TypeError, OverflowError, mpmath.libmp.NoConvergence):
            return own


def exact_values(group: str, args: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Return the values of an elementwise function of finite numbers in long double."""
    wide = np.clongdouble if args[0].dtype.kind == "c" else np.longdouble
    found = np.zeros(shape, wide)
    full = [np.broadcast_to(a, shape) for a in args]
    with mpmath.workdps(DIGITS):
        for at in np.ndindex(shape):
            value = FUNCTIONS[group](*(mpmath.mpmathify(a[at].item()) for a in full))
            if wide is np.clongdouble:
                found.real[at], found.imag[at] = (_rounded(part) for part in (value.real, value.imag))
            else:
                found[at] = _rounded(value)
    return found


def _rounded(value: Any) -> np.longdouble:
    return np.longdouble(mpmath.nstr(value, 30))
