"""Bounds that are promised for two small models.

- ``top_k`` of 131,072 columns: a call takes less than 50 ms (iree#20772: minutes).
- 64 short chains of small ops next to two matmuls: a later call records and allocates nothing, and a dispatch of the
  chains alone takes less than 5 us.
"""

from __future__ import annotations

import jax
import numpy as np

import aotc
from benchmarks import options, report, timing

WIDE, CHAINS, SIZE = 131_072, 64, 1024
MOST_MS, MOST_US = 50.0, 5.0


def chains_text(products: bool) -> str:
    """Return the model: chains of a slice, a sine and a cosine of one row each, with two matmuls if ``products``."""
    big, rows, row = (f"tensor<{shape}xf32>" for shape in (f"{SIZE}x{SIZE}", f"{CHAINS}x32", "1x32"))
    lines = []
    if products:
        for name, left in (("%l", "%a"), ("%r", "%aa")):
            lines += [f"%aa = stablehlo.add %a, %a : {big}"] if name == "%r" else []
            sides = f"({big}, {big}) -> {big}"
            lines.append(f"{name} = stablehlo.dot_general {left}, %a, contracting_dims = [1] x [0] : {sides}")
        lines.append(f"%o = stablehlo.add %l, %r : {big}")
    for n in range(CHAINS):
        lines.append(f"%x{n} = stablehlo.slice %s [{n}:{n + 1}, 0:32] : ({rows}) -> {row}")
        lines.append(f"%y{n} = stablehlo.sine %x{n} : {row}")
        lines.append(f"%z{n} = stablehlo.cosine %y{n} : {row}")
    names, types = ", ".join(f"%z{n}" for n in range(CHAINS)), ", ".join([row] * CHAINS)
    lines.append(f"%c = stablehlo.concatenate {names}, dim = 0 : ({types}) -> {rows}")
    results, kinds = ("%o, %c", f"{big}, {rows}") if products else ("%c", rows)
    body = "\n  ".join([*lines, f"return {results} : {kinds}"])
    return f"func.func public @main(%a: {big}, %s: {rows}) -> ({kinds}) {{\n  {body}\n}}"


def wide(rounds: int) -> bool:
    """Report the time of a wide ``top_k`` at each optimization level; return True if it is below the bound."""
    x = np.random.default_rng(0).standard_normal((1, WIDE)).astype(np.float32)
    good = True
    table = report.Table(f"top_k of {WIDE:,} columns", report.ms("call"), "bound ms")
    for level in range(4):
        module = aotc.load(aotc.compile(jax.jit(lambda x: jax.lax.top_k(x, 50)), x, opt_level=level))
        calls = {"call": lambda module=module: module.invoke("main", x)}
        took = timing.interleaved(calls, rounds=rounds).median("call")
        good = good and 1e3 * took < MOST_MS
        table.add(f"-O{level}", took, MOST_MS)
    return good


def dispatches(rounds: int) -> bool:
    """Report the recordings, allocations and time of later calls; return True if they are within the bounds."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((SIZE, SIZE), (CHAINS, 32))]
    good = True
    columns = [report.Column("kernels"), report.us("call"), report.us("dispatch"), "bound us", "records", "allocs"]
    table = report.Table("model", *columns)
    for products in (True, False):
        module = aotc.load(aotc.compile(chains_text(products)))
        module.invoke("main", *arrays)
        before = module.stats()
        calls = {"call": lambda module=module: module.invoke("main", *arrays)}
        took = timing.interleaved(calls, rounds=rounds).median("call")
        after, kernels = module.stats(), before["kernels"]
        new = [after[key] - before[key] for key in ("recordings", "arena_allocations")]
        good = good and new == [0, 0] and (products or 1e6 * took / kernels < MOST_US)
        name, bound = ("two matmuls, chains", None) if products else ("chains", MOST_US)
        table.add(name, kernels, took, took / kernels, bound, *new)
    return good


def run(rounds: options.Rounds = 50) -> int:
    """Measure both models; return 1 if a bound is exceeded."""
    return 0 if all([wide(rounds), dispatches(rounds)]) or timing.SMOKE else 1
