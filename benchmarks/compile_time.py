"""Compile time of generated modules of growing size, beside XLA's: it should grow linearly.

    python benchmarks/compile_time.py                      # all families, 1k to 16k ops
    python benchmarks/compile_time.py mlp --sizes 960 --profile
    python benchmarks/compile_time.py --start              # a process for a program of one op

Each module is compiled with an empty cache but for the executor, which is the same for all, then
by XLA, in this process; ``us/op`` is aotc's time over the ops of the StableHLO module. ``--start`` measures processes
of ``aotc compile``, with the processor time of all that they started.
"""

from __future__ import annotations

import argparse
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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aotc

Model = tuple[Callable[..., Any], tuple[Any, ...]]


def elementwise(count: int) -> Model:
    """Return ``count`` steps of one long chain of scalar functions on a vector."""

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
    """Return a network of ``count / 4`` layers, each with constant weights of its own."""
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
    """Return ``count / 4`` small independent computations whose results all meet at the end."""

    def f(x: Any) -> Any:
        return jnp.stack([jnp.exp(x[k % 50 : k % 50 + 14]).sum() / (k + 1) for k in range(count // 6)])

    return f, (np.linspace(0, 1, 64, dtype="float32"),)


FAMILIES = {f.__name__: f for f in (elementwise, mlp, baked, physics, wide)}


def operations(text: str) -> int:
    """Return how many ops a module has."""
    return sum(" = " in line for line in text.splitlines())


def measure(model: Model, started: Path, profile: bool) -> tuple[int, float, float]:
    """Return the ops of the module, and the seconds that aotc and XLA take to compile it.

    ``started`` is a cache directory to begin with.
    """
    function, args = model
    lowered = jax.jit(function).lower(*args)
    text = lowered.as_text()
    profiler = cProfile.Profile()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AOTC_CACHE_DIR"] = str(Path(folder) / "cache")
        shutil.copytree(started, os.environ["AOTC_CACHE_DIR"])
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
    """Return the seconds that a process takes, and those of the processor for it and all that it started."""
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


def starts(rounds: int = 3) -> None:
    """Print what a process takes for one op with an empty cache, with the executor in it, and with the bundle."""
    ctypes.CDLL(None).prctl(BECOME_SUBREAPER, 1, 0, 0, 0)
    found: dict[str, list[tuple[float, float]]] = {"empty": [], "executor": [], "bundle": []}
    code = "from aotc_cli.start import main; main()"
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "AOTC_CACHE_DIR": str(Path(folder) / "cache")}
            for n, times in enumerate(found.values()):
                model, made = Path(folder) / f"{min(n, 1)}.mlir", Path(folder) / "out.vmfb"
                model.write_text(ONE_OP.replace("add", "subtract") if n else ONE_OP)
                command = [sys.executable, "-c", code, "compile", str(model), "-q", "-o", str(made)]
                times.append(run_whole(command, environment))
    for name, times in found.items():
        seconds, processor = (statistics.median(t[k] for t in times) for k in (0, 1))
        print(f"cache: {name:9} {seconds:6.2f} s, of the processor {processor:6.2f} s", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--sizes", default="1000,4000,16000", help="about how many ops")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--start", action="store_true", help="measure processes for one op, and nothing else")
    given = parser.parse_args()
    if given.start:
        starts()
        return
    with tempfile.TemporaryDirectory() as started:
        os.environ["AOTC_CACHE_DIR"] = started
        aotc.compile(jax.jit(lambda x: x + 1), np.ones(3, "float32"))
        table(given, Path(started))


def table(given: argparse.Namespace, started: Path) -> None:
    """Measure and print a line for each family and size."""
    print(f"{'module':12} {'ops':>7} {'aotc s':>8} {'us/op':>7} {'XLA s':>8} {'aotc/XLA':>8}")
    for name in given.families:
        for size in map(int, given.sizes.split(",")):
            ops, ours, theirs = measure(FAMILIES[name](size), started, given.profile)
            ratios = f"{1e6 * ours / ops:7.0f} {theirs:8.2f} {ours / theirs:8.2f}"
            print(f"{name:12} {ops:7} {ours:8.2f} {ratios}", flush=True)


if __name__ == "__main__":
    main()
