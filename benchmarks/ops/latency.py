"""Sorts, scans, gathers, elementwise functions, rows.

``--only`` takes a pattern for the group and the name of a case: ``--only "sorting: sort f32"``. Results are compared
with XLA's before the clock starts.
"""

from __future__ import annotations

import jax

from benchmarks import options, report, timing
from benchmarks.ops.cases import GROUPS, Case
from benchmarks.peers.jax_jit import aotc_and_jax_calls


def run(
    only: options.Only = "", threads: options.Threads = 2, rounds: options.Rounds = 5, seconds: options.Seconds = 0.05
) -> None:
    """Print a row for each operation."""
    clock = timing.pin(threads)
    cases = {f"{group.__name__}: {case.name}": case for group in GROUPS for case in group()}
    table = report.Table("operation", report.us("aotc"), report.us("XLA"), report.ratio("aotc/XLA"))
    for name in options.select(cases, only):
        with jax.enable_x64(any(x.dtype in ("float64", "complex128") for x in cases[name].args)):
            times = _times(cases[name], threads, rounds, seconds, clock)
        table.add(cases[name].name, times.median("aotc"), times.median("XLA"), times.ratio("aotc", "XLA"))
    table.mean("aotc/XLA")


def _times(case: Case, threads: int, rounds: int, seconds: float, clock: timing.Clock) -> timing.Times:
    calls = aotc_and_jax_calls(case.function, case.args, threads, case.tolerance)
    return timing.interleaved(calls, rounds=rounds, seconds=seconds, clock=clock)
