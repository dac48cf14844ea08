"""Helpers of all transports: identity of ranks, comparison of facts between ranks, and errors for lost ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from types import TracebackType

import numpy as np

from aotc.vmfb.errors import CallError
from aotc.vmfb.host.locks import new_lock

# Seconds between two looks at the word that a rank is lost, in every wait. It bounds the delay of the error; each look
# costs some microseconds.
POLL_SECONDS = 0.05

CLOSED = "closed the module"

# Seconds after a rank has closed its link until work of a GPU that waits for it is given up. Its part of that work may
# be done, and on its way.
LEFT_SECONDS = 2.0


class LeftRanks:
    """Ranks that have closed their links, with the time at which this rank first noticed."""

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}

    def overdue(self, closed: Iterable[int]) -> int | None:
        """Return a rank that closed its link more than ``LEFT_SECONDS`` ago, or None."""
        now = monotonic()
        since = {rank: self._seen.setdefault(rank, now) for rank in tuple(closed)}
        return next((rank for rank, seen in since.items() if now - seen > LEFT_SECONDS), None)


@dataclass(frozen=True, slots=True)
class Peer:
    """Rank, host and process number of a process, for error messages."""

    rank: int
    host: str
    process: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.process})"


@dataclass(frozen=True, slots=True)
class Loss:
    """The rank that all ranks report as lost, and the reason ``why``: empty if its process or connection ended."""

    rank: int
    why: str = ""

    def text(self, peer: object, what: str, *, waiting: bool) -> str:
        """Return the error message for a rank that waits in the collective ``what``, or has not started it yet."""
        verb = self.why or "ended"
        return f"{peer} {verb} {'during' if waiting and not self.why else 'before'} {what}"


class OneThread:
    """Context manager that one thread at a time may enter; for a second thread it raises an error.

    A lock would order two concurrent calls differently on different ranks, which would mix up their data.
    """

    def __init__(self) -> None:
        self._lock = new_lock()

    def __enter__(self) -> None:
        """Enter the context; raise a CallError if another thread is in it."""
        if not self._lock.acquire(blocking=False):
            raise CallError(
                "",
                "two threads call collectives of the same ranks at once",
                hint="call a sharded module from one thread, or give its calls one order on all ranks",
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def facts_of_rank(facts: Mapping[str, str], size: int) -> dict[str, str]:
    """Return the facts that must be equal on all ranks: ``facts``, the number of ranks, and the byte order."""
    return {**facts, "ranks": str(size), "byte order": sys.byteorder}


def fact_difference(facts: Sequence[Mapping[str, str]]) -> str:
    """Return an error message with each differing fact and the ranks of each value; empty if all ranks agree."""
    lines = []
    for name in dict.fromkeys(name for one in facts for name in one):
        ranks_of: dict[str, list[int]] = {}
        for rank, one in enumerate(facts):
            ranks_of.setdefault(one.get(name, "nothing"), []).append(rank)
        if len(ranks_of) > 1:
            values = "; ".join(f"{value} on {rank_list(ranks)}" for value, ranks in ranks_of.items())
            lines.append(f"    {name}: {values}")
    if not lines:
        return ""
    return "\n".join(["the ranks do not run the same model in the same way", *lines])


def rank_list(ranks: Sequence[int]) -> str:
    """Format sorted rank numbers as text: ``rank 3`` or ``ranks 0, 2-7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def array_bytes(array: np.ndarray) -> memoryview:
    """Return a view of the bytes of a contiguous array of any dtype, also of ml_dtypes.

    Raises
    ------
    ValueError
        If the array is not contiguous.
    """
    if not array.flags.c_contiguous:
        raise ValueError("the array is not contiguous")
    return array.reshape(-1).view(np.uint8).data
