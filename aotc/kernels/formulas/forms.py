"""Common parts of the scalar formulas: their table, decorators for width and sign, and polynomials."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from aotc.kernels.formulas.llvm_algebra import Algebra

FUNCTIONS: dict[str, Callable[..., Any]] = {}
MAX_ULP: dict[str, tuple[float, float]] = {}

INF, NAN = math.inf, math.nan
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # the first has 32 trailing zero bits


def real_function(f32: float, f64: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds a formula to :data:`FUNCTIONS`, and its largest known error to :data:`MAX_ULP`."""

    def add(formula: Callable[..., Any]) -> Callable[..., Any]:
        assert formula.__name__ not in FUNCTIONS
        FUNCTIONS[formula.__name__] = formula
        MAX_ULP[formula.__name__] = (f32, f64)
        return formula

    return add


def computed_in_64_bits(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt ``formula``, written for 64 bits, to 32 bits by computing in 64."""

    def widened(m: Algebra, *args: Any) -> Any:
        if m.bits == 64:
            return formula(m, *args)
        return m.narrow(formula(m.wide, *(m.widen(a) for a in args)))

    widened.__name__ = formula.__name__
    widened.__doc__ = formula.__doc__
    return widened


def with_sign_of_first(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Give the result of ``formula`` the sign of its first argument; the sign of the formula's own result is ignored.

    Apply it outside of :func:`computed_in_64_bits`: LLVM moves the rounding to f16 into a ``copysign``. It would then
    narrow an f64 sign to f16 directly, for which x86 calls a C library.
    """

    def signed(m: Algebra, *args: Any) -> Any:
        return m.copysign(formula(m, *args), args[0])

    signed.__name__ = formula.__name__
    signed.__doc__ = formula.__doc__
    return signed


def polynomial(m: Algebra, x: Any, coefficients: tuple[float, ...]) -> Any:
    """Return the polynomial with ``coefficients``, highest power first, by Horner's rule."""
    total = m.const(coefficients[0])
    for c in coefficients[1:]:
        total = m.multiply_add(total, x, m.const(c))
    return total


def polynomial_by_squares(m: Algebra, x: Any, coefficients: tuple[float, ...]) -> Any:
    """Return :func:`polynomial`, as a polynomial in ``x**2`` with coefficients ``a x + b``: half the latency."""
    first = len(coefficients) % 2
    evens, odds = coefficients[first::2], coefficients[first + 1 :: 2]
    pairs = [m.multiply_add(m.const(a), x, m.const(b)) for a, b in zip(evens, odds, strict=True)]
    total, *rest = [m.const(c) for c in coefficients[:first]] + pairs
    square = x * x
    for pair in rest:
        total = m.multiply_add(total, square, pair)
    return total


def power_of_two(m: Algebra, n: Any) -> Any:
    """Return ``2**n`` for an integer ``n`` in the normal range."""
    bias, shift = (127, 23) if m.bits == 32 else (1023, 52)
    return m.from_bits((n + bias) << shift)
