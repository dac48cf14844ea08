"""``jax.jit`` in the same process: the calls of both engines for a function, and the comparison of their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import aotc
from benchmarks.timing import Call


def jax_call_on_device(function: Callable[..., Any], arguments: Sequence[Any]) -> Call:
    """Return a call of ``jax.jit(function)`` on arguments on JAX's device; it waits for the results."""
    jitted, there = jax.jit(function), jax.device_put(list(arguments))
    return lambda: jax.block_until_ready(jitted(*there))


def aotc_and_jax_calls(
    function: Callable[..., Any], arguments: Sequence[Any], threads: int, tolerance: float = 1e-3, **options: Any
) -> dict[str, Call]:
    """Return the calls of aotc and XLA for a function of arrays, after a comparison of their results.

    Parameters
    ----------
    function, arguments
        The function and its arrays.
    threads : int
        Threads of aotc's module.
    tolerance : float
        Allowed error relative to the largest value of a result.
    **options
        Options of ``aotc.compile``.

    Raises
    ------
    ValueError
        If the results differ.
    """
    leaves = [np.asarray(x) for x in jax.tree.leaves(list(arguments))]
    theirs = jax_call_on_device(function, arguments)
    module = aotc.load(aotc.compile(jax.jit(function), *arguments, **options), threads=threads)
    ours = lambda: module.invoke("main", *leaves)
    error = largest_error(ours(), jax.tree.leaves(theirs()))
    if not error <= tolerance:
        raise ValueError(f"error {error:.2g} of the largest value, allowed {tolerance:g}")
    return {"aotc": ours, "XLA": theirs}


def largest_error(got: Sequence[Any], want: Sequence[Any]) -> float:
    """Return the largest error of results, relative to the largest value of each.

    Raises
    ------
    ValueError
        If number, shapes or dtypes differ.
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
