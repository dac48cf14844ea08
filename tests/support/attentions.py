"""Attention as JAX and its libraries write it: patterns that ``fuse_attention`` must match.

For flax, haiku, equinox and keras these are the functions that their layers compute, as the packages cannot be
installed here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

B, T, S, H, D = 2, 20, 33, 4, 16
LOWEST = float(jnp.finfo(jnp.float32).min)
dot_product_attention = jax.nn.dot_product_attention


@dataclass(frozen=True)
class Spelling:
    """A function that computes attention, the shapes of its arguments, and their dtypes if not the test's."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = ()

    def arguments(self, dtype: str, seed: int = 0) -> list[np.ndarray]:
        """Return random arguments; integers are sizes between 1 and ``S``."""
        rng = np.random.default_rng(seed)
        made = []
        for n, shape in enumerate(self.shapes):
            kind = self.dtypes[n] if n < len(self.dtypes) and self.dtypes[n] else dtype
            match kind:
                case "bool":
                    x = rng.random(shape) < 0.7
                case "int32":
                    x = rng.integers(1, T, shape)
                case _:
                    x = rng.standard_normal(shape)
            made.append(np.asarray(x).astype(jnp.dtype(kind)))
        return made


def spelled(function: Callable[..., Any], *shapes: tuple[int, ...], dtypes: str = "") -> Spelling:
    """Return a spelling; ``dtypes`` are the dtypes of its last arguments."""
    last = tuple(dtypes.split())
    return Spelling(function, shapes, ("",) * (len(shapes) - len(last)) + last)


Q, K = (B, T, H, D), (B, S, H, D)
HEADS_FIRST = (B, H, T, D), (B, H, S, D), (B, H, S, D)


def by_hand(q: Any, k: Any, v: Any) -> Any:
    s = jnp.einsum("bthd,bshd->bhts", q, k) * D**-0.5
    e = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
    return jnp.einsum("bhts,bshd->bthd", e / e.sum(-1, keepdims=True), v)


def filled(fill: float) -> Callable[..., Any]:
    """Return attention whose masked scores are replaced by ``fill``, as in NumPy-style code."""

    def function(q: Any, k: Any, v: Any, mask: Any) -> Any:
        s = jnp.where(mask, jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(D), fill)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s, axis=-1), v)

    return function


def refused(q: Any, k: Any, v: Any, padding: Any) -> Any:
    """Attention whose mask is true for keys to ignore."""
    s = jnp.where(padding[:, None, None, :], -1e9, jnp.einsum("bhtd,bhsd->bhts", q, k))
    return jax.nn.softmax(s, axis=-1) @ v


def heads_behind_rows(q: Any, k: Any, v: Any) -> Any:
    """Attention with scores in the order bqhk."""
    s = jnp.einsum("bqhd,bkhd->bqhk", q, k)
    return jnp.einsum("bqhk,bkhd->bqhd", jax.nn.softmax(s, axis=-1), v)


def flax_like(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
    """Attention as ``flax.linen.dot_product_attention``: scaled queries, bias, mask, softmax in the model's dtype."""
    scores = jnp.einsum("...qhd,...khd->...hqk", q / jnp.sqrt(D).astype(q.dtype), k) + bias
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores).astype(q.dtype)
    return jnp.einsum("...hqk,...khd->...qhd", weights, v)


def haiku_like(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Attention as ``haiku.MultiHeadAttention``, of projected heads."""
    logits = jnp.einsum("...thd,...Thd->...htT", q, k) / np.sqrt(D).astype(k.dtype)
    weights = jax.nn.softmax(jnp.where(mask, logits, -1e30))
    attn = jnp.einsum("...htT,...Thd->...thd", weights, v)
    return jnp.reshape(attn, (*q.shape[:-2], -1))


def equinox_like(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Attention as ``equinox.nn.MultiheadAttention``: one sequence, heads by vmap, softmax in f32."""

    def head(q: Any, k: Any, v: Any, mask: Any) -> Any:
        logits = jnp.einsum("sd,Sd->sS", q / jnp.sqrt(D).astype(q.dtype), k)
        logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
        weights = jax.nn.softmax(logits.astype(jnp.float32), axis=-1).astype(v.dtype)
        return jnp.einsum("sS,Sd->sd", weights, v)

    return jax.vmap(head, in_axes=(1, 1, 1, None), out_axes=1)(q, k, v, mask)


def keras_like(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Attention as ``keras.layers.MultiHeadAttention``: scaled queries, ``aecd,abcd->acbe``, mask by ``Softmax``."""
    s = jnp.einsum("aecd,abcd->acbe", k, q * np.asarray(1 / np.sqrt(D), q.dtype))
    s = s + (1.0 - mask.astype(s.dtype)) * np.asarray(-3e4, s.dtype)
    return jnp.einsum("acbe,aecd->abcd", jax.nn.softmax(s, axis=-1), v)


def hugging_face_like(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Attention with a bias of 0 or the lowest number, from a mask of keys and a triangle."""
    causal = jnp.tril(jnp.ones((1, 1, T, S), bool), S - T)
    allowed = jnp.logical_and(mask[:, None, None, :], causal)
    bias = jnp.where(allowed, 0.0, LOWEST).astype(q.dtype)
    s = jnp.einsum("bqhd,bkhd->bhqk", q / np.sqrt(D).astype(q.dtype), k) + bias
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s.astype(jnp.float32), -1).astype(q.dtype), v)


def of_one_product(x: Any) -> Any:
    """Attention whose queries, keys and values are parts of one array, as in GPT-2."""
    q, k, v = (t.reshape(B, T, H, D).transpose(0, 2, 1, 3) for t in jnp.split(x, 3, axis=-1))
    s = jnp.where(np.tri(T, dtype=bool), q @ k.swapaxes(-1, -2) / np.sqrt(D), -1e10)
    return (jax.nn.softmax(s, -1) @ v).transpose(0, 2, 1, 3).reshape(B, T, H * D)


def repeated(q: Any, k: Any, v: Any) -> Any:
    """Attention with keys repeated for each head of their group."""
    return dot_product_attention(q, *(jnp.repeat(x, 2, axis=2) for x in (k, v)))


def decoded(q: Any, new: Any, keys: Any, values: Any, at: Any) -> Any:
    """Attention of one query against a cache after its key and value are written."""
    keys, values = (jax.lax.dynamic_update_slice(x, new, (at * 0, at, at * 0, at * 0)) for x in (keys, values))
    mask = (jnp.arange(200) <= at)[None, None, None, :]
    return dot_product_attention(q, keys, values, mask=mask), keys, values


def centred(q: Any, k: Any, v: Any) -> Any:
    """Attention whose softmax never subtracts an infinite maximum."""
    s = jnp.einsum("bhtd,bhsd->bhts", q, k)
    top = jax.lax.stop_gradient(s.max(-1, keepdims=True))
    e = jnp.exp(s - jnp.where(jnp.isfinite(top), top, 0))
    return (e / e.sum(-1, keepdims=True)) @ v


def with_heads_left_out(q: Any, k: Any, v: Any) -> Any:
    """Attention as in BERT of ``transformers``: head weights times a head mask, here of ones."""
    p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
    return jnp.einsum("bhts,bshd->bthd", jnp.einsum("...hqk,h->...hqk", p, jnp.ones((3, H), "i4")[1]), v)


SPELLINGS = {
    "heads left out": spelled(with_heads_left_out, Q, K, K),
    "plain": spelled(dot_product_attention, Q, K, K),
    "causal": spelled(lambda q, k, v: dot_product_attention(q, k, v, is_causal=True), Q, K, K),
    "mask": spelled(lambda q, k, v, m: dot_product_attention(q, k, v, mask=m), Q, K, K, (B, 1, T, S), dtypes="bool"),
    "bias": spelled(lambda q, k, v, b: dot_product_attention(q, k, v, bias=b), Q, K, K, (1, H, T, S)),
    "bias and mask": spelled(
        lambda q, k, v, b, m: dot_product_attention(q, k, v, b, m), Q, K, K, (1, H, T, S), (B, 1, 1, S), dtypes="bool"
    ),
    "scale": spelled(lambda q, k, v: dot_product_attention(q, k, v, scale=0.3), Q, K, K),
    "groups": spelled(
        lambda q, k, v: dot_product_attention(q, k, v, is_causal=True), Q, (B, S, 2, D), (B, S, 2, D)
    ),
    "one head of keys": spelled(dot_product_attention, Q, (B, S, 1, D), (B, S, 1, D)),
    "lengths": spelled(
        lambda q, k, v, a, b: dot_product_attention(q, k, v, query_seq_lengths=a, key_value_seq_lengths=b),
        Q, K, K, (B,), (B,), dtypes="int32 int32",
    ),
    "window": spelled(lambda q, k, v: dot_product_attention(q, k, v, local_window_size=(3, 2)), Q, K, K),
    "no batch": spelled(dot_product_attention, Q[1:], K[1:], K[1:]),
    "one head": spelled(lambda q, k, v: jax.nn.softmax(q @ k.T / 4) @ v, (T, D), (S, D), (S, D)),
    "columns": spelled(lambda q, k, v: jax.nn.softmax(q @ k.T / 4) @ v, (T, D), (S, D), (S, 7)),
    "by hand": spelled(by_hand, Q, K, K),
    "centred": spelled(centred, *HEADS_FIRST),
    "-inf": spelled(filled(-np.inf), Q, K, K, (B, 1, T, S), dtypes="bool"),
    "-1e9": spelled(filled(-1e9), Q, K, K, (B, 1, 1, S), dtypes="bool"),
    "lowest": spelled(filled(LOWEST), Q, K, K, (T, S), dtypes="bool"),
    "refused": spelled(refused, *HEADS_FIRST, (B, S), dtypes="bool"),
    "bqhk": spelled(heads_behind_rows, Q, K, K),
    "flax": spelled(flax_like, Q, K, K, (H, T, S), (B, 1, T, S), dtypes="bool"),
    "haiku": spelled(haiku_like, Q, K, K, (B, 1, T, S), dtypes="bool"),
    "equinox": spelled(equinox_like, Q[1:], K[1:], K[1:], (T, S), dtypes="bool"),
    "keras": spelled(keras_like, Q, K, K, (B, 1, T, S), dtypes="bool"),
    "hugging face": spelled(hugging_face_like, Q, K, K, (B, S), dtypes="bool"),
    "one product": spelled(of_one_product, (B, T, 3 * H * D)),
    "repeated keys": spelled(repeated, Q, (B, S, 2, D), (B, S, 2, D)),
    "decode": spelled(
        lambda q, k, v, m: dot_product_attention(q, k, v, mask=m), (B, 1, H, D), *[(B, 200, H, D)] * 2, (B, 1, 1, 200),
        dtypes="bool",
    ),
    "decode with a cache": spelled(
        decoded, (1, 1, H, D), (1, 1, H, D), (1, 200, H, D), (1, 200, H, D), (), dtypes="int32"
    ),
    "decode of one head": spelled(lambda q, k, v: jax.nn.softmax(q @ k.T / 4) @ v, (1, D), (300, D), (300, D)),
    "decode of groups": spelled(dot_product_attention, (B, 1, 8, D), (B, 200, 2, D), (B, 200, 2, D)),
}  # fmt: skip
