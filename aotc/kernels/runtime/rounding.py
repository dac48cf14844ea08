"""Whole numbers next to a float, in plain arithmetic: Numba's rounding functions do not all compile for GPUs."""

from __future__ import annotations

import math

from numba import float64, njit

# From this size on every f64 is a whole number; adding it to a smaller one rounds to a whole number, ties to even.
_WHOLE = 2.0**52


@njit
def round_even(x):
    """Return the nearest whole number, ties to even."""
    x = float64(x)
    size = abs(x)
    return math.copysign((size + _WHOLE) - _WHOLE, x) if size < _WHOLE else x


@njit
def floor(x):
    """Return the largest whole number that is not above."""
    x = float64(x)
    near = round_even(x)
    return near - 1.0 if near > x else near


@njit
def ceil(x):
    """Return the smallest whole number that is not below."""
    x = float64(x)
    near = round_even(x)
    return math.copysign(near + 1.0, x) if near < x else near


@njit
def round_afz(x):
    """Return the nearest whole number, ties away from 0."""
    size = abs(float64(x))
    whole = floor(size)
    return math.copysign(whole + 1 if size - whole >= 0.5 else whole, float64(x))
