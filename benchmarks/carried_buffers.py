"""Loops that update or exchange carried arrays: ``python benchmarks/carried_buffers.py [--threads 1]``.

Each program beside XLA and NumPy; samples in turn, medians. Results are compared with
NumPy's, bit for bit: XLA's are wrong for some programs of this kind.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

COUNT, TURNS = 2_000_000, 1000
RANDOM = np.random.default_rng(0)
ROW = RANDOM.standard_normal(COUNT).astype(np.float32)
EDGES = RANDOM.integers(0, 100_000, (3000, 2)).astype(np.int32)
PARENTS = np.arange(100_000, dtype=np.int32)
CACHE, LINES = (RANDOM.standard_normal((n, 512)).astype(np.float32) for n in (2048, 500))
WORDS = tuple(RANDOM.integers(0, 4, n).astype(np.int32) for n in (300, 400))


def branch(x: Any) -> Any:
    def step(i: Any, x: Any) -> Any:
        return lax.cond(i % 3 == 0, lambda: x.at[i].set(x[i + 1]), lambda: x.at[i + 2].multiply(2.0))

    return lax.fori_loop(0, TURNS, step, x)


def branch_numpy(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    for i in range(TURNS):
        if i % 3 == 0:
            x[i] = x[i + 1]
        else:
            x[i + 2] *= np.float32(2)
    return x


def switch(x: Any) -> Any:
    def step(i: Any, x: Any) -> Any:
        ways = [lambda: x, lambda: x.at[i].set(1.0), lambda: x.at[i].set(x[i + 1]), lambda: x.at[0].set(x[5])]
        return lax.switch(i % 4, ways)

    return lax.fori_loop(0, TURNS, step, x)


def switch_numpy(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    for i in range(TURNS):
        match i % 4:
            case 1:
                x[i] = 1
            case 2:
                x[i] = x[i + 1]
            case 3:
                x[0] = x[5]
    return x


def cache(cache: Any, lines: Any) -> Any:
    def step(state: Any, line: Any) -> Any:
        cache, n = state
        cache = lax.cond(line[0] > 0, lambda: lax.dynamic_update_slice(cache, line[None], (n, 0)), lambda: cache)
        return (cache, n + 1), cache[n, 3]

    (cache, _), seen = lax.scan(step, (cache, 0), lines)
    return cache, seen


def cache_numpy(cache: np.ndarray, lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    cache, seen = cache.copy(), np.empty(len(lines), np.float32)
    for n, line in enumerate(lines):
        if line[0] > 0:
            cache[n] = line
        seen[n] = cache[n, 3]
    return cache, seen


def nested(x: Any) -> Any:
    def outer(i: Any, x: Any) -> Any:
        return lax.fori_loop(0, 20, lambda j, x: x.at[i * 20 + j].set(x[j] + 1), x)

    return lax.fori_loop(0, TURNS // 20, outer, x)


def nested_numpy(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    for i in range(TURNS // 20):
        for j in range(20):
            x[i * 20 + j] = x[j] + np.float32(1)
    return x


def edit_distance(a: Any, b: Any) -> Any:
    n, m = a.shape[0], b.shape[0]
    table = jnp.zeros((n + 1, m + 1), jnp.int32).at[0].set(jnp.arange(m + 1)).at[:, 0].set(jnp.arange(n + 1))

    def outer(table: Any, i: Any) -> Any:
        def inner(table: Any, j: Any) -> Any:
            least = jnp.minimum(table[i, j + 1], table[i + 1, j]) + 1
            return table.at[i + 1, j + 1].set(jnp.minimum(least, table[i, j] + (a[i] != b[j]))), None

        return lax.scan(inner, table, jnp.arange(m))[0], None

    return lax.scan(outer, table, jnp.arange(n))[0]


def edit_distance_numpy(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    n, m = len(a), len(b)
    table = np.zeros((n + 1, m + 1), np.int32)
    table[0], table[:, 0] = np.arange(m + 1), np.arange(n + 1)
    for i in range(n):
        for j in range(m):
            least = min(table[i, j + 1], table[i + 1, j]) + 1
            table[i + 1, j + 1] = min(least, table[i, j] + (a[i] != b[j]))
    return table


def choice(x: Any) -> Any:
    return lax.fori_loop(0, TURNS, lambda i, x: jnp.where(x[i] > 0, x.at[i].set(1.0), x), x)


def choice_numpy(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    for i in range(TURNS):
        if x[i] > 0:
            x[i] = 1
    return x


def union_find(parents: Any, edges: Any) -> Any:
    def root(p: Any, i: Any) -> Any:
        return lax.while_loop(lambda i: p[i] != i, lambda i: p[i], i)

    def step(p: Any, edge: Any) -> Any:
        return p.at[root(p, edge[0])].set(root(p, edge[1])), None

    return lax.scan(step, parents, edges)[0]


def union_find_numpy(parents: np.ndarray, edges: np.ndarray) -> np.ndarray:
    p = parents.copy()

    def root(i: Any) -> Any:
        while p[i] != i:
            i = p[i]
        return i

    for a, b in edges:
        p[root(a)] = root(b)
    return p


def bubble_sort(x: Any) -> Any:
    def step(j: Any, x: Any) -> Any:
        return lax.cond(x[j] > x[j + 1], lambda: x.at[j].set(x[j + 1]).at[j + 1].set(x[j]), lambda: x)

    return lax.fori_loop(0, 63, lambda i, x: lax.fori_loop(0, 63, step, x), x)


def bubble_sort_numpy(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    for _ in range(63):
        for j in range(63):
            if x[j] > x[j + 1]:
                x[j], x[j + 1] = x[j + 1], x[j]
    return x


def fibonacci(xp: Any, a: Any, b: Any, c: Any) -> Any:
    return b, a + b * np.float32(0.5), c


def rotation(xp: Any, a: Any, b: Any, c: Any) -> Any:
    return b, c, a * np.float32(0.5) + c


def ping_pong(xp: Any, a: Any, b: Any, c: Any) -> Any:
    return (xp.roll(a, 1) + xp.roll(a, -1)) * np.float32(0.5), a, c


def repeated(step: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any], tuple[np.ndarray, ...]]:
    """Return 50 iterations over three arrays of 1 MB, for JAX and for NumPy."""

    def numpy(*state: np.ndarray) -> tuple[np.ndarray, ...]:
        for _ in range(50):
            state = step(np, *state)
        return state

    jitted = lambda *state: lax.fori_loop(0, 50, lambda _, state: step(jnp, *state), state)
    return jitted, numpy, tuple(RANDOM.standard_normal((3, 1 << 18)).astype(np.float32))


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "cond in a loop": (branch, branch_numpy, (ROW,)),
    "switch in a loop": (switch, switch_numpy, (ROW,)),
    "cache under a cond in a scan": (cache, cache_numpy, (CACHE, LINES)),
    "loop in a loop": (nested, nested_numpy, (ROW,)),
    "scan in a scan, edit distance": (edit_distance, edit_distance_numpy, WORDS),
    "where of an update": (choice, choice_numpy, (ROW,)),
    "union-find": (union_find, union_find_numpy, (PARENTS, EDGES)),
    "bubble sort": (bubble_sort, bubble_sort_numpy, (ROW[:100_000],)),
    "Fibonacci of arrays": repeated(fibonacci),
    "ring of three arrays": repeated(rotation),
    "ping-pong of a stencil": repeated(ping_pong),
}


def measure(name: str, options: argparse.Namespace) -> tuple[list[float], bool]:
    """Return the median milliseconds of aotc, XLA and NumPy, and whether XLA's results are right."""
    import aotc

    function, numpy, arguments = PROGRAMS[name]
    jitted, there = jax.jit(function), jax.device_put(arguments)
    module = aotc.load(aotc.compile(jitted, *arguments), threads=options.threads)
    want = jax.tree.leaves(numpy(*arguments))
    for got, expected in zip(module.invoke("main", *arguments), want, strict=True):
        np.testing.assert_array_equal(got, expected)
    right = all(map(np.array_equal, jax.tree.leaves(jitted(*there)), want))
    calls = (
        lambda: module.invoke("main", *arguments),
        lambda: jax.block_until_ready(jitted(*there)),
        lambda: numpy(*arguments),
    )
    times: list[list[float]] = [[], [], []]
    for _ in range(options.rounds):
        for call, row in zip(calls, times):
            begin = time.perf_counter()
            call()
            row.append(1e3 * (time.perf_counter() - begin))
    return [statistics.median(row) for row in times], right


def main() -> None:
    """Print a row for each program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="programs; all without one")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print("| program | aotc | XLA | NumPy | aotc / best |\n|---|---|---|---|---|")
    for name in options.names or PROGRAMS:
        (ours, xla, numpy), right = measure(name, options)
        wrong = "" if right else " (wrong)"
        best = min(xla, numpy) if right else numpy
        print(f"| {name} | {ours:.2f} ms | {xla:.2f} ms{wrong} | {numpy:.2f} ms | {ours / best:.2f} |", flush=True)


if __name__ == "__main__":
    main()
