"""The times of a rank's collectives while calls are recorded."""

from __future__ import annotations

from time import perf_counter_ns
from typing import NamedTuple

from aotc.vmfb.ranks.collectives import Collective


class CollectiveTime(NamedTuple):
    """An execution of a collective on one rank.

    Attributes
    ----------
    collective : Collective
    bytes : int
        Bytes of the rank's operands.
    start, end : int
        Times of ``time.perf_counter_ns``, a clock that all processes of a host share: before the rank offers its
        operands, and when it has its results.
    """

    collective: Collective
    bytes: int
    start: int
    end: int


class CollectiveLog:
    """The executions of a rank's collectives.

    Attributes
    ----------
    rows : list of CollectiveTime or None
        None while nothing is recorded.
    """

    def __init__(self) -> None:
        self.rows: list[CollectiveTime] | None = None

    def add(self, collective: Collective, size: int, start: int) -> None:
        """Append an execution that ends now."""
        if self.rows is not None:
            self.rows.append(CollectiveTime(collective, size, start, perf_counter_ns()))
