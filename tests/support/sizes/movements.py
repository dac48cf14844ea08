"""Programs with symbolic sizes that move elements and then combine them, and their gradients.

A program is one of :data:`MOVES` and one of :data:`READERS`: fusion computes the movement inside of its reader, so that
offsets, limits and extents of one op become those of another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

Function = Callable[[Any], Any]

SHAPES = [(3, 1), (1, 5), (2, 8), (4, 33), (3, 0), (0, 4)]
"""Sizes of calls: 1, odd, of whole vectors, larger, and none, which exports of JAX refuse."""


def _scattered(x: Any) -> Any:
    places = jnp.arange(x.shape[1]) * 2 // 3
    return jnp.zeros_like(x).at[:, places].add(x)


def _scan(x: Any) -> Any:
    return lax.scan(lambda c, row: (c * 0.5 + row, c), jnp.zeros_like(x[0]), x)[1]


def _windows(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME")


def _strided_windows(x: Any) -> Any:
    return lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), ((0, 0), (1, 1)))


def _convolved(x: Any) -> Any:
    kernel = jnp.array([[[0.5, 0.25, -1.0]]], x.dtype)
    return lax.conv_general_dilated(x[:, None, :], kernel, (1,), "SAME")[:, 0]


def _chosen(x: Any) -> Any:
    order = (jnp.arange(x.shape[1]) * 5 + 1) % jnp.maximum(x.shape[1], 1)
    return x[:, order]


def _part(x: Any) -> Any:
    return lax.dynamic_slice(x, (0, 1), (x.shape[0], x.shape[1]))


def _updated(x: Any) -> Any:
    return lax.dynamic_update_slice(x * 2, x, (0, 1))


MOVES: dict[str, Function] = {
    "roll by 1": lambda x: jnp.roll(x, 1, axis=1),
    "roll by -2": lambda x: jnp.roll(x, -2, axis=1),
    "roll of rows": lambda x: jnp.roll(x, 1, axis=0),
    "pad by numbers": lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 0))),
    "pad by a size": lambda x: jnp.pad(x, ((0, 0), (x.shape[0], 0))),
    "pad on both sides by sizes": lambda x: jnp.pad(x, ((0, x.shape[1]), (x.shape[1], x.shape[0]))),
    "pad between": lambda x: lax.pad(x, 1.0, ((0, 0, 0), (0, 1, 1))),
    "pad by less than nothing": lambda x: lax.pad(x, 0.0, ((0, 0, 0), (2, -1, 0))),
    "concatenation with itself": lambda x: jnp.concatenate([x, x * 2], axis=1),
    "concatenation with zeros": lambda x: jnp.concatenate([jnp.zeros_like(x), x, jnp.ones_like(x[:, :1])], axis=1),
    "rows in a row": lambda x: jnp.concatenate([x, -x], axis=0),
    "all but the first": lambda x: jnp.concatenate([x, x], axis=1)[:, 1:],
    "the first half": lambda x: x[:, : (x.shape[1] + 1) // 2],
    "the second half": lambda x: x[:, x.shape[1] // 2 :],
    "every other": lambda x: x[:, ::2],
    "reversed": lambda x: x[:, ::-1],
    "dynamic slice": _part,
    "dynamic update": _updated,
    "gather": _chosen,
    "scatter": _scattered,
    "transposed": lambda x: x.T,
    "flat": lambda x: x.reshape(1, -1),
    "tiles": lambda x: jnp.tile(x, (1, 2)),
    "repeated": lambda x: jnp.repeat(x, 3, axis=1),
    "triangle": lambda x: jnp.tril(jnp.broadcast_to(x[:1].T, (x.shape[1], x.shape[1]))),
    "windows": _windows,
    "windows with strides": _strided_windows,
    "convolution": _convolved,
    "scan": _scan,
    "sums so far": lambda x: jnp.cumsum(x, axis=1),
    "products so far": lambda x: jnp.cumprod(x, axis=1),
    "sorted": lambda x: jnp.sort(x, axis=1),
    "differences": lambda x: jnp.diff(jnp.concatenate([x[:, :1], x], axis=1), axis=1),
    "product of matrices": lambda x: x @ (x.T @ x),
}
READERS: dict[str, Function] = {
    "itself": lambda y: y,
    "sums": lambda y: y.sum(1),
    "sums of columns": lambda y: y.sum(0),
    "softmax": lambda y: jax.nn.softmax(y, axis=1),
    "largest": lambda y: jnp.max(y, axis=1, initial=-9.0),
    "normalized": lambda y: (y - y.mean(1, keepdims=True)) * lax.rsqrt(y.var(1, keepdims=True) + 1),
    "sums so far": lambda y: jnp.cumsum(y, axis=1),
    "product": lambda y: y @ y.T,
    "sorted": lambda y: jnp.sort(y, axis=1),
    "rolled": lambda y: jnp.roll(y, 1, axis=1) * y,
}
NAMES = [f"{'gradient of ' * g}{reader}, {move}" for move in MOVES for reader in READERS for g in (False, True)]


def function_of(name: str) -> Function:
    """Return the program with a name of :data:`NAMES`."""
    reader, _, move = name.removeprefix("gradient of ").partition(", ")

    def run(x: Any) -> Any:
        return READERS[reader](MOVES[move](x))

    if not name.startswith("gradient of "):
        return run

    def loss(x: Any) -> Any:
        y = run(x)
        return (jnp.tanh(y) + 0.1 * y).sum()

    return jax.grad(loss)


def exported(name: str) -> export.Exported | None:
    """Return the export of a program for a matrix of unknown sizes, or None if JAX cannot export it."""
    sizes = export.symbolic_shape("m, n")
    try:
        return export.export(jax.jit(function_of(name)))(jax.ShapeDtypeStruct(sizes, np.float32))
    except NotImplementedError:  # gradients of some of JAX's functions need known sizes
        return None


def arguments() -> list[np.ndarray]:
    """Return a matrix of each of :data:`SHAPES`."""
    rng = np.random.default_rng(5)
    return [0.3 * rng.normal(size=shape).astype("f4") for shape in SHAPES]
