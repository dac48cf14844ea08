"""Matrices times 1 to 8 rows or columns.

Also batches of these; all operands are arguments. A loop that reads as many bytes as the matrix has, on as many
threads, takes turns with both engines: the last column is aotc's fraction of its speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import ml_dtypes
import numpy as np

from benchmarks import options, report, timing
from benchmarks.ops.read_loop import read_loop
from benchmarks.peers.jax_jit import aotc_and_jax_calls

Shape = tuple[int, ...]


SIZES = ((256, 256), (512, 512), (1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192))
OTHERS = ((65536, 128), (16384, 512), (512, 16384), (768, 50257), (1000, 1003), (4099, 4097), (11008, 4096))


def cases() -> Iterator[tuple[str, Callable[..., Any], tuple[Shape, ...], str]]:
    """Yield name, function, shapes of the arguments (the matrix first), and dtype."""
    def row(w: Any, x: Any) -> Any:
        return x @ w

    def column(w: Any, x: Any) -> Any:
        return w @ x

    def dense(w: Any, x: Any, b: Any) -> Any:
        return jax.nn.gelu(x @ w + b)

    def dense_column(w: Any, x: Any, b: Any) -> Any:
        return jax.nn.gelu(w @ x + b[:, None])

    for k, n in (*SIZES, *OTHERS):
        yield f"row {k} x {n}", row, ((k, n), (1, k)), "float32"
        yield f"column {k} x {n}", column, ((k, n), (n, 1)), "float32"
    for few in (2, 3, 4, 5, 8):
        for k, n in ((1024, 1024), (4096, 4096), (4099, 4097)):
            yield f"{few} rows {k} x {n}", row, ((k, n), (few, k)), "float32"
            yield f"{few} columns {k} x {n}", column, ((k, n), (n, few)), "float32"
    for batch, k, n in ((8, 1024, 1024), (64, 256, 256), (1000, 64, 64), (12, 64, 2048), (12, 2048, 64)):
        yield f"batch {batch} of row {k} x {n}", row, ((batch, k, n), (batch, 1, k)), "float32"
        yield f"batch {batch} of column {k} x {n}", column, ((batch, k, n), (batch, n, 1)), "float32"
        yield f"batch {batch} of 4 columns {k} x {n}", column, ((batch, k, n), (batch, n, 4)), "float32"
    for few in (1, 4, 8):
        yield f"{few} rows, bias, gelu 4096 x 4096", dense, ((4096, 4096), (few, 4096), (4096,)), "float32"
        yield f"{few} columns, bias, gelu 4096 x 4096", dense_column, ((4096, 4096), (4096, few), (4096,)), "float32"
        yield f"{few} rows turned 4096 x 4096", lambda w, x: x.T @ w, ((4096, 4096), (4096, few)), "float32"
        yield f"{few} columns turned 4096 x 4096", lambda w, x: w @ x.T, ((4096, 4096), (few, 4096)), "float32"
        for dtype in ("bfloat16", "float16"):
            yield f"{few} rows {dtype} 4096 x 4096", row, ((4096, 4096), (few, 4096)), dtype
            yield f"{few} columns {dtype} 4096 x 4096", column, ((4096, 4096), (4096, few)), dtype


def operands(shapes: tuple[Shape, ...], dtype: str) -> list[Any]:
    random = np.random.default_rng(0)
    kind = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    return [(random.standard_normal(shape, "float32") / 4).astype(kind) for shape in shapes]


def reads_of(matrix: np.ndarray, threads: int) -> timing.Call:
    """Return a call that reads a matrix on ``threads`` threads, each of them a part."""
    part = matrix.nbytes // threads // 512 * 512
    starts = [matrix.ctypes.data + i * part for i in range(threads)]
    read = read_loop()
    if threads == 1:
        return lambda: read(starts[0], part)
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(lambda at: read(at, part), starts))


def run(
    only: options.Only = "", threads: options.Threads = 1, rounds: options.Rounds = 5, seconds: options.Seconds = 0.03
) -> None:
    """Print a row for each matmul."""
    clock = timing.pin(threads)
    columns = [report.us("aotc"), report.us("XLA"), report.ratio("aotc/XLA"), report.Column("GB/s", 1e-9)]
    table = report.Table("matmul", *columns, report.ratio("of reading"))
    known = {name: rest for name, *rest in cases()}
    for name in options.select(known, only):
        function, shapes, dtype = known[name]
        arguments = operands(shapes, dtype)
        calls = aotc_and_jax_calls(function, arguments, threads, 1e-4 if dtype == "float32" else 2e-2)
        calls["reads"] = reads_of(arguments[0], threads)
        times = timing.interleaved(calls, rounds=rounds, seconds=seconds, clock=clock)
        ours = times.median("aotc")
        speed = arguments[0].nbytes / ours
        table.add(name, ours, times.median("XLA"), times.ratio("aotc", "XLA"), speed, times.ratio("reads", "aotc"))
