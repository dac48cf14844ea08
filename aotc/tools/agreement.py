"""Compare two results of an op: exactly, in units in the last place (ulp), or by errors relative to a 64-bit reference.

In all functions ``ours`` is the result of the compiled model and ``expected`` that of the reference. Sums of many terms
and factorizations are compared normwise, in units in the last place of their largest element, because single elements
may cancel (Higham, "Accuracy and Stability of Numerical Algorithms", ch. 3 and 9).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from aotc.ir.opset import OPS

LOOSE = {4: 5e-1, 6: 2.5e-1, 8: 1e-1, 16: 2e-2, 32: 1e-4, 64: 1e-9}
"""Relative tolerance for results of several ops, by the bits of the type; times the largest element, also absolute."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds ``|ours - expected| <= atol + rtol * |expected|``, which replace the bounds of this module."""

    rtol: float
    atol: float


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A mismatch: the worst element, its distance in units in the last place, the number of differing elements."""

    index: tuple[int, ...]
    ours: str
    expected: str
    units: float
    largest: float
    count: int
    size: int


@dataclass(frozen=True, slots=True)
class Deviation:
    """Error of a result: relative root mean square error, largest absolute error, largest element of the reference."""

    relative: float
    largest: float
    size: float


def array_deviation(ours: np.ndarray, expected: np.ndarray) -> Deviation | None:
    """Return the deviation of ``ours`` from ``expected`` over finite elements; None for dtypes without rounding."""
    if not is_float(expected) or ours.shape != expected.shape:
        return None
    a, b = ours.astype(_array_as_f64(expected)), expected.astype(_array_as_f64(expected))
    finite = np.isfinite(a) & np.isfinite(b)
    error, size = np.abs(a[finite] - b[finite]), np.abs(b[finite])
    if not size.size:
        return Deviation(0.0, 0.0, 0.0)
    norm, whole = (float(np.sqrt(np.mean(x**2))) for x in (error, size))
    relative = norm / whole if whole else (math.inf if norm else 0.0)
    return Deviation(relative, float(error.max()), float(size.max()))


def compare_op(
    name: str, ours: np.ndarray, expected: np.ndarray, truth: Callable[[], np.ndarray | None], given: Tolerance | None,
    terms: int = 1,
) -> Mismatch | None:  # fmt: skip
    """Compare a result of op ``name`` with the reference's for the same operands; return a mismatch or None.

    ``truth`` computes the result in 64 bits, or returns None; the tolerance ``given`` replaces the op's own bound. Each
    element is a sum of ``terms`` numbers. Rounding errors are nearly independent, so the error of a sum grows with the
    square root of the number of terms (Higham, ch. 4.2).
    """
    row = OPS[name]
    assert row.tolerance is not None, f"results of {name} have no bound"
    limit, normwise = max(row.tolerance, math.sqrt(terms)) if is_float(expected) else 0.0, row.normwise
    if limit and _bits_of_array(expected) < 16:
        limit = 1.0
    error = (
        _element_errors(ours, expected, normwise)
        if given is None or not is_float(expected)
        else _errors_outside_tolerance(ours, expected, given)
    )
    if error is None or not error.size or float(error.max()) <= limit:
        return None if error is not None else _shape_mismatch(ours, expected)
    exact = truth() if given is None and limit and is_float(expected) else None
    if exact is not None:
        step = unit_in_last_place(expected, normwise)
        rounded = exact.astype(expected.dtype)
        own, theirs = distance_in_units(ours, rounded, step), distance_in_units(expected, rounded, step)
        if float(own.max()) <= max(float(theirs.max()), limit):
            return None
    return _worst_mismatch(ours, expected, error, limit)


def compare_results(
    ours: np.ndarray, expected: np.ndarray, given: Tolerance | None,
    truth: Callable[[], np.ndarray | None] | None = None,
) -> Mismatch | None:  # fmt: skip
    """Compare a result that several ops computed: integers exactly, floats within :data:`LOOSE` or ``given``.

    A program may amplify rounding errors. ``truth`` computes the result in 64 bits: elements also agree if their error
    against it is at most :data:`AMPLIFIED` times the largest error of ``expected``.
    """
    plain = given is None
    if ours.shape != expected.shape or ours.dtype != expected.dtype:
        return _shape_mismatch(ours, expected)
    if given is None and is_float(expected):
        tolerance = LOOSE[_bits_of_array(expected)]
        size = np.abs(expected.astype(_array_as_f64(expected)))
        finite = size[np.isfinite(size)]
        given = Tolerance(tolerance, tolerance * float(finite.max()) if finite.size else 0.0)
    error = (
        _errors_outside_tolerance(ours, expected, given)
        if given and is_float(expected)
        else _element_errors(ours, expected, False)
    )
    if error is None or not error.size or float(error.max()) == 0.0:
        return None
    exact = truth() if truth and plain and is_float(expected) else None
    if exact is not None and _is_as_accurate(ours, expected, exact, error > 0):
        return None
    return _worst_mismatch(ours, expected, error, 0.0)


# Accepted multiple of the reference's own error. A result this near to one of higher precision is as good as the
# reference, even if the two differ.
AMPLIFIED = 4.0


def _is_as_accurate(ours: np.ndarray, expected: np.ndarray, exact: np.ndarray, differ: np.ndarray) -> bool:
    """Return True if the errors of ``ours`` are at most :data:`AMPLIFIED` times those of ``expected``.

    ``exact`` is the result in 64 bits, ``differ`` the mask of the elements to compare.
    """
    with np.errstate(all="ignore"):
        own, theirs = (np.abs(a.astype(exact.dtype) - exact) for a in (ours, expected))
    finite = theirs[np.isfinite(theirs)]
    return bool(finite.size and (own[differ] <= AMPLIFIED * finite.max()).all())


def is_float(array: np.ndarray) -> bool:
    """Return True if the values of ``array`` can have rounding errors."""
    return array.dtype.kind in "fc" or (array.dtype.kind == "V" and "float" in array.dtype.name)


def _bits_of_array(array: np.ndarray) -> int:
    return int(ml_dtypes.finfo(_real_parts(array).dtype).bits)


def _real_parts(array: np.ndarray) -> np.ndarray:
    return array.real if array.dtype.kind == "c" else array


def _array_as_f64(array: np.ndarray) -> Any:
    return np.complex128 if array.dtype.kind == "c" else np.float64


def unit_in_last_place(expected: np.ndarray, normwise: bool) -> np.ndarray:
    """Return the unit in the last place of each element of ``expected``, or of its largest element if ``normwise``."""
    info = ml_dtypes.finfo(_real_parts(expected).dtype)
    size = np.abs(expected.astype(_array_as_f64(expected)))
    if normwise:
        finite = size[np.isfinite(size)]
        size = np.full_like(size, finite.max() if finite.size else 1.0)
    exponent = np.floor(np.log2(np.maximum(size, float(info.smallest_normal))))
    return np.asarray(np.exp2(np.where(np.isfinite(exponent), exponent, 0) + np.log2(float(info.eps))))


def distance_in_units(ours: np.ndarray, expected: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Return the distance of each element in units of ``step``; infinity if only one of the two is NaN or infinite."""
    if expected.dtype.kind == "c":
        parts = (ours.real, expected.real), (ours.imag, expected.imag)
        return np.maximum(*(distance_in_units(a, b, step) for a, b in parts))
    a, b = ours.astype(np.float64), expected.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(all="ignore"):
        gap = np.where(same, 0.0, np.abs(a - b) / step)
    return np.where(np.isfinite(gap), gap, np.inf)


def _element_errors(ours: np.ndarray, expected: np.ndarray, normwise: bool) -> np.ndarray | None:
    """Return the error of each element in units in the last place (integers: 0 or 1), or None if the types differ."""
    if ours.shape != expected.shape or ours.dtype != expected.dtype:
        return None
    if is_float(expected):
        return distance_in_units(ours, expected, unit_in_last_place(expected, normwise))
    return np.asarray(ours != expected).astype(np.float64)


def _errors_outside_tolerance(ours: np.ndarray, expected: np.ndarray, given: Tolerance) -> np.ndarray | None:
    """Return 0 for elements within the tolerance ``given``, else the absolute error; None if types differ."""
    if ours.shape != expected.shape or ours.dtype != expected.dtype:
        return None
    a, b = ours.astype(_array_as_f64(expected)), expected.astype(_array_as_f64(expected))
    with np.errstate(all="ignore"):
        gap = np.abs(a - b)
        close = np.isclose(a, b, given.rtol, given.atol, equal_nan=True)
    return np.where(close, 0.0, np.where(np.isfinite(gap) & (gap > 0), gap, np.inf))


def _worst_mismatch(ours: np.ndarray, expected: np.ndarray, error: np.ndarray, limit: float) -> Mismatch:
    """Return the mismatch at the element of the largest ``error``, with the number of elements above ``limit``."""
    place = tuple(int(i) for i in np.unravel_index(int(np.argmax(error)), error.shape))
    units = _element_errors(ours, expected, False)
    assert units is not None
    wide = _array_as_f64(expected)
    with np.errstate(all="ignore"):
        gap = np.abs(ours.astype(wide) - expected.astype(wide))
    return Mismatch(
        place, str(ours[place]), str(expected[place]), float(units[place]), float(gap[place]),
        int((error > limit).sum()), expected.size,
    )  # fmt: skip


def _shape_mismatch(ours: np.ndarray, expected: np.ndarray) -> Mismatch:
    left, right = (f"{a.dtype}{list(a.shape)}" for a in (ours, expected))
    return Mismatch((), left, right, float("inf"), float("inf"), ours.size, expected.size)
