"""Elementwise ops, data movement, reductions.

Times are the GPU's, of many launches back to back on resident arrays: aotc's by events around a graph, XLA's by the
clock around asynchronous calls. The fraction of a copy's bandwidth compares with a copy of as many bytes in the same
process, by the same clock. ``--compile DIR`` writes the bundles on any machine, ``--bundles DIR`` measures them.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

import aotc
from aotc.vmfb.devices.cuda import driver
from aotc.vmfb.devices.cuda.libcuda.graphs import GraphMaker
from benchmarks import options, report
from benchmarks.gpu.graphs import bundles_of, need_gpu

TARGET = "cuda:sm_90"


MEGABYTES = (1, 64, 256)
REPEATS = 20
Shape = tuple[tuple[int, ...], Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A function, and the shapes of its arguments for a given number of bytes of the first one."""

    name: str
    function: Callable[..., Any]
    shapes: Callable[[int], list[Shape]]


def _rows(width: int, dtype: Any = np.float32) -> Callable[[int], list[Shape]]:
    return lambda size: [((max(size // np.dtype(dtype).itemsize // width, 1), width), dtype)]


def _square(dtype: Any, batch: int = 0) -> Callable[[int], list[Shape]]:
    def shapes(size: int) -> list[Shape]:
        rows = 1
        while rows * rows * np.dtype(dtype).itemsize * max(batch, 1) < size:
            rows *= 2
        columns = size // (rows * np.dtype(dtype).itemsize * max(batch, 1))
        return [((batch, rows, columns) if batch else (rows, columns), dtype)]

    return shapes


def _layer_norm(x: Any, scale: Any, bias: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + bias


def _with(shapes: Callable[[int], list[Shape]], *more: Shape) -> Callable[[int], list[Shape]]:
    return lambda size: [*shapes(size), *more]


def _flat(dtype: Any = np.float32, count: int = 1, less: int = 0) -> Callable[[int], list[Shape]]:
    return lambda size: [((size // np.dtype(dtype).itemsize - less,), dtype)] * count


F32, BF16 = np.float32, jnp.bfloat16
CASES = (
    Case("copy", lambda x: jax.lax.optimization_barrier(x) * F32(2), _flat()),
    Case("add", jnp.add, _flat(count=2)),
    Case("add, odd size", jnp.add, _flat(count=2, less=3)),
    Case("gelu", jax.nn.gelu, _flat()),
    Case("gelu bf16", jax.nn.gelu, _flat(BF16)),
    Case("convert f32 to bf16", lambda x: x.astype(BF16), _flat()),
    Case("bias and gelu bf16", lambda x, b: jax.nn.gelu(x + b), _with(_rows(4096, BF16), ((4096,), BF16))),
    Case("bias", jnp.add, _with(_rows(1000), ((1000,), F32))),
    Case("transpose f32", lambda x: x.T, _square(F32)),
    Case("transpose bf16", lambda x: x.T, _square(BF16)),
    Case("transpose batched", lambda x: x.transpose(0, 2, 1), _square(F32, 16)),
    Case("transpose and add", lambda x, y: x.T + y, lambda n: [*_square(F32)(n), (_square(F32)(n)[0][0][::-1], F32)]),
    Case("row sum 64", lambda x: x.sum(1), _rows(64)),
    Case("row sum 1024", lambda x: x.sum(1), _rows(1024)),
    Case("row sum 65536", lambda x: x.sum(1), _rows(65536)),
    Case("column sum", lambda x: x.sum(0), _rows(1024)),
    Case("full sum", lambda x: x.sum(), _flat()),
    Case("argmax 1024", lambda x: jnp.argmax(x, 1), _rows(1024)),
    Case("softmax 512", jax.nn.softmax, _rows(512)),
    Case("softmax 8192", jax.nn.softmax, _rows(8192)),
    Case("softmax 8192 bf16", jax.nn.softmax, _rows(8192, BF16)),
    Case("layer norm 1024", _layer_norm, _with(_rows(1024), ((1024,), F32), ((1024,), F32))),
    Case("concat", lambda x, y: jnp.concatenate([x, y], 1), lambda n: [*_rows(1024)(n // 2), *_rows(1024)(n // 2)]),
    Case("pad", lambda x: jnp.pad(x, ((1, 1), (3, 5))), _rows(1024)),
    Case("slice", lambda x: x[:, 1:-1], _rows(1026)),
    Case("one hot", lambda i: jax.nn.one_hot(i, 1024), lambda n: [((n // 4096,), np.int32)]),
    Case("iota", lambda x: x + jax.lax.broadcasted_iota(F32, (x.shape[0], 1024), 1), lambda n: [((n // 4096, 1), F32)]),
)


def cases() -> dict[str, tuple[Case, int]]:
    """Return each case with its size in megabytes."""
    return {f"{case.name} {megabytes} MB": (case, megabytes) for case in CASES for megabytes in MEGABYTES}


def compile_case(name: str) -> bytes:
    """Compile the case ``name`` to a bundle."""
    case, megabytes = cases()[name]
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in case.shapes(megabytes << 20)]
    return aotc.compile(jax.jit(case.function), *arguments, target=TARGET)


class RecordedLaunches:
    """Kernel launches of a call, to be repeated as one CUDA graph."""

    def __init__(self) -> None:
        self.gpu: Any = None
        self.seen: list[tuple[Any, ...]] = []
        launch = GraphMaker.launch

        def noted(maker: Any, after: Any, *arguments: Any) -> Any:
            self.gpu = maker._gpu
            self.seen.append(arguments)
            return launch(maker, after, *arguments)

        GraphMaker.launch = noted  # type: ignore[method-assign]

    def once(self) -> list[tuple[Any, ...]]:
        """Return each launch once, by its parameter table."""
        return list({id(arguments[-1]): arguments for arguments in self.seen}.values())

    def seconds(self) -> float:
        """Return the median time of the recorded kernels over several measurements."""
        gpu, seen = self.gpu, self.once()
        gpu.make_context_current()
        made, last = gpu.new_graph(), ()
        for _ in range(REPEATS):
            for arguments in seen:
                last = (made.launch(last, *arguments),)
        graph = gpu.instantiate_graph(made)
        events = [ctypes.c_void_p() for _ in range(2)]
        for event in events:
            driver.call("cuEventCreate", ctypes.byref(event), 0)
        times = []
        for _ in range(5):
            for event in events:
                gpu.record_event(event)
                if event is events[0]:
                    gpu.run_graph(graph)
            gpu.synchronize_event(events[1])
            milliseconds = ctypes.c_float()
            driver.call("cuEventElapsedTime", ctypes.byref(milliseconds), *events)
            times.append(milliseconds.value / 1e3 / REPEATS)
        return statistics.median(times)


def xla_seconds(function: Callable[..., Any], arrays: list[Any]) -> float:
    """Return the time of a call of ``function`` among many asynchronous calls."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(REPEATS):
            made = function(*arrays)
        jax.block_until_ready(made)
        times.append((time.perf_counter() - start) / REPEATS)
    return min(times)


def random_arrays(shapes: list[Shape]) -> list[np.ndarray]:
    """Return arguments that repeat the same 65536 random numbers."""
    start = np.random.default_rng(0).standard_normal(1 << 16).astype(F32)
    made = []
    for shape, dtype in shapes:
        numbers = start if np.dtype(dtype).kind != "i" else np.abs(start * 300).astype(np.int64)
        made.append(np.resize(numbers, shape).astype(dtype))
    return made


def largest_relative_difference(got: Any, want: Any) -> float:
    """Return the largest difference relative to the largest value, of a sample of the elements."""
    a, b = (np.asarray(x).reshape(-1)[: 1 << 22].astype(np.float64) for x in (got, want))
    return float(np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-30))


def run(
    only: options.Only = "",
    compile_: options.CompileTo = None,
    bundles: options.Bundles = None,
    limit: Annotated[float, typer.Option(help="Seconds after which no case begins.")] = 600.0,
) -> None:
    """Print a row for each case and size; the copies are always among them."""
    names = options.select(cases(), only)
    names = [name for name in cases() if name in names or name.startswith("copy ")]
    data = bundles_of(names, compile_case, compile_, bundles)
    if compile_:
        return
    need_gpu()
    begin, launches, copies = time.perf_counter(), RecordedLaunches(), {}
    columns = [report.us("aotc"), "GB/s", "% of copy", report.us("jax"), "kernels", "error"]
    table = report.Table("case", *columns)
    with ThreadPoolExecutor(8) as pool:
        known = {name: cases()[name] for name in names}
        theirs = {name: pool.submit(_by_xla, case, megabytes) for name, (case, megabytes) in known.items()}
        for name, (case, megabytes) in known.items():
            if time.perf_counter() - begin > limit:
                report.note(f"the limit of {limit:.0f} s is reached before {name}")
                break
            arrays = random_arrays(case.shapes(megabytes << 20))
            module = aotc.load(data[name], devices="cuda")
            (function,) = module.functions
            launches.seen.clear()
            (result,) = module.invoke(function, *arrays)
            ours = launches.seconds()
            on_gpu = [jax.device_put(a) for a in arrays]
            xla = theirs[name].result()
            error = largest_relative_difference(result, xla(*on_gpu))
            rate = (sum(a.nbytes for a in arrays) + result.nbytes) / ours / 1e9
            copies.setdefault(megabytes, rate)
            share = 100 * rate / copies[megabytes]
            table.add(name, ours, rate, share, xla_seconds(xla, on_gpu), len(launches.once()), error)


def _by_xla(case: Case, megabytes: int) -> Callable[..., Any]:
    types = [jax.ShapeDtypeStruct(*x) for x in case.shapes(megabytes << 20)]
    return jax.jit(case.function).lower(*types).compile()
