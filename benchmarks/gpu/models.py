"""Models next to jax.jit, arrays on the GPU.

Two pairs of columns: a call until its results are ready, both in turn; and a call among many asynchronous calls back
to back: the time for which the GPU is busy, or the host if that is slower. The error is the largest difference from
``jax.jit`` on the CPU in full precision, relative to the largest value, for both engines.
"""

from __future__ import annotations

from typing import Annotated, Any

import jax
import numpy as np
import typer

import aotc
from aotc.vmfb.devices.cuda import driver
from benchmarks import options, report, timing
from benchmarks.gpu.graphs import need_gpu
from benchmarks.programs.gpu_models import ZOO, Case

BEHIND = 30  # calls that are waited for together


def largest_relative_difference(got: list[Any], want: list[Any]) -> float:
    """Return the largest absolute difference of results, relative to the largest value."""
    both = zip(got, want, strict=True)
    pairs = [(np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)) for a, b in both]
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)) for a, b in pairs)


def results_on_cpu(case: Case) -> list[np.ndarray]:
    """Return the results of ``jax.jit`` on the CPU, in full precision."""
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        return [np.asarray(x) for x in jax.tree.leaves(jax.jit(case.function)(case.weights, *case.inputs))]


def compile_model(case: Case) -> bytes:
    """Compile a model for a GPU of compute capability 9.0."""
    return aotc.compile(jax.jit(case.function), case.weights, *case.inputs, target="cuda:sm_90", source=False)


def measure(name: str, table: report.Table, rounds: int) -> None:
    """Add the row of a model."""
    case = ZOO[name]()
    arguments = (case.weights, *case.inputs)
    module = aotc.load(compile_model(case))
    placed = [module.put(np.asarray(x)) for x in jax.tree.leaves(arguments)]
    jitted, theirs = jax.jit(case.function), jax.device_put(arguments)
    calls: dict[str, timing.Call] = {
        "aotc": lambda: module.invoke("main", *placed, results="device"), "jax": lambda: jitted(*theirs),
    }  # fmt: skip
    want = results_on_cpu(case)
    results = [x.numpy() for x in calls["aotc"]()], jax.tree.leaves(calls["jax"]())
    errors = [largest_relative_difference(got, want) for got in results]
    wait = lambda: driver.call("cuCtxSynchronize")
    ready = timing.interleaved(calls, rounds=rounds, wait=wait)
    behind = timing.interleaved(calls, rounds=3, wait=wait, batch=BEHIND)
    cells = [x for times in (ready, behind) for x in (*map(times.median, calls), times.ratio("aotc", "jax"))]
    table.add(name, *cells, *errors)
    if errors[0] > max(case.tolerance, 2 * errors[1]):
        report.note(f"{name}: WRONG, the error is {errors[0]:.1e}")


def run(
    only: options.Only = "",
    rounds: options.Rounds = 30,
    compile_: Annotated[bool, typer.Option("--compile", help="Only compile, into the cache; needs no GPU.")] = False,
) -> None:
    """Print a row for each model, and the means."""
    if not compile_:
        need_gpu()
    columns = [report.us("aotc"), report.us("jax"), report.ratio("aotc/jax")]
    behind = [report.us("behind"), report.us("jax behind"), report.ratio("behind/jax")]
    table = report.Table("model", *columns, *behind, "error", "jax error")
    for name in options.select(ZOO, only):
        try:
            if compile_:
                compile_model(ZOO[name]())
            else:
                measure(name, table, rounds)
        except Exception as error:  # the others are still worth measuring
            table.failed(name, error)
    if table.rows:
        table.mean("aotc/jax")
        table.mean("behind/jax")
