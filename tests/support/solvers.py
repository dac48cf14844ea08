"""Matrices for the tests of linear algebra."""

from __future__ import annotations

import numpy as np

from support.differential import normal

DTYPES = ["float32", "float64", "complex64", "complex128"]


def values(*shape, dtype, seed=0):
    """Return normally distributed numbers, also complex ones."""
    x = normal(*shape, seed=seed, dtype="float64")
    if np.dtype(dtype).kind == "c":
        x = x + 1j * normal(*shape, seed=seed + 1, dtype="float64")
    return x.astype(dtype)


def positive(*shape, dtype):
    """Return Hermitian positive definite matrices."""
    a = values(*shape, dtype=dtype)
    return (a @ np.conj(np.swapaxes(a, -1, -2)) + 2 * np.eye(shape[-1])).astype(dtype)


def adjoint(a):
    return np.conj(np.swapaxes(a, -1, -2))
