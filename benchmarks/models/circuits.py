"""Programs whose stages read values twice.

A sorting network of 32 numbers, controlled-NOT gates on 16 qubits, the gradient of a circuit of 12 qubits, next to
XLA. A compilation runs in a fresh process with an empty cache and is timed after the imports; calls run on one thread.
The exit status is 1 if a program takes more than 20 s to compile or a call takes longer than XLA's.
"""

from __future__ import annotations

import json
import tempfile
from typing import Annotated

import jax
import numpy as np
import typer

import aotc
from benchmarks import children, options, report, timing
from benchmarks.programs.circuits import PROGRAMS

MOST_SECONDS = 20.0


def measure(name: str, rounds: int) -> dict[str, float]:
    """Return compile times and call times in seconds, by engine."""
    clock = timing.pin(1)
    function, shape = PROGRAMS[name]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    jitted = jax.jit(function)
    aotc.compile(jax.jit(lambda x: x + 1), x)  # the executor, and imports
    bundles: list[bytes] = []
    ours = timing.once(lambda: bundles.append(aotc.compile(jitted, x)))
    theirs = timing.once(lambda: jitted.lower(x).compile())
    module = aotc.load(bundles[0], threads=1)
    np.testing.assert_allclose(module.invoke("main", x)[0], jitted(x), rtol=1e-4, atol=1e-4)
    calls = {"aotc": lambda: module.invoke("main", x), "XLA": lambda: jitted(x).block_until_ready()}
    times = timing.interleaved(calls, rounds=rounds, clock=clock)
    return {"compile": ours, "XLA compile": theirs, "call": times.median("aotc"), "XLA call": times.median("XLA")}


def run(
    only: options.Only = "",
    rounds: options.Rounds = 101,
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> int:
    """Measure each program in a process of its own; return 1 if a bound is exceeded."""
    if one:
        print(json.dumps(measure(one, rounds)))
        return 0
    columns = [report.Column("compile s"), report.Column("XLA s"), report.us("call"), report.us("XLA")]
    table = report.Table("program", *columns)
    slow = False
    for name in options.select(PROGRAMS, only):
        with tempfile.TemporaryDirectory() as cache:
            command = children.suite("models", "circuits", "--one", name, "--rounds", rounds)
            times = json.loads(children.output(command, AOTC_CACHE_DIR=cache).splitlines()[-1])
        table.add(name, *times.values())
        slow = slow or times["compile"] > MOST_SECONDS or times["call"] > times["XLA call"]
    return int(slow and not timing.SMOKE)
