"""Compile a JAX function with aotc and compare its results with ``jax.jit`` on the CPU; also for random programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

import aotc
from aotc.vmfb.module import LoadedModule
from support.programs.values import EPS, Program

LEVELS = [0, 2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]

TOLERANCE = {
    "float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-6, "complex64": 2e-6, "float64": 1e-13, "complex128": 1e-13,
}  # fmt: skip


def normal(*shape: int, seed: int = 0, dtype: Any = "float32", scale: float = 1.0) -> np.ndarray:
    """Return normally distributed numbers, times ``scale``."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def integers(*shape: int, low: int = -9, high: int = 10, seed: int = 0, dtype: Any = "int32") -> np.ndarray:
    """Return integers in ``[low, high)``."""
    return np.random.default_rng(seed).integers(low, high, shape).astype(dtype)


def flat(tree: Any) -> list[np.ndarray]:
    """Return the leaves of a result as arrays."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def close(got: Any, want: Any, factor: float = 1.0) -> None:
    """Assert that results agree: equal types and shapes, equal integers, floats within the precision of their type."""
    left, right = flat(got), flat(want)
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.dtype.name not in TOLERANCE:
            np.testing.assert_array_equal(a, b)
            continue
        wide = "complex128" if a.dtype.kind == "c" else "float64"
        finite = np.isfinite(b.astype(wide))
        scale = max(float(np.abs(b.astype(wide)[finite]).max()), 1e-6) if finite.any() else 1.0
        tolerance = TOLERANCE[a.dtype.name] * factor
        np.testing.assert_allclose(a.astype(wide), b.astype(wide), rtol=tolerance, atol=tolerance * scale)


def load(function: Callable[..., Any], args: Sequence[Any], level: int, threads: int = 2) -> LoadedModule:
    """Compile ``function`` for ``args`` at an optimization level and load it."""
    return aotc.load(aotc.compile(jax.jit(function), *args, opt_level=level, verify_each=True), threads=threads)


def check(function: Callable[..., Any], args: Sequence[Any], level: int, factor: float = 1.0) -> None:
    """Assert that ``function`` agrees with ``jax.jit``, and that 1 and 2 threads give the same bits."""
    data = aotc.compile(jax.jit(function), *args, opt_level=level, verify_each=True)
    want = jax.jit(function)(*args)
    leaves = [np.asarray(a) for a in jax.tree.leaves(args)]
    got = [aotc.load(data, threads=n).invoke("main", *leaves) for n in (1, 2)]
    close(got[1], want, factor)
    for a, b in zip(got[0], got[1], strict=True):
        assert a.tobytes() == b.tobytes()


def compare(program: Program, what: str, got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> None:
    """Assert that exact results have equal bits except the sign of zero, and others agree within their bounds."""
    for value, a, b in zip(program.results, got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), what
        if value.exact or value.dtype not in EPS:
            wide = a.dtype if a.dtype.kind in "biu" and a.dtype.isbuiltin else "float64"
            np.testing.assert_array_equal(a.astype(wide), b.astype(wide), err_msg=f"{what}, {value.name}\n{program}")
        else:
            allowed = 64 * EPS[value.dtype] * max(value.bound, 1.0)
            a64, b64 = a.astype("float64"), b.astype("float64")
            np.testing.assert_allclose(a64, b64, rtol=0, atol=allowed, err_msg=f"{what}, {value.name}\n{program}")
