"""Products whose operand is also added to their result: that operand is read until the last tile, and is not reused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.differential import LEVELS, check, integers, normal

SIZES = [(8, 64), (8, 256), (16, 256), (112, 112), (1, 64), (5, 48), (33, 65), (256, 16)]


def block(x, w, v):
    h = jnp.tanh(x)
    return (h + h @ w) @ v


def left(x, w, v):
    h = jnp.tanh(x.T)
    return v @ (w @ h + h)


def loop(x, w, v):
    return lax.fori_loop(0, 3, lambda i, h: h + 0.1 * (h @ w), x) @ v


def square(x, w, v):
    h = jnp.tanh(x[:, :1] * w[:1])
    return (h @ h.T) @ (h @ v) + h


def gated(x, w, v):
    h = jnp.tanh(x)
    return (jax.nn.sigmoid(h @ w) * h - h) @ v


def attention(x, w, v):
    h = jnp.tanh(x)
    return h + jax.nn.softmax(h @ h.T) @ h @ v


def batched(x, w, v):
    h = jnp.tanh(jnp.stack([x, x + 1, x * 2]))
    return (h + h @ w) @ v


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("function", [block, left, loop, square, gated, attention, batched])
def test_residual_matmuls_match_jax(function, size, level):
    m, n = size
    scale = 1 / np.sqrt(n)
    check(function, [normal(m, n), normal(n, n, seed=1, scale=scale), normal(n, n, seed=2, scale=scale)], level, 100)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "int8"])
def test_residual_matmuls_of_other_dtypes_match_jax(dtype):
    def quantized(x, w):
        h = jnp.clip(x, -7, 7)
        return h.astype(jnp.int32) + lax.dot(h, w, preferred_element_type=jnp.int32)

    if dtype == "int8":
        check(quantized, [integers(16, 64, dtype="int8"), integers(64, 64, dtype="int8", seed=1)], 2)
        return
    with jax.enable_x64(dtype == "float64"):
        weights = [normal(64, 64, seed=k, dtype=dtype, scale=0.1) for k in (1, 2)]
        check(block, [normal(16, 64, dtype=dtype), *weights], 2, 20)


@pytest.mark.parametrize("level", LEVELS)
def test_residual_convolutions_match_jax(level):
    def same(x, w):
        h = jnp.tanh(x)
        return lax.conv_general_dilated(h, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + h

    def blocks(x, w):
        return lax.fori_loop(0, 2, lambda i, h: same(h, w), x)

    for size, channels in [(9, 16), (28, 32), (8, 64)]:
        args = [normal(1, size, size, channels), normal(3, 3, channels, channels, seed=1, scale=0.1)]
        check(same, args, level, 100)
        check(blocks, args, level, 100)


@pytest.mark.parametrize("level", LEVELS)
def test_residual_solves_match_jax(level):
    """A library's or a kernel's factor of an array that is also used beside it."""

    def f(a, b):
        m = a @ a.T + 4 * jnp.eye(len(a))
        low = jnp.linalg.cholesky(m)
        return m + low, m - lax.linalg.triangular_solve(low, m, left_side=True, lower=True) @ b, m + jnp.linalg.inv(m)

    check(f, [normal(12, 12), normal(12, 12, seed=1)], level, 2000)
