"""One trial of ``aotc tune`` in a process of its own: check the results of a bundle, and time it against another.

Tuned code may crash or not end. The search runs each trial here, with a time limit, and only reads the result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from aotc.tools.agreement import compare_results
from aotc.vmfb.module import LoadedModule, load
from aotc.vmfb.profile.latency import average, latencies, quantile

QUICK_SECONDS, QUICK_ROUNDS = 0.04, 3
"""Seconds of a round, and rounds, that decide whether a candidate is measured in full."""

FULL_SECONDS, FULL_ROUNDS = 0.1, 10

PROMISING = 0.985
"""Duration relative to the best bundle so far, at most, of a candidate that is measured in full."""


def differing_result(ours: Sequence[Any], want: Sequence[np.ndarray]) -> str:
    """Return the first result of ``ours`` that does not agree with ``want``, as text; empty if all agree."""
    for number, (a, b) in enumerate(zip(ours, want, strict=True)):
        mismatch = compare_results(np.asarray(a), b, None)
        if mismatch is not None:
            return f"result {number} is {mismatch.ours} at {list(mismatch.index)}, expected {mismatch.expected}"
    return ""


def time_in_turns(
    one: LoadedModule, other: LoadedModule, name: str, values: Sequence[Any], seconds: float, rounds: int
) -> dict[str, float]:
    """Time two modules in turns.

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


def run_trial(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run a trial; return the times, or the reason why the results are wrong under ``wrong``.

    ``job`` has the paths of the bundles ``candidate`` and ``best``, the ``function``, the paths of ``arguments`` and
    ``expected`` results, ``devices``, ``threads``, and whether to measure in ``full`` at once.
    """
    settings = {"devices": job["devices"], "threads": job["threads"]}
    candidate = load(job["candidate"], **settings)
    values, want = ([arrays[key] for key in arrays] for arrays in (np.load(job["arguments"]), np.load(job["expected"])))
    values, want = (
        [array.view(dtype) for array, dtype in zip(arrays, map(_dtype, names), strict=True)]
        for arrays, names in ((values, job["argument_dtypes"]), (want, job["expected_dtypes"]))
    )
    if wrong := differing_result(candidate.invoke(job["function"], *values), want):
        return {"wrong": wrong}
    best = load(job["best"], **settings)
    measured = (candidate, best, job["function"], values)
    if not job["full"]:
        quick = time_in_turns(*measured, QUICK_SECONDS, QUICK_ROUNDS)
        if quick["ratio"] > PROMISING:
            return quick
    return time_in_turns(*measured, FULL_SECONDS, FULL_ROUNDS)


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def main() -> None:
    """Run the trial that standard input describes as JSON; print the result as JSON."""
    print(json.dumps(run_trial(json.load(sys.stdin))))
