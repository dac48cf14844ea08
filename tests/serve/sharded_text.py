"""A small sharded language model with ``prefill`` and ``decode`` for two ranks, and its tokens by JAX."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import aotc

WORDS, WIDTH, HEADS, SIZE, PROMPT, MOST = 32, 16, 4, 4, 3, 40
CUT = {"embed": P(), "q": P(None, "model"), "k": P(None, "model"), "v": P(None, "model"), "o": P("model"), "out": P()}
CACHE = {"k": P(None, "model"), "v": P(None, "model"), "n": P()}


def weights(seed=1):
    random = np.random.default_rng(seed)
    shapes = {"embed": (WORDS, WIDTH), "o": (HEADS, SIZE, WIDTH), "out": (WIDTH, WORDS)}
    shapes |= dict.fromkeys("qkv", (WIDTH, HEADS, SIZE))
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def attend(params, x, cache):
    """Return logits of the last of the rows ``x``, which follow those in the cache."""
    q, k, v = (jnp.einsum("td,dhs->ths", x, params[name]) for name in "qkv")
    at = cache["n"]
    cache = {
        "k": jax.lax.dynamic_update_slice(cache["k"], k, (at, 0, 0)),
        "v": jax.lax.dynamic_update_slice(cache["v"], v, (at, 0, 0)), "n": at + x.shape[0],
    }  # fmt: skip
    seen = jnp.arange(MOST)[None, :] <= at + jnp.arange(x.shape[0])[:, None]
    scores = jnp.where(seen[None], jnp.einsum("ths,uhs->htu", q, cache["k"]), -jnp.inf)
    y = jnp.einsum("htu,uhs->ths", jax.nn.softmax(scores), cache["v"])
    return (x + jnp.einsum("ths,hsd->td", y, params["o"]))[-1] @ params["out"], cache


def empty():
    cache = jnp.zeros((MOST, HEADS, SIZE), "f4")
    return {"k": cache, "v": cache, "n": jnp.int32(0)}


def prefill(params, tokens):
    return attend(params, params["embed"][tokens[0]], empty())


def decode(params, token, cache):
    return attend(params, params["embed"][token[0]], cache)


def compiled(prompt=(1, PROMPT), **options):
    params, state, word = weights(), empty(), np.zeros((1, 1), np.int32)
    return aotc.compile(
        {"prefill": prefill, "decode": jax.jit(decode, donate_argnums=2)},
        args={"prefill": (params, jax.ShapeDtypeStruct(prompt, np.int32)), "decode": (params, word, state)},
        bind=["params"], **options,
    )  # fmt: skip


def sharded(made=CACHE, **options):
    return compiled(
        **options, mesh={"model": 2}, in_shardings={"prefill": (CUT, P()), "decode": (CUT, P(), CACHE)},
        out_shardings={"prefill": (P(), made), "decode": (P(), CACHE)},
    )  # fmt: skip


def save_checkpoint(path):
    """Write the weights to a safetensors file."""
    save_file({f"params/{name}": value for name, value in weights().items()}, path)


def by_jax(prompt, count):
    """Return the most likely tokens."""
    params = weights()
    first, cache = prefill(params, np.array([prompt]))
    found = []
    for _ in range(count):
        found.append(int(first.argmax()))
        first, cache = decode(params, np.array([[found[-1]]]), cache)
    return found
