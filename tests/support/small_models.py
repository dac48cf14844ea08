"""Small models end to end, with their arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def array(*shape, seed=0, scale=1.0):
    """Return normally distributed numbers, f32."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype("float32")


def mlp(w, x):
    h = jax.nn.gelu(x @ w[0] + w[1])
    return jax.nn.softmax(h @ w[2])


def conv_net(w, x):
    dims = ("NHWC", "HWIO", "NHWC")
    x = jax.nn.relu(jax.lax.conv_general_dilated(x, w[0], (2, 2), "SAME", dimension_numbers=dims))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.lax.conv_general_dilated(x, w[1], (1, 1), "VALID", dimension_numbers=dims, feature_group_count=2)
    return jnp.mean(x, (1, 2)) @ w[2]


def attention(w, x):
    mean = x.mean(-1, keepdims=True)
    h = (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    q, k, v = (jnp.reshape(h @ m, (2, 6, 2, 8)).transpose(0, 2, 1, 3) for m in w)
    scores = jnp.where(jnp.tri(6, dtype=bool), q @ k.swapaxes(-1, -2) / np.sqrt(8), -jnp.inf)
    out = jax.nn.softmax(scores) @ v
    return x + out.transpose(0, 2, 1, 3).reshape(2, 6, 16)


def lstm(w, x):
    def step(state, row):
        h, c = state
        i, f, g, o = jnp.split(row @ w[0] + h @ w[1] + w[2], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((2, 5))
    return jax.lax.scan(step, (zero, zero), x)


def newton(w, x):
    """Return a root by a while loop whose number of iterations depends on the data."""

    def body(state):
        y, n = state
        return 0.5 * (y + x / y), n + 1

    def far(state):
        return (jnp.max(jnp.abs(state[0] ** 2 - x)) > 1e-4 * jnp.max(x)) & (state[1] < 50)

    return jax.lax.while_loop(far, body, (x * w[0], 0))


def int8_dense(w, x):
    scale = jnp.max(jnp.abs(x), -1, keepdims=True) / 127
    q = jnp.round(x / scale).astype(jnp.int8)
    total = jax.lax.dot_general(q, w[0], (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
    return total.astype(jnp.float32) * scale * w[1]


def bf16_mlp(w, x):
    return jax.nn.silu(x.astype(jnp.bfloat16) @ w[0]).astype(jnp.float32)


def train_step(w, x):
    """Return loss and new weights of one step of gradient descent with momentum."""

    def loss(w):
        h = jnp.tanh(x @ w[0] + w[1])
        return jnp.mean((h @ w[2] - 1.0) ** 2)

    value, gradient = jax.value_and_grad(loss)(w)
    return value, jax.tree.map(lambda a, g: a - 0.1 * g, w, gradient)


MLP = (array(12, 24, scale=0.3), array(24, seed=1), array(24, 7, seed=2, scale=0.3))


MODELS = {
    "mlp": (mlp, MLP, array(5, 12, seed=3), 1e-5),
    "conv_net": (
        conv_net,
        (array(3, 3, 3, 8, scale=0.2), array(3, 3, 4, 6, seed=1, scale=0.2), array(6, 4, seed=2)),
        array(2, 17, 15, 3, seed=3),
        1e-5,
    ),
    "attention": (attention, tuple(array(16, 16, seed=i, scale=0.25) for i in range(3)), array(2, 6, 16, seed=5), 1e-5),
    "lstm": (lstm, (array(3, 20), array(5, 20, seed=1), array(20, seed=2)), array(9, 2, 3, seed=3), 1e-5),
    "newton": (newton, (np.float32(0.3),), np.abs(array(11)) + 0.1, 1e-5),
    "int8_dense": (
        int8_dense,
        (np.random.default_rng(0).integers(-127, 128, (32, 24)).astype("int8"), np.abs(array(24, seed=1))),
        array(4, 32),
        1e-5,
    ),
    "bf16_mlp": (bf16_mlp, (array(32, 16, scale=0.2).astype(jnp.bfloat16),), array(4, 32), 2e-2),
    "train_step": (train_step, MLP, array(5, 12, seed=3), 1e-5),
}


def close(got, want, tolerance):
    """Assert that flat results agree with a pytree from JAX."""
    leaves = jax.tree.leaves(want)
    assert len(got) == len(leaves)
    for a, b in zip(got, leaves):
        b = np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        scale = max(float(np.abs(b.astype("f8")).max()), 1e-6) if b.size else 1.0
        np.testing.assert_allclose(a.astype("f8"), b.astype("f8"), rtol=0, atol=tolerance * scale)
