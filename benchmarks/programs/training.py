"""Networks and their training with flax, equinox, diffrax and optax, on which aotc was slower than a peer."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.programs.catalogue import Program, mlp, perceptron, program, trained
from benchmarks.programs.models import integers, normal


@program
def gpt2_train() -> Program:
    """One step of AdamW on a decoder of two layers."""
    import optax

    d, heads, vocabulary, length = 128, 4, 1000, 64

    def weights() -> Any:
        def layer(s: int) -> Any:
            ones, zeros = np.ones(d, "float32"), np.zeros(d, "float32")
            sizes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
            pairs = [(normal(*v, seed=s + i, scale=0.02), np.zeros(v[1], "f4")) for i, v in enumerate(sizes.values())]
            return {**dict(zip(sizes, pairs)), "norm1": (ones, zeros), "norm2": (ones, zeros)}

        tables = {"wte": normal(vocabulary, d, seed=90, scale=0.02), "wpe": normal(length, d, seed=91, scale=0.02)}
        return {**tables, "layers": [layer(10), layer(20)], "norm": (np.ones(d, "float32"), np.zeros(d, "float32"))}

    def norm(x: Any, scale: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale[0] + scale[1]

    def loss(w: Any, tokens: Any) -> Any:
        batch, n = tokens.shape
        x = w["wte"][tokens] + w["wpe"][:n]
        mask = np.tril(np.ones((n, n), bool))
        for layer in w["layers"]:
            y = norm(x, layer["norm1"]) @ layer["qkv"][0] + layer["qkv"][1]
            q, k, v = (t.reshape(batch, n, heads, -1).transpose(0, 2, 1, 3) for t in jnp.split(y, 3, -1))
            scores = jnp.where(mask, q @ k.transpose(0, 1, 3, 2) / np.sqrt(d / heads), -1e9)
            y = (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(batch, n, d)
            x = x + y @ layer["out"][0] + layer["out"][1]
            y = jax.nn.gelu(norm(x, layer["norm2"]) @ layer["up"][0] + layer["up"][1])
            x = x + y @ layer["down"][0] + layer["down"][1]
        logits = norm(x, w["norm"])[:, :-1] @ w["wte"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return trained(loss, weights(), optax.adamw(1e-3, eps=1e-4), integers(vocabulary, 4, length))


@program
def nnx_transformer() -> Program:
    """A small encoder of flax.nnx, batch 8."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, d: int, rngs: Any) -> None:
            self.norm1, self.norm2 = nnx.LayerNorm(d, rngs=rngs), nnx.LayerNorm(d, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(4, d, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(d, 4 * d, rngs=rngs), nnx.Linear(4 * d, d, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = x + self.attention(self.norm1(x))
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    blocks = nnx.List([Block(64, nnx.Rngs(i)) for i in range(2)])
    graph, state = nnx.split(blocks)

    def run(x: Any) -> Any:
        for block in nnx.merge(graph, state):
            x = block(x)
        return x

    return run, (normal(8, 32, 64),)


@program
def diffusion_unet() -> Program:
    """A small UNet of Stable Diffusion's kind: residual blocks with group norm, attention, a skip connection."""

    c = 32

    def conv(w: Any, x: Any, stride: int = 1) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=numbers)

    def group_norm(x: Any) -> Any:
        y = x.reshape(*x.shape[:3], 8, -1)
        y = y - y.mean((1, 2, 4), keepdims=True)
        return (y * jax.lax.rsqrt((y * y).mean((1, 2, 4), keepdims=True) + 1e-5)).reshape(x.shape)

    def residual(w: Any, x: Any, t: Any) -> Any:
        y = conv(w[0], jax.nn.silu(group_norm(x))) + (jax.nn.silu(t) @ w[1])[:, None, None]
        y = conv(w[2], jax.nn.silu(group_norm(y)))
        return y + (x if x.shape == y.shape else conv(w[3], x))

    def attention(w: Any, x: Any) -> Any:
        y = group_norm(x).reshape(x.shape[0], -1, x.shape[-1])
        q, k, v = (y @ m for m in w[:3])
        y = jax.nn.softmax(q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])) @ v @ w[3]
        return x + y.reshape(x.shape)

    def block(seed: int, a: int, b: int) -> Any:
        sizes = ((3, 3, a, b), (64, b), (3, 3, b, b), (1, 1, a, b))
        return [normal(*s, seed=seed + i, scale=0.05) for i, s in enumerate(sizes)]

    w = {
        "in": normal(3, 3, 4, c, scale=0.1), "down1": block(10, c, c),
        "half": normal(3, 3, c, 2 * c, seed=3, scale=0.05),
        "down2": block(20, 2 * c, 2 * c), "middle": [normal(2 * c, 2 * c, seed=30 + i, scale=0.1) for i in range(4)],
        "fine": [normal(c, c, seed=60 + i, scale=0.1) for i in range(4)],
        "up": block(40, 3 * c, c), "out": normal(3, 3, c, 4, seed=50, scale=0.1),
    }  # fmt: skip

    def run(x: Any, t: Any) -> Any:
        high = attention(w["fine"], residual(w["down1"], conv(w["in"], x), t))
        y = residual(w["down2"], conv(w["half"], high, 2), t)
        y = attention(w["middle"], y)
        y = jax.image.resize(y, (*high.shape[:3], y.shape[-1]), "nearest")
        y = residual(w["up"], jnp.concatenate([y, high], -1), t)
        return conv(w["out"], jax.nn.silu(group_norm(y)))

    return run, (normal(1, 64, 64, 4), normal(1, 64, seed=1))


@program
def eqx_gru_gradient() -> Program:
    """The gradient of an equinox GRU cell over a sequence, for its weights."""
    import equinox as eqx

    cell, rest = eqx.partition(eqx.nn.GRUCell(16, 32, key=jax.random.PRNGKey(0)), eqx.is_array)
    leaves, tree = jax.tree.flatten(cell)

    def run(leaves: Any, x: Any) -> Any:
        def loss(leaves: Any) -> Any:
            cell = eqx.combine(jax.tree.unflatten(tree, leaves), rest)
            return (jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(32), x)[0] ** 2).sum()

        return jax.grad(loss)(leaves)

    return run, ([np.asarray(x) for x in leaves], normal(60, 16))


@program
def jacfwd_mlp() -> Program:
    """The Jacobian of a perceptron for all weights, in forward mode."""

    def run(weights: Any, x: Any) -> Any:
        return jax.jacfwd(mlp)(weights, x)

    return run, (perceptron(8, 16, 16, 4), normal(8, seed=3))


@program
def jacfwd_mlp_batch() -> Program:
    """The Jacobian of a larger perceptron for a batch, in forward mode."""
    return lambda weights, x: jax.jacfwd(mlp)(weights, x), (perceptron(16, 32, 32, 4), normal(4, 16, seed=3))


@program
def jacrev_mlp() -> Program:
    return lambda weights, x: jax.jacrev(mlp)(weights, x), (perceptron(16, 32, 32, 8), normal(4, 16, seed=3))


@program
def hessian_mlp() -> Program:
    return lambda x, weights: jax.hessian(lambda x: mlp(weights, x).sum())(x), (normal(32), perceptron(32, 64, 64, 1))


@program
def ctc_gradient() -> Program:
    import optax

    def run(logits: Any, labels: Any) -> Any:
        pads = jnp.zeros(logits.shape[:2]), jnp.zeros(labels.shape)
        return jax.grad(lambda x: optax.ctc_loss(x, pads[0], labels, pads[1]).mean())(logits)

    return run, (normal(4, 50, 30), integers(29, 4, 12) + 1)


@program
def neural_ode_gradient() -> Program:
    import diffrax

    weights = perceptron(2, 64, 64, 2)

    def run(weights: Any, y: Any) -> Any:
        def loss(weights: Any) -> Any:
            term = diffrax.ODETerm(lambda t, y, args: mlp(weights, y))
            control = diffrax.PIDController(rtol=1e-3, atol=1e-6)
            saved = diffrax.SaveAt(ts=jnp.linspace(0, 1, 10))
            found = diffrax.diffeqsolve(term, diffrax.Tsit5(), 0, 1, 0.1, y, stepsize_controller=control, saveat=saved)
            return (found.ys**2).sum()

        return jax.grad(loss)(weights)

    return run, (weights, normal(2))


def dense_step(weights: Any, x: Any, labels: Any) -> Any:
    """Return the loss of three dense layers, and their weights after a step of gradient descent."""

    def loss(weights: Any) -> Any:
        hidden = jax.nn.relu(jax.nn.relu(x @ weights[0]) @ weights[1])
        return -jnp.take_along_axis(jax.nn.log_softmax(hidden @ weights[2]), labels[:, None], 1).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return value, [w - 0.1 * g for w, g in zip(weights, gradient)]


def dense_weights() -> list[np.ndarray]:
    """Return weights and biases of layers of 784, 1024, 1024 and 10."""
    return [normal(m, n, seed=m, scale=m**-0.5) for m, n in pairwise((784, 1024, 1024, 10))]


@program
def dense_training() -> Program:
    return dense_step, (dense_weights(), normal(128, 784), integers(10, 128))


@program
def dense_training_baked() -> Program:
    weights = dense_weights()
    return lambda x, labels: dense_step(weights, x, labels), (normal(128, 784), integers(10, 128))


@program
def lstm_gradient() -> Program:
    def loss(weights: Any, x: Any) -> Any:
        def cell(state: Any, x: Any) -> Any:
            hidden, carried = state
            into, forget, new, out = jnp.split(jnp.concatenate([x, hidden], -1) @ weights, 4, -1)
            carried = jax.nn.sigmoid(forget) * carried + jax.nn.sigmoid(into) * jnp.tanh(new)
            hidden = jax.nn.sigmoid(out) * jnp.tanh(carried)
            return (hidden, carried), hidden

        return (jax.lax.scan(cell, (jnp.zeros((16, 64)),) * 2, x)[1] ** 2).sum()

    return jax.grad(loss), (normal(128, 256, scale=0.1), normal(50, 16, 64))


@program
def group_norm_gradient() -> Program:
    def block(kernel: Any, x: Any, scale: Any) -> Any:
        groups = x.reshape(*x.shape[:3], 8, -1)
        centred = groups - groups.mean((1, 2, 4), keepdims=True)
        normed = centred * jax.lax.rsqrt((centred**2).mean((1, 2, 4), keepdims=True) + 1e-5)
        form = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        return x + jax.lax.conv_general_dilated(
            jax.nn.silu(normed.reshape(x.shape) * scale), kernel, (1, 1), "SAME", **form
        )

    def loss(kernel: Any, x: Any, scale: Any) -> Any:
        return (block(kernel, x, scale) ** 2).sum()

    return jax.grad(loss), (normal(3, 3, 64, 64, scale=0.05), normal(1, 64, 64, 64), normal(64))


@program
def grouped_gradient() -> Program:
    """The gradient of a convolution of four groups for its kernel."""
    layout = ("NHWC", "HWIO", "NHWC")

    def loss(w: Any, x: Any) -> Any:
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layout, feature_group_count=4)
        return (y**2).sum()

    return jax.grad(loss), (normal(3, 3, 8, 32), normal(2, 16, 16, 32, seed=1))


@program
def transposed_convolution() -> Program:
    """A transposed convolution to twice the size, as in image generators."""
    return lambda x, k: jax.lax.conv_transpose(x, k, (2, 2), "SAME"), (normal(8, 8, 8, 32), normal(4, 4, 32, 16))


@program
def patches_gradient() -> Program:
    """The gradient of a vision transformer's first layer, for the image and the weights."""

    def loss(x: Any, w: Any) -> Any:
        layout = ("NHWC", "HWIO", "NHWC")
        return (jax.lax.conv_general_dilated(x, w, (8, 8), "SAME", dimension_numbers=layout) ** 2).sum()

    return jax.grad(loss, (0, 1)), (normal(2, 64, 64, 3), normal(8, 8, 3, 64))


@program
def echo_state() -> Program:
    """A recurrent network with rows of 100, a size without a tiled kernel."""

    def step(w: Any, h: Any, u: Any) -> Any:
        h = 0.7 * h + 0.3 * jnp.tanh(w @ h + u)
        return h, h

    return lambda w, u: jax.lax.scan(lambda h, u: step(w, h, u), jnp.zeros(100), u)[1], (
        normal(100, 100, scale=0.09),
        normal(200, 100),
    )
