"""The benchmark's models: random weights with fixed seeds, no downloads.

``MODELS`` maps a name to a builder that returns a :class:`Model`. A builder imports its own library, so a missing
library only affects its own models.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, slots=True)
class Model:
    """A function of its inputs alone, with its weights as constants, and example inputs.

    ``specs`` replace the inputs' shapes for the export (symbolic dims); ``tolerance`` is the allowed error relative to
    the largest value.
    """

    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    specs: tuple[str, ...] | None = None
    tolerance: float = 1e-3


MODELS: dict[str, Callable[[], Model]] = {}


def model(builder: Callable[[], Model]) -> Callable[[], Model]:
    """Add a builder to :data:`MODELS` under its name."""
    MODELS[builder.__name__] = builder
    return builder


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Return normally distributed numbers, f32."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype("float32")


def integers(high: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Return random integers from 0 to ``high`` - 1, i32."""
    return np.random.default_rng(seed).integers(0, high, shape).astype("int32")


def jitter(tree: Any) -> Any:
    """Add noise to constant leaves of weights (biases, norm scales), so that each of them affects the result."""
    random = np.random.default_rng(7)

    def one(leaf: Any) -> Any:
        array = np.asarray(leaf)
        if not jnp.issubdtype(array.dtype, jnp.floating) or not array.size:
            return array
        if (array != array.flat[0]).any():
            return array
        return (array.astype("float32") + 0.05 * random.standard_normal(array.shape)).astype(array.dtype)

    return jax.tree.map(one, tree)


# ---------------------------------------------------------------- vision


def _keras(name: str, pixels: float) -> Model:
    """Return a network of keras.applications, with batch norm statistics of a batch."""
    import keras

    keras.utils.set_random_seed(0)
    network = getattr(keras.applications, name)(weights=None, classifier_activation=None, input_shape=(224, 224, 3))
    images = normal(4, 224, 224, 3, scale=pixels) + (pixels > 1) * 120
    for layer in network._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.0
    trained = jitter([np.asarray(v.value) for v in network.trainable_variables])
    start = [np.asarray(v.value) for v in network.non_trainable_variables]
    statistics = [np.asarray(v) for v in network.stateless_call(trained, start, images, training=True)[1]]
    return Model(lambda x: network.stateless_call(trained, statistics, x, training=False)[0], (images[:1],))


@model
def resnet50v2() -> Model:
    return _keras("ResNet50V2", 1.0)


@model
def mobilenetv3s() -> Model:
    return _keras("MobileNetV3Small", 60.0)


@model
def convnext_t() -> Model:
    return _keras("ConvNeXtTiny", 60.0)


@model
def vit_s16() -> Model:
    sizes = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "num_labels": 1000}
    return _transformer("FlaxViTForImageClassification", "ViTConfig", sizes, pixel_values=normal(1, 3, 224, 224))


# ---------------------------------------------------------------- language


def _transformer(kind: str, config: str, sizes: dict[str, int], **inputs: np.ndarray) -> Model:
    import transformers

    network = getattr(transformers, kind)(getattr(transformers, config)(**sizes), seed=0)
    weights, names = jitter(network.params), tuple(inputs)
    return Model(lambda *x: network(params=weights, train=False, **dict(zip(names, x)))[0], tuple(inputs.values()))


@model
def bert_small() -> Model:
    sizes = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
    return _transformer("FlaxBertForSequenceClassification", "BertConfig", sizes, input_ids=integers(30000, 4, 64))


@model
def llama_prefill() -> Model:
    sizes = {
        "vocab_size": 16000, "num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 1376,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256,
    }  # fmt: skip
    return _transformer("FlaxLlamaForCausalLM", "LlamaConfig", sizes, input_ids=integers(16000, 1, 128))


@model
def gpt2_decode() -> Model:
    """One step of generation with a cache of 256 positions, 19 of them filled."""
    step, past, token, mask, position = _gpt2_step("float32")
    return Model(step, (past, token, mask, position))


@model
def gpt2_decode_bf16() -> Model:
    """The same step in bf16: the cache is a constant and the logits are f32, as input files cannot have bf16."""
    step, past, *inputs = _gpt2_step("bfloat16")
    return Model(lambda *x: step(past, *x)[0].astype(jnp.float32), tuple(inputs), tolerance=6e-2)


@model
def gpt2_bf16() -> Model:
    """A prompt of 64 tokens, weights and activations in bf16."""
    import transformers

    network = transformers.FlaxGPT2LMHeadModel(transformers.GPT2Config(n_layer=6), seed=0, dtype=jnp.bfloat16)
    weights = network.to_bf16(jitter(network.params))
    logits = lambda x: network(x, params=weights, train=False).logits.astype(jnp.float32)
    return Model(logits, (integers(50000, 1, 64),), tolerance=6e-2)


def _gpt2_step(dtype: str) -> tuple[Any, ...]:
    """Return a decoding step of a small GPT-2 in ``dtype``, and its arguments."""
    import transformers

    network = transformers.FlaxGPT2LMHeadModel(transformers.GPT2Config(n_layer=6), seed=0, dtype=jnp.dtype(dtype))
    weights, filled = jitter(network.params), np.arange(256) < 19
    weights = network.to_bf16(weights) if dtype == "bfloat16" else weights

    def fill(leaf: Any) -> np.ndarray:
        shape = np.shape(leaf)
        if not shape:
            return np.asarray(19, np.asarray(leaf).dtype)
        return np.where(filled.reshape((1, 256) + (1,) * (len(shape) - 2)), normal(*shape, seed=5), 0).astype(dtype)

    past = jax.tree.map(fill, network.init_cache(1, 256))
    mask = (np.arange(256) < 20).astype("int32")[None]

    def step(past: Any, token: Any, mask: Any, position: Any) -> Any:
        out = network(token, params=weights, past_key_values=past, attention_mask=mask, position_ids=position)
        return out.logits, out.past_key_values

    return step, past, integers(50000, 1, 1), mask, np.array([[19]], "int32")


# ---------------------------------------------------------------- recurrent, training, scientific


@model
def flax_lstm_scan() -> Model:
    import flax.linen as nn

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(2):
                x = nn.RNN(nn.OptimizedLSTMCell(256))(x)
            return nn.Dense(64)(x)

    network = Network()
    weights = jitter(network.init(jax.random.PRNGKey(0), normal(1, 4, 64)))
    return Model(lambda x: network.apply(weights, x), (normal(4, 100, 64),))


@model
def flax_mnist_train() -> Model:
    """One training step: loss, new weights, new state of the optimizer."""
    import flax.linen as nn
    import optax

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for features in (32, 64):
                x = nn.avg_pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), (2, 2))
            return nn.Dense(10)(nn.relu(nn.Dense(256)(x.reshape(x.shape[0], -1))))

    network, optimizer = Network(), optax.sgd(0.1, momentum=0.9)
    weights = jitter(network.init(jax.random.PRNGKey(0), normal(1, 28, 28, 1)))
    leaves, tree = jax.tree.flatten(jax.tree.map(np.asarray, optimizer.init(weights)))

    def step(weights: Any, leaves: Any, x: Any, y: Any) -> Any:
        state = jax.tree.unflatten(tree, leaves)  # jax.export does not know optax's types

        def loss(weights: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(network.apply(weights, x), y).mean()

        value, gradient = jax.value_and_grad(loss)(weights)
        change, new = optimizer.update(gradient, state, weights)
        return value, optax.apply_updates(weights, change), jax.tree.leaves(new)

    return Model(step, (weights, leaves, normal(32, 28, 28, 1), integers(10, 32)))


@model
def diffrax_lorenz() -> Model:
    """The Lorenz system by an adaptive Runge-Kutta method: a loop whose length depends on the data."""
    import diffrax

    def field(t: Any, y: Any, args: Any) -> Any:
        return jnp.stack([10 * (y[1] - y[0]), y[0] * (28 - y[2]) - y[1], y[0] * y[1] - 8 / 3 * y[2]])

    def solve(y: Any) -> Any:
        found = diffrax.diffeqsolve(
            diffrax.ODETerm(field), diffrax.Tsit5(), 0.0, 2.0, 0.01, y,
            stepsize_controller=diffrax.PIDController(rtol=1e-5, atol=1e-5), throw=False,
        )  # fmt: skip
        return found.ys

    return Model(solve, (np.array([1.0, 1.0, 1.0], "float32"),), tolerance=2e-2)


# ---------------------------------------------------------------- dense


def _norm(x: Any) -> Any:
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-6)


@model
def mlp_bf16() -> Model:
    sizes = [784, 1024, 1024, 1024, 1024, 256]
    weights = [normal(a, b, seed=a, scale=a**-0.5).astype(jnp.bfloat16) for a, b in pairwise(sizes)]

    def run(x: Any) -> Any:
        x = x.astype(jnp.bfloat16)
        for w in weights[:-1]:
            x = _norm(jax.nn.gelu(x @ w).astype(jnp.float32)).astype(jnp.bfloat16)
        return (x @ weights[-1]).astype(jnp.float32)

    return Model(run, (normal(32, 784),), tolerance=6e-2)


@model
def mlp_dynbatch() -> Model:
    sizes = [128, 512, 512, 512, 100]
    weights = [normal(a, b, seed=a + b, scale=a**-0.5) for a, b in pairwise(sizes)]

    def run(x: Any) -> Any:
        for w in weights[:-1]:
            x = _norm(jax.nn.silu(x @ w))
        return jax.nn.softmax(x @ weights[-1])

    return Model(run, (normal(16, 128),), specs=("b, 128",))


@model
def int8_mlp() -> Model:
    weights = [np.random.default_rng(i).integers(-127, 128, (1024, 1024)).astype("int8") for i in range(3)]
    scales = [np.abs(normal(1024, seed=9 + i)) * 1e-3 for i in range(3)]

    def run(x: Any) -> Any:
        for w, scale in zip(weights, scales):
            step = jnp.max(jnp.abs(x), -1, keepdims=True) / 127
            q = jnp.round(x / step).astype(jnp.int8)
            x = jax.nn.relu(jnp.matmul(q, w, preferred_element_type=jnp.int32).astype(jnp.float32) * step * scale)
        return x

    return Model(run, (normal(16, 1024),), tolerance=2e-2)


@model
def tiny_add() -> Model:
    """An addition of four numbers, which measures the overhead of a call."""
    return Model(lambda x, y: x + y, (normal(8), normal(8, seed=1)))


@model
def softmax_rows() -> Model:
    return Model(lambda x: jax.nn.softmax(x), (normal(256, 4096),))


@model
def matmul_512() -> Model:
    w = normal(512, 512, seed=1)
    return Model(lambda x: x @ w, (normal(512, 512),))


@model
def softmax_short() -> Model:
    return Model(lambda x: jax.nn.softmax(x, axis=-1), (normal(12, 128, 128),), tolerance=1e-5)


@model
def gelu_exact() -> Model:
    return Model(lambda x: jax.nn.gelu(x, approximate=False), (normal(512, 3072),), tolerance=1e-5)


def _convolution(pixels: int, kernel: int, channels: int, groups: int) -> Model:
    """Return a convolution with a ReLU; its weights are constants."""
    each = channels // groups
    weights = normal(kernel, kernel, each, channels, seed=1, scale=(kernel * kernel * each) ** -0.5)
    form: dict[str, Any] = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": groups}
    convolve = lambda x: jax.nn.relu(jax.lax.conv_general_dilated(x, weights, (1, 1), "SAME", **form))
    return Model(convolve, (normal(1, pixels, pixels, channels),), tolerance=1e-5)


@model
def grouped_convolution() -> Model:
    return _convolution(28, 3, 256, 32)


@model
def depthwise_7x7() -> Model:
    return _convolution(28, 7, 96, 96)
