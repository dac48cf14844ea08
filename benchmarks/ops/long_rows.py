"""Softmax, logsumexp and layer norm of long rows.

Both engines read resident arrays: NumPy arrays on a CPU, arrays in GPU memory with ``--target cuda:sm_90``.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import jax
import numpy as np

import aotc
from benchmarks import options, report, timing
from benchmarks.peers.jax_jit import jax_call_on_device

SHAPES = ((32, 1 << 20), (256, 1 << 17), (64, 1 << 17), (8, 1 << 17), (1, 1 << 20), (1, 1 << 22), (4096, 1 << 14))


def layer_norm(x: Any) -> Any:
    """Return rows minus their mean, divided by their standard deviation."""
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


FUNCTIONS = {"softmax": jax.nn.softmax, "logsumexp": lambda x: jax.nn.logsumexp(x, -1), "layer_norm": layer_norm}


def calls_of(function: Any, shape: tuple[int, int], target: str, threads: int) -> dict[str, timing.Call]:
    """Return the calls of aotc and XLA."""
    gpu = target.startswith("cuda")
    where: dict[str, Any] = {"devices": "cuda"} if gpu else {"threads": threads}
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32) * 3 + 1
    module = aotc.load(aotc.compile(jax.jit(function), x, target=target), **where)
    ours, kind = (module.put(x), "device") if gpu else (x, "numpy")
    return {"aotc": lambda: module.invoke("main", ours, results=kind), "XLA": jax_call_on_device(function, [x])}


def run(
    only: options.Only = "",
    threads: options.Threads = 1,
    rounds: options.Rounds = 15,
    target: options.Target = "cpu",
) -> None:
    """Print a row for each function and shape."""
    clock = timing.pin(threads) if target == "cpu" else perf_counter
    columns = [report.us("aotc"), report.us("least"), report.us("XLA"), report.us("XLA least")]
    table = report.Table("rows", *columns, report.ratio("aotc/XLA"))
    known = {f"{name} {a} x {b}": (name, (a, b)) for name in FUNCTIONS for a, b in SHAPES}
    for case in options.select(known, only, smallest="softmax 8 x 131072"):
        name, shape = known[case]
        times = timing.interleaved(calls_of(FUNCTIONS[name], shape, target, threads), rounds=rounds, clock=clock)
        each = [found for who in ("aotc", "XLA") for found in (times.median(who), times.least(who))]
        table.add(case, *each, times.ratio("aotc", "XLA"))
