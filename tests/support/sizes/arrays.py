"""Random reductions, scans, windows, gathers, scatters, sorts and movement, up to a million elements."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from support.sizes.draw import FLOATS, MOST_ELEMENTS, Draw, Program

TYPES = (*FLOATS, "int8", "int32")


def reduction(d: Draw) -> Program:
    """Return a reduction over random axes, alone or with ops on its argument and its result."""
    dtype, shape = d.one(*TYPES), d.shape(d.one(1, 2, 2, 3, 4))
    axes = tuple(k for k in range(len(shape)) if d.maybe()) or (d.one(*range(len(shape))),)
    exact = {"max": jnp.max, "min": jnp.min, "argmax": lambda v, axis: jnp.argmax(v, axis[-1])}
    summed = {
        "sum": jnp.sum,
        "mean": jnp.mean,
        "norm": lambda v, axis: jnp.sqrt((v * v).sum(axis)),
        "softmax": lambda v, axis: jax.nn.softmax(v, axis),
        "normalise": lambda v, axis: (v - v.mean(axis, keepdims=True)) / (v.std(axis, keepdims=True) + 1),
        "logsumexp": lambda v, axis: jax.nn.logsumexp(v, axis),
    }
    name = d.one(*exact, *(summed if dtype in FLOATS else ("sum",)))
    terms = 0 if name in exact or dtype not in FLOATS else 4 * int(np.prod([shape[k] for k in axes]))
    function = (exact | summed)[name]
    return Program(
        f"{name} {dtype} {shape} over {axes}", lambda v: function(v, axis=axes), [d.values(*shape, dtype=dtype)], terms
    )


def scan(d: Draw) -> Program:
    """Return a prefix scan, forwards or backwards."""
    dtype, shape = d.one(*TYPES), d.shape(d.one(1, 1, 2, 3))
    axis, back = d.one(*range(len(shape))), d.maybe(0.3)
    name = d.one("cumsum", "cummax", "cummin", *(("cumlogsumexp",) if dtype in FLOATS else ()))
    op = getattr(lax, name)
    text = f"{name} {dtype} {shape} axis {axis}{' reverse' * back}"
    terms = 0 if name in ("cummax", "cummin") or dtype not in FLOATS else 4 * shape[axis]
    return Program(text, lambda v: op(v, axis, reverse=back), [d.values(*shape, dtype=dtype)], terms)


def window(d: Draw) -> Program:
    """Return a window reduction: strides, dilations, padding."""
    dtype, shape = d.one(*TYPES), d.shape(d.one(1, 2, 3, 4), MOST_ELEMENTS // 4)
    sizes = [min(n, d.one(1, 1, 2, 3, 7, 16, 33)) for n in shape]
    strides = [d.one(1, 1, 2, 3) for _ in shape]
    gaps = [d.one(1, 2) if (w - 1) * 2 < n else 1 for w, n in zip(sizes, shape, strict=True)]
    padding = d.one("SAME", "VALID")
    total = d.maybe()
    zero = 0 if total else (-np.inf if dtype in FLOATS else np.iinfo(dtype).min)
    op = lax.add if total else lax.max

    def function(v: Any) -> Any:
        start = np.array(zero).astype(v.dtype)
        return lax.reduce_window(v, start, op, sizes, strides, padding, window_dilation=gaps)

    text = f"window {op.__name__} {dtype} {shape} sizes {sizes} strides {strides} gaps {gaps} {padding}"
    terms = 2 * int(np.prod(sizes)) if total and dtype in FLOATS else 0
    return Program(text, function, [d.values(*shape, dtype=dtype)], terms)


def gather(d: Draw) -> Program:
    """Return rows, elements or slices by index, with some indices out of bounds."""
    dtype, shape = d.one(*TYPES), d.shape(d.one(1, 2, 3))
    axis = d.one(*range(len(shape)))
    count = d.size(max(MOST_ELEMENTS * shape[axis] // int(np.prod(shape)), 1))
    x = d.values(*shape, dtype=dtype)
    kind = d.one("int32", "int64", "uint8") if shape[axis] < 200 else "int32"
    at = d.rng.integers(-2, shape[axis] + 2, count).astype(kind)
    mode = d.one("clip", "fill", "wrap")
    if d.maybe(0.3):
        at = d.rng.integers(0, shape[axis], shape).astype("int32")
        return Program(
            f"take_along_axis {dtype} {shape} axis {axis}", lambda v, i: jnp.take_along_axis(v, i, axis), [x, at], 0
        )
    text = f"take {dtype} {shape} axis {axis} of {count} {at.dtype} {mode}"
    return Program(text, lambda v, i: jnp.take(v, i, axis, mode=mode), [x, at], 0)


def scatter(d: Draw) -> Program:
    """Return updates of rows or elements (set, add, min, max) at repeated indices."""
    dtype, shape = d.one(*TYPES), d.shape(d.one(1, 2, 3), MOST_ELEMENTS // 2)
    count = d.size(max(MOST_ELEMENTS * shape[0] // int(np.prod(shape)), 1))
    name = d.one("set", "add", "max", "min")
    unique = name == "set"
    count = min(count, shape[0]) if unique else count
    at = d.rng.permutation(shape[0])[:count] if unique else d.rng.integers(-1, shape[0] + 1, count)
    x, new = d.values(*shape, dtype=dtype), d.values(count, *shape[1:], dtype=dtype)
    text = f"scatter {name} {dtype} {shape} with {count} rows"
    terms = 2 * count if name == "add" and dtype in FLOATS else 0

    def function(v: Any, i: Any, u: Any) -> Any:
        return getattr(v.at[i], name)(u)

    return Program(text, function, [x, at.astype("int32"), new], terms)


def sort(d: Draw) -> Program:
    """Return a sort, its order, several keys, or the k largest."""
    dtype, shape = d.one(*TYPES), d.shape(d.one(1, 1, 2, 3), MOST_ELEMENTS // 2)
    axis = d.one(*range(len(shape)))
    x = np.round(d.values(*shape, dtype=dtype) * (4 if d.maybe() and dtype in FLOATS else 1))
    name = d.one("sort", "argsort", "keys", "top_k")
    k = d.size(shape[-1])
    function = {
        "sort": lambda v: jnp.sort(v, axis),
        "argsort": lambda v: jnp.argsort(v, axis, stable=True, descending=True),
        "keys": lambda v: lax.sort((v, -v, lax.iota("int32", v.size).reshape(v.shape)), axis, True, 2),
        "top_k": lambda v: lax.top_k(v, k),
    }[name]
    return Program(f"{name} {dtype} {shape} axis {axis}, k {k}", function, [x.astype(x.dtype)], 0)


def movement(d: Draw) -> Program:
    """Return a chain of data movements of one array."""
    dtype, shape = d.one(*TYPES), d.shape(d.one(2, 3, 4), MOST_ELEMENTS // 4)
    x, steps = d.values(*shape, dtype=dtype), []
    for _ in range(d.one(2, 3, 4)):
        steps.append(d.one("transpose", "pad", "flip", "slice", "repeat", "halves", "flat"))
    order = [int(k) for k in d.rng.permutation(len(shape))]

    def function(v: Any) -> Any:
        for step in steps:
            rank = v.ndim
            match step:
                case "transpose":
                    v = v.transpose(order) if rank == len(order) else v.T
                case "pad":
                    v = lax.pad(v, np.array(1).astype(v.dtype), [(1, 2, 0)] + [(0, 1, 1)] * (rank - 1))
                case "flip":
                    v = jnp.flip(v, rank - 1)
                case "slice":
                    v = v[tuple(slice(n // 3, None, 2) for n in v.shape)]
                case "repeat":
                    v = jnp.concatenate([v, v], -1) if v.size < MOST_ELEMENTS else v
                case "halves":
                    v = jnp.stack([v[: len(v) // 2], v[len(v) - len(v) // 2 :]])
                case "flat":
                    v = v.reshape(-1, *v.shape[2:])
        return v

    return Program(f"{' '.join(steps)} {dtype} {shape} order {order}", function, [x], 0)
