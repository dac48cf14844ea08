"""Comparison of LAPACK results with XLA's."""

from __future__ import annotations

import numpy as np

from support.differential import flat

TOLERANCE = {"float32": 3e-4, "complex64": 3e-4, "float64": 1e-10, "complex128": 1e-10}


def agree(got, want):
    """Assert that all leaves agree relative to their size, with NaN at the same elements."""
    left, right = flat(got), flat(want)
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if b.dtype.kind in "iub":
            np.testing.assert_array_equal(a, b)
            continue
        scale = max(np.abs(b[np.isfinite(b)]).max(initial=0), 1)
        np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=TOLERANCE[b.dtype.name])
