"""``jax.jit`` in the same process: the calls of both engines for a function, and the check that they agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import aotc
from benchmarks.timing import Call


def placed(function: Callable[..., Any], arguments: Sequence[Any]) -> Call:
    """Return a call of ``jax.jit(function)`` on arguments that are on JAX's device, until its results are ready."""
    jitted, there = jax.jit(function), jax.device_put(list(arguments))
    return lambda: jax.block_until_ready(jitted(*there))


def pair(
    function: Callable[..., Any], arguments: Sequence[Any], threads: int, tolerance: float = 1e-3, **options: Any
) -> dict[str, Call]:
    """Return the calls of aotc and XLA for a function of arrays, after a comparison of their results.

    Parameters
    ----------
    tolerance : float
        Allowed error as a share of the largest value of a result.
    **options
        Of ``aotc.compile``.

    Raises
    ------
    ValueError
        The results differ.
    """
    leaves = [np.asarray(x) for x in jax.tree.leaves(list(arguments))]
    theirs = placed(function, arguments)
    module = aotc.load(aotc.compile(jax.jit(function), *arguments, **options), threads=threads)
    ours = lambda: module.invoke("main", *leaves)
    error = largest_error(ours(), jax.tree.leaves(theirs()))
    if not error <= tolerance:
        raise ValueError(f"error {error:.2g} of the largest value, allowed {tolerance:g}")
    return {"aotc": ours, "XLA": theirs}


def largest_error(got: Sequence[Any], want: Sequence[Any]) -> float:
    """Return the largest error of results as a share of each one's largest value.

    Raises
    ------
    ValueError
        Number, shapes or dtypes differ.
    """
    if len(got) != len(want):
        raise ValueError(f"{len(got)} results, expected {len(want)}")
    errors = [0.0]
    for a, b in zip(map(np.asarray, got), map(np.asarray, want)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(f"{a.dtype}{list(a.shape)}, expected {b.dtype}{list(b.shape)}")
        wide = "complex128" if a.dtype.kind == "c" else "float64"
        difference = np.abs(a.astype(wide) - b.astype(wide)).max(initial=0)
        errors.append(float(difference) / max(float(np.abs(b.astype(wide)).max(initial=0)), 1e-30))
    return float(np.max(errors))
