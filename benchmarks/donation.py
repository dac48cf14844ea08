"""A row into a cache that is donated: python benchmarks/donation.py [--target cuda:sm_90] [--mib 64] [--rounds 50].

On a GPU the cache is a DeviceArray, which no call copies. Beside it: the same for a cache of a hundredth (what a call
costs at all), sixteen rows in a loop of the model, submissions that follow each other, and XLA on the device that JAX
has. Medians of bursts that are taken in turn, in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

import aotc

WIDTH, LOOP, BURST = 1024, 16, 12


def update(cache: jax.Array, row: jax.Array, at: jax.Array) -> jax.Array:
    """Return the cache with a row at ``at``."""
    return lax.dynamic_update_slice(cache, row, (at, 0))


def updates(cache: jax.Array, row: jax.Array, at: jax.Array) -> jax.Array:
    """Return the cache with rows from ``at`` on."""
    return lax.fori_loop(0, LOOP, lambda i, c: lax.dynamic_update_slice(c, row * i, (at + i, 0)), cache)


class Chain:
    """Calls each of which is given the result of the one before."""

    def __init__(self, rows: int, function: Callable[..., Any], target: str, submits: bool = False) -> None:
        self._cache: Any
        self._rows, self._turn, self._submits = rows, 0, submits
        self._on_gpu = target.startswith("cuda")
        row = np.ones((1, WIDTH), np.float32)
        cache = np.zeros((rows, WIDTH), np.float32)
        jitted = jax.jit(function, donate_argnums=0)
        self._module = aotc.load(aotc.compile(jitted, cache, row, np.int32(0), target=target))
        self._row, self._cache = row, cache
        if self._on_gpu:
            (self._cache,) = self._module.invoke("main", cache, row, np.int32(0), results="device")

    def __call__(self) -> None:
        self._turn += 1
        at = np.int32(self._turn % (self._rows - LOOP))
        results = "device" if self._on_gpu else ""
        if self._submits:
            fence = self._module.submit("main", self._cache, self._row, at, donate=True, results=results)
            (self._cache,) = fence.result()
        else:
            (self._cache,) = self._module.invoke("main", self._cache, self._row, at, donate=True, results=results)


class Xla:
    """The same by JAX."""

    def __init__(self, rows: int, function: Callable[..., Any]) -> None:
        self._function = jax.jit(function, donate_argnums=0)
        self._cache = jax.numpy.zeros((rows, WIDTH), np.float32)
        self._row = jax.numpy.ones((1, WIDTH), np.float32)
        self._rows, self._turn = rows, 0

    def __call__(self) -> None:
        self._turn += 1
        self._cache = self._function(self._cache, self._row, np.int32(self._turn % (self._rows - LOOP)))
        self._cache.block_until_ready()


def main() -> None:
    """Measure, and print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    rows = (options.mib << 20) // (4 * WIDTH)
    ways: dict[str, Callable[[], None]] = {
        f"a row into {options.mib} MiB": Chain(rows, update, options.target),
        "a row into a hundredth": Chain(max(rows // 100, 2 * LOOP), update, options.target),
        f"a loop of {LOOP} rows": Chain(rows, updates, options.target),
        "submitted": Chain(rows, update, options.target, submits=True),
        f"XLA on {jax.devices()[0].platform}": Xla(rows, update),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            for turn in range(BURST):
                begin = time.perf_counter()
                way()
                if turn > 1:  # the others have had the caches, and the GPU its rest
                    times[name].append(time.perf_counter() - begin)
    for name, taken in times.items():
        print(f"{name:24} {1e6 * statistics.median(taken):9.1f} us")


if __name__ == "__main__":
    main()
