"""Weights as they are, and as integers of few bits: python benchmarks/quantized_weights.py [NAMES].

One thread, its processor time, calls in turn: medians of us, of the ratios of time to that of the model as it is, round
by round, and how far results are from it: the root mean square of the difference over that of the result. With
``--target cuda:sm_90a`` the time is that of the graph of a call on the GPU, back to back.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aotc

sys.path.insert(0, str(Path(__file__).parents[1]))
WAYS = ("none", "int8", "int4:64")
Model = tuple[Callable[..., Any], tuple[Any, ...]]


def normal(*shape: int, scale: float = 1.0, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """Return random numbers."""
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) * scale).astype(dtype)


def chain(rows: int, size: int = 4096, layers: int = 3, dtype: Any = np.float32) -> Model:
    """Products with square matrices, one behind the other."""
    weights = [normal(size, size, scale=size**-0.5, dtype=dtype, seed=n) for n in range(layers)]

    def function(x: Any) -> Any:
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    return function, (normal(rows, size, dtype=dtype),)


def gpt(rows: int, dim: int = 1024, layers: int = 4, heads: int = 16, past: int = 256, words: int = 16384) -> Model:
    """One step of a decoder whose table of words is that of its logits too, for so many sequences of ``past`` words."""
    shapes = {"qkv": (dim, 3 * dim), "out": (dim, dim), "up": (dim, 4 * dim), "down": (4 * dim, dim)}
    blocks = [{k: normal(*s, scale=s[0] ** -0.5, seed=n) for k, s in shapes.items()} for n in range(layers)]
    table, size = normal(words, dim, scale=0.3), dim // heads

    def norm(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def function(token: Any, keys: Any, values: Any) -> Any:
        x = jnp.asarray(table)[token]
        for n, b in enumerate(blocks):
            q, k, v = jnp.split((norm(x) @ b["qkv"]).reshape(rows, heads, 3 * size), 3, -1)
            k, v = (jnp.concatenate([old[n], new[:, :, None]], 2) for old, new in ((keys, k), (values, v)))
            scores = jax.nn.softmax(jnp.einsum("bhd,bhkd->bhk", q, k) * size**-0.5)
            x = x + jnp.einsum("bhk,bhkd->bhd", scores, v).reshape(rows, dim) @ b["out"]
            x = x + jax.nn.gelu(norm(x) @ b["up"]) @ b["down"]
        return norm(x) @ table.T

    cache = [normal(layers, rows, heads, past, size, seed=seed) for seed in (1, 2)]
    return function, (np.arange(rows, dtype=np.int32), *cache)


MODELS: dict[str, Callable[[], Model]] = {
    **{f"chain {rows} x 4096": partial(chain, rows) for rows in (1, 4, 8, 64, 256)},
    **{f"chain bf16 {rows} x 4096": partial(chain, rows, dtype=jnp.bfloat16) for rows in (1, 8, 64, 256)},
    **{f"gpt {rows}": partial(gpt, rows) for rows in (1, 8)},
}


def of_call(module: aotc.Module, inputs: tuple[Any, ...]) -> float:
    """Return the us that a call takes of the thread's processor time."""
    begin = time.thread_time()
    module.invoke("main", *inputs)
    return (time.thread_time() - begin) * 1e6


def of_graph(data: bytes, inputs: tuple[Any, ...]) -> float:
    """Return the us of the graph of a call on a GPU."""
    from benchmarks.products import of_aotc

    return of_aotc(data, inputs)[0]


def measure(name: str, model: Model, seconds: float, target: str) -> None:
    """Print the lines of a model."""
    function, inputs = model
    flags: dict[str, Any] = {"target": target, "source": False}
    made = [aotc.compile(jax.jit(function), *inputs, quantize_weights=way, **flags) for way in WAYS]
    modules = [aotc.load(data, threads=1) for data in made]
    clocks = [partial(of_graph, data, inputs) if target.startswith("cuda") else partial(of_call, module, inputs)
              for data, module in zip(made, modules, strict=True)]  # fmt: skip
    results = [np.asarray(m.invoke("main", *inputs)[0], np.float64) for m in modules]
    rounds = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rounds) < 5:
        rounds.append([clock() for clock in clocks])
    for n, way in enumerate(WAYS):
        took = statistics.median(row[n] for row in rounds)
        ratio = statistics.median(row[n] / row[0] for row in rounds)
        error = np.sqrt(np.mean((results[n] - results[0]) ** 2) / np.mean(results[0] ** 2))
        size = len(made[n]) / 1e6
        print(f"{name:20} {way:8} {took:9.0f} us {ratio:6.3f}   off by {error:.1e}   {size:6.1f} MB", flush=True)


def main() -> None:
    """Run what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names of models")
    parser.add_argument("--seconds", type=float, default=6, help="for each model")
    parser.add_argument("--target", default="cpu")
    given = parser.parse_args()
    for name, make in MODELS.items():
        if not given.names or any(part in name for part in given.names):
            measure(name, make(), given.seconds, given.target)


if __name__ == "__main__":
    main()
