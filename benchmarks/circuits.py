"""Programs whose stages read values twice, beside XLA: ``python benchmarks/circuits.py``.

A sorting network of 32 numbers, 11 and 15 controlled-NOT gates on 16 qubits, and the gradient of a circuit of 12
qubits: fusion that forgets how often a value is read doubles their work at each stage. Compilation is that of a new
process with a new cache, after imports; calls are on one thread, samples in turn, medians.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from time import perf_counter
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax
import jax.numpy as jnp
import numpy as np

import aotc

MOST_SECONDS = 20.0


def sorting_network(x: Any) -> Any:
    """A bitonic sort."""
    n = x.shape[0]
    for k in (2**i for i in range(1, n.bit_length())):
        for j in (k >> i for i in range(1, k.bit_length())):
            y = x.reshape(n // (2 * j), 2, j)
            low, high = jnp.minimum(y[:, 0], y[:, 1]), jnp.maximum(y[:, 0], y[:, 1])
            up = ((np.arange(n) & k) == 0).reshape(y.shape)[:, 0]
            x = jnp.stack([jnp.where(up, low, high), jnp.where(up, high, low)], axis=1).reshape(n)
    return x


def controlled_nots(x: Any, gates: int) -> Any:
    """One qubit after the other turns its neighbour around where it is 1."""
    bits = x.shape[0].bit_length() - 1
    for c in range(gates):
        state = x.reshape((2,) * bits)
        zero, one = jnp.take(state, 0, axis=c), jnp.flip(jnp.take(state, 1, axis=c), axis=c)
        x = jnp.stack([zero, one], axis=c).reshape(-1)
    return x


def energy(angles: Any) -> Any:
    """The energy of a state in which one qubit after the other was turned, with gates between."""
    bits = angles.shape[0]
    x = jnp.zeros(2**bits, "complex64").at[0].set(1)
    for q in range(bits):
        c, s = jnp.cos(angles[q]), jnp.sin(angles[q])
        y = x.reshape(2**q, 2, -1)
        x = jnp.stack([c * y[:, 0] - s * y[:, 1], s * y[:, 0] + c * y[:, 1]], axis=1).reshape(-1)
        x = controlled_nots(x, bits - 1)
    return jnp.sum(jnp.abs(x) ** 2 * (np.arange(2**bits) % 3).astype("float32"))


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "sorting network of 32": (sorting_network, (32,)),
    "11 gates on 16 qubits": (lambda x: controlled_nots(x, 11), (2**16,)),
    "15 gates on 16 qubits": (lambda x: controlled_nots(x, 15), (2**16,)),
    "gradient of 12 qubits": (jax.grad(energy), (12,)),
}


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    start = perf_counter()
    call()
    return perf_counter() - start


def answer(name: str, rounds: int) -> bool:
    """Print one line about a program; False if a figure is not reached."""
    function, shape = PROGRAMS[name]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    jitted = jax.jit(function)
    aotc.compile(jax.jit(lambda x: x + 1), x)  # the executor, and imports
    found: list[bytes] = []
    ours_s = timed(lambda: found.append(aotc.compile(jitted, x)))
    theirs_s = timed(lambda: jitted.lower(x).compile())
    module = aotc.load(found[0], threads=1)
    np.testing.assert_allclose(module.invoke("main", x)[0], jitted(x), rtol=1e-4, atol=1e-4)
    calls = (lambda: module.invoke("main", x), lambda: jitted(x).block_until_ready())
    pairs = [[timed(call) for call in calls] for _ in range(rounds)]
    ours, theirs = (1e6 * statistics.median(times) for times in zip(*pairs))
    print(f"{name}: compiled in {ours_s:.1f} s (XLA {theirs_s:.1f}), {ours:.1f} us (XLA {theirs:.1f})", flush=True)
    return ours_s <= MOST_SECONDS and ours <= theirs


def main() -> int:
    """Measure each in a process of its own; 1 if a figure is not reached."""
    if len(sys.argv) > 1:
        return 0 if answer(sys.argv[1], 101) else 1
    codes = []
    for name in PROGRAMS:
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "AOTC_CACHE_DIR": cache}
            codes.append(subprocess.run([sys.executable, __file__, name], env=environment, check=False).returncode)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
