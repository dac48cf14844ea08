"""Compile time of generated modules of growing size.

It should grow linearly. Each module is compiled with an empty cache except for the executor, which is the same for
all, then by XLA, in this process; ``us/op`` is aotc's time per op of the StableHLO module. ``--only`` selects
families of modules. ``--start`` instead measures processes of ``aotc compile`` for a program of one op, with the
processor time of all processes that they started.
"""

from __future__ import annotations

import cProfile
import ctypes
import os
import pstats
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

import aotc
from benchmarks import children, options, report, timing
from benchmarks.compile.processes import cache_with_executor

Model = tuple[Callable[..., Any], tuple[Any, ...]]


def elementwise(count: int) -> Model:
    """Return ``count`` steps of a long chain of scalar functions on a vector."""

    def f(x: Any, y: Any) -> Any:
        for k in range(count // 4):
            x = jnp.sin(x) * (0.5 + k % 7 * 0.01) + y
        return x

    return f, (np.ones(64, "float32"), np.ones(64, "float32"))


def mlp(count: int) -> Model:
    """Return a network of ``count / 5`` layers whose weights are arguments."""

    def f(x: Any, w: Any, b: Any) -> Any:
        for k in range(count // 5):
            x = jnp.tanh(x @ w[k % 4] + b[k % 4])
        return x

    return f, (np.ones((8, 32), "float32"), np.ones((4, 32, 32), "float32"), np.ones((4, 32), "float32"))


def baked(count: int) -> Model:
    """Return a network of ``count / 4`` layers, each with its own constant weights."""
    rng = np.random.default_rng(0)
    layers = [rng.normal(size=(64, 64), scale=0.1).astype("float32") for _ in range(count // 4)]

    def f(x: Any) -> Any:
        for w in layers:
            x = jnp.tanh(x @ w + 1)
        return x

    return f, (np.ones((8, 64), "float32"),)


def physics(count: int) -> Model:
    """Return unrolled steps of a stencil: shifts, a reduction, a division and a wide state."""

    def f(u: Any, v: Any, h: Any) -> Any:
        for k in range(count // 24):
            flux = 0.5 * (u + jnp.roll(u, 1, 0)) * v - 0.1 * (jnp.roll(v, -1, 1) - v)
            u = u - h * (flux - jnp.roll(flux, 1, 0))
            v = v + h * (u * u).sum(1, keepdims=True) / (1.0 + k) - h * jnp.tanh(v)
        return u, v

    return f, (np.ones((16, 16), "float32"), np.ones((16, 16), "float32"), np.float32(0.01))


def wide(count: int) -> Model:
    """Return ``count / 4`` small independent computations whose results are combined at the end."""

    def f(x: Any) -> Any:
        return jnp.stack([jnp.exp(x[k % 50 : k % 50 + 14]).sum() / (k + 1) for k in range(count // 6)])

    return f, (np.linspace(0, 1, 64, dtype="float32"),)


FAMILIES = {f.__name__: f for f in (elementwise, mlp, baked, physics, wide)}


def operations(text: str) -> int:
    """Return the number of ops in the text of a module."""
    return sum(" = " in line for line in text.splitlines())


def measure(model: Model, cache: Path, profile: bool) -> tuple[int, float, float]:
    """Compile a model by aotc and by XLA; return the number of ops of its module, and the seconds of both.

    ``cache`` is the cache directory at the start.
    """
    function, args = model
    lowered = jax.jit(function).lower(*args)
    text = lowered.as_text()
    profiler = cProfile.Profile()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AOTC_CACHE_DIR"] = str(Path(folder) / "cache")
        shutil.copytree(cache, os.environ["AOTC_CACHE_DIR"])
        begin = time.perf_counter()
        if profile:
            profiler.enable()
        data = aotc.compile(text.encode())
        profiler.disable()
        ours = time.perf_counter() - begin
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    begin = time.perf_counter()
    compiled = lowered.compile()
    theirs = time.perf_counter() - begin
    leaves = [np.asarray(x) for x in jax.tree.leaves(compiled(*args))]
    for a, b in zip(aotc.load(data).invoke("main", *map(np.asarray, args)), leaves, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * float(np.abs(b).max()))
    return operations(text), ours, theirs


ONE_OP = """func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {
  %y = stablehlo.add %x, %x : tensor<3xf32>
  return %y : tensor<3xf32>
}
"""
BECOME_SUBREAPER = 36


def run_whole(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Run a process; return its wall time in seconds, and the processor time of all its processes."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=environment, check=True)
    seconds = time.perf_counter() - begin
    while True:
        try:
            os.wait()  # those that it left behind come here
        except ChildProcessError:
            break
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def start(rounds: int) -> None:
    """Print the time of a process for one op with an empty cache, with a cached executor, and with a cached bundle."""
    ctypes.CDLL(None).prctl(BECOME_SUBREAPER, 1, 0, 0, 0)
    times: dict[str, list[tuple[float, float]]] = {"empty": [], "executor": [], "bundle": []}
    code = "from aotc_cli.start import main; main()"
    for _ in range(1 if timing.SMOKE else rounds):
        with tempfile.TemporaryDirectory() as folder:
            environment = children.environment(AOTC_CACHE_DIR=str(Path(folder) / "cache"))
            for n, row in enumerate(times.values()):
                model, bundle = Path(folder) / f"{min(n, 1)}.mlir", Path(folder) / "out.vmfb"
                model.write_text(ONE_OP.replace("add", "subtract") if n else ONE_OP)
                command = [sys.executable, "-c", code, "compile", str(model), "-q", "-o", str(bundle)]
                row.append(run_whole(command, environment))
    table = report.Table("in the cache", report.Column("wall s"), report.Column("processor s"))
    for name, row in times.items():
        table.add(name, *(statistics.median(t[k] for t in row) for k in (0, 1)))


def run(
    only: options.Only = "",
    sizes: Annotated[str, typer.Option(help="About how many ops, separated by commas.")] = "1000,4000,16000",
    profile: Annotated[bool, typer.Option("--profile", help="Also print a profile of aotc.")] = False,
    start_: Annotated[bool, typer.Option("--start", help="Measure processes for one op instead.")] = False,
    rounds: options.Rounds = 3,
) -> None:
    """Print a row for each family and size."""
    if start_:
        start(rounds)
        return
    columns = [report.Column("ops"), report.Column("aotc s"), report.us("op"), report.Column("XLA s")]
    table = report.Table("module", *columns, report.Column("aotc/XLA"))
    with cache_with_executor() as cache:
        for name in options.select(FAMILIES, only, smallest="mlp"):
            for size in (50,) if timing.SMOKE else map(int, sizes.split(",")):
                ops, ours, theirs = measure(FAMILIES[name](size), cache, profile)
                table.add(name, ops, ours, ours / ops, theirs, ours / theirs)
