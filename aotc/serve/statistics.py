"""Statistics of a function's requests in Triton's form."""

from __future__ import annotations

from collections.abc import Mapping
from time import time
from typing import Any

SUCCESS, FAIL = "success", "fail"
QUEUE, INPUT, INFER, OUTPUT = "queue", "compute_input", "compute_infer", "compute_output"
_PHASES = (SUCCESS, FAIL, QUEUE, INPUT, INFER, OUTPUT)
_CACHES = ("cache_hit", "cache_miss")  # the server has no response cache


class Duration:
    """Number of occurrences and total duration of an event."""

    __slots__ = ("count", "seconds")

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0

    def add(self, seconds: float) -> None:
        """Add one event."""
        self.count += 1
        self.seconds += seconds

    def report(self) -> dict[str, int]:
        """Return the counters in Triton's form, in nanoseconds."""
        return {"count": self.count, "ns": round(self.seconds * 1e9)}


class Statistics:
    """Statistics of one function's requests since the load of its model."""

    def __init__(self) -> None:
        self._phases = {phase: Duration() for phase in _PHASES}
        self._calls: dict[int, Duration] = {}
        self._rows = 0
        self._last = 0.0

    def ended(self, seconds: float, phases: Mapping[str, float], good: bool, rows: int) -> None:
        """Record a finished request: its total seconds, the seconds of each of its phases, and its rows."""
        self._phases[SUCCESS if good else FAIL].add(seconds)
        if good:
            for phase, taken in phases.items():
                self._phases[phase].add(taken)
            self._rows += rows
            self._last = time()

    def called(self, rows: int, seconds: float) -> None:
        """Record a call of the model with ``rows`` rows."""
        found = self._calls.get(rows)
        if found is None:
            found = self._calls[rows] = Duration()
        found.add(seconds)

    def page(self) -> dict[str, Any]:
        """Return calls by their rows, and the mean seconds of each phase of a request, for the status page."""
        phases = {phase: self._phases[phase] for phase in (QUEUE, INPUT, INFER, OUTPUT)}
        return {
            "calls": {rows: call.count for rows, call in sorted(self._calls.items())},
            "phases": {name: phase.seconds / phase.count for name, phase in phases.items() if phase.count},
        }

    def report(self, name: str, version: int) -> dict[str, Any]:
        """Return Triton's ModelStatistics."""
        nothing = Duration().report()
        phases = {phase: duration.report() for phase, duration in self._phases.items()}
        return {
            "name": name, "version": str(version), "last_inference": round(self._last * 1e3),
            "inference_count": self._rows, "execution_count": sum(call.count for call in self._calls.values()),
            "inference_stats": phases | dict.fromkeys(_CACHES, nothing),
            "batch_stats": [
                {"batch_size": rows, INPUT: nothing, INFER: call.report(), OUTPUT: nothing}
                for rows, call in sorted(self._calls.items())
            ],
        }  # fmt: skip
