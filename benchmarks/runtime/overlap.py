"""Independent loops at the same time.

The diamond: a matmul, four loops of 40, 30, 20 and 10 iterations that read its result, and the sum of their results.
Lower bounds of its time are its longest path, and its total work divided by the number of threads: both are measured
with one thread, in the same rounds. The least time of each counts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer

import aotc
from benchmarks import options, report, timing

TURNS = (40, 30, 20, 10)


def loop(w: jax.Array, x: jax.Array, iterations: int) -> jax.Array:
    """Compute a loop of dependent matmuls."""
    return jax.lax.fori_loop(0, iterations, lambda i, c: jnp.tanh(c @ w), x)


def one(w: jax.Array, x: jax.Array) -> jax.Array:
    """Compute one loop."""
    return loop(w, x, TURNS[0])


def two(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute two independent loops."""
    return loop(w, x, TURNS[0]), loop(x, w, TURNS[0])


def diamond(w: jax.Array, x: jax.Array, iterations: tuple[int, ...] = TURNS) -> jax.Array:
    """Compute a matmul, independent loops that read its result, and the sum of their results."""
    first = jnp.tanh(x @ w)
    return sum((loop(w, first * (n + 1), count) for n, count in enumerate(iterations)), jnp.zeros_like(x))


def loaded_call(function: Callable[..., object], arrays: list[np.ndarray], threads: int) -> timing.Call:
    """Compile and load a function for ``threads`` threads, and return a call of it."""
    data = aotc.compile(jax.jit(function), *arrays)
    return partial(aotc.load(data, threads=threads).invoke, "main", *arrays)


def run(
    threads: options.Threads = 2,
    size: Annotated[int, typer.Option(help="Rows and columns of the matrices.")] = 128,
    rounds: options.Rounds = 200,
) -> None:
    """Print both ratios."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((size, size)).astype(np.float32) / size**0.5 for _ in range(2)]
    table = report.Table(f"program, {threads} threads", report.us("least"), report.us("median"), "of bound")
    loops = timing.interleaved({f.__name__: loaded_call(f, arrays, threads) for f in (one, two)}, rounds=rounds)
    table.add("one loop", loops.least("one"), loops.median("one"), None)
    table.add("two loops", loops.least("two"), loops.median("two"), loops.least("two") / loops.least("one"))
    calls = {
        "longest path": loaded_call(partial(diamond, iterations=TURNS[:1]), arrays, 1),
        "one thread": loaded_call(diamond, arrays, 1),
        "diamond": loaded_call(diamond, arrays, threads),
    }  # fmt: skip
    times = timing.interleaved(calls, rounds=rounds)
    bound = max(times.least("longest path"), times.least("one thread") / threads)
    for name in calls:
        table.add(f"diamond: {name}", times.least(name), times.median(name), times.least(name) / bound)
