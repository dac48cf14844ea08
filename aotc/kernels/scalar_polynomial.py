"""Polynomials, for the formulas of scalar functions."""

from __future__ import annotations

from typing import Any


def polynomial(m: Any, x: Any, coefficients: tuple[float, ...]) -> Any:
    """Return the polynomial with ``coefficients``, highest power first, by Horner's rule."""
    total = m.const(coefficients[0])
    for c in coefficients[1:]:
        total = m.fma(total, x, m.const(c))
    return total
