"""Interface of a rank's connection to the other ranks, and the choice of the transport (TCP, MPI or threads)."""

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
        """Send and receive arrays, keyed by rank, concurrently.

        Arrays are contiguous; those of ``receives`` are written. A rank may exchange with itself. After the call, the
        arrays of ``sends`` may be modified.

        Parameters
        ----------
        what : str
            The collective, for errors: ``all_reduce at model.py:35, collective 84``. It must be equal on both sides.

        Raises
        ------
        RankLost
            If a rank ended, or closed its link, while its data were needed. All ranks raise the error for the same
            lost rank, also in every later call.
        CallError
            If the other side runs another collective, or another thread of this rank is in the link.
        """

    def lost(self, what: str) -> RankLost | None:
        """Return the error for a lost rank, or None, without waiting; polled while a GPU waits for other ranks.

        A rank that has closed its link counts as lost only after :data:`~aotc.vmfb.ranks.loss.LEFT_SECONDS`, because
        its data may still be in transit.
        """

    def close(self, why: str = ...) -> None:
        """Disconnect; ranks that still need this one raise an error with the text ``rank N`` and ``why``."""


def open_link(ranks: Ranks, facts: Mapping[str, str]) -> Link:
    """Join all ranks, and compare ``facts`` (bundle, version, target, mesh) between them.

    Raises
    ------
    CallError
        On all connected ranks, if a rank is missing at the timeout, or if facts differ.
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
    """Return ``mpi`` if an MPI launcher started this process and no address is given, else ``tcp``."""
    launched = ranks_from_environment()
    return "mpi" if not ranks.address and launched is not None and launched.transport == "mpi" else "tcp"
