"""Loops side by side: ``python benchmarks/overlap.py``; two loops beside one, and a diamond beside what bounds it.

The diamond: a product, four loops of 40, 30, 20 and 10 turns that read it, and the sum of what they make. It cannot end
before its longest way does, nor before all threads together have done all of it: both are measured with one thread, in
the same rounds. Samples are taken in turn; the least of each is printed, and the ratio of the medians in brackets.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import aotc

TURNS = (40, 30, 20, 10)


def loop(w: jax.Array, x: jax.Array, turns: int) -> jax.Array:
    """A loop of products, each of which needs the one before."""
    return jax.lax.fori_loop(0, turns, lambda i, c: jnp.tanh(c @ w), x)


def one(w: jax.Array, x: jax.Array) -> jax.Array:
    """A loop."""
    return loop(w, x, TURNS[0])


def two(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two loops that do not need each other."""
    return loop(w, x, TURNS[0]), loop(x, w, TURNS[0])


def diamond(w: jax.Array, x: jax.Array, turns: tuple[int, ...] = TURNS) -> jax.Array:
    """Loops between a product and a sum."""
    first = jnp.tanh(x @ w)
    return sum((loop(w, first * (n + 1), count) for n, count in enumerate(turns)), jnp.zeros_like(x))


def loaded(function: Callable[..., object], arrays: list[np.ndarray], threads: int) -> Callable[[], object]:
    """Return the call of a function that is compiled and loaded for so many threads."""
    data = aotc.compile(jax.jit(function), *arrays)
    return partial(aotc.load(data, threads=threads).invoke, "main", *arrays)


def timed(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call in each round."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            found[name].append(time.perf_counter() - start)
    return found


def ratio(times: dict[str, list[float]], over: str, under: Callable[[dict[str, float]], float]) -> str:
    """Return the ratio of least times, and that of medians in brackets."""
    kinds = [{name: how(row) for name, row in times.items()} for how in (min, statistics.median)]
    least, median = (kind[over] / under(kind) for kind in kinds)
    return f"{least:.2f} ({median:.2f})"


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((args.size, args.size)).astype(np.float32) / args.size**0.5 for _ in range(2)]
    calls = {f.__name__: loaded(f, arrays, args.threads) for f in (one, two)}
    times = timed(calls, args.rounds)
    shown = ", ".join(f"{name} {1e6 * min(row):.0f} us" for name, row in times.items())
    print(f"{args.threads} threads, loops: {shown}; two / one = {ratio(times, 'two', lambda t: t['one'])}")
    longest = partial(diamond, turns=TURNS[:1])
    calls = {
        "diamond": loaded(diamond, arrays, args.threads),
        "longest way": loaded(longest, arrays, 1),
        "all of it on one thread": loaded(diamond, arrays, 1),
    }
    times = timed(calls, args.rounds)
    shown = ", ".join(f"{name} {1e6 * min(row):.0f} us" for name, row in times.items())
    bound = ratio(times, "diamond", lambda t: max(t["longest way"], t["all of it on one thread"] / args.threads))
    print(f"diamond: {shown}; makespan / bound = {bound}")


if __name__ == "__main__":
    main()
