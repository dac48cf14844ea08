"""Tests that run in a separate process: pytest's hooks for the marker ``own_process``.

Numba's front end as an ahead-of-time compiler (``aotc.kernels.numba_aot``) replaces the target context of its process,
so that functions which Numba compiles there afterwards have no machine code: a call jumps to address 1. The product
runs it in compiler processes only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPORTS = "AOTC_TEST_REPORTS"
"""The variable of the environment that names a child's file: a line for each test."""
_OUTCOMES = pytest.StashKey[dict[str, tuple[str, str]]]()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the child, write the outcome of a test's call, or of its setup if that failed."""
    path = os.environ.get(REPORTS)
    if path and (report.when == "call" or report.outcome != "passed"):
        with Path(path).open("a") as file:
            file.write(json.dumps([report.nodeid, report.outcome, report.longreprtext]) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run all marked tests of a file in one child before the first of them, and repeat their outcomes here."""
    if not pyfuncitem.get_closest_marker("own_process") or REPORTS in os.environ:
        return None
    outcomes = pyfuncitem.session.stash.setdefault(_OUTCOMES, {})
    if pyfuncitem.nodeid not in outcomes:
        own = [i for i in pyfuncitem.session.items if i.path == pyfuncitem.path and i.get_closest_marker("own_process")]
        outcomes.update(_run([i.nodeid for i in own], pyfuncitem.config.rootpath))
    outcome, text = outcomes[pyfuncitem.nodeid]
    if outcome == "skipped":
        pytest.skip(text)
    assert outcome == "passed", text
    return True


def _run(nodes: list[str], root: Path) -> dict[str, tuple[str, str]]:
    """Return the outcome of each test, and its traceback as text."""
    file = Path(os.environ["TMPDIR"], f"reports-{os.getpid()}.jsonl")
    file.write_text("")
    words = ["-n", "0", "-q", "-p", "no:cacheprovider", *nodes]
    environment = {**os.environ, REPORTS: str(file)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", *words]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    lost = "failed", f"the process of its own ended with {done.returncode}\n{done.stdout}{done.stderr}"
    found = {node: (outcome, text) for node, outcome, text in map(json.loads, file.read_text().splitlines())}
    return {node: found.get(node, lost) for node in nodes}
