"""Loops that update or exchange carried arrays.

Results are compared with NumPy's, bit for bit; a note reports where XLA's differ. The ratio is to the faster of the
engines whose results are right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import aotc
from benchmarks import options, report, timing
from benchmarks.peers.jax_jit import jax_call_on_device

COUNT, TURNS = 2_000_000, 1000
RANDOM = np.random.default_rng(0)
ROW = RANDOM.standard_normal(COUNT).astype(np.float32)
EDGES = RANDOM.integers(0, 100_000, (3000, 2)).astype(np.int32)
PARENTS = np.arange(100_000, dtype=np.int32)
CACHE, LINES = (RANDOM.standard_normal((n, 512)).astype(np.float32) for n in (2048, 500))
COSTS = RANDOM.random((60, 80)).astype(np.float32)
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


def least_cost(costs: Any) -> Any:
    """Return the cost of the best alignment, by a table that is updated in place."""
    n, m = costs.shape
    table = jnp.zeros((n + 1, m + 1)).at[0].set(jnp.arange(m + 1.0)).at[:, 0].set(jnp.arange(n + 1.0))

    def outer(table: Any, i: Any) -> Any:
        def inner(table: Any, j: Any) -> Any:
            least = jnp.minimum(table[i, j + 1], table[i + 1, j]) + 1
            return table.at[i + 1, j + 1].set(jnp.minimum(least, table[i, j] + costs[i, j])), None

        return lax.scan(inner, table, jnp.arange(m))[0], None

    return lax.scan(outer, table, jnp.arange(n))[0][n, m]


def least_cost_gradient_numpy(costs: np.ndarray) -> np.ndarray:
    n, m = costs.shape
    one, half = np.float32(1), np.float32(0.5)
    table = np.zeros((n + 1, m + 1), np.float32)
    table[0], table[:, 0] = np.arange(m + 1), np.arange(n + 1)
    for i in range(n):
        for j in range(m):
            least = min(table[i, j + 1], table[i + 1, j]) + one
            table[i + 1, j + 1] = min(least, table[i, j] + costs[i, j])
    given, gradient = np.zeros_like(table), np.zeros_like(costs)
    given[n, m] = 1
    for i in range(n - 1, -1, -1):
        for j in range(m - 1, -1, -1):
            whole, given[i + 1, j + 1] = given[i + 1, j + 1], 0
            left, up, step = table[i, j + 1], table[i + 1, j], table[i, j] + costs[i, j]
            least = min(left, up) + one
            edge = whole if least < step else whole * half if least == step else np.float32(0)
            first = edge if left < up else edge * half if left == up else np.float32(0)
            gradient[i, j] += whole - edge
            given[i, j] += whole - edge
            given[i, j + 1] += first
            given[i + 1, j] += edge - first
    return gradient


def chosen_swap(a: Any, b: Any) -> Any:
    def step(i: Any, state: Any) -> Any:
        a, b = state
        b = b.at[i].set(a[i + 1] + 1)
        swaps = b[i] > 0.5
        return jnp.where(swaps, b, a), jnp.where(swaps, a, b)

    return lax.fori_loop(0, 200, step, (a, b))


def chosen_swap_numpy(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    a, b = a.copy(), b.copy()
    for i in range(200):
        b[i] = a[i + 1] + np.float32(1)
        if b[i] > np.float32(0.5):
            a, b = b, a
    return a, b


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
    """Return 50 iterations of ``step`` over three arrays of 1 MB, for JAX and for NumPy, and the arrays."""

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
    "edit distance, gradient": (jax.grad(least_cost), least_cost_gradient_numpy, (COSTS,)),
    "where that swaps": (chosen_swap, chosen_swap_numpy, tuple(ROW.reshape(4, -1)[:2])),
    "where of an update": (choice, choice_numpy, (ROW,)),
    "union-find": (union_find, union_find_numpy, (PARENTS, EDGES)),
    "bubble sort": (bubble_sort, bubble_sort_numpy, (ROW[:100_000],)),
    "Fibonacci of arrays": repeated(fibonacci),
    "ring of three arrays": repeated(rotation),
    "ping-pong of a stencil": repeated(ping_pong),
}


def run(only: options.Only = "", threads: options.Threads = 1, rounds: options.Rounds = 5) -> None:
    """Print a row for each program."""
    clock = timing.pin(threads)
    columns = [report.ms("aotc"), report.ms("XLA"), report.ms("NumPy"), report.ratio("aotc/best")]
    table = report.Table("program", *columns)
    for name in options.select(PROGRAMS, only, smallest="bubble sort"):
        function, numpy, arguments = PROGRAMS[name]
        module = aotc.load(aotc.compile(jax.jit(function), *arguments), threads=threads)
        calls: dict[str, timing.Call] = {
            "aotc": lambda module=module, arguments=arguments: module.invoke("main", *arguments),
            "XLA": jax_call_on_device(function, arguments),
            "NumPy": lambda numpy=numpy, arguments=arguments: numpy(*arguments),
        }
        want = jax.tree.leaves(calls["NumPy"]())
        for got, expected in zip(calls["aotc"](), want, strict=True):
            np.testing.assert_array_equal(got, expected)
        right = all(map(np.array_equal, jax.tree.leaves(calls["XLA"]()), want))
        times = timing.interleaved(calls, rounds=rounds, clock=clock)
        best = min(["XLA", "NumPy"] if right else ["NumPy"], key=times.median)
        table.add(name, *map(times.median, calls), times.ratio("aotc", best))
        if not right:
            report.note(f"{name}: XLA's results are wrong")
