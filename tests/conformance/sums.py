"""Sums of every kind: through how many additions a term goes at most, and so how large the error can be.

The error of a sum of ``n`` terms is at most ``height * u * sum(abs(x))`` to first order, where ``u`` is half a unit in
the last place of 1 and ``height`` the largest number of additions that a term goes through (N. Higham, "Accuracy and
Stability of Numerical Algorithms", 4.2). The height is measured: next to a 1 every number below ``u`` is lost, so that
a sum of a 1 and of many of these lacks one for each addition that the 1 goes through.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import aotc

HALF_UNIT = {"float32": 2.0**-24, "float64": 2.0**-53}
LOST = 0.9  # in half units: what is added to 1 and lost


@dataclass(frozen=True, slots=True)
class Sum:
    """A kind of sum: the function, the shape for ``n`` terms, where the first of them is, and a bound of the height."""

    name: str
    function: Callable[[Any], Any]
    shape: Callable[[int], tuple[int, ...]]
    first: Any
    exact: Callable[[np.ndarray], np.ndarray]
    height: Callable[[int], float]
    formula: str
    lengths: tuple[int, ...] = (8, 64, 100, 1000, 10_000)


def _window(*size: int) -> tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]:
    def function(x: Any) -> Any:
        return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, size, (1,) * len(size), "VALID")

    def exact(x: np.ndarray) -> np.ndarray:
        return np.lib.stride_tricks.sliding_window_view(x, size).sum(tuple(range(-len(size), 0)))

    return function, exact


def _windows(*size: int) -> Sum:
    function, exact = _window(*size)
    name = f"reduce_window, {' x '.join(map(str, size))}"
    return Sum(
        name, function, lambda n: (n,) * len(size), size, exact, lambda n: math.prod(size) - 1, "n - 1", (64, 100)
    )  # fmt: skip


def _all_but_one(n: int) -> float:
    return n - 1


_LANES = "n / 8 + 16"  # 4 vectors of partial sums, of at least 2 numbers each
_ROOTS = "2 sqrt(n) + 8"
SUMS: tuple[Sum, ...] = (
    Sum("reduce, all", jnp.sum, lambda n: (n,), 0, np.sum, lambda n: n / 8 + 16, _LANES),
    Sum("reduce, rows", lambda x: jnp.sum(x, 1), lambda n: (8, n), (slice(None), 0), lambda x: x.sum(1),
        lambda n: n / 8 + 16, _LANES),
    Sum("reduce, columns", lambda x: jnp.sum(x, 0), lambda n: (n, 8), 0, lambda x: x.sum(0), _all_but_one, "n - 1"),
    Sum("cumsum", jnp.cumsum, lambda n: (n,), 0, np.cumsum, lambda n: 2 * n**0.5 + 8, _ROOTS),
    Sum("cumsum, columns", lambda x: jnp.cumsum(x, 0), lambda n: (n, 8), 0, lambda x: x.cumsum(0),
        lambda n: 2 * n**0.5 + 8, _ROOTS),
    _windows(3), _windows(16), _windows(2, 2), _windows(5, 5), _windows(20, 20),
    Sum("dot_general", lambda x: x @ jnp.ones((x.shape[1], 16), x.dtype), lambda n: (32, n), (slice(None), 0),
        lambda x: np.repeat(x.sum(1)[:, None], 16, 1), lambda n: float(n), "n"),
    Sum("dot_general, vectors", lambda x: x[0] @ x[1], lambda n: (2, n), (0, 0), lambda x: (x[0] * x[1]).sum(),
        lambda n: float(n), "n"),
)  # fmt: skip


def measured_height(kind: Sum, n: int, dtype: str) -> float:
    """Return through how many additions the first of ``n`` terms goes."""
    half = HALF_UNIT[dtype]
    x = np.full(kind.shape(n), LOST * half, dtype)
    x[kind.first] = 1
    if kind.name == "dot_general, vectors":
        x[1] = 1
    return float(_error(kind, x).max() / (LOST * half))


def relative_error(kind: Sum, x: np.ndarray) -> float:
    """Return the largest error over half a unit of the sum of sizes."""
    sizes = kind.exact(np.abs(x.astype(np.longdouble)))
    return float((_error(kind, x) / (HALF_UNIT[x.dtype.name] * sizes)).max())


def _error(kind: Sum, x: np.ndarray) -> np.ndarray:
    got = np.asarray(aotc.load(aotc.compile(kind.function, x)).invoke("main", x)[0])
    return np.abs(got.astype(np.longdouble) - kind.exact(x.astype(np.longdouble)))
