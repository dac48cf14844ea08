"""Networks and their training steps as libraries lower them, with JAX alone: ``NETWORKS`` by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.programs.models import integers, normal

Program = tuple[Callable[..., Any], tuple[Any, ...]]
Weights = dict[str, np.ndarray]
NETWORKS: dict[str, Callable[[], Program]] = {}


def network(builder: Callable[[], Program]) -> Callable[[], Program]:
    """Add a builder to :data:`NETWORKS` under its name."""
    NETWORKS[builder.__name__] = builder
    return builder


class Layers:
    """Layers with weights: created at the first trace of a network, and reused in the same order at later traces."""

    def __init__(self) -> None:
        self.weights: Weights = {}
        self.traced: dict[str, Any] = {}
        self.count = 0

    def weight(self, *shape: int, scale: float = 0.0) -> Any:
        """Return the next array of weights, created at first use."""
        self.count += 1
        name = f"w{self.count:03}"
        if name not in self.weights and not self.traced:
            self.weights[name] = normal(*shape, seed=self.count, scale=scale or float(np.prod(shape[:-1])) ** -0.5)
        return self.traced[name] if self.traced else jnp.asarray(self.weights[name])

    def conv(self, x: Any, features: int, size: int = 3, stride: int = 1, groups: int = 1) -> Any:
        """Apply a convolution and batch normalisation with known statistics."""
        w = self.weight(size, size, x.shape[-1] // groups, features)
        y = lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
        )
        mean, scale, shift = (self.weight(features, scale=0.1) for _ in range(3))
        variance = jnp.abs(self.weight(features, scale=1.0)) + 0.5
        return (y - mean) * lax.rsqrt(variance + 1e-3) * (1 + scale) + shift

    def dense(self, x: Any, features: int) -> Any:
        """Apply an affine layer."""
        return x @ self.weight(x.shape[-1], features) + self.weight(features, scale=0.1)

    def norm(self, x: Any) -> Any:
        """Apply layer normalisation."""
        mean = x.mean(-1, keepdims=True)
        x = (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
        return x * (1 + self.weight(x.shape[-1], scale=0.1)) + self.weight(x.shape[-1], scale=0.1)

    def attention(self, x: Any, heads: int, causal: bool = False) -> Any:
        """Apply self-attention with projections."""
        batch, length, width = x.shape
        split = lambda y: y.reshape(batch, length, heads, width // heads)
        q, k, v = (split(self.dense(x, width)) for _ in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
        if causal:
            scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return self.dense(mixed.reshape(batch, length, width), width)

    def block(self, x: Any, heads: int, causal: bool = False) -> Any:
        """Apply a transformer layer."""
        x = x + self.attention(self.norm(x), heads, causal)
        y = self.norm(x)
        return x + self.dense(jax.nn.gelu(self.dense(y, 4 * x.shape[-1])), x.shape[-1])


def network_and_weights(
    apply: Callable[[Layers, Any], Any], x: np.ndarray
) -> tuple[Callable[[Any, Any], Any], Weights]:
    """Return the network as a function of weights and input, and its weights."""
    first = Layers()
    jax.eval_shape(lambda x: apply(first, x), x)

    def call(weights: Any, x: Any) -> Any:
        layers = Layers()
        layers.traced = weights
        return apply(layers, x)

    return call, first.weights


def inference(apply: Callable[[Layers, Any], Any], x: np.ndarray) -> Program:
    """Return the program of a network whose weights are arguments."""
    call, weights = network_and_weights(apply, x)
    return call, (weights, x)


def training(apply: Callable[[Layers, Any], Any], x: np.ndarray, labels: np.ndarray) -> Program:
    """Return the program of an Adam step on the cross entropy of a network."""
    call, weights = network_and_weights(apply, x)

    def loss(weights: Any, x: Any, labels: Any) -> Any:
        logits = jax.nn.log_softmax(call(weights, x))
        return -jnp.take_along_axis(logits, labels[..., None], -1).mean()

    def step(weights: Any, first: Any, second: Any, count: Any, x: Any, labels: Any) -> Any:
        value, slope = jax.value_and_grad(loss)(weights, x, labels)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, slope)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, slope)
        rate = 1e-3 * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        new = jax.tree.map(lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-8), weights, first, second)
        return value, new, first, second

    zeros = {name: np.zeros_like(w) for name, w in weights.items()}
    return step, (weights, zeros, zeros, np.float32(1), x, labels)


def classifier(layers: Layers, x: Any) -> Any:
    """Apply a small convolutional network."""
    for features in (16, 32):
        x = jax.nn.relu(layers.conv(x, features))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    return layers.dense(jax.nn.relu(layers.dense(x.reshape(len(x), -1), 64)), 10)


def residual(layers: Layers, x: Any) -> Any:
    """Apply a ResNet of four stages."""
    x = jax.nn.relu(layers.conv(x, 16, 7, 2))
    for features in (16, 32, 64, 128):
        for n in range(2):
            stride = 2 if n == 0 and features > 16 else 1
            y = layers.conv(jax.nn.relu(layers.conv(x, features, 3, stride)), features)
            x = jax.nn.relu(y + (layers.conv(x, features, 1, stride) if x.shape != y.shape else x))
    return layers.dense(x.mean((1, 2)), 10)


def separable(layers: Layers, x: Any) -> Any:
    """Apply MobileNet's blocks: depthwise, then pointwise convolutions."""
    x = jnp.clip(layers.conv(x, 16, 3, 2), 0, 6)
    for features, stride in ((32, 1), (64, 2), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (256, 1), (512, 2)):
        x = jnp.clip(layers.conv(x, x.shape[-1], 3, stride, x.shape[-1]), 0, 6)
        x = jnp.clip(layers.conv(x, features, 1), 0, 6)
    return layers.dense(x.mean((1, 2)), 10)


def efficient(layers: Layers, x: Any) -> Any:
    """Apply EfficientNet's blocks: inverted residuals with squeeze and excitation."""
    x = jax.nn.silu(layers.conv(x, 16, 3, 2))
    for features, stride, fused in ((16, 1, 1), (32, 2, 1), (48, 2, 0), (48, 1, 0), (80, 2, 0), (80, 1, 0), (96, 1, 0)):
        wide, before = 4 * x.shape[-1], x
        x = jax.nn.silu(layers.conv(x, wide, 3 if fused else 1, stride if fused else 1))
        if not fused:
            x = jax.nn.silu(layers.conv(x, wide, 3, stride, wide))
            gate = layers.dense(jax.nn.silu(layers.dense(x.mean((1, 2)), features // 4)), wide)
            x = x * jax.nn.sigmoid(gate)[:, None, None]
        x = layers.conv(x, features, 1)
        x = x + before if x.shape == before.shape else x
    return layers.dense(jax.nn.silu(layers.conv(x, 256, 1)).mean((1, 2)), 10)


def u_net(layers: Layers, x: Any) -> Any:
    """Apply a U-Net: downsampling, upsampling, and skip connections."""
    kept = []
    for features in (16, 32):
        x = jax.nn.relu(layers.conv(jax.nn.relu(layers.conv(x, features)), features))
        kept.append(x)
        x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME") / 4
    x = jax.nn.relu(layers.conv(x, 64))
    for before in reversed(kept):
        x = jax.image.resize(x, (*before.shape[:3], x.shape[-1]), "nearest")
        x = jax.nn.relu(layers.conv(jnp.concatenate([x, before], -1), before.shape[-1]))
    return layers.conv(x, 1, 1)


def vision(layers: Layers, x: Any) -> Any:
    """Apply a vision transformer: patches are tokens."""
    x = layers.conv(x, 64, 8, 8).reshape(len(x), -1, 64)
    x = x + layers.weight(*x.shape[1:], scale=0.1)
    for _ in range(3):
        x = layers.block(x, 4)
    return layers.dense(layers.norm(x).mean(1), 10)


def words(layers: Layers, tokens: Any) -> Any:
    """Apply a decoder of two layers."""
    x = layers.weight(256, 64, scale=0.1)[tokens] + layers.weight(tokens.shape[1], 64, scale=0.1)
    for _ in range(2):
        x = layers.block(x, 4, causal=True)
    return layers.dense(layers.norm(x), 256)


def unrolled(layers: Layers, x: Any) -> Any:
    """Apply a gated recurrent network whose 16 steps are unrolled."""
    state = jnp.zeros((x.shape[0], 48))
    u, w = layers.weight(48, 144), layers.weight(x.shape[-1], 144)
    for n in range(x.shape[1]):
        (r, z, c), (rs, zs, cs) = jnp.split(x[:, n] @ w, 3, -1), jnp.split(state @ u, 3, -1)
        z = jax.nn.sigmoid(z + zs)
        state = z * state + (1 - z) * jnp.tanh(c + jax.nn.sigmoid(r + rs) * cs)
    return layers.dense(state, 10)


def experts(layers: Layers, x: Any) -> Any:
    """Apply a mixture of four experts, two for each token."""
    scores, chosen = lax.top_k(jax.nn.softmax(layers.dense(x, 4)), 2)
    up, down = layers.weight(4, x.shape[-1], 128), layers.weight(4, 128, x.shape[-1])
    each = jnp.einsum("neh,ehd->ned", jax.nn.silu(jnp.einsum("nd,edh->neh", x, up)), down)
    picked = jnp.take_along_axis(each, chosen[..., None], 1)
    return layers.norm(x + (picked * scores[..., None]).sum(1))


def waves(layers: Layers, x: Any) -> Any:
    """Apply dilated causal convolutions, as for audio."""
    for n in range(4):
        w, names = layers.weight(2, x.shape[-1], 64), ("NWC", "WIO", "NWC")
        y = lax.conv_general_dilated(x, w, (1,), [(2**n, 0)], rhs_dilation=(2**n,), dimension_numbers=names)
        x = layers.dense(jnp.tanh(y[..., :32]) * jax.nn.sigmoid(y[..., 32:]), 32)
    return layers.dense(x, 16)


def perceptron(layers: Layers, x: Any) -> Any:
    """Apply four dense layers."""
    for features in (128, 128, 64):
        x = jax.nn.relu(layers.dense(x, features))
    return layers.dense(x, 10)


IMAGES = normal(2, 64, 64, 3)
TOKENS, NUMBERS = integers(256, 4, 32).astype("int32"), integers(10, 2).astype("int32")
APPLIED: dict[str, tuple[Callable[[Layers, Any], Any], np.ndarray]] = {
    "resnet": (residual, IMAGES), "mobilenet": (separable, IMAGES), "efficientnet": (efficient, IMAGES),
    "unet": (u_net, IMAGES[:, :32, :32]), "vit": (vision, IMAGES), "decoder": (words, TOKENS),
    "gru_unrolled": (unrolled, normal(4, 16, 24)), "mixture_of_experts": (experts, normal(64, 32)),
    "wavenet": (waves, normal(2, 128, 16)), "perceptron": (perceptron, normal(32, 100)),
}  # fmt: skip
TRAINED: dict[str, tuple[Callable[[Layers, Any], Any], np.ndarray, np.ndarray]] = {
    "classifier_training": (classifier, IMAGES[:, :28, :28], NUMBERS),
    "decoder_training": (words, TOKENS, TOKENS), "vit_training": (vision, IMAGES, NUMBERS),
    "gru_training": (unrolled, normal(4, 16, 24), integers(10, 4).astype("int32")),
    "perceptron_training": (perceptron, normal(32, 100), integers(10, 32).astype("int32")),
}  # fmt: skip
for _name, _row in APPLIED.items():
    NETWORKS[_name] = lambda row=_row: inference(*row)
for _name, _step in TRAINED.items():
    NETWORKS[_name] = lambda row=_step: training(*row)


@network
def lstm_scan() -> Program:
    """An LSTM over a sequence."""

    def run(x: Any, w: Any, u: Any, b: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(row @ w + h @ u + b, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        return lax.scan(step, (jnp.zeros((4, 32)), jnp.zeros((4, 32))), x)[1]

    return run, (normal(20, 4, 16), normal(16, 128), normal(32, 128), normal(128))


@network
def decode_step() -> Program:
    """A decoding step of one token with its cache of keys and values."""

    def run(x: Any, keys: Any, values: Any, at: Any, w: Any) -> Any:
        q, k, v = jnp.split(x @ w, 3, -1)
        keys = lax.dynamic_update_slice(keys, k.reshape(4, 1, 16), (0, at, 0))
        values = lax.dynamic_update_slice(values, v.reshape(4, 1, 16), (0, at, 0))
        scores = jnp.einsum("hd,hkd->hk", q.reshape(4, 16), keys) / 4
        scores = jnp.where(jnp.arange(keys.shape[1]) <= at, scores, -1e9)
        return jnp.einsum("hk,hkd->hd", jax.nn.softmax(scores), values).reshape(-1), keys, values

    return run, (normal(64), normal(4, 128, 16), normal(4, 128, 16), np.int32(7), normal(64, 192))
