"""Models to compare with ``jax.jit`` on a GPU: plain JAX, weights from a seed, no downloads.

``ZOO`` maps a name to a builder. Weights are an argument, as for training and for exchangeable weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax, nn


class Case(NamedTuple):
    """A model: ``function(weights, *inputs)``, its weights and inputs.

    ``tolerance`` is the allowed error relative to the largest value.
    """

    function: Callable[..., Any]
    weights: Any
    inputs: tuple[Any, ...]
    tolerance: float = 2e-2


RNG = np.random.default_rng(0)


def normal(*shape: int, scale: float = 1.0, dtype: Any = np.float32) -> np.ndarray:
    """Return normally distributed numbers, times ``scale``."""
    return (RNG.standard_normal(shape, dtype=np.float32) * np.float32(scale)).astype(dtype)


def weight(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Return a weight that preserves the scale of normally distributed inputs."""
    return normal(*shape, scale=float(np.prod(shape[:-1])) ** -0.5, dtype=dtype)


def tokens(high: int, *shape: int) -> np.ndarray:
    """Return random integers from 0 to ``high`` - 1."""
    return RNG.integers(0, high, shape).astype(np.int32)


def layer_norm(x: Any, gain: Any, bias: Any) -> Any:
    """Normalize the last axis, in f32."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    return (centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gain + bias).astype(x.dtype)


def norm_weights(dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return gain and bias of a normalization."""
    return 1 + normal(dim, scale=0.05), normal(dim, scale=0.05)


# ---------------------------------------------------------------- transformers


def attention(x: Any, w: dict[str, Any], heads: int) -> Any:
    """Compute self-attention of ``heads`` heads, without a mask."""
    batch, length, dim = x.shape
    q, k, v = ((x @ w[n] + w["b" + n]).reshape(batch, length, heads, dim // heads) for n in "qkv")
    return nn.dot_product_attention(q, k, v).reshape(batch, length, dim) @ w["o"] + w["bo"]


def block_weights(dim: int, dtype: Any) -> dict[str, Any]:
    """Return the weights of a block of an encoder."""
    made: dict[str, Any] = {n: weight(dim, dim, dtype=dtype) for n in "qkvo"}
    made |= {"b" + n: normal(dim, scale=0.05, dtype=dtype) for n in "qkvo"}
    made |= {"up": weight(dim, 4 * dim, dtype=dtype), "bup": normal(4 * dim, scale=0.05, dtype=dtype)}
    made |= {"down": weight(4 * dim, dim, dtype=dtype), "bdown": normal(dim, scale=0.05, dtype=dtype)}
    return made | {"n1": norm_weights(dim), "n2": norm_weights(dim)}


def feed_forward(x: Any, w: dict[str, Any]) -> Any:
    """Compute the two dense layers of a block, with gelu in between."""
    return nn.gelu(x @ w["up"] + w["bup"]) @ w["down"] + w["bdown"]


def bert(batch: int, length: int, dtype: Any) -> Case:
    """Return BERT-base: 12 layers of 768, normalized after each half."""
    dim = 768
    weights = {
        "words": normal(30522, dim, scale=0.5, dtype=dtype), "places": normal(length, dim, scale=0.5, dtype=dtype),
        "norm": norm_weights(dim), "blocks": [block_weights(dim, dtype) for _ in range(12)],
    }  # fmt: skip

    def function(w: Any, ids: Any) -> Any:
        x = layer_norm(w["words"][ids] + w["places"], *w["norm"])
        for b in w["blocks"]:
            x = layer_norm(x + attention(x, b, 12), *b["n1"])
            x = layer_norm(x + feed_forward(x, b), *b["n2"])
        return x

    return Case(function, weights, (tokens(30522, batch, length),), 5e-2 if dtype != np.float32 else 2e-2)


def vit(batch: int) -> Case:
    """Return ViT-S/16 on 224 x 224 pixels: 12 layers of 384, normalized before each half."""
    dim = 384
    weights = {
        "patch": weight(16 * 16 * 3, dim), "first": normal(1, 1, dim), "places": normal(197, dim, scale=0.1),
        "norm": norm_weights(dim), "blocks": [block_weights(dim, np.float32) for _ in range(12)],
        "head": weight(dim, 1000),
    }  # fmt: skip

    def function(w: Any, pixels: Any) -> Any:
        kernel = w["patch"].reshape(16, 16, 3, dim)
        x = lax.conv_general_dilated(pixels, kernel, (16, 16), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jnp.concatenate([jnp.broadcast_to(w["first"], (batch, 1, dim)), x.reshape(batch, 196, dim)], 1)
        x = x + w["places"]
        for b in w["blocks"]:
            x = x + attention(layer_norm(x, *b["n1"]), b, 6)
            x = x + feed_forward(layer_norm(x, *b["n2"]), b)
        return layer_norm(x[:, 0], *w["norm"]) @ w["head"]

    return Case(function, weights, (normal(batch, 224, 224, 3),))


def gpt2_decode() -> Case:
    """Return a decoding step of GPT-2 small after 512 tokens, with a cache of 1024."""
    dim, heads, length = 768, 12, 1024
    weights = {
        "words": normal(50257, dim, scale=0.2), "places": normal(length, dim, scale=0.1),
        "norm": norm_weights(dim), "blocks": [block_weights(dim, np.float32) for _ in range(12)],
    }  # fmt: skip
    caches = [(normal(1, length, heads, 64), normal(1, length, heads, 64)) for _ in range(12)]

    def function(w: Any, caches: Any, token: Any, place: Any) -> Any:
        x = (w["words"][token] + w["places"][place]).reshape(1, 1, dim)
        kept = []
        for b, (keys, values) in zip(w["blocks"], caches, strict=True):
            h = layer_norm(x, *b["n1"])
            q, k, v = ((h @ b[n] + b["b" + n]).reshape(1, 1, heads, 64) for n in "qkv")
            keys, values = (lax.dynamic_update_slice(c, u, (0, place, 0, 0)) for c, u in ((keys, k), (values, v)))
            kept.append((keys, values))
            seen = (jnp.arange(length) <= place)[None, None, None]
            x = x + nn.dot_product_attention(q, keys, values, mask=seen).reshape(1, 1, dim) @ b["o"] + b["bo"]
            x = x + feed_forward(layer_norm(x, *b["n2"]), b)
        return layer_norm(x, *w["norm"]) @ w["words"].T, kept

    return Case(function, weights, (caches, np.int32(7), np.int32(512)))


def llama_prefill() -> Case:
    """Return the prefill of 512 tokens through 4 layers of 2048 with 32 heads of queries, 8 of keys, in bf16."""
    dim, groups, length, inner = 2048, 8, 512, 5632
    half = partial(weight, dtype=ml_dtypes.bfloat16)
    blocks = [
        {
            "q": half(dim, dim), "k": half(dim, groups * 64), "v": half(dim, groups * 64), "o": half(dim, dim),
            "gate": half(dim, inner), "up": half(dim, inner), "down": half(inner, dim),
            "n1": 1 + normal(dim, scale=0.05), "n2": 1 + normal(dim, scale=0.05),
        }
        for _ in range(4)
    ]  # fmt: skip
    words, last = normal(8192, dim, dtype=ml_dtypes.bfloat16), 1 + normal(dim, scale=0.05)
    weights = {"words": words, "blocks": blocks, "norm": last}

    def scaled(x: Any, gain: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * gain).astype(x.dtype)

    def transposed(x: Any) -> Any:
        angle = jnp.arange(length)[:, None] * 10000.0 ** (-jnp.arange(32) / 32.0)
        sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    def function(w: Any, ids: Any) -> Any:
        x = w["words"][ids]
        for b in w["blocks"]:
            h = scaled(x, b["n1"])
            q, k, v = ((h @ b[n]).reshape(1, length, -1, 64) for n in "qkv")
            seen = nn.dot_product_attention(transposed(q), transposed(k), v, is_causal=True)
            x = x + seen.reshape(1, length, dim) @ b["o"]
            h = scaled(x, b["n2"])
            x = x + (nn.silu(h @ b["gate"]) * (h @ b["up"])) @ b["down"]
        return scaled(x[:, -1], w["norm"]) @ w["words"].T

    return Case(function, weights, (tokens(8192, 1, length),), 5e-2)


def mlp(rows: int) -> Case:
    """Return 12 layers in bf16: 768 to 3072 with gelu, back, residual and normalization."""
    layers = [
        {n: w for n, w in block_weights(768, ml_dtypes.bfloat16).items() if n in ("up", "bup", "down", "bdown", "n1")}
        for _ in range(12)
    ]

    def function(weights: Any, x: Any) -> Any:
        for w in weights:
            x = layer_norm(x + feed_forward(x, w), *w["n1"])
        return x

    return Case(function, layers, (normal(rows, 768, dtype=ml_dtypes.bfloat16),), 5e-2)


# ---------------------------------------------------------------- convolutions


def conv(x: Any, w: Any, stride: int = 1) -> Any:
    """Convolve images whose channels are the last dim."""
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def resnet50(batch: int, dtype: Any) -> Case:
    """Return ResNet-50 on 224 x 224 pixels; a batch norm is a scale and a shift."""

    def unit(*shape: int) -> tuple[np.ndarray, ...]:
        return weight(*shape, dtype=dtype), normal(shape[-1], scale=0.1, dtype=dtype), normal(shape[-1], dtype=dtype)

    blocks, channels = [], 64
    for stage, count in enumerate((3, 4, 6, 3)):
        inner = 64 << stage
        for n in range(count):
            block = {"a": unit(1, 1, channels, inner), "b": unit(3, 3, inner, inner), "c": unit(1, 1, inner, 4 * inner)}
            if n == 0:
                block["skip"] = unit(1, 1, channels, 4 * inner)
            blocks.append(block)
            channels = 4 * inner
    strides = [2 if stage and n == 0 else 1 for stage, count in enumerate((3, 4, 6, 3)) for n in range(count)]

    def layer(x: Any, w: Any, stride: int = 1) -> Any:
        return conv(x, w[0], stride) * (1 + w[1]) + w[2]

    def function(w: Any, x: Any) -> Any:
        x = nn.relu(layer(x, w["stem"], 2))
        low = -jnp.inf if x.dtype == jnp.float32 else jnp.asarray(-jnp.inf, x.dtype)
        x = lax.reduce_window(x, low, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for b, stride in zip(w["blocks"], strides, strict=True):
            kept = layer(x, b["skip"], stride) if "skip" in b else x
            y = nn.relu(layer(nn.relu(layer(x, b["a"])), b["b"], stride))
            x = nn.relu(layer(y, b["c"]) + kept)
        return x.mean((1, 2)) @ w["head"]

    weights = {"stem": unit(7, 7, 3, 64), "blocks": blocks, "head": weight(2048, 1000, dtype=dtype)}
    return Case(function, weights, (normal(batch, 224, 224, 3, dtype=dtype),), 5e-2)


# ---------------------------------------------------------------- recurrent, training


def lstm() -> Case:
    """Return two LSTM layers of 256 over 100 steps of 16 sequences."""
    layers = [{"x": weight(256, 1024), "h": weight(256, 1024), "b": normal(1024, scale=0.1)} for _ in range(2)]

    def function(layers: Any, x: Any) -> Any:
        for w in layers:

            def step(state: Any, at: Any, w: Any = w) -> Any:
                h, c = state
                i, f, g, o = jnp.split(at @ w["x"] + h @ w["h"] + w["b"], 4, -1)
                c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
                h = nn.sigmoid(o) * jnp.tanh(c)
                return (h, c), h

            zero = jnp.zeros((16, 256))
            x = lax.scan(step, (zero, zero), x)[1]
        return x

    return Case(function, layers, (normal(100, 16, 256),))


def trained(loss: Callable[..., Any], weights: Any, *inputs: Any) -> Case:
    """Return a training step by gradient descent with momentum."""

    def function(state: Any, *inputs: Any) -> Any:
        w, momentum = state
        value, slope = jax.value_and_grad(loss)(w, *inputs)
        momentum = jax.tree.map(lambda m, s: 0.9 * m + s, momentum, slope)
        return value, jax.tree.map(lambda x, m: x - 0.01 * m, w, momentum), momentum

    return Case(function, (weights, jax.tree.map(np.zeros_like, weights)), inputs)


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Return the mean cross entropy."""
    return -jnp.take_along_axis(nn.log_softmax(logits), labels[:, None], -1).mean()


def cnn_train() -> Case:
    """Return a training step of a network of two convolutions, 32 images of 28 x 28."""
    weights = [weight(3, 3, 1, 32), weight(3, 3, 32, 64), weight(3136, 256), weight(256, 10)]

    def loss(w: Any, x: Any, labels: Any) -> Any:
        for kernel in w[:2]:
            x = nn.relu(conv(x, kernel))
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return cross_entropy(nn.relu(x.reshape(32, -1) @ w[2]) @ w[3], labels)

    return trained(loss, weights, normal(32, 28, 28, 1), tokens(10, 32))


def mlp_train() -> Case:
    """Return a training step of three layers of 1024, 128 rows."""
    weights = [weight(784, 1024), weight(1024, 1024), weight(1024, 10)]

    def loss(w: Any, x: Any, labels: Any) -> Any:
        return cross_entropy(nn.relu(nn.relu(x @ w[0]) @ w[1]) @ w[2], labels)

    return trained(loss, weights, normal(128, 784), tokens(10, 128))


def vae_train() -> Case:
    """Return a training step of a variational autoencoder of 784, 400 and 20, 128 rows."""
    weights = [weight(784, 400), weight(400, 40), weight(20, 400), weight(400, 784)]

    def loss(w: Any, x: Any, key: Any) -> Any:
        mean, spread = jnp.split(nn.relu(x @ w[0]) @ w[1], 2, -1)
        z = mean + jnp.exp(spread / 2) * jax.random.normal(key, mean.shape)
        back = nn.relu(z @ w[2]) @ w[3]
        close = (nn.softplus(back) - x * back).sum(-1)
        return (close - 0.5 * (1 + spread - mean**2 - jnp.exp(spread)).sum(-1)).mean()

    return trained(loss, weights, np.abs(normal(128, 784)).clip(0, 1), np.array([3, 4], np.uint32))


ZOO: dict[str, Callable[[], Case]] = {
    "resnet50 b1": lambda: resnet50(1, np.float32),
    "resnet50 b16": lambda: resnet50(16, np.float32),
    "resnet50 b16 bf16": lambda: resnet50(16, ml_dtypes.bfloat16),
    "vit_s16 b8": lambda: vit(8),
    "bert 8x128": lambda: bert(8, 128, np.float32),
    "bert 8x128 bf16": lambda: bert(8, 128, ml_dtypes.bfloat16),
    "mlp 128 bf16": lambda: mlp(128),
    "mlp 8192 bf16": lambda: mlp(8192),
    "gpt2 decode": gpt2_decode,
    "llama prefill bf16": llama_prefill,
    "lstm": lstm,
    "vae train": vae_train,
    "cnn train": cnn_train,
    "mlp train": mlp_train,
}
