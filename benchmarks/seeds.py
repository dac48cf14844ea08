"""Figures that are promised for two small models: ``python benchmarks/seeds.py``.

- ``top_k`` of 131,072 columns: a call takes less than 50 ms (iree#20772: minutes).
- 64 short chains of small ops beside two products: a later call records and allocates nothing, and a dispatch of the
  chains alone takes less than 5 us.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

import aotc

WIDE, CHAINS, SIZE = 131_072, 64, 1024
MOST_MS, MOST_US = 50.0, 5.0


def chains_text(products: bool) -> str:
    """Return the model: chains of a slice, a sine and a cosine of one row each, beside two products or alone."""
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


def median_of(call: Callable[[], Any], count: int) -> float:
    """Return the median time of some calls, in seconds."""
    times = []
    for _ in range(count):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return statistics.median(times)


def wide(rounds: int) -> bool:
    """Print what a wide ``top_k`` takes."""
    x = np.random.default_rng(0).standard_normal((1, WIDE)).astype(np.float32)
    good = True
    for level in range(4):
        module = aotc.load(aotc.compile(jax.jit(lambda x: jax.lax.top_k(x, 50)), x, opt_level=level))
        module.invoke("main", x)
        took = 1e3 * median_of(lambda module=module: module.invoke("main", x), rounds)
        good = good and took < MOST_MS
        print(f"top_k of {WIDE:,} columns, -O{level}: {took:.2f} ms (promised: below {MOST_MS:g})")
    return good


def dispatches(rounds: int) -> bool:
    """Print what later calls record, allocate and take."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((SIZE, SIZE), (CHAINS, 32))]
    good = True
    for products in (True, False):
        module = aotc.load(aotc.compile(chains_text(products)))
        module.invoke("main", *arrays)
        before = module.stats()
        took = median_of(lambda module=module: module.invoke("main", *arrays), rounds)
        after, kernels = module.stats(), before["kernels"]
        news = [after[key] - before[key] for key in ("recordings", "arena_allocations")]
        each = 1e6 * took / kernels
        good = good and news == [0, 0] and (products or each < MOST_US)
        what = "two products and chains" if products else f"chains (promised: below {MOST_US:g} us a dispatch)"
        print(f"{what}: {kernels} kernels, {1e6 * took:.1f} us a call, {each:.2f} us a dispatch;", end=" ")
        print(f"{news[0]} recordings and {news[1]} allocations in {rounds} later calls")
    return good


def main() -> int:
    """Measure and print everything; 1 if a promise is not kept."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    return 0 if all([wide(rounds), dispatches(rounds)]) else 1


if __name__ == "__main__":
    sys.exit(main())
