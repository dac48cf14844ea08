"""Sums of every kind: through how many additions a term goes at most, and so how large the error can be.

The error of a sum of ``n`` terms is at most ``height * u * sum(abs(x))`` to first order, where ``u`` is half a unit in
the last place of 1 and ``height`` the largest number of additions that a term goes through (N. Higham, "Accuracy and
Stability of Numerical Algorithms", 4.2). The height is measured: next to a 1 every number below ``u`` is lost, so that
a sum of a 1 and of many of these lacks one for each addition that the 1 goes through.

``u`` is that of the type in which a kind of sum adds: f32 for floats of 16 bits and fewer, rounded once at the end, or
the type itself, where each addition is rounded to it (:attr:`Sum.narrow`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import aotc

HALF_UNIT = {"float32": 2.0**-24, "float64": 2.0**-53}
NARROW = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
LEAST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float8_e4m3fn": 2.0**-9, "float8_e5m2": 2.0**-16}
LOST = 0.9  # in half units: what is added to 1 and lost


@dataclass(frozen=True, slots=True)
class Sum:
    """A kind of sum: the function, the shape for ``n`` terms, where the first of them is, and a bound of the height.

    ``narrow`` says in which type floats of 16 bits and fewer are added: ``f32``, or their ``own``. Of complex numbers
    a sum that ``mixes`` adds both parts: JAX writes a convolution as three real ones.
    """

    name: str
    function: Callable[[Any], Any]
    shape: Callable[[int], tuple[int, ...]]
    first: Any
    exact: Callable[[np.ndarray], np.ndarray]
    height: Callable[[int], float]
    formula: str
    lengths: tuple[int, ...] = (8, 64, 100, 1000, 10_000)
    narrow: str = "f32"
    mixes: bool = False


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
        name, function, lambda n: (n,) * len(size), size, exact, lambda n: math.prod(size) - 1, "n - 1", (64, 100),
        "own",
    )  # fmt: skip


def _all_but_one(n: int) -> float:
    return n - 1


def _reduce(x: Any, axis: int) -> Any:
    return lax.reduce(x, np.zeros((), x.dtype), lax.add, (axis,))


def _convolved(x: Any) -> Any:
    ones = jnp.ones((3, x.shape[1], 4), x.dtype)
    return lax.conv_general_dilated(x, ones, (1,), "VALID", dimension_numbers=("NCH", "OIH", "NCH"))


_LANES = "n / 8 + 16"  # 4 vectors of partial sums, of at least 2 numbers each
_ROOTS = "2 sqrt(n) + 8"
SUMS: tuple[Sum, ...] = (
    Sum("reduce, all", lambda x: _reduce(x, 0), lambda n: (n,), 0, np.sum, lambda n: n / 8 + 16, _LANES),
    Sum("reduce, rows", lambda x: _reduce(x, 1), lambda n: (8, n), (slice(None), 0), lambda x: x.sum(1),
        lambda n: n / 8 + 16, _LANES),
    Sum("reduce, columns", lambda x: _reduce(x, 0), lambda n: (n, 8), 0, lambda x: x.sum(0), _all_but_one, "n - 1"),
    Sum("cumsum", lambda x: lax.cumsum(x, 0), lambda n: (n,), 0, np.cumsum, lambda n: 2 * n**0.5 + 8, _ROOTS,
        narrow="own"),
    Sum("cumsum, columns", lambda x: lax.cumsum(x, 0), lambda n: (n, 8), 0, lambda x: x.cumsum(0),
        lambda n: 2 * n**0.5 + 8, _ROOTS, narrow="own"),
    _windows(3), _windows(16), _windows(2, 2), _windows(5, 5), _windows(20, 20),
    Sum("scatter, add", lambda x: jnp.zeros(3, x.dtype).at[np.zeros(x.shape, int)].add(x), lambda n: (n,), 0,
        lambda x: np.array([x.sum(), 0, 0]), float, "n", narrow="own"),
    Sum("dot_general", lambda x: x @ jnp.ones((x.shape[1], 16), x.dtype), lambda n: (32, n), (slice(None), 0),
        lambda x: np.repeat(x.sum(1)[:, None], 16, 1), float, "n"),
    Sum("dot_general, vectors", lambda x: x[0] @ x[1], lambda n: (2, n), (0, 0), lambda x: (x[0] * x[1]).sum(),
        float, "n"),
    Sum("convolution", _convolved, lambda n: (1, n // 4, 6), (0, 0, 1),
        lambda x: np.repeat((x[:, :, :-3] + x[:, :, 1:-2] + x[:, :, 2:-1] + x[:, :, 3:]).sum(1)[:, None], 3, 1),
        lambda n: float(n), "n", (8, 64, 100, 1000), mixes=True),
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
    """Return the largest error over half a unit of the sum of sizes, but for the rounding of a narrow result."""
    is_complex = x.dtype.kind == "c"
    parts = (x.real, x.imag) if is_complex else (x,)
    got = np.asarray(aotc.load(aotc.compile(kind.function, x)).invoke("main", x)[0])
    results = (got.real, got.imag) if is_complex else (got,)
    both = kind.exact(np.abs(x.real).astype(np.longdouble) + np.abs(x.imag)) if is_complex and kind.mixes else None
    found = 0.0
    for part, result in zip(parts, results, strict=True):
        wide = part.astype(np.longdouble)
        exact, sizes = kind.exact(wide), kind.exact(np.abs(wide)) if both is None else both
        error, unit = np.abs(result.astype(np.longdouble) - exact), HALF_UNIT.get(part.dtype.name)
        if unit is None:
            own = NARROW[part.dtype.name]
            error = np.maximum(error - np.maximum(own * np.abs(exact), LEAST[part.dtype.name] / 2), 0)
            unit = HALF_UNIT["float32"] if kind.narrow == "f32" else own
        found = max(found, float((error / np.maximum(unit * sizes, np.finfo(np.longdouble).tiny)).max()))
    return found


def difficult(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> dict[str, np.ndarray]:
    """Return terms by name: random ones, and those that sums lose most of."""
    random, n = np.random.default_rng(seed), math.prod(shape)
    spread = {1: 1, 2: 3}.get(dtype.itemsize, 30)  # so that f16 and f8 stay in their range
    small, large = random.uniform(0.5, 1, n), 2.0 ** min(spread + 1, 20)
    steep = np.sort(random.uniform(-1, 1, n) * np.exp2(random.uniform(-spread, spread, n)))
    signs = np.where(np.arange(n) % 2, -1, 1)
    found = {
        "normal": random.normal(size=n), "wide": random.normal(size=n) * np.exp2(random.uniform(-spread, spread, n)),
        "alternating": np.where(np.arange(n) % 3, signs * large * small, small), "ascending": np.sort(np.abs(steep)),
        "descending": np.sort(np.abs(steep))[::-1], "from below to above": steep, "ones": np.ones(n),
        "one and small": np.where(np.arange(n), 2.0 ** -(4 if dtype.itemsize < 4 else 24) * small, 1),
    }  # fmt: skip
    if dtype.kind == "c":
        found = {name: x + 1j * np.roll(x, 1) for name, x in found.items()}
    return {name: x.astype(dtype).reshape(shape) for name, x in found.items()}


def _error(kind: Sum, x: np.ndarray) -> np.ndarray:
    got = np.asarray(aotc.load(aotc.compile(kind.function, x)).invoke("main", x)[0])
    return np.abs(got.astype(np.longdouble) - kind.exact(x.astype(np.longdouble)))


# ---------------------------------------------------------------- functions made of sums


@dataclass(frozen=True, slots=True)
class Composed:
    """A function of rows that is made of sums: its value in long double, and a bound of its error in units of ``u``."""

    name: str
    function: Callable[[Any], Any]
    exact: Callable[[np.ndarray], np.ndarray]
    bound: Callable[[np.ndarray, np.ndarray, float, float], np.ndarray]
    formula: str


def _height(x: np.ndarray) -> float:
    return x.shape[1] / 8 + 16


def _logsumexp(x: np.ndarray) -> np.ndarray:
    top = x.max(1, keepdims=True)
    return np.log(np.exp(x - top).sum(1)) + top[:, 0]


def _softmax(x: np.ndarray) -> np.ndarray:
    power = np.exp(x - x.max(1, keepdims=True))
    return power / power.sum(1, keepdims=True)


def _below_top(x: np.ndarray) -> np.ndarray:
    return x.max(1, keepdims=True) - x


COMPOSED: tuple[Composed, ...] = (
    Composed("mean", lambda x: x.mean(1), lambda x: x.mean(1),
             lambda x, y, h, u: (h + 2) * np.abs(x).mean(1), "(h + 2) mean(abs(x))"),
    Composed("variance", lambda x: x.var(1), lambda x: x.var(1),
             lambda x, y, h, u: (h + 8) * y + u * ((h + 2) * np.abs(x).mean(1)) ** 2,
             "(h + 8) var(x) + u ((h + 2) mean(abs(x)))**2"),
    Composed("logsumexp", lambda x: jax.nn.logsumexp(x, 1), _logsumexp,
             lambda x, y, h, u: h + 8 + 2 * np.log(x.shape[1]) + 2 * np.abs(y) + 2 * np.abs(x.max(1)),
             "h + 8 + 2 log n + 2 abs(y) + 2 abs(max(x))"),
    Composed("softmax", lambda x: jax.nn.softmax(x, 1), _softmax,
             lambda x, y, h, u: (h + 8 + 2 * np.log(x.shape[1]) + 2 * _below_top(x)) * y,
             "(h + 8 + 2 log n + 2 (max(x) - x)) y"),
)  # fmt: skip


def excess(row: Composed, x: np.ndarray) -> float:
    """Return the largest error over its bound, of results in the normal range."""
    got, wide = np.asarray(aotc.load(aotc.compile(row.function, x)).invoke("main", x)[0]), x.astype(np.longdouble)
    exact, unit = row.exact(wide), HALF_UNIT[x.dtype.name]
    bound = unit * row.bound(wide, exact, _height(x), unit) + np.finfo(x.dtype).tiny
    return float((np.abs(got.astype(np.longdouble) - exact) / bound).max())
