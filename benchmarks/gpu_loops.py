"""Loops and branches on a GPU beside ``jax.jit``: ``python benchmarks/gpu_loops.py``.

``--compile DIR`` only compiles, which needs no GPU; ``--bundles DIR`` takes what that has written. Printed for each
case: us of a turn by aotc, with the host as the one that turns the loop, and by ``jax.jit``, from two calls of which
one has more turns, all of them waited for and on resident arrays; us of a whole call with few turns; the largest error.
Cases without turns are whole calls: branches side by side.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

import aotc
from aotc.vmfb.abi import Graph
from aotc.vmfb.devices.cuda import program as cuda_program

ROUNDS = 15
FEW, MANY = 20, 220
RNG = np.random.default_rng(0)


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    """Return random numbers."""
    return RNG.standard_normal(shape, dtype=np.float32) * np.float32(scale)


def lstm(turns: Any, x: Any, h: Any, c: Any, w: Any, u: Any) -> Any:
    """A recurrent cell over the rows of ``x``, again and again."""

    def step(i: Any, state: Any) -> Any:
        h, c = state
        row = jax.lax.dynamic_index_in_dim(x, i % x.shape[0], 0, keepdims=False)
        a, b, f, o = jnp.split(row @ w + h @ u, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(a) * jnp.tanh(b)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c

    return jax.lax.fori_loop(0, turns, step, (h, c))


def lstm_case(batch: int, width: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the cell and its arrays."""
    s = width**-0.5
    return lstm, (
        normal(16, batch, width), normal(batch, width), normal(batch, width), normal(width, 4 * width, scale=s),
        normal(width, 4 * width, scale=s),
    )  # fmt: skip


def lorenz(turns: Any, y: Any) -> Any:
    """Steps of Runge and Kutta's method."""

    def field(y: Any) -> Any:
        return jnp.stack([10 * (y[1] - y[0]), y[0] * (28 - y[2]) - y[1], y[0] * y[1] - 8 / 3 * y[2]])

    def step(i: Any, y: Any) -> Any:
        a = field(y)
        b = field(y + 0.0005 * a)
        c = field(y + 0.0005 * b)
        return y + 0.001 / 6 * (a + 2 * b + 2 * c + field(y + 0.001 * c))

    return jax.lax.fori_loop(0, turns, step, y)


def decode(turns: Any, token: Any, table: Any, w: Any) -> Any:
    """A token follows from the last one, until there are enough, or the end is one of them."""

    def goes_on(state: Any) -> Any:
        n, token, _ = state
        return (n < turns) & (token != -1)

    def step(state: Any) -> Any:
        n, token, h = state
        h = jnp.tanh(h * 0.9 + table[token])
        return n + 1, jnp.argmax(h @ w).astype(jnp.int32), h

    return jax.lax.while_loop(goes_on, step, (jnp.int32(0), token, jnp.zeros(table.shape[1])))


def relax(turns: Any, x: Any, a: Any) -> Any:
    """Steps towards the solution of a system, while it is not near enough."""

    def goes_on(state: Any) -> Any:
        n, x = state
        return (jnp.abs(x).max() > 1e-30) & (n < turns)

    return jax.lax.while_loop(goes_on, lambda s: (s[0] + 1, s[1] - 0.1 * (a @ s[1]) + 0.1), (jnp.int32(0), x))


def randoms(turns: Any, key: Any) -> Any:
    """Sums of random numbers."""

    def step(i: Any, total: Any) -> Any:
        return total + jax.random.uniform(jax.random.fold_in(key, i), (256,))

    return jax.lax.fori_loop(0, turns, step, jnp.zeros(256))


def switches(turns: Any, x: Any) -> Any:
    """A branch in each turn."""
    some = [lambda x: jnp.tanh(x @ x), lambda x: x * 0.5, jnp.cos]
    return jax.lax.fori_loop(0, turns, lambda i, x: jax.lax.switch(i % 3, some, x), x)


def chains(x: Any, w: Any, ways: int = 4, length: int = 6) -> Any:
    """Products one after the other, several such chains side by side."""
    found = []
    for n in range(ways):
        y = x[n]
        for k in range(length):
            y = jnp.tanh(y @ w[n * length + k])
        found.append(y)
    return sum(found)


LOOPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "lstm 4 x 256": lstm_case(4, 256),
    "lstm 32 x 512": lstm_case(32, 512),
    "lstm 4 x 32": lstm_case(4, 32),
    "lorenz": (lorenz, (np.ones(3, "f4"),)),
    "decode 256, 4096": (decode, (np.int32(3), normal(4096, 256), normal(256, 4096, scale=0.1))),
    "decode 32, 64": (decode, (np.int32(3), normal(64, 32), normal(32, 64, scale=0.1))),
    "while 512": (relax, (normal(512), normal(512, 512, scale=0.01) + np.eye(512, dtype="f4"))),
    "threefry 256": (randoms, (np.array([1, 2], "u4"),)),
    "switch 128 x 128": (switches, (normal(128, 128, scale=0.01),)),
}
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "4 chains 64": (chains, (normal(4, 64, 64), normal(24, 64, 64, scale=0.1))),
    "4 chains 256": (chains, (normal(4, 256, 256), normal(24, 256, 256, scale=0.05))),
    "4 chains 1024": (chains, (normal(4, 1024, 1024), normal(24, 1024, 1024, scale=0.03))),
}


def case_of(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function of a case, and its arrays, the number of turns first."""
    function, arrays = {**LOOPS, **CALLS}[name]
    return function, (np.int32(FEW), *arrays) if name in LOOPS else arrays


def compiled(name: str, target: str) -> bytes:
    """Return the bundle of a case."""
    function, arrays = case_of(name)
    return aotc.compile(jax.jit(function), *arrays, target=target)


def seconds(call: Callable[[], Any]) -> float:
    """Return the median time of a call."""
    for _ in range(3):
        call()
    found = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def ours(data: bytes, arrays: tuple[Any, ...]) -> Callable[[], Any]:
    """Return a call with arrays that are on the GPU."""
    module = aotc.load(data)
    held = [module.put(np.asarray(x)) for x in arrays]
    return lambda: module.invoke("main", *held, results="device")


def theirs(function: Callable[..., Any], arrays: tuple[Any, ...]) -> Callable[[], Any]:
    """Return a call of ``jax.jit`` with arrays that are on the GPU."""
    jitted, held = jax.jit(function), [jax.device_put(x) for x in arrays]
    return lambda: jax.block_until_ready(jitted(*held))


def a_turn(make: Callable[[tuple[Any, ...]], Callable[[], Any]], arrays: tuple[Any, ...]) -> tuple[float, float]:
    """Return us of a turn, and of a call with few of them."""
    few, many = (seconds(make((np.int32(turns), *arrays))) for turns in (FEW, MANY))
    return (many - few) / (MANY - FEW) * 1e6, few * 1e6


def error_of(got: Any, want: Any) -> float:
    """Return the largest difference, in parts of the largest number."""
    pairs = zip(map(np.asarray, got), map(np.asarray, jax.tree.leaves(want)), strict=True)
    return max(float(np.abs(a.astype("f8") - b).max() / (np.abs(b).max() + 1e-30)) for a, b in pairs)


def by_host(data: bytes, arrays: tuple[Any, ...]) -> Callable[[], Any]:
    """Return a call whose loops the host turns, as with an older driver."""
    is_recorded = cuda_program.is_recorded
    cuda_program.is_recorded = lambda nodes, gpu: all(isinstance(n, Graph) for n in nodes)
    try:
        call = ours(data, arrays)
        for _ in range(3):
            call()
    finally:
        cuda_program.is_recorded = is_recorded
    return call


def main() -> None:
    """Compile, or compile and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="cuda:sm_90")
    parser.add_argument("--compile", type=Path)
    parser.add_argument("--bundles", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    names = [n for n in (*LOOPS, *CALLS) if not options.only or any(o in n for o in options.only)]
    for name in names:
        if options.compile:
            options.compile.mkdir(parents=True, exist_ok=True)
            (options.compile / f"{name}.vmfb").write_bytes(compiled(name, options.target))
            continue
        data = (options.bundles / f"{name}.vmfb").read_bytes() if options.bundles else compiled(name, options.target)
        print(f"{name:18}", measured(name, data), flush=True)


def measured(name: str, data: bytes) -> str:
    """Return the figures of a case."""
    function, arrays = case_of(name)
    wrong = error_of(ours(data, arrays)(), theirs(function, arrays)())
    if name not in LOOPS:
        us, xla = seconds(ours(data, arrays)) * 1e6, seconds(theirs(function, arrays)) * 1e6
        return f"call {us:7.1f} jax {xla:7.1f} | error {wrong:.1e}"
    (turn, few), (hosts, _), (xla, xla_few) = (
        a_turn(make, arrays[1:]) for make in (partial(ours, data), partial(by_host, data), partial(theirs, function))
    )
    calls = f"{FEW} turns {few:7.1f} jax {xla_few:7.1f}"
    return f"turn {turn:7.2f} host {hosts:7.2f} jax {xla:7.2f} | {calls} | error {wrong:.1e}"


if __name__ == "__main__":
    main()
