"""Quantized weights next to float weights.

One thread, in processor time. The ratio is to the model with float weights; the error is the root mean square of the
difference relative to that of the result. With ``--target cuda:sm_90a`` the time is that of the call's CUDA graph,
back to back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import thread_time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aotc
from benchmarks import options, report, timing

FORMS = ("none", "int8", "int4:64")
Model = tuple[Callable[..., Any], tuple[Any, ...]]


def normal(*shape: int, scale: float = 1.0, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """Return random numbers."""
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) * scale).astype(dtype)


def chain(rows: int, size: int = 4096, layers: int = 3, dtype: Any = np.float32) -> Model:
    """Return matmuls with square matrices, one after the other."""
    weights = [normal(size, size, scale=size**-0.5, dtype=dtype, seed=n) for n in range(layers)]

    def function(x: Any) -> Any:
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    return function, (normal(rows, size, dtype=dtype),)


def gpt(rows: int, dim: int = 1024, layers: int = 4, heads: int = 16, past: int = 256, words: int = 16384) -> Model:
    """Return one step of a decoder with tied embeddings, for ``rows`` sequences of ``past`` tokens."""
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
    "chain 1 x 256": partial(chain, 1, 256),
    **{f"chain {rows} x 4096": partial(chain, rows) for rows in (1, 4, 8, 64, 256)},
    **{f"chain bf16 {rows} x 4096": partial(chain, rows, dtype=jnp.bfloat16) for rows in (1, 8, 64, 256)},
    **{f"gpt {rows}": partial(gpt, rows) for rows in (1, 8)},
}


def samples_of(bundles: dict[str, Any], modules: dict[str, Any], inputs: Any, gpu: bool) -> dict[str, Any]:
    """Return functions that measure one call of each form, in seconds."""
    if not gpu:
        return {
            form: partial(timing.sample, partial(module.invoke, "main", *inputs), clock=thread_time)
            for form, module in modules.items()
        }
    from benchmarks.gpu.graphs import graph_of

    graphs = {form: graph_of(data, inputs) for form, data in bundles.items()}
    return {form: partial(timing.back_to_back, graph.run, graph.wait) for form, graph in graphs.items()}


def run(only: options.Only = "", rounds: options.Rounds = 15, target: options.Target = "cpu") -> None:
    """Print a row for each model and form."""
    columns = [report.us("call"), report.ratio("of none"), report.Column("error"), report.Column("MB", 1e-6)]
    table = report.Table("model, weights", *columns)
    for name in options.select(MODELS, only):
        function, inputs = MODELS[name]()
        flags: dict[str, Any] = {"target": target, "source": False}
        bundles = {f: aotc.compile(jax.jit(function), *inputs, quantize_weights=f, **flags) for f in FORMS}
        modules = {form: aotc.load(data, threads=1) for form, data in bundles.items()}
        results = {f: np.asarray(m.invoke("main", *inputs)[0], np.float64) for f, m in modules.items()}
        times = timing.measured(samples_of(bundles, modules, inputs, target.startswith("cuda")), rounds)
        whole = results["none"]
        for form in FORMS:
            error = float(np.sqrt(np.mean((results[form] - whole) ** 2) / np.mean(whole**2)))
            size = len(bundles[form])
            table.add(f"{name}, {form}", times.median(form), times.ratio(form, "none"), error, size)
