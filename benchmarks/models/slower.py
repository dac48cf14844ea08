"""Programs on which aotc was slower than XLA."""

from __future__ import annotations

from benchmarks import options, report, timing
from benchmarks.peers.jax_jit import aotc_and_jax_calls
from benchmarks.programs.slower import PROGRAMS


def run(
    only: options.Only = "", threads: options.Threads = 1, rounds: options.Rounds = 7, seconds: options.Seconds = 0.05
) -> None:
    """Print a row for each program."""
    clock = timing.pin(threads)
    table = report.Table("program", report.us("aotc"), report.us("XLA"), report.ratio("aotc/XLA"))
    for name in options.select(PROGRAMS, only, smallest="top_k_ascending"):
        try:
            calls = aotc_and_jax_calls(*PROGRAMS[name](), threads, 2e-3)
        except (ImportError, ValueError) as error:
            table.failed(name, error)
            continue
        times = timing.interleaved(calls, rounds=rounds, seconds=seconds, clock=clock)
        table.add(name, times.median("aotc"), times.median("XLA"), times.ratio("aotc", "XLA"))
    table.mean("aotc/XLA")
