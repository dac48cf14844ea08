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
from aotc.vmfb.devices.cuda import array as cuda_array
from aotc.vmfb.devices.cuda import driver, staging

TARGET = "cuda:sm_90"
ROUNDS = 15


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
    buffer, staging.STAGED_BYTES = keeper.empty(x.shape, x.dtype, "cuda:0").buffer, limit
    found = [quickest(lambda: keeper.write(buffer, x)), quickest(lambda: keeper.read(x, buffer))]
    staging.STAGED_BYTES = usual
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


def mlp(x, *weights):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def host():
    """Microseconds of the host for a call of a small program with its arrays on the GPU, and from call to ready."""
    x, weights = np.ones((16, 64), np.float32), [np.eye(64, dtype=np.float32)] * 12
    module = aotc.load(aotc.compile(jax.jit(mlp), x, *weights, target=TARGET))
    bound = module.bind(dict(enumerate(weights, 1)))
    given, out, flat = module.put(x), module.put(x), [module.put(w) for w in weights]
    sets = iter([(module.put(x), module.put(x)) for _ in range(40 * ROUNDS)])
    others = iter([[module.put(w) for w in weights] for _ in range(40 * ROUNDS)])
    print("12 layers, us of the host for a call that returns before the GPU is done:")
    report("weights bound, result stays", lambda: bound.invoke(given, results="device"))
    report("weights bound, out=", lambda: bound.invoke(given, out=[out]))
    report("13 arrays given", lambda: module.invoke("main", given, *flat, results="device"))
    report("weights bound, argument and out= new in each call", lambda: into(bound, *next(sets)))
    report("12 of 13 arrays new in each call", lambda: module.invoke("main", given, *next(others), results="device"))
    many = [np.ones(8, np.float32)] * 200
    added = aotc.load(aotc.compile(jax.jit(lambda x, *w: jnp.sin(x + sum(w))), many[0], *many, target=TARGET))
    wide, small = added.bind(dict(enumerate(many, 1))), added.put(many[0])
    report("200 arrays bound", lambda: wide.invoke(small, results="device"))
    print("from call to ready:")
    report("results stay, wait()", lambda: bound.invoke(given, results="device")[0].wait(), 1)
    report("NumPy result", lambda: bound.invoke(given), 1)
    report("NumPy argument and result", lambda: bound.invoke(x), 1)
    foreign(bound, x)
    beside_jax(x, weights)


def into(bound, given, out):
    bound.invoke(given, out=[out])


def report(name, run, calls=40):
    """Print the least time of a call, of rounds of so many; their end is waited for outside of the time."""
    print(f"  {name}: {per_call(run, calls):.1f}")


def per_call(run, calls):
    best = 1e9
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        best = min(best, (time.perf_counter() - start) / calls)
        driver.call("cuCtxSynchronize")
    return best * 1e6


def foreign(bound, x):
    """The same with an argument of another library, whose calls end with a wait."""
    try:
        import cupy
        import torch
    except ImportError:
        return
    for name, given in (("torch", torch.from_numpy(x).cuda()), ("cupy", cupy.asarray(x))):
        report(f"{name} argument, result stays", lambda given=given: bound.invoke(given, results="device"), 1)


def beside_jax(x, weights):
    """The same of jax.jit, if it has a GPU."""
    if jax.default_backend() != "gpu":
        return
    function, arrays = jax.jit(mlp), [jax.device_put(a) for a in (x, *weights)]
    print("jax.jit:")
    report("host", lambda: function(*arrays))
    report("from call to ready", lambda: function(*arrays).block_until_ready(), 1)


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
