"""The largest absolute and relative error of a result."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class LargestError:
    """The largest errors of an array: absolute, relative to the largest value, and relative to each element.

    An error is infinite where only one of the two elements is NaN, or one is infinite. Elements whose reference is 0
    have no relative error.
    """

    absolute: float
    relative: float
    of_largest: float

    def __str__(self) -> str:
        if not self.absolute:
            return "no error"
        share = f"{self.of_largest:.3g} of the largest value"
        return f"largest error {self.absolute:.3g}, {share}; largest relative error {self.relative:.3g}"


def largest_error(ours: np.ndarray, want: np.ndarray) -> LargestError:
    """Return the largest errors of ``ours``; both arrays have the same shape, and any dtype."""
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    a, b = np.asarray(ours).astype(wide), np.asarray(want).astype(wide)
    with np.errstate(all="ignore"):
        same = (ours == want) | (np.isnan(a) & np.isnan(b))
        gap = np.where(same, 0.0, np.abs(a - b))
        gap = np.where(np.isnan(gap), np.inf, gap)
        size = np.abs(b)
        finite = np.where(np.isfinite(size), size, 1.0)
        relative = np.where(gap == 0, 0.0, gap / finite)[size != 0]
        absolute, largest = gap.max(initial=0.0), finite.max(initial=0.0)
        share = absolute / largest if largest else math.inf if absolute else 0.0
    return LargestError(float(absolute), float(relative.max(initial=0.0)), float(share))
