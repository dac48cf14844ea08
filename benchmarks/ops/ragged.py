"""Matmuls of ragged groups.

``jax.lax.ragged_dot`` with ragged rows, and with ragged terms (``ragged_dot_general``); f32.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from benchmarks import options, report, timing
from benchmarks.peers.jax_jit import aotc_and_jax_calls

TERMS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
CASES = [(512, 512, 512, 8), (64, 256, 512, 8), (8, 256, 256, 32), (2048, 256, 256, 8)]


def contract_ragged_terms(x: Any, y: Any, sizes: Any) -> Any:
    """Return the ragged matmul whose contracted dim is ragged."""
    return jax.lax.ragged_dot_general(x, y, sizes, TERMS)


def arguments_of(rows: int, terms: int, columns: int, groups: int) -> tuple[np.ndarray, ...]:
    """Return the operands for ragged rows and for ragged terms, and the sizes of the groups."""
    random = np.random.default_rng(0)
    shapes = (rows, terms), (groups, terms, columns), (rows, columns)
    x, w, y = (random.standard_normal(s, np.float32) for s in shapes)
    return x, w, y, random.multinomial(rows, np.ones(groups) / groups).astype(np.int32)


def run(
    only: options.Only = "", threads: options.Threads = 1, rounds: options.Rounds = 7, seconds: options.Seconds = 0.02
) -> None:
    """Print a row for each case."""
    clock = timing.pin(threads)
    table = report.Table("rows x terms x columns", report.ms("aotc"), report.ms("XLA"), report.ratio("aotc/XLA"))
    titles = {f"{'x'.join(map(str, case[:3]))}, {case[3]} groups": case for case in CASES}
    known = {f"{title}, ragged {kind}": (case, kind) for title, case in titles.items() for kind in ("rows", "terms")}
    for name in options.select(known, only, smallest="64x256x512, 8 groups, ragged rows"):
        case, kind = known[name]
        x, w, y, sizes = arguments_of(*case)
        if kind == "rows":
            function, arguments = jax.lax.ragged_dot, (x, w, sizes)
        else:
            function, arguments = contract_ragged_terms, (x, y, sizes)
        calls = aotc_and_jax_calls(function, arguments, threads)
        times = timing.interleaved(calls, rounds=rounds, seconds=seconds, clock=clock)
        table.add(name, times.median("aotc"), times.median("XLA"), times.ratio("aotc", "XLA"))
