"""The interface of a rank's connection to the others, and the choice of the transport."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from aotc.vmfb.errors import ArgumentValueError, RankLost
from aotc.vmfb.ranks.ranks import Ranks, ranks_from_environment


class Link(Protocol):
    """One rank's connection to all others.

    Attributes
    ----------
    rank, size : int
    """

    rank: int
    size: int

    def exchange(self, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray], what: str) -> None:
        """Send each array to its rank, and fill each array from its rank, all at once.

        Arrays are contiguous; those of ``receives`` are written. A rank may exchange with itself. The call returns when
        the arrays of ``sends`` may change.

        Parameters
        ----------
        what : str
            The collective, for errors: ``all_reduce at model.py:35, collective 84``. It must be equal on both sides.

        Raises
        ------
        RankLost
            If a rank ended, or closed its link, while it was needed. All ranks name the same one, in every later call.
        CallError
            If the other side is in another collective, or another thread of this rank is in one.
        """

    def lost(self, what: str) -> RankLost | None:
        """Return the error of a lost rank, or None, without waiting; for work on a GPU, which waits for all ranks.

        A rank that has closed its link is lost when this one has waited for :data:`~aotc.vmfb.ranks.loss.LEFT_SECONDS`
        since: before, it may have done its part.
        """

    def close(self, why: str = ...) -> None:
        """Leave the other ranks; ``why`` completes the sentence ``rank 3 ...`` for those that still need this one."""


def open_link(ranks: Ranks, facts: Mapping[str, str]) -> Link:
    """Join all ranks, and compare ``facts`` (bundle, version, target, mesh) between them.

    Raises
    ------
    CallError
        On all ranks that are there: if a rank is missing at the timeout, or if facts differ.
    """
    transport = ranks.transport or _default_transport(ranks)
    facts = {**facts, "transport": transport}
    match transport:
        case "mpi":
            from aotc.vmfb.ranks.mpi import mpi_link

            return mpi_link(ranks, facts)
        case "tcp":
            from aotc.vmfb.ranks.tcp import tcp_link

            return tcp_link(ranks, facts)
    raise ArgumentValueError("Ranks", "ranks that are threads share one process: use thread_links(size)")


def _default_transport(ranks: Ranks) -> str:
    """Return ``mpi`` if a launcher of MPI started the process and no address says otherwise."""
    launched = ranks_from_environment()
    return "mpi" if not ranks.address and launched is not None and launched.transport == "mpi" else "tcp"
