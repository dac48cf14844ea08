"""Measure thresholds of lowering again: ``python benchmarks/thresholds.py --most-read 20``, or with their names.

A threshold takes other values in turn (``--factors``). Programs of the corpora of ``cost_model.py`` and ``ops.py``
that read it, and whose kernels change with it, are compiled both ways and run in turn, round by round: processor time
of one thread, so that other work on the machine counts little. Printed is the median time with the other value over
that with the value as it is, as the geometric mean over the programs, and the programs that gain and lose most: below 1
the other value is better.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


@dataclass(frozen=True, slots=True)
class Program:
    """A function and its arguments."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def kernels(self) -> list[str]:
        """Return the texts of its kernels for this machine."""
        import jax

        from aotc.frontend.importer import import_model
        from aotc.ir.loop.printer import print_kernel
        from aotc.lowering.lower import lower
        from aotc.options import Options
        from aotc.pipeline import run_passes
        from aotc.targets import host

        with jax.enable_x64(any(x.dtype.itemsize == 8 for x in self.arguments)):
            exported = jax.export.export(jax.jit(self.function))(*self.arguments)
        options = Options(target=host().name)
        return [print_kernel(k) for k in lower(run_passes(import_model(exported), options), host(), options).kernels]

    def call(self) -> Callable[[], Any]:
        """Return a call of it, compiled with the thresholds as they are now."""
        import jax

        import aotc

        with jax.enable_x64(any(x.dtype.itemsize == 8 for x in self.arguments)):
            bundle = aotc.compile(self.function, *self.arguments, source=False)
        module = aotc.load(bundle, threads=1)
        return lambda: module.invoke("main", *self.arguments)


def corpus() -> Iterator[Program]:
    """Yield the programs of both corpora, without sizes that take long."""
    import numpy as np

    from benchmarks import cost_model, ops

    rng = np.random.default_rng(0)
    for group in cost_model.GROUPS:
        for case in group():
            if sum(np.prod(shape) for shape in case.shapes) <= cost_model.SIZES[-2] * 1.1:
                arguments = tuple((rng.standard_normal(shape) * 3).astype(case.dtype) for shape in case.shapes)
                yield Program(f"{case.group}: {case.name}", case.function, arguments)
    for build in (ops.sorting, ops.selection, ops.indexing, ops.scans, ops.elementwise, ops.rows, ops.transposes):
        for case in build():
            yield Program(case.name, case.function, case.args)


@contextmanager
def value_of(row: Any, value: int) -> Iterator[None]:
    """Give a threshold another value for a while."""
    before = row.value
    object.__setattr__(row, "value", value)
    try:
        yield
    finally:
        object.__setattr__(row, "value", before)


def readers(programs: list[Program], rows: dict[str, Any]) -> dict[str, list[Program]]:
    """Return the programs in which each threshold is read, those with most of them first."""
    from aotc.lowering.threshold import CostRow

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


def sample(call: Callable[[], Any], seconds: float) -> float:
    """Return the mean processor time of calls that take so long together."""
    count, start, end = 0, time.process_time(), 0.0
    while end < seconds:
        call()
        count += 1
        end = time.process_time() - start
    return end / count


def ratio(program: Program, row: Any, value: int, given: argparse.Namespace) -> float:
    """Return the time of a program with another value over that with the value as it is."""
    now = program.call()
    with value_of(row, value):
        other = program.call()
    rounds = [[sample(call, given.seconds) for call in (now, other)] for _ in range(given.rounds + 1)][1:]
    return statistics.median(b / a for a, b in rounds)


def compare(row: Any, value: int, texts: dict[str, list[str]], programs: list[Program], given: Any) -> str:
    """Return what another value changes, as a cell of the table."""
    with value_of(row, value):
        changed = [program for program in programs if program.kernels() != texts[program.name]]
    if not changed:
        return "no program changes"
    chosen = changed[:: -(-len(changed) // given.programs)]
    ratios = {program.name: ratio(program, row, value, given) for program in chosen}
    mean = exp(statistics.fmean(log(r) for r in ratios.values()))
    best, worst = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    return f"{mean:.2f} ({len(changed)} change; {best} {ratios[best]:.2f}, {worst} {ratios[worst]:.2f})"


def main() -> None:
    """Print a row for each threshold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="thresholds, as REDUCED_ELEMENTS")
    parser.add_argument("--most-read", type=int, default=0, help="take so many that most programs read")
    parser.add_argument("--every", type=int, default=1, help="take every nth program only")
    parser.add_argument("--factors", default="0.25,0.5,2,4", help="of the value")
    parser.add_argument("--programs", type=int, default=4, help="programs to run for each value, of those that change")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.03, help="per call and round")
    given = parser.parse_args()

    from support.threshold_rows import all_rows

    from aotc import pipeline

    pipeline.WORTH_SECONDS = float("inf")  # a bundle of another value is not for later compilations
    rows = {found.name.upper(): found.row for found in all_rows()}
    programs = list(corpus())[:: given.every]
    found = readers(programs, rows)
    names = given.names or list(found)[: given.most_read]
    texts = {program.name: program.kernels() for program in programs}
    factors = [float(text) for text in given.factors.split(",")]
    print(f"| threshold | value | {' | '.join(f'times {f:g}' for f in factors)} |\n|---|---|{'---|' * len(factors)}")
    for name in names:
        values = [max(int(rows[name].value * factor), 1) for factor in factors]
        cells = [compare(rows[name], value, texts, found.get(name, []), given) for value in values]
        print(f"| {name} | {rows[name].value} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
