"""Layers of the sizes of Llama 3 70B, with shardings: prefill, decoding, training steps. Shapes only, no weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

Tree = Any


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a layer: width, heads of queries, heads of keys, width of a head, inner width."""

    d: int = 8192
    heads: int = 64
    groups: int = 8
    head: int = 128
    wide: int = 28672


class Case(NamedTuple):
    """A function with the shapes and shardings of its arguments; the results have the shardings ``results``."""

    function: Callable[..., Any]
    arguments: tuple[Tree, ...]
    shardings: tuple[Tree, ...]
    results: Tree


def weights(s: Sizes, layers: int, dtype: Any = jnp.bfloat16) -> list[Tree]:
    """Return the shapes of the weights of ``layers`` layers."""
    shapes = {
        "norm1": (s.d,), "norm2": (s.d,), "q": (s.d, s.heads, s.head), "k": (s.d, s.groups, s.head),
        "v": (s.d, s.groups, s.head), "o": (s.heads, s.head, s.d), "gate": (s.d, s.wide), "up": (s.d, s.wide),
        "down": (s.wide, s.d),
    }  # fmt: skip
    return [{name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}] * layers


def tensor_parallel(layers: int) -> list[Tree]:
    """Return the shardings of weights over the axis ``model``: heads, and the inner width."""
    row = {"norm1": P(), "norm2": P(), "o": P("model"), "down": P("model")}
    return [row | {name: P(None, "model") for name in ("q", "k", "v", "gate", "up")}] * layers


def fully_sharded(layers: int) -> list[Tree]:
    """Return shardings that cut the first dim of all weights over the axis ``data``."""
    names = ("norm1", "norm2", "q", "k", "v", "gate", "up", "down")
    return [{**{name: P("data") for name in names}, "o": P(None, None, "data")}] * layers


def _norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    f = x.astype(jnp.float32)
    return (f * jax.lax.rsqrt(jnp.mean(f * f, -1, keepdims=True) + 1e-5)).astype(x.dtype) * weight


def _rotated(x: jax.Array, at: jax.Array) -> jax.Array:
    """Apply rotary embeddings at the positions ``at``."""
    half = x.shape[-1] // 2
    angles = at[:, None] * 500000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    c, s = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * c - b * s, b * c + a * s], -1).astype(x.dtype)


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Return grouped attention; ``q`` is [batch, rows, heads, head], ``k`` and ``v`` have fewer heads."""
    b, t, heads, head = q.shape
    q = q.reshape(b, t, k.shape[2], -1, head)
    scores = jnp.einsum("btghd,bsgd->bghts", q, k).astype(jnp.float32) / head**0.5
    share = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1).astype(q.dtype)
    return jnp.einsum("bghts,bsgd->btghd", share, v).reshape(b, t, heads, head)


def _mlp(w: Tree, x: jax.Array) -> jax.Array:
    h = _norm(x, w["norm2"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def layer(w: Tree, x: jax.Array) -> jax.Array:
    """Apply a layer to whole sequences with a causal mask."""
    t = x.shape[1]
    h, at = _norm(x, w["norm1"]), jnp.arange(t, dtype=jnp.float32)
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, w[name]) for name in "qkv")
    mixed = _attention(_rotated(q, at), _rotated(k, at), v, jnp.tril(jnp.ones((t, t), bool)))
    return _mlp(w, x + jnp.einsum("bthk,hkd->btd", mixed, w["o"]))


def stack(ws: list[Tree], x: jax.Array) -> jax.Array:
    """Apply layers to whole sequences."""
    for w in ws:
        x = layer(w, x)
    return x


def _decoded(w: Tree, cache: Tree, x: jax.Array, at: jax.Array) -> tuple[Tree, jax.Array]:
    """Apply a layer to one token of each sequence, at position ``at``, and add it to the cache."""
    h = _norm(x, w["norm1"])
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, w[name]) for name in "qkv")
    place = at.astype(jnp.float32)[None]
    new = {"k": _rotated(k, place), "v": v}
    cache = {name: jax.lax.dynamic_update_slice(cache[name], new[name], (0, at, 0, 0)) for name in "kv"}
    seen = jnp.arange(cache["k"].shape[1]) <= at
    mixed = _attention(_rotated(q, place), cache["k"], cache["v"], seen)
    return cache, _mlp(w, x + jnp.einsum("bthk,hkd->btd", mixed, w["o"]))


def decode(ws: list[Tree], caches: list[Tree], x: jax.Array, at: jax.Array) -> tuple[list[Tree], jax.Array]:
    """Apply layers to one token of each sequence."""
    found = []
    for w, cache in zip(ws, caches, strict=True):
        cache, x = _decoded(w, cache, x, at)
        found.append(cache)
    return found, x


def _loss(ws: list[Tree], x: jax.Array) -> jax.Array:
    for w in ws:
        x = jax.checkpoint(layer)(w, x)  # the layer runs again in the backward pass
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def _adam(w: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    f = g.astype(jnp.float32)
    m, v = 0.9 * m + 0.1 * f, 0.95 * v + 0.05 * f * f
    return (w.astype(jnp.float32) - 1e-4 * m / (jnp.sqrt(v) + 1e-8)).astype(w.dtype), m, v


def update(ws: Tree, gradients: Tree, m: Tree, v: Tree) -> tuple[Tree, Tree, Tree]:
    """Apply Adam."""
    rows = jax.tree.map(_adam, ws, gradients, m, v)
    return jax.tree.transpose(jax.tree.structure(ws), jax.tree.structure((0, 0, 0)), rows)


def train(ws: list[Tree], m: list[Tree], v: list[Tree], x: jax.Array) -> tuple[Tree, Tree, Tree]:
    """Apply a training step: gradients of all layers, which run twice, and Adam."""
    return update(ws, jax.grad(_loss)(ws, x), m, v)


def stage(ws: list[Tree], x: jax.Array, dy: jax.Array, sums: list[Tree]) -> tuple[jax.Array, jax.Array, Tree]:
    """Run a microbatch through a stage of a pipeline, forward and backward, and add its gradients to ``sums``."""
    y, pull = jax.vjp(lambda ws, x: _checkpointed(ws, x), ws, x)
    gradients, dx = pull(dy)
    return y, dx, jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums, gradients)


def _checkpointed(ws: list[Tree], x: jax.Array) -> jax.Array:
    for w in ws:
        x = jax.checkpoint(layer)(w, x)
    return x


def summed_update(ws: Tree, parts: Tree, m: Tree, v: Tree) -> tuple[Tree, Tree, Tree]:
    """Add the gradients of all replicas of a stage, which are the first dim of ``parts``, and apply Adam."""
    return update(ws, jax.tree.map(lambda g: jnp.sum(g, 0), parts), m, v)


def _tokens(s: Sizes, batch: int, rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, rows, s.d), jnp.bfloat16)


def prefill_case(s: Sizes, layers: int, batch: int, rows: int) -> Case:
    """Return the case of whole sequences, on the axes ``data`` and ``model``."""
    given = weights(s, layers), _tokens(s, batch, rows)
    return Case(stack, given, (tensor_parallel(layers), P("data")), P("data"))


def decode_case(s: Sizes, layers: int, batch: int, rows: int) -> Case:
    """Return the case of a token of ``batch`` sequences with ``rows`` in the cache, on ``data`` and ``model``."""
    cache = jax.ShapeDtypeStruct((batch, rows, s.groups, s.head), jnp.bfloat16)
    caches, cut = [{"k": cache, "v": cache}] * layers, P("data", None, "model")
    cuts = [{"k": cut, "v": cut}] * layers
    given = weights(s, layers), caches, _tokens(s, batch, 1), jax.ShapeDtypeStruct((), jnp.int32)
    return Case(decode, given, (tensor_parallel(layers), cuts, P("data"), P()), (cuts, P("data")))


def train_case(s: Sizes, layers: int, batch: int, rows: int) -> Case:
    """Return the case of a training step, on the axes ``data`` and ``model``."""
    return _training(s, layers, batch, rows, tensor_parallel(layers))


def fsdp_case(s: Sizes, layers: int, batch: int, rows: int) -> Case:
    """Return the case of a training step with all weights cut over the axis ``data``."""
    return _training(s, layers, batch, rows, fully_sharded(layers))


def _training(s: Sizes, layers: int, batch: int, rows: int, cuts: Tree) -> Case:
    moments = weights(s, layers, jnp.float32)
    given = weights(s, layers), moments, moments, _tokens(s, batch, rows)
    return Case(train, given, (cuts, cuts, cuts, P("data")), (cuts, cuts, cuts))


def adam_case(s: Sizes, layers: int) -> Case:
    """Return the case of the update alone, on one device."""
    moments, ws = weights(s, layers, jnp.float32), weights(s, layers)
    return Case(update, (ws, ws, moments, moments), (), ())


def stage_case(s: Sizes, layers: int, batch: int, rows: int) -> Case:
    """Return the case of a microbatch in a stage of a pipeline, on the axis ``model``."""
    cuts, sums = tensor_parallel(layers), weights(s, layers, jnp.float32)
    x = _tokens(s, batch, rows)
    return Case(stage, (weights(s, layers), x, x, sums), (cuts, P(), P(), cuts), (P(), P(), cuts))


def update_case(s: Sizes, layers: int, replicas: int) -> Case:
    """Return the case of the update of a stage with several replicas, on the axes ``data`` and ``model``."""
    cuts, moments = tensor_parallel(layers), weights(s, layers, jnp.float32)
    parts = jax.tree.map(lambda m: jax.ShapeDtypeStruct((replicas, *m.shape), m.dtype), moments)
    stacked = jax.tree.map(lambda cut: P("data", *cut), cuts, is_leaf=lambda x: isinstance(x, P))
    return Case(summed_update, (weights(s, layers), parts, moments, moments), (cuts, stacked, cuts, cuts), (cuts,) * 3)
