"""Thresholds of lowering with other values.

The suite multiplies a threshold by other factors (``--factors``). Programs of ``benchmarks/costs/cases.py`` and
``benchmarks/ops/cases.py`` that read it, and whose kernels change with it, are compiled with both values and run in
turn, on one thread, in processor time. A row shows the geometric mean over the programs of the time with the other
value relative to the time with the current one, and the programs with the largest gain and loss. Below 1 the other
value is better.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp, log
from time import process_time
from typing import Annotated, Any

import jax
import numpy as np
import typer

import aotc
from aotc import pipeline
from aotc.frontend.importer import import_model
from aotc.ir.loop.printer import print_kernel
from aotc.lowering.lower import lower
from aotc.lowering.threshold import CostRow
from aotc.options import Options
from aotc.targets import host_target
from benchmarks import children, options, report, timing
from benchmarks.costs import cases
from benchmarks.ops import cases as ops


@dataclass(frozen=True, slots=True)
class Program:
    """A function and its arguments, to be compiled with different thresholds."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def kernels(self) -> list[str]:
        """Return the texts of the program's kernels for this machine."""
        with jax.enable_x64(any(x.dtype.itemsize == 8 for x in self.arguments)):
            exported = jax.export.export(jax.jit(self.function))(*self.arguments)
        choices = Options(target=host_target().name)
        program = pipeline.run_passes(import_model(exported), choices)
        return [print_kernel(k) for k in lower(program, host_target(), choices).kernels]

    def call(self) -> Callable[[], Any]:
        """Compile the program with the current thresholds and return a call of it."""
        with jax.enable_x64(any(x.dtype.itemsize == 8 for x in self.arguments)):
            bundle = aotc.compile(self.function, *self.arguments, source=False)
        module = aotc.load(bundle, threads=1)
        return lambda: module.invoke("main", *self.arguments)


def corpus() -> Iterator[Program]:
    """Yield the programs of both corpora, without large sizes."""
    rng = np.random.default_rng(0)
    for group in cases.GROUPS:
        for case in group():
            if sum(np.prod(shape) for shape in case.shapes) <= cases.SIZES[-2] * 1.1:
                arguments = tuple((rng.standard_normal(shape) * 3).astype(case.dtype) for shape in case.shapes)
                yield Program(f"{case.group}: {case.name}", case.function, arguments)
    for build in (ops.sorting, ops.selection, ops.indexing, ops.scans, ops.elementwise, ops.rows, ops.transposes):
        for case in build():
            yield Program(case.name, case.function, case.args)


@contextmanager
def replaced_threshold(row: Any, value: int) -> Iterator[None]:
    """Give a threshold another value within the ``with`` block."""
    before = row.value
    object.__setattr__(row, "value", value)
    try:
        yield
    finally:
        object.__setattr__(row, "value", before)


def programs_by_threshold(programs: list[Program], rows: dict[str, Any]) -> dict[str, list[Program]]:
    """Return the programs that read each threshold; thresholds with the most programs are first."""
    names = {id(row): name for name, row in rows.items()}
    seen: set[str] = set()

    def read(row: Any, name: str) -> Any:
        if name == "value":
            seen.add(names.get(id(row), ""))
        return object.__getattribute__(row, name)

    found: dict[str, list[Program]] = {}
    CostRow.__getattribute__ = read
    try:
        for program in programs:
            seen.clear()
            program.kernels()
            for name in seen - {""}:
                found.setdefault(name, []).append(program)
    finally:
        del CostRow.__getattribute__
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def ratio(program: Program, row: Any, value: int, rounds: int, seconds: float) -> float:
    """Return the time of a program with another threshold value relative to the time with the current one."""
    calls = {"now": program.call()}
    with replaced_threshold(row, value):
        calls["other"] = program.call()
    times = timing.interleaved(calls, rounds=rounds, seconds=seconds, clock=process_time)
    return times.ratio("other", "now").median


@dataclass(frozen=True, slots=True)
class Effort:
    """Number of programs, rounds and seconds for the measurement of each value."""

    programs: int
    rounds: int
    seconds: float


def compare(
    row: Any, value: int, texts: dict[str, list[str]], programs: list[Program], effort: Effort
) -> tuple[float | None, int, str]:
    """Return the mean ratio for another value, the number of programs that change, and the best and worst as text."""
    with replaced_threshold(row, value):
        changed = [program for program in programs if program.kernels() != texts[program.name]]
    if not changed:
        return None, 0, "no program changes"
    chosen = changed[:: -(-len(changed) // effort.programs)]
    ratios = {p.name: ratio(p, row, value, effort.rounds, effort.seconds) for p in chosen}
    mean = exp(statistics.fmean(log(r) for r in ratios.values()))
    best, worst = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    return mean, len(changed), f"{best} {ratios[best]:.2f}, {worst} {ratios[worst]:.2f}"


def run(
    names: Annotated[list[str] | None, typer.Argument(help="Thresholds, as REDUCED_ELEMENTS.")] = None,
    most_read: Annotated[int, typer.Option(help="Also the thresholds that most programs read.")] = 0,
    every: Annotated[int, typer.Option(min=1, help="Use every nth program only.")] = 1,
    factors: Annotated[str, typer.Option(help="Of the value, separated by commas.")] = "0.25,0.5,2,4",
    programs: Annotated[int, typer.Option(min=1, help="Programs to run for each value, of those that change.")] = 4,
    rounds: options.Rounds = 5,
    seconds: options.Seconds = 0.03,
) -> None:
    """Print a row for each threshold and value."""
    sys.path.insert(0, str(children.ROOT / "tests"))
    from support.threshold_rows import all_rows

    if timing.SMOKE:
        every, factors = 150, "4"
    pipeline.WORTH_SECONDS = float("inf")  # a bundle of another value is not for later compilations
    rows = {row.name.upper(): row.row for row in all_rows()}
    if unknown := set(names or ()) - set(rows):
        raise SystemExit(f"unknown thresholds {', '.join(unknown)}; expected some of {', '.join(sorted(rows))}")
    corpus_ = list(corpus())[::every]
    by_row = programs_by_threshold(corpus_, rows)
    texts = {program.name: program.kernels() for program in corpus_}
    table = report.Table("threshold", "times", "value", report.Column("ratio"), "changed", "best and worst")
    for name in names or list(by_row)[: most_read or 1]:
        for factor in map(float, factors.split(",")):
            value = max(int(rows[name].value * factor), 1)
            cells = compare(rows[name], value, texts, by_row.get(name, []), Effort(programs, rounds, seconds))
            table.add(name, factor, value, *cells)
