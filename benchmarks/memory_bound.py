"""Measure what memory bounds on a GPU beside XLA: elementwise work, movements, reductions, rows.

``python benchmarks/memory_bound.py --compile FOLDER`` writes the bundles, on any machine; ``--run FOLDER`` measures
them. Times are the GPU's, of many launches in a row on resident arrays: ours by events around a graph, XLA's by the
clock around calls that wait for none. A share of a copy's bandwidth compares with a copy of as many bytes in the same
process, ours, by the same clock.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aotc

TARGET = "cuda:sm_90"
MEGABYTES = (1, 64, 256)
REPEATS = 20
Shape = tuple[tuple[int, ...], Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A function, and the shapes of its arguments for so many bytes of the first one."""

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


def _layer_norm(x, scale, bias):
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


def cases(only: str) -> Iterator[tuple[Case, int, list[Shape], Path]]:
    """Yield what is measured, and the name of its bundle."""
    for number, case in enumerate(CASES):
        for megabytes in MEGABYTES:
            if not only or case.name == "copy" or only in f"{case.name} {megabytes}":
                yield case, megabytes, case.shapes(megabytes << 20), Path(f"{number}_{megabytes}.vmfb")


def compile_all(folder: Path, only: str) -> None:
    """Write the bundles."""
    folder.mkdir(parents=True, exist_ok=True)
    for case, _, shapes, path in cases(only):
        arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
        aotc.compile(jax.jit(case.function), *arguments, target=TARGET).save(folder / path)


class Launches:
    """The kernels that a call launches, to be launched again as one graph."""

    def __init__(self) -> None:
        from aotc.vmfb.devices.cuda import driver
        from aotc.vmfb.devices.cuda.libcuda.graphs import GraphMaker

        self.driver, self.gpu, self.seen = driver, None, []
        launch = GraphMaker.launch

        def noted(maker, after, *arguments):
            self.gpu = maker._gpu
            self.seen.append(arguments)
            return launch(maker, after, *arguments)

        GraphMaker.launch = noted

    def once(self) -> list[tuple[Any, ...]]:
        """Return each launch once, by its table of parameters."""
        return list({id(arguments[-1]): arguments for arguments in self.seen}.values())

    def microseconds(self) -> float:
        """Return the time of the noted kernels, the median of some measurements."""
        gpu, seen = self.gpu, self.once()
        gpu.enter()
        made, last = gpu.new_graph(), ()
        for _ in range(REPEATS):
            for arguments in seen:
                last = (made.launch(last, *arguments),)
        graph = gpu.ready(made)
        events = [ctypes.c_void_p() for _ in range(2)]
        for event in events:
            self.driver.call("cuEventCreate", ctypes.byref(event), 0)
        times = []
        for _ in range(5):
            for event in events:
                gpu.record(event)
                if event is events[0]:
                    gpu.run_graph(graph)
            gpu.finish(events[1])
            found = ctypes.c_float()
            self.driver.call("cuEventElapsedTime", ctypes.byref(found), *events)
            times.append(found.value * 1000 / REPEATS)
        return sorted(times)[2]


def xla_microseconds(function: Callable[..., Any], arrays: list[Any]) -> float:
    """Return the time of a call of ``function`` among many that wait for none."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(REPEATS):
            made = function(*arrays)
        jax.block_until_ready(made)
        times.append((time.perf_counter() - start) / REPEATS)
    return min(times) * 1e6


def random_arrays(shapes: list[Shape]) -> list[np.ndarray]:
    """Return arguments: the first 65536 numbers again and again."""
    start = np.random.default_rng(0).standard_normal(1 << 16).astype(F32)
    made = []
    for shape, dtype in shapes:
        numbers = start if np.dtype(dtype).kind != "i" else np.abs(start * 300).astype(np.int64)
        made.append(np.resize(numbers, shape).astype(dtype))
    return made


def difference(found: Any, want: Any) -> float:
    """Return the largest difference as a share of the largest value, of what fits a short look."""
    a, b = (np.asarray(x).reshape(-1)[: 1 << 22].astype(np.float64) for x in (found, want))
    return float(np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-30))


def run_all(folder: Path, only: str, seconds: float) -> None:
    """Measure the bundles and print a row for each; ``seconds`` end it."""
    begin, launches, copies = time.perf_counter(), Launches(), {}
    todo = list(cases(only))
    with ThreadPoolExecutor(8) as pool:
        compiled = {
            path: pool.submit(
                lambda f, s: jax.jit(f).lower(*[jax.ShapeDtypeStruct(*x) for x in s]).compile(), case.function, shapes
            )
            for case, _, shapes, path in todo
        }
        for case, megabytes, shapes, path in todo:
            if time.perf_counter() - begin > seconds:
                break
            arrays = random_arrays(shapes)
            module = aotc.load(folder / path, devices="cuda")
            (name,) = module.functions
            launches.seen.clear()
            (found,) = module.invoke(name, *arrays)
            ours = launches.microseconds()
            function, on_gpu = compiled[path].result(), [jax.device_put(a) for a in arrays]
            want = function(*on_gpu)
            theirs = xla_microseconds(function, on_gpu)
            rate = (sum(a.nbytes for a in arrays) + found.nbytes) / ours / 1e3
            copies.setdefault(megabytes, rate)
            row = {
                "case": case.name, "MB": megabytes, "us": round(ours, 2), "GB/s": round(rate),
                "% of copy": round(100 * rate / copies[megabytes], 1), "jax us": round(theirs, 2),
                "kernels": len(launches.once()),
                "error": float(f"{difference(found, want):.1e}"),
            }  # fmt: skip
            print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", type=Path, help="folder that the bundles are written to")
    parser.add_argument("--run", type=Path, help="folder of the bundles to measure")
    parser.add_argument("--only", default="", help="part of a case's name and megabytes")
    parser.add_argument("--seconds", type=float, default=600.0, help="no case begins after so many")
    arguments = parser.parse_args()
    if arguments.compile:
        compile_all(arguments.compile, arguments.only)
    if arguments.run:
        run_all(arguments.run, arguments.only, arguments.seconds)


if __name__ == "__main__":
    main()
