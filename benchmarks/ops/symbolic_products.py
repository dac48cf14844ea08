"""Matmuls of symbolic sizes next to static code and XLA.

Each program is compiled once for symbolic sizes, and once by aotc and by XLA for each size. All three take turns.
``--compile-time`` measures compilation instead: of the symbolic program, and of a static one, without the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import process_time
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import typer
from jax import export

import aotc
from benchmarks import options, report, timing
from benchmarks.peers.jax_jit import aotc_and_jax_calls

Shapes = tuple[str, ...]
SQUARES: Shapes = ("n,n", "n,n")
CASES: dict[str, tuple[Callable[..., Any], Shapes, str]] = {
    "A @ B": (jnp.matmul, SQUARES, "float32"),
    "A @ B, f64": (jnp.matmul, SQUARES, "float64"),
    "A @ B, complex": (jnp.matmul, SQUARES, "complex64"),
    "A @ B, bf16": (jnp.matmul, SQUARES, "bfloat16"),
    "A @ B, f16": (jnp.matmul, SQUARES, "float16"),
    "A @ B, i32": (jnp.matmul, SQUARES, "int32"),
    "relu(A @ B + c)": (lambda x, y, c: jax.nn.relu(x @ y + c), (*SQUARES, "n"), "float32"),
    "x @ x.T": (lambda x: x @ x.T, ("n,64",), "float32"),
    "x.T @ y": (lambda x, y: x.T @ y, ("n,48", "n,80"), "float32"),
    "A.T @ B": (lambda x, y: x.T @ y, SQUARES, "float32"),
    "A @ B.T": (lambda x, y: x @ y.T, SQUARES, "float32"),
    "batch of 5": (jnp.matmul, ("5,n,32", "5,32,n"), "float32"),
    "columns alone": (jnp.matmul, ("64,128", "128,n"), "float32"),
    "slices": (lambda x, y: x[:, 1:] @ y[1:], SQUARES, "float32"),
    "two": (lambda x, y: jnp.tanh(x @ y) @ y, SQUARES, "float32"),
}


def types(shapes: Shapes, dtype: str, n: int = 0) -> list[jax.ShapeDtypeStruct]:
    """Return the types of arguments of size ``n``, or of symbolic size for 0."""
    kind, scope = np.dtype(getattr(ml_dtypes, dtype, dtype)), export.SymbolicScope()
    if not n:
        return [jax.ShapeDtypeStruct(export.symbolic_shape(s, scope=scope), kind) for s in shapes]
    return [jax.ShapeDtypeStruct([n if d == "n" else int(d) for d in s.split(",")], kind) for s in shapes]


def exported(case: str, n: int = 0) -> export.Exported:
    """Return the ``jax.export`` of a case for size ``n``, or for a symbolic size with 0."""
    function, shapes, dtype = CASES[case]
    return export.export(jax.jit(function))(*types(shapes, dtype, n))


def compile_time(model: export.Exported) -> float:
    """Return the processor time of a compilation in seconds."""
    begin = process_time()
    aotc.compile(model, cache=False, jobs=1)
    return process_time() - begin


def run(
    sizes: Annotated[str, typer.Option(help="Sizes, separated by commas.")] = "7,31,64,100,128,256,500,1000",
    compile_time_: Annotated[bool, typer.Option("--compile-time", help="Measure compilation.")] = False,
    only: options.Only = "",
    threads: options.Threads = 1,
    rounds: options.Rounds = 9,
    seconds: options.Seconds = 0.01,
) -> None:
    """Print a row for each program and size."""
    clock = timing.pin(threads)
    jax.config.update("jax_enable_x64", True)
    numbers = [int(n) for n in ("64" if timing.SMOKE else sizes).split(",")]
    columns = [report.us("symbolic"), report.us("static"), report.us("XLA")]
    table = report.Table("matmul, n", *columns, report.ratio("symbolic/static"), report.ratio("symbolic/XLA"))
    compiling = report.Table("matmul", report.ms("symbolic"), report.ms("static"), report.ratio("symbolic/static"))
    for name in options.select(CASES, only):
        if compile_time_:
            models = {"symbolic": exported(name), "static": exported(name, numbers[0])}
            times = timing.measured({key: partial(compile_time, model) for key, model in models.items()}, rounds)
            compiling.add(name, times.median("symbolic"), times.median("static"), times.ratio("symbolic", "static"))
            continue
        function, shapes, dtype = CASES[name]
        module = aotc.load(aotc.compile(exported(name)), threads=threads)
        random = np.random.default_rng(0)
        for n in numbers:
            arguments = [(4 * random.standard_normal(t.shape)).astype(t.dtype) for t in types(shapes, dtype, n)]
            calls = aotc_and_jax_calls(function, arguments, threads, 5e-2 if dtype in ("bfloat16", "float16") else 1e-3)
            calls["symbolic"] = partial(module.invoke, "main", *arguments)
            times = timing.interleaved(calls, rounds=rounds, seconds=seconds, clock=clock)
            medians = [times.median(engine) for engine in ("symbolic", "aotc", "XLA")]
            table.add(f"{name}, {n}", *medians, times.ratio("symbolic", "aotc"), times.ratio("symbolic", "XLA"))
