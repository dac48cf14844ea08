"""Start of a process to its first result, by step.

Each row of the first table is a process that loads a bundle and calls it; the first rows read files that are not in
the page cache yet. Then follow medians over more processes: time and processor time up to each step, and their part
after the import of NumPy. That part is a difference within a process, so it varies less than the times of processes
on a machine with other load. It excludes the exit of the process: there Python collects garbage, 15 ms of processor
time after the import of NumPy alone.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks import children, options, report, timing

STEPS = ("import numpy", "import aotc", "load", "arguments", "first call")


def process(kind: str, path: str) -> str:
    """Start a process that measures itself; return its output.

    The process uses compiled Python modules whatever the environment says: otherwise it would compile the sources.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    script = str(Path(__file__).with_name("start_process.py"))
    return children.output([sys.executable, script, kind, path, repr(time.time())]).strip()


def make(folder: str, target: str) -> dict[str, str]:
    """Compile a small model and one of many kernels; return their files by name."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import aotc

    def layers(x, *weights):
        for w in weights:
            x = jnp.tanh(x @ w)
            x = x / jnp.sum(x * x, axis=1, keepdims=True)
        return x

    bundles = {}
    for name, widths in (("1 layer", [64, 64]), ("40 layers", range(64, 64 + 8 * 41, 8))):
        weights = [np.full(shape, 0.01, np.float32) for shape in pairwise(widths)]
        bundles[name] = str(Path(folder, f"{len(widths)}.vmfb"))
        data = aotc.compile(jax.jit(layers), np.ones((16, 64), np.float32), *weights, target=target)
        Path(bundles[name]).write_bytes(data)
    return bundles


def run(rounds: options.Rounds = 15, target: options.Target = "cpu") -> None:
    """Print a row for each process, and for each model the medians of its steps."""
    rounds = 1 if timing.SMOKE else rounds
    single = report.Table("model, process", report.Column("all ms"), title="Processes")
    columns = ["wall ms", "after NumPy", "CPU ms", "after NumPy"]
    steps = report.Table("model, up to", *(report.Column(title, width=11) for title in columns), title="Medians")
    with tempfile.TemporaryDirectory() as folder:
        rows = {}
        for name, path in make(folder, target).items():
            samples = []
            for number in range(rounds):
                samples.append([1e3 * float(text) for text in process("clocks", path).split()])
                row, _, took = process("steps", path).rpartition(" ")
                single.add(f"{name}, {number}: {row}", float(took))
            rows[name] = samples
        for name, samples in rows.items():
            for step, cells in zip(STEPS, zip(*medians_by_step(samples, 0), *medians_by_step(samples, 1)), strict=True):
                steps.add(f"{name}, {step}", *cells)


def medians_by_step(samples: list[list[float]], kind: int) -> list[list[float]]:
    """Return the medians of a kind of time (0: wall, 1: processor) up to each step, and after the first step."""
    times = [sample[kind::2] for sample in samples]
    parts = [[time - row[0] for time in row] for row in times]
    return [[median(column) for column in zip(*rows)] for rows in (times, parts)]
