"""Sorts, scans, scatters and factorisations.

GPU time of a call, between two events around repeated replays of its graph; the time of each call of ``jax.jit`` on
resident arrays, back to back. ``--kernels`` adds the time of each launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

import aotc
from aotc.vmfb.devices.cuda import driver
from aotc.vmfb.devices.cuda import program as cuda_program
from aotc.vmfb.devices.cuda.driver import Gpu
from benchmarks import options, report
from benchmarks.gpu.graphs import bundles_of, need_gpu

REPEATS = 20
M = 1 << 20
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    """Return normally distributed f32 numbers."""
    return RNG.standard_normal(shape, dtype=np.float32)


def numbers(count: int, below: int) -> np.ndarray:
    """Return ``count`` random integers from 0 to ``below`` - 1."""
    return RNG.integers(0, below, count).astype(np.int32)


def positive(batch: int, n: int) -> np.ndarray:
    """Return positive definite matrices, which have a Cholesky factor."""
    x = normal(batch, n, n)
    return x @ x.swapaxes(1, 2) / np.float32(n) + 2 * np.eye(n, dtype=np.float32)


def segment_sums(size: int) -> Callable[..., Any]:
    """Return a function that sums values by segment, for ``size`` segments."""
    return lambda x, i: jax.ops.segment_sum(x, i, size)


def solved(a: Any, b: Any) -> Any:
    """Return the solutions of triangular systems with matrices ``a``."""
    return jax.lax.linalg.triangular_solve(a, b, left_side=True, lower=True)


def square(batch: int, n: int) -> list[np.ndarray]:
    """Return well-conditioned square matrices."""
    return [normal(batch, n, n) + 2 * np.eye(n, dtype=np.float32)]


def bits(key: Any) -> Any:
    """Return 64 MB of random bits from a key."""
    return jax.random.bits(key, (16 * M,))


def pool_gradient(x: Any, window: int) -> Any:
    """Return the gradient of the sum of squared window maxima, for windows with a stride of 2."""
    sizes, steps = (1, window, window, 1), (1, 2, 2, 1)
    return jax.grad(lambda y: (jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, sizes, steps, "SAME") ** 2).sum())(x)


def symmetric(batch: int, n: int) -> list[np.ndarray]:
    """Return symmetric matrices."""
    x = normal(batch, n, n)
    return [x + x.swapaxes(1, 2)]


SQUARES = ((1024, 16), (1024, 32), (256, 64), (64, 128), (64, 256))
Case = tuple[Callable[..., Any], Callable[[], list[np.ndarray]]]
CASES: dict[str, Case] = {
    "sort 1M": (jnp.sort, lambda: [normal(M)]),
    "sort 1000003": (jnp.sort, lambda: [normal(1000003)]),
    "argsort 1M": (jnp.argsort, lambda: [normal(M)]),
    "sort 4096x512": (jnp.sort, lambda: [normal(4096, 512)]),
    "top_k 64 of 131072": (lambda x: jax.lax.top_k(x, 64), lambda: [normal(131072)]),
    "top_k 64 of 64x8192": (lambda x: jax.lax.top_k(x, 64), lambda: [normal(64, 8192)]),
    "top_k 8 of 64x131072": (lambda x: jax.lax.top_k(x, 8), lambda: [normal(64, 131072)]),
    "cumsum 1M": (jnp.cumsum, lambda: [normal(M)]),
    "cumsum 16M": (jnp.cumsum, lambda: [normal(16 * M)]),
    "cumsum 4096x4096 rows": (lambda x: jnp.cumsum(x, 1), lambda: [normal(4096, 4096)]),
    "cumsum 4096x4096 columns": (lambda x: jnp.cumsum(x, 0), lambda: [normal(4096, 4096)]),
    "segment_sum 1M to 1000": (segment_sums(1000), lambda: [normal(M), numbers(M, 1000)]),
    "segment_sum 1M to 1000, sorted": (segment_sums(1000), lambda: [normal(M), np.sort(numbers(M, 1000))]),
    "segment_sum 1M to 100000": (segment_sums(100000), lambda: [normal(M), numbers(M, 100000)]),
    "segment_max 1M to 1000": (lambda x, i: jax.ops.segment_max(x, i, 1000), lambda: [normal(M), numbers(M, 1000)]),
    "sort 16M": (jnp.sort, lambda: [normal(16 * M)]),
    "sort 1M int8": (jnp.sort, lambda: [numbers(M, 100).astype(np.int8)]),
    "scatter add rows": (lambda x, i, u: x.at[i].add(u),
                         lambda: [normal(50000, 256), numbers(8192, 50000), normal(8192, 256)]),
    "scatter set rows": (lambda x, i, u: x.at[i].set(u),
                         lambda: [normal(50000, 256), np.arange(8192, dtype=np.int32) * 6, normal(8192, 256)]),
    "gather rows": (lambda x, i: x[i], lambda: [normal(50000, 256), numbers(65536, 50000)]),
    "cholesky 64x256x256": (jnp.linalg.cholesky, lambda: [positive(64, 256)]),
    "cholesky 256x64x64": (jnp.linalg.cholesky, lambda: [positive(256, 64)]),
    "triangular_solve 64x256x64": (solved, lambda: [np.tril(positive(64, 256)), normal(64, 256, 64)]),
    "fft 4096x1024": (jnp.fft.fft, lambda: [normal(4096, 1024).astype(np.complex64)]),
    "fft 4096x4096": (jnp.fft.fft, lambda: [normal(4096, 4096).astype(np.complex64)]),
    "segment_prod 1M to 100000": (lambda x, i: jax.ops.segment_prod(x, i, 100000),
                                  lambda: [normal(M), numbers(M, 100000)]),
    "histogram 1M, 256 bins": (lambda x: jnp.histogram(x, bins=256)[0], lambda: [normal(M)]),
    "bincount 16M to 256": (lambda i: jnp.bincount(i, length=256), lambda: [numbers(16 * M, 256)]),
    "bincount 1M to 100000": (lambda i: jnp.bincount(i, length=100000), lambda: [numbers(M, 100000)]),
    "median 1M": (jnp.median, lambda: [normal(M)]),
    "median 4096x1000 rows": (lambda x: jnp.median(x, 1), lambda: [normal(4096, 1000)]),
    "unique 1M": (lambda i: jnp.unique(i, size=1000), lambda: [numbers(M, 1000)]),
    "gather 4M of 16M": (lambda x, i: x[i], lambda: [normal(16 * M), numbers(4 * M, 16 * M)]),
    "take_along_axis 4096x4096": (lambda x, i: jnp.take_along_axis(x, i, 1),
                                  lambda: [normal(4096, 4096), numbers(16 * M, 4096).reshape(4096, 4096)]),
    "searchsorted 1M in 1M": (jnp.searchsorted, lambda: [np.sort(normal(M)), normal(M)]),
    **{f"lu {b}x{n}x{n}": (lambda a: jax.lax.linalg.lu(a)[:2], partial(square, b, n)) for b, n in SQUARES},
    **{f"qr {b}x{n}x{n}": (jnp.linalg.qr, partial(square, b, n)) for b, n in SQUARES},
    "solve 256x64x64": (lambda a: jnp.linalg.solve(a, a[:, :, :1]), lambda: square(256, 64)),
    **{f"max pool gradient {w}x{w}": (partial(pool_gradient, window=w), lambda: [normal(32, 112, 112, 64)])
       for w in (2, 3)},
    **{f"eigh {b}x{n}x{n}": (jnp.linalg.eigh, partial(symmetric, b, n)) for b, n in SQUARES[:4]},
    **{f"svd {b}x{n}x{n}": (partial(jnp.linalg.svd, full_matrices=False), partial(square, b, n))
       for b, n in SQUARES[:4]},
    "random bits 64 MB": (bits, lambda: [np.array([1, 2], np.uint32)]),
}  # fmt: skip


def compile_case(name: str) -> bytes:
    """Compile the case ``name`` to a bundle."""
    function, make = CASES[name]
    return aotc.compile(jax.jit(function), *make(), target="cuda:sm_90", source=False)


class DeviceTimer:
    """Timer of GPU work: replaces the driver's methods by methods that record events around it."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any, Any, int]] = []
        self.repeats = 0  # how often graphs run again: what a loop has in place is then no result any more

    def event(self, gpu: Gpu) -> Any:
        """Record an event on the stream and return it."""
        event = ctypes.c_void_p()
        driver.call("cuEventCreate", ctypes.byref(event), 0)
        driver.call("cuEventRecord", event, gpu.stream)
        return event

    def install(self, kernels: bool) -> None:
        """Time graphs, or with ``kernels`` each kernel, which is then launched on its own."""
        run_graph, launch = Gpu.run_graph, Gpu.launch

        def graph(gpu: Gpu, recorded: Any) -> None:
            run_graph(gpu, recorded)
            if not self.repeats:
                return
            begin = self.event(gpu)
            for _ in range(self.repeats):
                run_graph(gpu, recorded)
            self.spans.append(("graph", begin, self.event(gpu), self.repeats))

        def one(gpu: Gpu, function: Any, shape: Any, parameters: Any) -> None:
            begin = self.event(gpu)
            launch(gpu, function, shape, parameters)
            self.spans.append((f"{shape.blocks[0]}x{shape.threads}", begin, self.event(gpu), 1))

        Gpu.run_graph = graph  # type: ignore[method-assign]
        if kernels:
            Gpu.launch = one  # type: ignore[method-assign]
            made = cuda_program.CudaProgram.__init__
            cuda_program.CudaProgram.__init__ = lambda self, *a, **_: made(self, *a[:5], False)  # type: ignore[misc]

    def times(self) -> list[tuple[str, float]]:
        """Return the names and seconds of the timed work."""
        found = []
        for what, begin, end, repeats in self.spans:
            driver.call("cuEventSynchronize", end)
            took = ctypes.c_float()
            driver.call("cuEventElapsedTime", ctypes.byref(took), begin, end)
            found.append((what, took.value / 1e3 / repeats))
        self.spans.clear()
        return found


def jax_results_and_seconds(function: Callable[..., Any], args: list[np.ndarray]) -> tuple[list[np.ndarray], float]:
    """Return the results of ``jax.jit(function)``, and the seconds of a call."""
    jitted, placed = jax.jit(function), [jax.device_put(a) for a in args]
    want = jax.block_until_ready(jitted(*placed))
    begin = perf_counter()
    for _ in range(REPEATS):
        last = jitted(*placed)
    jax.block_until_ready(last)
    took = (perf_counter() - begin) / REPEATS
    return [np.asarray(x) for x in jax.tree.leaves(want)], took


def largest_relative_difference(got: list[Any], want: list[np.ndarray]) -> float:
    """Return the largest absolute difference of results, relative to the largest value."""
    found = 0.0
    for a, b in zip(got, want, strict=True):
        wide = np.complex128 if b.dtype.kind == "c" else np.float64
        x, y = np.asarray(a).astype(wide), b.astype(wide)
        found = max(found, float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-30)))
    return found


def measure(name: str, data: bytes, watch: DeviceTimer, table: report.Table) -> None:
    """Add the row of a case."""
    function, make = CASES[name]
    args = make()
    module = aotc.load(data)
    got = module.invoke("main", *args)
    watch.times()
    watch.repeats = REPEATS
    module.invoke("main", *args)
    spans = watch.times()
    watch.repeats = 0
    want, theirs = jax_results_and_seconds(function, args)
    ours = sum(took for _, took in spans)
    table.add(name, ours, theirs, ours / theirs, largest_relative_difference(got, want))
    if len(spans) > 1:
        report.note(f"{name}: " + ", ".join(f"{what} {1e6 * took:.1f} us" for what, took in spans))


def run(
    only: options.Only = "",
    compile_: options.CompileTo = None,
    bundles: options.Bundles = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Also the time of each launch.")] = False,
) -> None:
    """Print a row for each case."""
    data = bundles_of(options.select(CASES, only), compile_case, compile_, bundles)
    if compile_:
        return
    need_gpu()
    watch = DeviceTimer()
    watch.install(kernels)
    table = report.Table("case", report.us("aotc"), report.us("jax"), report.Column("aotc/jax"), "error")
    for name, bundle in data.items():
        try:
            measure(name, bundle, watch, table)
        except Exception as error:  # the others are still worth measuring
            table.failed(name, error)
    table.mean("aotc/jax")
