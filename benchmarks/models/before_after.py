"""Two states of the sources, interleaved.

BEFORE is a folder with another state of the sources, as ``git worktree add ../old COMMIT`` creates. MODELS are names
of ``benchmarks/programs/models.py``; a prefix selects the timed operation: ``load:tiny_add`` ``aotc.load`` of the
bundle while another copy of it is loaded; ``first:tiny_add`` the first call after each load; ``recorded:tiny_add``
calls within ``with module.profile()`` next to calls without it, of one state. Each state compiles the model in its
own process. These operations, and calls of one thread, count processor time. The ratio is after to before.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks import children, options, report, timing
from benchmarks.programs.export import export


def measure(name: str, before: Path, threads: int, rounds: int, calls: int) -> timing.Times:
    """Return the times of both states for a model; a prefix of ``name`` selects the timed operation."""
    what, _, name = name.rpartition(":")
    what = what or "call"
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder, "kept.npy"), export(name, Path(folder))["kept"])
        states = {
            "before": (before, "call" if what == "recorded" else what),
            "after": (children.ROOT, what),
        }
        processes = {key: _start(root, folder, threads, kind) for key, (root, kind) in states.items()}
        samples = {key: _sample(process, 1 if timing.SMOKE else calls) for key, process in processes.items()}
        times = timing.measured(samples, rounds)
        for process in processes.values():
            process.stdin.close()  # type: ignore[union-attr]
            process.wait()
    return times


def _start(root: Path, folder: str, threads: int, what: str) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("one_state.py")
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, str(script), folder, str(threads), what],
        env={**os.environ, "PYTHONPATH": path}, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder,
    )  # fmt: skip


def _sample(process: subprocess.Popen[str], calls: int) -> Callable[[], float]:
    return lambda: float(children.exchange_line(process, calls))


def run(
    before: Annotated[Path, typer.Argument(help="Folder of the other state.")] = children.ROOT,
    models: Annotated[list[str] | None, typer.Argument(help="Models, as load:tiny_add.")] = None,
    threads: options.Threads = 1,
    rounds: options.Rounds = 15,
    calls: Annotated[int, typer.Option(help="Calls in a sample.")] = 200,
) -> None:
    """Print a row for each model."""
    table = report.Table("model", report.us("before"), report.us("after"), report.ratio("after/before"))
    for name in models or ["tiny_add"]:
        times = measure(name, before.resolve(), threads, rounds, calls)
        table.add(name, times.median("before"), times.median("after"), times.ratio("after", "before"))
