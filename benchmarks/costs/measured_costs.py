"""Bundles with their own measured costs.

Each model is compiled, profiled, and compiled again with the record. The fastest call of each sample counts; the ratio
is the time with costs relative to the time without.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp

import aotc
from benchmarks import options, report, timing
from benchmarks.programs.models import MODELS, normal

DEFAULT = ("tiny_add", "softmax_rows", "matmul_512", "mlp_bf16", "int8_mlp")  # of the models, next to the programs here


GRAPHS = 12  # of dense layers, some side by side


def programs() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return programs of several kernels for which order, claims and threads matter, by name, and the models."""
    def diamond(x: Any, w: Any) -> Any:
        left, right = jnp.tanh(x @ w), jnp.sort(x, 1)
        return (left @ w + right).sum(1)

    def layers(x: Any, w: Any) -> Any:
        for n in range(GRAPHS):
            x = jax.nn.softmax(jnp.tanh(x @ w) + jnp.cumsum(x, 0), n % 2)
        return x

    def small(x: Any) -> Any:
        return [jnp.sort(x * n) for n in range(1, 17)]

    def scan(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda c, y: (jnp.tanh(c @ w + y), c.sum(1)), x, jnp.stack([x] * 20))

    x, w = normal(256, 256), normal(256, 256, scale=0.05)
    return {
        "diamond": (diamond, (x, w)), "layers": (layers, (x, w)), "sorts": (small, (x[0],)),
        "scan": (scan, (x[:32], w)),
        "gather": (lambda x, i: jnp.sin(x[i]) @ x.T, (x, abs(x[:, 0] * 99).astype("int32") % 256)),
        "sums": (lambda x: [x.sum(0), x.sum(1), x.max(), jnp.argmax(x, 1)], (normal(1000, 1000),)),
    }  # fmt: skip


def quickest(call: Callable[[], Any], seconds: float) -> float:
    """Return the time of the fastest call during ``seconds``."""
    best, end = timing.once(call), perf_counter() + seconds
    while perf_counter() < end:
        best = min(best, timing.once(call))
    return best


def run(
    only: options.Only = "", threads: options.Threads = 2, rounds: options.Rounds = 15, seconds: options.Seconds = 0.1
) -> None:
    """Print a row for each program, and the mean."""
    every = programs()
    seconds = 0.0 if timing.SMOKE else seconds
    table = report.Table("program", report.us("without"), report.us("with"), report.ratio("with/without"))
    known = [*every, *(MODELS if only else DEFAULT)]
    for name in options.select(known, only):
        model = MODELS[name]() if name in MODELS else None
        function, inputs = (model.function, model.inputs) if model else every[name]
        plain = aotc.compile(function, *inputs)
        record = aotc.load(plain, threads=1).profile("main", *inputs)
        bundles = {"without": plain, "with": aotc.compile(function, *inputs, costs=record)}
        modules = {key: aotc.load(data, threads=threads) for key, data in bundles.items()}
        samples = {
            key: lambda m=module: quickest(lambda: m.invoke("main", *inputs), seconds)  # noqa: B023
            for key, module in modules.items()
        }
        times = timing.measured(samples, rounds)
        table.add(name, times.median("without"), times.median("with"), times.ratio("with", "without"))
    table.mean("with/without")
