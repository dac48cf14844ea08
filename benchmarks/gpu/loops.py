"""Loops and branches next to jax.jit.

The time of an iteration by aotc, by aotc with host-side loops, and by ``jax.jit``, from two calls of which one has
more iterations, both synchronous and on resident arrays; the time of a whole call with few iterations; the largest
error. Cases without iterations are whole calls: branches next to each other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aotc
from aotc.vmfb.abi import Graph
from aotc.vmfb.devices.cuda import program as cuda_program
from benchmarks import options, report, timing
from benchmarks.gpu.graphs import bundles_of, need_gpu

ROUNDS = 15
FEW, MANY = 20, 220
RNG = np.random.default_rng(0)


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    """Return normally distributed f32 numbers, times ``scale``."""
    return RNG.standard_normal(shape, dtype=np.float32) * np.float32(scale)


def lstm(iterations: Any, x: Any, h: Any, c: Any, w: Any, u: Any) -> Any:
    """Apply a recurrent cell to the rows of ``x``, ``iterations`` times."""

    def step(i: Any, state: Any) -> Any:
        h, c = state
        row = jax.lax.dynamic_index_in_dim(x, i % x.shape[0], 0, keepdims=False)
        a, b, f, o = jnp.split(row @ w + h @ u, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(a) * jnp.tanh(b)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c

    return jax.lax.fori_loop(0, iterations, step, (h, c))


def lstm_case(batch: int, width: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the LSTM loop with random arrays."""
    s = width**-0.5
    return lstm, (
        normal(16, batch, width), normal(batch, width), normal(batch, width), normal(width, 4 * width, scale=s),
        normal(width, 4 * width, scale=s),
    )  # fmt: skip


def lorenz(iterations: Any, y: Any) -> Any:
    """Integrate the Lorenz system by steps of the Runge-Kutta method."""

    def field(y: Any) -> Any:
        return jnp.stack([10 * (y[1] - y[0]), y[0] * (28 - y[2]) - y[1], y[0] * y[1] - 8 / 3 * y[2]])

    def step(i: Any, y: Any) -> Any:
        a = field(y)
        b = field(y + 0.0005 * a)
        c = field(y + 0.0005 * b)
        return y + 0.001 / 6 * (a + 2 * b + 2 * c + field(y + 0.001 * c))

    return jax.lax.fori_loop(0, iterations, step, y)


def decode(iterations: Any, token: Any, table: Any, w: Any) -> Any:
    """Generate tokens, each from the previous one, until there are enough or one is the end token."""

    def continue_while(state: Any) -> Any:
        n, token, _ = state
        return (n < iterations) & (token != -1)

    def step(state: Any) -> Any:
        n, token, h = state
        h = jnp.tanh(h * 0.9 + table[token])
        return n + 1, jnp.argmax(h @ w).astype(jnp.int32), h

    return jax.lax.while_loop(continue_while, step, (jnp.int32(0), token, jnp.zeros(table.shape[1])))


def relax(iterations: Any, x: Any, a: Any) -> Any:
    """Iterate towards the solution of a linear system until it is near enough."""

    def continue_while(state: Any) -> Any:
        n, x = state
        return (jnp.abs(x).max() > 1e-30) & (n < iterations)

    return jax.lax.while_loop(continue_while, lambda s: (s[0] + 1, s[1] - 0.1 * (a @ s[1]) + 0.1), (jnp.int32(0), x))


def randoms(iterations: Any, key: Any) -> Any:
    """Sum random numbers."""

    def step(i: Any, total: Any) -> Any:
        return total + jax.random.uniform(jax.random.fold_in(key, i), (256,))

    return jax.lax.fori_loop(0, iterations, step, jnp.zeros(256))


def switches(iterations: Any, x: Any) -> Any:
    """Execute a branch in each iteration."""
    some = [lambda x: jnp.tanh(x @ x), lambda x: x * 0.5, jnp.cos]
    return jax.lax.fori_loop(0, iterations, lambda i, x: jax.lax.switch(i % 3, some, x), x)


def chains(x: Any, w: Any, ways: int = 4, length: int = 6) -> Any:
    """Multiply matrices in several independent chains of ``length`` products."""
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
    """Return the function of a case, and its arrays; the number of iterations is the first."""
    function, arrays = {**LOOPS, **CALLS}[name]
    return function, (np.int32(FEW), *arrays) if name in LOOPS else arrays


def compile_case(name: str) -> bytes:
    """Compile a case to a bundle."""
    function, arrays = case_of(name)
    return aotc.compile(jax.jit(function), *arrays, target="cuda:sm_90")


def seconds(call: timing.Call) -> float:
    """Return the median time of a call."""
    for _ in range(2):
        call()
    return timing.interleaved({"call": call}, rounds=ROUNDS).median("call")


def aotc_call(data: bytes, arrays: tuple[Any, ...]) -> Callable[[], Any]:
    """Return a call of a bundle with arrays in GPU memory."""
    module = aotc.load(data)
    placed = [module.put(np.asarray(x)) for x in arrays]
    return lambda: module.invoke("main", *placed, results="device")


def jax_call(function: Callable[..., Any], arrays: tuple[Any, ...]) -> Callable[[], Any]:
    """Return a call of ``jax.jit`` with arrays in GPU memory."""
    jitted, placed = jax.jit(function), [jax.device_put(x) for x in arrays]
    return lambda: jax.block_until_ready(jitted(*placed))


def seconds_per_iteration(
    make: Callable[[tuple[Any, ...]], Callable[[], Any]], arrays: tuple[Any, ...]
) -> tuple[float, float]:
    """Return the seconds of an iteration, and of a call with few iterations."""
    few, many = (seconds(make((np.int32(iterations), *arrays))) for iterations in (FEW, MANY))
    return (many - few) / (MANY - FEW), few


def relative_error(got: Any, want: Any) -> float:
    """Return the largest difference, relative to the largest number."""
    pairs = zip(map(np.asarray, got), map(np.asarray, jax.tree.leaves(want)), strict=True)
    return max(float(np.abs(a.astype("f8") - b).max() / (np.abs(b).max() + 1e-30)) for a, b in pairs)


def call_with_host_loops(data: bytes, arrays: tuple[Any, ...]) -> Callable[[], Any]:
    """Return a call whose loops run on the host, as with an older driver."""
    is_recorded = cuda_program.is_recorded
    cuda_program.is_recorded = lambda nodes, gpu: all(isinstance(n, Graph) for n in nodes)
    try:
        call = aotc_call(data, arrays)
        for _ in range(3):
            call()
    finally:
        cuda_program.is_recorded = is_recorded
    return call


def run(only: options.Only = "", compile_: options.CompileTo = None, bundles: options.Bundles = None) -> None:
    """Print a row for each case."""
    data = bundles_of(options.select((*LOOPS, *CALLS), only), compile_case, compile_, bundles)
    if compile_:
        return
    need_gpu()
    columns = [report.us("iteration"), report.us("by host"), report.us("jax"), report.us("call"), report.us("jax call")]
    table = report.Table("case", *columns, "error")
    for name, bundle in data.items():
        function, arrays = case_of(name)
        wrong = relative_error(aotc_call(bundle, arrays)(), jax_call(function, arrays)())
        if name not in LOOPS:
            calls = seconds(aotc_call(bundle, arrays)), seconds(jax_call(function, arrays))
            table.add(name, None, None, None, *calls, wrong)
            continue
        makers = (partial(aotc_call, bundle), partial(call_with_host_loops, bundle), partial(jax_call, function))
        (each, few), (hosts, _), (xla, xla_few) = (seconds_per_iteration(make, arrays[1:]) for make in makers)
        table.add(name, each, hosts, xla, few, xla_few, wrong)
