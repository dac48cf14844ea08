"""Calls that write a row into a donated cache.

With ``--target cuda:sm_90`` the cache is a DeviceArray, which no call copies. For comparison: a cache of a hundredth
of the size (the overhead of a call), sixteen rows in a loop of the model, submissions one after the other, and XLA on
JAX's device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import jax
import numpy as np
import typer
from jax import lax

import aotc
from benchmarks import options, report, timing

WIDTH, LOOP = 1024, 16


def update(cache: jax.Array, row: jax.Array, at: jax.Array) -> jax.Array:
    """Return the cache with ``row`` at position ``at``."""
    return lax.dynamic_update_slice(cache, row, (at, 0))


def updates(cache: jax.Array, row: jax.Array, at: jax.Array) -> jax.Array:
    """Return the cache with several rows from position ``at`` on."""
    return lax.fori_loop(0, LOOP, lambda i, c: lax.dynamic_update_slice(c, row * i, (at + i, 0)), cache)


class DonatingCalls:
    """Calls of aotc, each with the result of the previous one as donated argument."""

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


class JaxDonatingCalls:
    """Calls of ``jax.jit``, each with the result of the previous one as donated argument."""

    def __init__(self, rows: int, function: Callable[..., Any]) -> None:
        self._function = jax.jit(function, donate_argnums=0)
        self._cache = jax.numpy.zeros((rows, WIDTH), np.float32)
        self._row = jax.numpy.ones((1, WIDTH), np.float32)
        self._rows, self._turn = rows, 0

    def __call__(self) -> None:
        self._turn += 1
        self._cache = self._function(self._cache, self._row, np.int32(self._turn % (self._rows - LOOP)))
        self._cache.block_until_ready()


def run(
    target: options.Target = "cpu",
    mib: Annotated[int, typer.Option(help="Size of the cache.")] = 64,
    rounds: options.Rounds = 50,
) -> None:
    """Print a row for each way."""
    mib = 1 if timing.SMOKE else mib
    rows = (mib << 20) // (4 * WIDTH)
    calls: dict[str, Callable[[], None]] = {
        f"a row into {mib} MiB": DonatingCalls(rows, update, target),
        "a row into a hundredth": DonatingCalls(max(rows // 100, 2 * LOOP), update, target),
        f"a loop of {LOOP} rows": DonatingCalls(rows, updates, target),
        "submitted": DonatingCalls(rows, update, target, submits=True),
        f"XLA on {jax.devices()[0].platform}": JaxDonatingCalls(rows, update),
    }
    table = report.Table("call", report.us("median"), report.us("least"))
    samples = {name: lambda call=call: third_call_seconds(call) for name, call in calls.items()}
    times = timing.measured(samples, rounds)
    for name in calls:
        table.add(name, times.median(name), times.least(name))


def third_call_seconds(call: Callable[[], None]) -> float:
    """Return the seconds of a call after two warm-up calls."""
    for _ in range(2):
        call()
    return timing.sample(call, 0.001)
