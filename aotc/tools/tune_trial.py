"""Trials of ``aotc tune`` in a child process: check the results of a bundle, and time it against another one.

Tuned code may crash or loop forever. So the search runs its trials in this process, with a time limit, and only reads
their results.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from aotc.tools.agreement import compare_results
from aotc.vmfb.host.children import python_command
from aotc.vmfb.module import LoadedModule, load
from aotc.vmfb.profile.latency import average, latencies, quantile

TRIAL_SECONDS = 60.0
"""Time limit of a trial, in which 26 rounds and the loads take 3 s: a candidate may be endlessly slow."""

QUICK_SECONDS, QUICK_ROUNDS = 0.04, 3
"""Seconds of a round, and rounds, that decide whether a candidate is measured in full."""

FULL_SECONDS, FULL_ROUNDS = 0.1, 10

PROMISING = 0.985
"""Duration relative to the best bundle so far, at most, of a candidate that is measured in full."""


def differing_result(ours: Sequence[Any], want: Sequence[np.ndarray]) -> str:
    """Describe the first result in ``ours`` that differs from ``want``; an empty string if all agree."""
    for number, (a, b) in enumerate(zip(ours, want, strict=True)):
        mismatch = compare_results(np.asarray(a), b, None)
        if mismatch is not None:
            return f"result {number} is {mismatch.ours} at {list(mismatch.index)}, expected {mismatch.expected}"
    return ""


def time_in_turns(
    one: LoadedModule, other: LoadedModule, name: str, values: Sequence[Any], seconds: float, rounds: int
) -> dict[str, float]:
    """Time calls of two modules, interleaved.

    Returns
    -------
    dict
        ``ratio``: mean over the rounds of the median call of ``one`` divided by that of ``other``; ``low`` and
        ``high``: its 95 % confidence interval; ``seconds``: median call of ``one``; ``other``: of the other.
    """
    calls = [partial(module.invoke, name, *values) for module in (one, other)]
    for call in calls:
        call()
    medians = [[quantile(latencies(call, seconds), 0.5).value for call in calls] for _ in range(rounds)]
    ratio = average([a / b for a, b in medians])
    middle = [sorted(column)[rounds // 2] for column in zip(*medians, strict=True)]
    return {"ratio": ratio.value, "low": ratio.low, "high": ratio.high, "seconds": middle[0], "other": middle[1]}


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """Description of the call that all trials of a search make; its fields are JSON values.

    Attributes
    ----------
    function : str
    arguments, expected : str
        Paths of ``.npz`` files with the arguments and the expected results.
    argument_dtypes, expected_dtypes : list of str
        Dtypes of the arrays in the files, which cannot store those of ml_dtypes.
    devices : str, list of str or None
    threads : int or None
    """

    function: str
    arguments: str
    expected: str
    argument_dtypes: Sequence[str]
    expected_dtypes: Sequence[str]
    devices: str | Sequence[str] | None
    threads: int | None


class Trials:
    """Runner of trials with the same call; it keeps the best bundle loaded between trials."""

    def __init__(self, setup: TrialSetup) -> None:
        self.function = setup.function
        self.values = _read_arrays(setup.arguments, setup.argument_dtypes)
        self.expected = _read_arrays(setup.expected, setup.expected_dtypes)
        self._load = partial(load, devices=setup.devices, threads=setup.threads)
        self._best: tuple[str, LoadedModule] | None = None

    def run(self, candidate_path: str, best_path: str, full: bool) -> dict[str, Any]:
        """Check the results of a candidate, and time it in turns with the best bundle so far.

        Returns
        -------
        dict
            The times (:func:`time_in_turns`), or the key ``wrong`` with a description of the first wrong result. Unless
            ``full``, the measurement stops early if the candidate is slower in the first rounds.
        """
        with self._load(candidate_path) as candidate:
            if wrong := differing_result(candidate.invoke(self.function, *self.values), self.expected):
                return {"wrong": wrong}
            measured = (candidate, self._load_best(best_path), self.function, self.values)
            if not full:
                quick = time_in_turns(*measured, QUICK_SECONDS, QUICK_ROUNDS)
                if quick["ratio"] > PROMISING:
                    return quick
            return time_in_turns(*measured, FULL_SECONDS, FULL_ROUNDS)

    def _load_best(self, path: str) -> LoadedModule:
        if self._best is None or self._best[0] != path:
            if self._best is not None:
                self._best[1].close()
            self._best = (path, self._load(path))
        return self._best[1]


def _read_arrays(path: str, dtypes: Sequence[str]) -> list[np.ndarray]:
    with np.load(path) as arrays:
        return [arrays[key].view(np.dtype(getattr(ml_dtypes, d, d))) for key, d in zip(arrays, dtypes, strict=True)]


class TrialProcess:
    """A child process that runs trials, because tuned code may crash, loop forever, or corrupt memory.

    The process starts with the first trial, and starts again after a trial that failed or had wrong results.

    Parameters
    ----------
    setup : TrialSetup
    log : str
        Path of the file with the child's standard error.
    """

    def __init__(self, setup: TrialSetup, log: str) -> None:
        self._setup, self._log = setup, log
        self._child: subprocess.Popen[str] | None = None

    def run(self, candidate: str, best: str, *, full: bool = False, seconds: float = TRIAL_SECONDS) -> dict[str, Any]:
        """Run a trial and return the result of :meth:`Trials.run`, or ``{"failed": reason}`` if the process failed."""
        try:
            return self._exchange(json.dumps([candidate, best, full]), seconds)
        except BaseException:  # an interrupt: a later result would be that of this trial
            self.close()
            raise

    def _exchange(self, job: str, seconds: float) -> dict[str, Any]:
        """Send a trial to the child, and return its result."""
        child = self._child = self._child or self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(job + "\n")
            child.stdin.flush()
        except BrokenPipeError:
            return self._failure(child)
        if not select.select([child.stdout], [], [], seconds)[0]:
            self.close()
            return {"failed": f"it took more than {seconds:g} s"}
        line = child.stdout.readline()  # the child writes a result at once, so the rest of the line is there
        if not line.endswith("\n"):
            return self._failure(child)
        found: dict[str, Any] = json.loads(line)
        if "wrong" in found:
            self.close()
        return found

    def close(self) -> None:
        """End the child process."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()

    def _start(self) -> subprocess.Popen[str]:
        code = "from aotc.tools.tune_trial import main; main()"
        return _start_child(python_command(code, json.dumps(asdict(self._setup))), self._log)

    def _failure(self, child: subprocess.Popen[str]) -> dict[str, Any]:
        """End the child; return ``{"failed": ...}`` with the last line of its standard error, or its exit status."""
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=1)  # its output has ended
        self.close()
        lines = Path(self._log).read_text().strip().splitlines()
        return {"failed": lines[-1] if lines else f"exit status {child.returncode}"}


def _start_child(command: Sequence[str], log_path: str) -> subprocess.Popen[str]:
    with open(log_path, "w") as log:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )  # Ctrl-C in a terminal is for this process, which needs the child for the last measurement


def main() -> None:
    """Read trials from standard input, one JSON value a line; write each result as JSON to standard output."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what custom calls print is no result
    trials = Trials(TrialSetup(**json.loads(sys.argv[1])))
    for line in sys.stdin:
        print(json.dumps(trials.run(*json.loads(line))), file=results, flush=True)
