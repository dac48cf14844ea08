"""Loop kernels with other limits on unrolled code.

Programs of ``benchmarks/programs/small_loops.py``, compiled with each value of ``UNROLLED_CODE`` and by XLA. Processor
time of a compilation, and of a call on one thread in turn with the value as it is.
"""

from __future__ import annotations

from time import process_time
from typing import Annotated, Any

import jax
import typer

import aotc
from aotc import pipeline
from aotc.lowering.program.while_kernels.unrolled_loops import UNROLLED_CODE
from benchmarks import options, report, timing
from benchmarks.compile.processes import cache_with_executor, compile_by_aotc, compile_by_xla
from benchmarks.costs.thresholds import replaced_threshold
from benchmarks.programs.small_loops import Program, programs


def compile_times(program: Program, values: dict[str, int], rounds: int, cache: Any) -> timing.Times:
    """Return the processor times of compilations with each value, and of XLA."""

    def ours(value: int) -> float:
        with replaced_threshold(UNROLLED_CODE, value):
            return compile_by_aotc(*program, cache, warm=True)[0]

    samples = {name: lambda value=value: ours(value) for name, value in values.items()}
    return timing.measured({**samples, "XLA": lambda: compile_by_xla(*program)[0]}, rounds, warm_up=False)


def call_times(program: Program, values: dict[str, int], rounds: int, seconds: float) -> timing.Times:
    """Return the processor times of calls of the program compiled with each value, and by XLA."""
    function, args = program
    leaves = [jax.numpy.asarray(x) for x in jax.tree.leaves(args)]
    arrays = jax.tree.leaves(args)
    calls = {}
    for name, value in values.items():
        with replaced_threshold(UNROLLED_CODE, value):
            module = aotc.load(aotc.compile(function, *args, source=False), threads=1)
        calls[name] = lambda module=module: module.invoke("main", *arrays)
    compiled = jax.jit(function).lower(*args).compile()
    given = jax.tree.unflatten(jax.tree.structure(args), leaves)
    calls["XLA"] = lambda: jax.block_until_ready(compiled(*given))
    return timing.interleaved(calls, rounds=rounds, seconds=seconds, clock=process_time)


def run(
    only: options.Only = "",
    values: Annotated[str, typer.Option(help="Values of the limit, separated by commas.")] = "32,64,256,512,1000000",
    rounds: options.Rounds = 3,
    seconds: options.Seconds = 0.02,
) -> None:
    """Print a row for each program, and the means."""
    pipeline.WORTH_SECONDS = float("inf")  # a bundle of another value is not for later compilations
    found = programs()
    names = options.select(found, only, smallest="newton")
    limits = {"now": UNROLLED_CODE.value, **{v: int(v) for v in values.split(",") if v}}
    others = [name for name in limits if name != "now"]
    ratios = [f"compile {v}" for v in others] + [f"run {v}" for v in others]
    theirs = [report.ratio("compile/XLA"), report.ratio("run/XLA")]
    table = report.Table("program", "us", *theirs, *(report.ratio(name) for name in ratios))
    with cache_with_executor() as cache:
        for name in names:
            built, called = (
                compile_times(found[name], limits, rounds, cache),
                call_times(found[name], limits, rounds, seconds),
            )
            cells = [times.ratio("now", "XLA") for times in (built, called)]
            cells += [times.ratio(v, "now") for times in (built, called) for v in others]
            table.add(name, called.median("now") * 1e6, *cells)
    for column in ("compile/XLA", "run/XLA", *ratios):
        table.mean(column)
