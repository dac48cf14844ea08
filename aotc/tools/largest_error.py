"""The largest absolute and relative error of a result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class LargestError:
    """The largest absolute error of all elements, and the largest relative error of those whose reference is not 0.

    An error is infinite where only one of the two elements is NaN, or one is infinite.
    """

    absolute: float
    relative: float

    def __str__(self) -> str:
        if not self.absolute:
            return "no error"
        return f"largest error {self.absolute:.3g}, relative {self.relative:.3g}"


def largest_error(ours: np.ndarray, want: np.ndarray) -> LargestError:
    """Return the largest errors of ``ours``; both arrays have one shape, and any dtype."""
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    a, b = np.asarray(ours).astype(wide), np.asarray(want).astype(wide)
    with np.errstate(all="ignore"):
        same = (ours == want) | (np.isnan(a) & np.isnan(b))
        gap = np.where(same, 0.0, np.abs(a - b))
        gap = np.where(np.isnan(gap), np.inf, gap)
        size = np.abs(b)
        relative = np.where(gap == 0, 0.0, gap / np.where(np.isfinite(size), size, 1.0))[size != 0]
    return LargestError(float(gap.max(initial=0.0)), float(relative.max(initial=0.0)))
