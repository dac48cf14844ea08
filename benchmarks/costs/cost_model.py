"""Predicted times next to measured times.

Each case is compiled, and each of its kernels runs alone on one core. The suite prints the rank correlation of
predicted and measured times (Spearman), over all kernels and by group, and the kernels with the largest errors. The
exit status is 1 if the correlation over all is below 0.8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from typing import Annotated

import jax
import numpy as np
import typer

import aotc
from aotc.ir.loop.parser import parse_kernel
from aotc.lowering.cost_model.model import predict
from aotc.targets import host_target
from benchmarks import options, report, timing
from benchmarks.costs.cases import GROUPS, Case

LEAST_CORRELATION = 0.8


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel: its predicted and its measured time, in nanoseconds."""

    case: Case
    kernel: str
    predicted: float
    measured: float
    bound: str


def measure(case: Case, repeat: int) -> Iterator[Row]:
    """Yield the predicted and measured time of each kernel that a case runs."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(case.dtype == "float64"):
        arguments = [(rng.standard_normal(s) * 3).astype(case.dtype) for s in case.shapes]
        bundle = aotc.compile(case.function, *arguments, source=False)
    module = aotc.load(bundle, threads=1)
    texts = {name: text for name, text, *_ in module._executable.kernel_texts() or ()}
    for row in module.profile("main", *arguments, repeat=repeat)["kernels"]:
        prediction = predict(parse_kernel(texts[row["name"]]), host_target(), row["sizes"])
        yield Row(case, row["name"], prediction.ns, row["ns"]["cpu"], prediction.bound)


def ranks(values: list[float]) -> list[float]:
    """Return the rank of each value; equal values have the same mean rank."""
    order = sorted(range(len(values)), key=values.__getitem__)
    places = [0.0] * len(values)
    begin = 0
    while begin < len(order):
        end = begin
        while end < len(order) and values[order[end]] == values[order[begin]]:
            end += 1
        for at in order[begin:end]:
            places[at] = (begin + end - 1) / 2
        begin = end
    return places


def spearman(rows: list[Row]) -> float:
    """Return Spearman's rank correlation of predicted and measured times."""
    a, b = (ranks([getattr(r, key) for r in rows]) for key in ("predicted", "measured"))
    middle = (len(rows) - 1) / 2
    products_, squares = sum((x - middle) * (y - middle) for x, y in zip(a, b)), sum((x - middle) ** 2 for x in a)
    return products_ / max((squares * sum((y - middle) ** 2 for y in b)) ** 0.5, 1e-9)


def run(
    only: options.Only = "",
    rounds: options.Rounds = 7,
    worst: Annotated[int, typer.Option(help="Kernels that are furthest off to list.")] = 15,
    every: Annotated[bool, typer.Option("--all", help="Print each kernel.")] = False,
) -> int:
    """Print both tables; return 1 if the correlation over all cases is too low."""
    cases = {f"{case.group}: {case.name}": case for group in GROUPS for case in group()}
    names = options.select(cases, only)
    rows = [row for name in names for row in measure(cases[name], 1 if timing.SMOKE else rounds)]
    columns = [report.us("predicted"), report.us("measured"), report.Column("ratio"), "bound"]
    if every:
        _print_kernels(report.Table("kernel", *columns, title="All kernels"), rows)
    groups = report.Table("group", "kernels", "rank correlation", "predicted / measured", title="Groups")
    for group in (*dict.fromkeys(r.case.group for r in rows), ""):
        some = [r for r in rows if group in ("", r.case.group)]
        middle = sorted(r.predicted / r.measured for r in some)[len(some) // 2]
        groups.add(group or "all", len(some), spearman(some), middle)
    far = sorted(rows, key=lambda r: -abs(log(r.predicted / r.measured)))[:worst]
    _print_kernels(report.Table("kernel", *columns, title="Furthest off"), far)
    return int(not only and not timing.SMOKE and spearman(rows) < LEAST_CORRELATION)


def _print_kernels(table: report.Table, rows: list[Row]) -> None:
    for r in rows:
        name = f"{r.case.group}: {r.case.name} {r.kernel}"
        table.add(name, r.predicted / 1e9, r.measured / 1e9, r.predicted / r.measured, r.bound)
