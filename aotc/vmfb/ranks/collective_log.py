"""Log of the execution times of a rank's collectives, for the profiler."""

from __future__ import annotations

from time import perf_counter_ns
from typing import NamedTuple

from aotc.vmfb.ranks.collectives import Collective


class CollectiveTime(NamedTuple):
    """Time of one execution of a collective on one rank.

    Attributes
    ----------
    collective : Collective
    bytes : int
        Bytes of the rank's operands.
    start, end : int
        Times of ``time.perf_counter_ns``, a clock that all processes of a host share: before the rank sends its
        operands, and after it has received its results.
    """

    collective: Collective
    bytes: int
    start: int
    end: int


class CollectiveLog:
    """Executions of a rank's collectives, in the order in which they end.

    Attributes
    ----------
    rows : list of CollectiveTime or None
        None while the log is inactive.
    """

    def __init__(self) -> None:
        self.rows: list[CollectiveTime] | None = None

    def add(self, collective: Collective, size: int, start: int) -> None:
        """Append an execution with operands of ``size`` bytes that began at ``start`` and ends now."""
        if self.rows is not None:
            self.rows.append(CollectiveTime(collective, size, start, perf_counter_ns()))
