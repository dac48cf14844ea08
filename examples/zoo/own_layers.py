"""Networks of the layers of flax.nnx and of equinox, as their examples build them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.zoo.table import Model, model, normal, seeded


def of_nnx(build: Callable[[Any], Any], *inputs: np.ndarray) -> Model:
    """Return the module of flax.nnx that ``build`` makes of its keys, as a function."""
    from flax import nnx

    graph, state = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))
    weights = seeded(state)
    return Model(lambda *x: nnx.merge(graph, jax.tree.map(jnp.asarray, weights))(*x), inputs, weights)


@model("flax nnx", "MLP-Mixer-S/16, one image")
def mlp_mixer(small: bool) -> Model:
    from flax import nnx

    pixels, patch, width, blocks, classes = (32, 8, 16, 2, 10) if small else (224, 16, 512, 8, 1000)
    patches = (pixels // patch) ** 2

    class Mlp(nnx.Module):
        def __init__(self, size: int, hidden: int, rngs: nnx.Rngs) -> None:
            self.first, self.second = nnx.Linear(size, hidden, rngs=rngs), nnx.Linear(hidden, size, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.second(nnx.gelu(self.first(x)))

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.before, self.between = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
            self.places, self.channels = Mlp(patches, width // 2, rngs), Mlp(width, 4 * width, rngs)

        def __call__(self, x: Any) -> Any:
            x = x + self.places(self.before(x).swapaxes(1, 2)).swapaxes(1, 2)
            return x + self.channels(self.between(x))

    class Mixer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.stem = nnx.Conv(3, width, (patch, patch), strides=patch, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(blocks)])
            self.norm, self.head = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, classes, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = self.stem(x).reshape(x.shape[0], patches, width)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x).mean(1))

    return of_nnx(Mixer, normal(1, pixels, pixels, 3))


@model("flax nnx", "LSTM of two layers (width 256), 8 sequences of 64 steps")
def lstm(small: bool) -> Model:
    from flax import nnx

    width, steps = (8, 5) if small else (256, 64)

    class Network(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.RNN(nnx.OptimizedLSTMCell(width, width, rngs=rngs)) for _ in range(2)])
            self.head = nnx.Linear(width, 10, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return self.head(x[:, -1])

    return of_nnx(Network, normal(8, steps, width))


@model("flax nnx", "VAE of 28 x 28 pixels, 32 images there and back")
def vae(small: bool) -> Model:
    from flax import nnx

    hidden, latent = (16, 4) if small else (512, 64)

    class Vae(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.into, self.mean = nnx.Linear(784, hidden, rngs=rngs), nnx.Linear(hidden, latent, rngs=rngs)
            self.spread = nnx.Linear(hidden, latent, rngs=rngs)
            self.back, self.out = nnx.Linear(latent, hidden, rngs=rngs), nnx.Linear(hidden, 784, rngs=rngs)

        def __call__(self, x: Any, seed: Any) -> Any:
            h = nnx.relu(self.into(x.reshape(x.shape[0], -1)))
            mean, spread = self.mean(h), self.spread(h)
            z = mean + jnp.exp(0.5 * spread) * jax.random.normal(jax.random.key(seed), mean.shape)
            return jax.nn.sigmoid(self.out(nnx.relu(self.back(z)))).reshape(x.shape), mean, spread

    images = normal(4 if small else 32, 28, 28)
    return of_nnx(Vae, images, np.array(3, "uint32"))


def of_equinox(build: Callable[[], Any], call: Callable[..., Any], *inputs: np.ndarray) -> Model:
    """Return ``call(network, *inputs)`` of the module of equinox that ``build`` makes."""
    import equinox as eqx

    arrays, rest = eqx.partition(eqx.filter_eval_shape(build), lambda x: isinstance(x, jax.ShapeDtypeStruct))
    weights = seeded(arrays, outputs_last=False)
    return Model(lambda *x: call(eqx.combine(weights, rest), *x), inputs, weights)


@model("equinox", "U-Net that predicts noise (widths 32 to 128, attention in the middle), one image of 64 x 64")
def unet(small: bool) -> Model:
    import equinox as eqx

    widths, pixels = ((4, 8), 16) if small else ((32, 64, 128), 64)
    keys = map(jax.random.key, count())

    class Block(eqx.Module):
        norm: eqx.nn.GroupNorm
        conv: eqx.nn.Conv2d
        time: eqx.nn.Linear

        def __init__(self, before: int, after: int) -> None:
            self.norm = eqx.nn.GroupNorm(4, before)
            self.conv = eqx.nn.Conv2d(before, after, 3, padding=1, key=next(keys))
            self.time = eqx.nn.Linear(32, after, key=next(keys))

        def __call__(self, x: Any, t: Any) -> Any:
            return self.conv(jax.nn.silu(self.norm(x))) + self.time(t)[:, None, None]

    class Unet(eqx.Module):
        stem: eqx.nn.Conv2d
        down: list[Block]
        attention: eqx.nn.MultiheadAttention
        up: list[Block]
        out: eqx.nn.Conv2d

        def __init__(self) -> None:
            pairs = list(zip(widths, [*widths[1:], widths[-1]]))
            self.stem = eqx.nn.Conv2d(3, widths[0], 3, padding=1, key=next(keys))
            self.down = [Block(a, b) for a, b in pairs]
            self.attention = eqx.nn.MultiheadAttention(4, widths[-1], key=next(keys))
            self.up = [Block(2 * b, a) for a, b in reversed(pairs)]
            self.out = eqx.nn.Conv2d(widths[0], 3, 3, padding=1, key=next(keys))

        def __call__(self, x: Any, t: Any) -> Any:
            angles = t * jnp.exp(-jnp.arange(16) / 2)
            t = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)])
            x, kept = self.stem(x), []
            for block in self.down:
                x = block(x, t)
                kept.append(x)
                x = eqx.nn.AvgPool2d(2, 2)(x)
            rows = x.reshape(x.shape[0], -1).T
            x = x + self.attention(rows, rows, rows).T.reshape(x.shape)
            for block in self.up:
                x = jax.image.resize(x, (x.shape[0], 2 * x.shape[1], 2 * x.shape[2]), "nearest")
                x = block(jnp.concatenate([x, kept.pop()]), t)
            return self.out(jax.nn.silu(x))

    return of_equinox(Unet, lambda net, x, t: net(x, t), normal(3, pixels, pixels), np.array(0.3, "float32"))


@model("equinox", "GRU (width 256) over 128 steps, a batch of 16 by vmap")
def gru(small: bool) -> Model:
    import equinox as eqx

    width, steps = (8, 5) if small else (256, 128)

    def build() -> Any:
        first, second = jax.random.split(jax.random.key(0))
        return eqx.nn.GRUCell(width, width, key=first), eqx.nn.Linear(width, 10, key=second)

    def call(network: Any, rows: Any) -> Any:
        cell, head = network
        last, _ = jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(width), rows)
        return head(last)

    return of_equinox(build, lambda net, x: jax.vmap(lambda rows: call(net, rows))(x), normal(16, steps, width))


@model("equinox", "Transformer encoder of 6 layers (width 384, rotary positions), 128 tokens")
def encoder(small: bool) -> Model:
    import equinox as eqx

    width, heads, layers, length = (16, 2, 1, 8) if small else (384, 6, 6, 128)
    keys = map(jax.random.key, count())

    class Layer(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP
        norms: list[eqx.nn.RMSNorm]
        rotary: eqx.nn.RotaryPositionalEmbedding

        def __init__(self) -> None:
            self.attention = eqx.nn.MultiheadAttention(heads, width, key=next(keys))
            self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=next(keys))
            self.norms = [eqx.nn.RMSNorm(width) for _ in range(2)]
            self.rotary = eqx.nn.RotaryPositionalEmbedding(width // heads)

        def turn(self, q: Any, k: Any, v: Any) -> Any:
            each = jax.vmap(self.rotary, 1, 1)
            return each(q), each(k), v

        def __call__(self, x: Any) -> Any:
            rows = jax.vmap(self.norms[0])(x)
            x = x + self.attention(rows, rows, rows, process_heads=self.turn)
            return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))

    def call(network: Any, x: Any) -> Any:
        for layer in network:
            x = layer(x)
        return x

    return of_equinox(lambda: [Layer() for _ in range(layers)], call, normal(length, width))
