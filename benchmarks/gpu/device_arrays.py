"""Copies, concurrent calls, host time, memory.

``--only`` selects parts: copies, overlap, host, shapes. The least time of each counts; calls of the host part return
before the GPU has finished, and the wait is not timed, except in the rows "until ready".
"""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aotc
from aotc.vmfb.devices.cuda import array as cuda_array
from aotc.vmfb.devices.cuda import driver, staging
from benchmarks import options, report, timing
from benchmarks.gpu.graphs import need_gpu

TARGET = "cuda:sm_90"
ROUNDS = 15


def least_seconds(run: timing.Call, calls: int = 1, rounds: int = ROUNDS) -> float:
    """Return the least seconds of a call over ``rounds`` of ``calls`` calls; the wait for the GPU is not timed."""
    best = float("inf")
    for _ in range(1 if timing.SMOKE else rounds):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        best = min(best, (time.perf_counter() - start) / calls)
        driver.call("cuCtxSynchronize")
    return best


def copies() -> None:
    """Report GB/s to and from the GPU, by the driver alone and through page-locked memory."""
    titles = ["driver up", "driver down", "staged up", "staged down"]
    table = report.Table("copy, GB/s", *titles)
    for megabytes in (1, 16, 256):
        x = np.ones(megabytes << 20, np.uint8)
        table.add(f"{megabytes} MB", *both_ways(x, 1 << 62), *both_ways(x, staging.STAGED_BYTES))


def both_ways(x: np.ndarray, limit: int) -> list[float]:
    """Return the GB/s of copies to the GPU and back; arrays of at least ``limit`` bytes are staged."""
    keeper, usual = cuda_array.memory_keeper(0), staging.STAGED_BYTES
    buffer, staging.STAGED_BYTES = keeper.empty_array(x.shape, x.dtype, "cuda:0").buffer, limit
    calls = (lambda: keeper.upload_to_buffer(buffer, x)), (lambda: keeper.download_buffer(x, buffer))
    seconds = []
    for call in calls:
        call()
        seconds.append(least_seconds(call, rounds=7))
    staging.STAGED_BYTES = usual
    return [x.nbytes / took / 1e9 for took in seconds]


def overlap() -> None:
    """Report two calls whose kernel occupies little of the GPU: one after the other, and concurrently."""
    function = jax.jit(lambda n, x: jax.lax.fori_loop(0, n, lambda i, y: jnp.sin(y) + x, x))
    x = np.ones(7, np.float32)  # so few that the loop is one kernel
    module = aotc.load(aotc.compile(function, np.int32(1), x, target=TARGET))

    def one() -> None:
        module.invoke("main", np.int32(1_000_000), x)

    def two() -> None:
        threads = [threading.Thread(target=one) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    two()
    table = report.Table("calls at the same time", report.ms("all"))
    table.add("one", least_seconds(one, rounds=7))
    table.add("two", least_seconds(two, rounds=7))


def mlp(x: Any, *weights: Any) -> Any:
    """Compute twelve layers of tanh."""
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def host() -> None:
    """Report the host time of a call of a small program with arrays on the GPU, and the time until its results exist.

    The calls differ in the location of their weights and results.
    """
    x, weights = np.ones((16, 64), np.float32), [np.eye(64, dtype=np.float32)] * 12
    module = aotc.load(aotc.compile(jax.jit(mlp), x, *weights, target=TARGET))
    bound = module.bind(dict(enumerate(weights, 1)))
    there, out, flat = module.put(x), module.put(x), [module.put(w) for w in weights]
    sets = iter([(module.put(x), module.put(x)) for _ in range(40 * ROUNDS)])
    others = iter([[module.put(w) for w in weights] for _ in range(40 * ROUNDS)])
    many = [np.ones(8, np.float32)] * 200
    added = aotc.load(aotc.compile(jax.jit(lambda x, *w: jnp.sin(x + sum(w))), many[0], *many, target=TARGET))
    wide, small = added.bind(dict(enumerate(many, 1))), added.put(many[0])
    table = report.Table("12 layers: host time", report.us("call"))
    rows: dict[str, tuple[timing.Call, int]] = {
        "weights bound, result stays": (lambda: bound.invoke(there, results="device"), 40),
        "weights bound, out=": (lambda: bound.invoke(there, out=[out]), 40),
        "13 arrays": (lambda: module.invoke("main", there, *flat, results="device"), 40),
        "weights bound, argument and out= new in each call": (lambda: call_with_output(bound, *next(sets)), 40),
        "12 of 13 arrays new": (lambda: module.invoke("main", there, *next(others), results="device"), 40),
        "200 arrays bound": (lambda: wide.invoke(small, results="device"), 40),
        "until ready: results stay, wait()": (lambda: bound.invoke(there, results="device")[0].wait(), 1),
        "until ready: NumPy result": (lambda: bound.invoke(there), 1),
        "until ready: NumPy argument and result": (lambda: bound.invoke(x), 1),
        **calls_with_foreign_arrays(bound, x), **jax_calls(x, weights),
    }  # fmt: skip
    for name, (call, count) in rows.items():
        table.add(name, least_seconds(call, count))


def call_with_output(bound: Any, argument: Any, out: Any) -> None:
    """Call a function with memory for its result, and wait."""
    bound.invoke(argument, out=[out])


def calls_with_foreign_arrays(bound: Any, x: np.ndarray) -> dict[str, tuple[timing.Call, int]]:
    """Return calls with an array of another library as argument, which end with a wait."""
    found: dict[str, tuple[timing.Call, int]] = {}
    try:
        import cupy
        import torch
    except ImportError:
        return found
    for name, argument in (("torch", torch.from_numpy(x).cuda()), ("cupy", cupy.asarray(x))):
        found[f"{name} argument, result stays"] = (lambda a=argument: bound.invoke(a, results="device")), 1
    return found


def jax_calls(x: np.ndarray, weights: list[np.ndarray]) -> dict[str, tuple[timing.Call, int]]:
    """Return calls of ``jax.jit``, if JAX has a GPU."""
    if jax.default_backend() != "gpu":
        return {}
    function, arrays = jax.jit(mlp), [jax.device_put(a) for a in (x, *weights)]
    return {
        "jax.jit": (lambda: function(*arrays), 40),
        "until ready: jax.jit": (lambda: function(*arrays).block_until_ready(), 1),
    }


def shapes() -> None:
    """Report memory and time of a function that is called with 399 shapes."""
    n = jax.export.symbolic_shape("n, 1024")
    exported = jax.export.export(jax.jit(jax.nn.softmax))(jax.ShapeDtypeStruct(n, "float32"))
    module = aotc.load(aotc.compile(exported, target=TARGET))
    start = time.perf_counter()
    for rows in range(20, 20 * 400, 20):
        module.invoke("main", np.ones((rows, 1024), np.float32))
    took, size = time.perf_counter() - start, module.stats()["device_bytes"]
    table = report.Table("shapes", report.Column("MB", 1e-6), report.ms("call"))
    table.add("399 shapes up to 7,980 rows", float(size), took / 399)


PARTS = {"copies": copies, "overlap": overlap, "host": host, "shapes": shapes}


def run(only: options.Only = "") -> None:
    """Measure the parts that ``--only`` selects."""
    need_gpu()
    for name in options.select(PARTS, only):
        PARTS[name]()
