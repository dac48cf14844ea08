"""Arrays on a GPU: copies, calls at the same time, time of the host for a call, memory of many shapes.

python benchmarks/device_arrays.py [copies] [overlap] [host] [shapes]
"""

from __future__ import annotations

import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

import aotc
from aotc.vmfb.devices import cuda_array, driver, staging

TARGET = "cuda:sm_90"


def quickest(run, rounds=7):
    """The least time of a call, in seconds."""
    run()
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def copies():
    """GB/s up and down, by the driver alone and through page-locked memory."""
    for megabytes in (1, 16, 256):
        x = np.ones(megabytes << 20, np.uint8)
        driver_alone, staged = both_ways(x, 1 << 62), both_ways(x, staging.STAGED_BYTES)
        print(f"{megabytes:4} MB, GB/s up and down: driver {driver_alone}, staged {staged}")


def both_ways(x, limit):
    keeper, usual = cuda_array.keeper(0), staging.STAGED_BYTES
    address, staging.STAGED_BYTES = keeper.gpu.allocate(x.nbytes), limit
    found = [quickest(lambda: keeper.write(address, x)), quickest(lambda: keeper.read(x, address))]
    staging.STAGED_BYTES = usual
    keeper.gpu.free([address])
    return " ".join(f"{x.nbytes / seconds / 1e9:.1f}" for seconds in found)


def overlap():
    """Wall time of two calls whose kernel leaves most of the GPU free, one after the other and at the same time."""
    function = jax.jit(lambda n, x: jax.lax.fori_loop(0, n, lambda i, y: jnp.sin(y) + x, x))
    x = np.ones(7, np.float32)  # so few that the loop is one kernel
    module = aotc.load(aotc.compile(function, np.int32(1), x, target=TARGET))

    def one():
        module.invoke("main", np.int32(1_000_000), x)

    def two():
        threads = [threading.Thread(target=one) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    two()
    print(f"one call {quickest(one) * 1e3:.2f} ms; two at the same time {quickest(two) * 1e3:.2f} ms")


def host():
    """Microseconds from call to ready, and of the host alone, of a small program with its arrays on the GPU."""

    def mlp(x, *weights):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    x, weights = np.ones((16, 64), np.float32), [np.eye(64, dtype=np.float32)] * 12
    module = aotc.load(aotc.compile(jax.jit(mlp), x, *weights, target=TARGET))
    bound = module.bind(dict(enumerate(weights, 1)))
    given, out = module.put(x), module.put(x)
    sets = [(module.put(x), module.put(x)) for _ in range(200)]
    ready = quickest(lambda: [bound.invoke(given, out=[out]) for _ in range(100)]) / 100
    new = quickest(lambda: [bound.invoke(a, out=[b]) for a, b in sets], 2) / len(sets)
    print(f"12 layers, call to ready: {ready * 1e6:.1f} us, addresses new in each call {new * 1e6:.1f} us")
    print(f"until the host waits: {until_it_waits(lambda: bound.invoke(given, out=[out])) * 1e6:.1f} us")
    stays = until_it_waits(lambda: bound.invoke(given, results="device"))
    print(f"the same with results='device': {stays * 1e6:.1f} us")
    foreign(bound, x)


def until_it_waits(run):
    """The least time from the call until the host has nothing to do but wait, in seconds."""
    wait, found = driver.Gpu.wait, []

    def noted(gpu):
        found.append(time.perf_counter())
        wait(gpu)

    driver.Gpu.wait = noted
    took = []
    for _ in range(200):
        start = time.perf_counter()
        run()
        took.append(found[-1] - start)
    driver.Gpu.wait = wait
    return min(took)


def foreign(bound, x):
    """The same with an argument of another library."""
    try:
        import cupy
        import torch
    except ImportError:
        return
    for name, given in (("torch", torch.from_numpy(x).cuda()), ("cupy", cupy.asarray(x))):
        took = quickest(lambda given=given: [len(bound.invoke(given, results="device")) for _ in range(100)]) / 100
        print(f"{name} argument, result stays: {took * 1e6:.1f} us")


def shapes():
    """Memory and time of a function of 399 shapes."""
    n = jax.export.symbolic_shape("n, 1024")
    exported = jax.export.export(jax.jit(jax.nn.softmax))(jax.ShapeDtypeStruct(n, "float32"))
    module = aotc.load(aotc.compile(exported, target=TARGET))
    start = time.perf_counter()
    for rows in range(20, 20 * 400, 20):
        module.invoke("main", np.ones((rows, 1024), np.float32))
    took, held = time.perf_counter() - start, module.stats()["device_bytes"]
    print(f"399 shapes up to 7,980 rows: {held / 1e6:.0f} MB held, {took / 399 * 1e3:.2f} ms a call")


if __name__ == "__main__":
    parts = {"copies": copies, "overlap": overlap, "host": host, "shapes": shapes}
    for name in sys.argv[1:] or parts:
        parts[name]()
