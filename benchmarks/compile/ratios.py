"""Compile time next to XLA's over a catalogue.

``aotc.compile(function, *arguments)`` and ``jax.jit(function).lower(*arguments).compile()`` take turns in this
process, without cached traces, with an empty cache except for the executor, and without running compiler processes,
which each compilation starts as it needs them (``--warm`` reuses them). One warm-up of each precedes. Both the
processor time of all threads and processes and the wall time are measured. ``--stages`` compiles in this process and
prints aotc's time by stage.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer

from benchmarks import options, report, timing
from benchmarks.compile.processes import Times, cache_with_executor, compile_by_aotc, compile_by_xla
from benchmarks.compile.stages import stages
from benchmarks.programs.compiled import catalogue

Program = tuple[Any, tuple[Any, ...]]


def measure(program: Program, rounds: int, warm: bool, cache: Path) -> list[timing.Times]:
    """Return processor times and wall times of aotc and XLA for a program."""
    function, args = program
    jax.jit(function).lower(*args)  # what JAX imports for it counts for neither
    walls: dict[str, list[float]] = {"aotc": [], "XLA": []}

    def sample(name: str, call: Any) -> float:
        times: Times = call()
        walls[name].append(times[1])
        return times[0]

    samples = {
        "aotc": lambda: sample("aotc", lambda: compile_by_aotc(function, args, cache, warm)),
        "XLA": lambda: sample("XLA", lambda: compile_by_xla(function, args)),
    }
    processor = timing.measured(samples, rounds, warm_up=False)
    return [processor, timing.Times({name: tuple(row) for name, row in walls.items()})]


def shares(program: Program, rounds: int, cache: Path) -> str:
    """Return a text with the fraction of each stage in aotc's processor time."""
    spent: dict[str, float] = {}
    with stages(spent):
        total = sum(compile_by_aotc(*program, cache, warm=True)[0] for _ in range(rounds))
    spent["other"] = total - sum(spent.values())
    return ", ".join(f"{stage} {seconds / total:.0%}" for stage, seconds in sorted(spent.items(), key=lambda s: -s[1]))


def run(
    only: options.Only = "",
    rounds: options.Rounds = 1,
    warm: Annotated[bool, typer.Option("--warm", help="Keep compiler processes between compilations.")] = False,
    stages: Annotated[bool, typer.Option("--stages", help="The shares of the stages, in this process.")] = False,
) -> None:
    """Print a row for each program, and the means."""
    programs = catalogue()
    names = options.select(programs, only, smallest="sin f32 [100000]")
    first = (lambda x, y: jnp.tanh(x @ y)), (jnp.ones((8, 8)), jnp.ones((8, 8)))
    columns = [report.Column("aotc s", width=6), report.Column("XLA s", width=6), report.ratio("aotc/XLA")]
    walls = [report.Column("wall s", width=6), report.Column("XLA s", width=6), report.ratio("wall/XLA")]
    table = report.Table("program", *columns, *walls)
    with cache_with_executor() as cache:
        compile_by_aotc(*first, cache)
        compile_by_xla(*first)
        for name in names:
            program = programs[name]()
            if stages:
                report.note(f"{name}: {shares(program, rounds, cache)}")
                continue
            cells = [
                x for times in measure(program, rounds, warm, cache)
                for x in (times.median("aotc"), times.median("XLA"), times.ratio("aotc", "XLA"))
            ]  # fmt: skip
            table.add(name, *cells)
    if not stages:
        table.mean("aotc/XLA")
        table.mean("wall/XLA")
