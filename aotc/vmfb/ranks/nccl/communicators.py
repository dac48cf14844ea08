"""NCCL's communicators of one rank: one for each distinct list of groups, made when the module is loaded."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref, c_void_p
from functools import partial
from time import monotonic

import numpy as np

from aotc.vmfb.errors import CallError
from aotc.vmfb.host.locks import new_lock
from aotc.vmfb.ranks.link import Link
from aotc.vmfb.ranks.loss import POLL_SECONDS, rank_list
from aotc.vmfb.ranks.nccl.library import ID_BYTES, Config, Nccl, UniqueId

Groups = tuple[tuple[int, ...], ...]

# Seconds for all ranks of a group to make a communicator. It takes 0.3 to 2 s between GPUs of a host.
_START_SECONDS = 120

# Seconds that the end of a communicator may take. NCCL waits in it for kernels of ranks that are gone, possibly for
# ever.
END_SECONDS = 4.0


class Communicators:
    """The communicators of one rank, by their groups.

    Parameters
    ----------
    nccl : Nccl
    link : Link
        Carries NCCL's ids of the groups between the ranks.
    enter : callable
        Makes the rank's GPU current in the calling thread.
    """

    def __init__(self, nccl: Nccl, link: Link, enter: Callable[[], None]) -> None:
        self.nccl, self._link, self._enter = nccl, link, enter
        self._made: dict[Groups, c_void_p] = {}
        self._lock = new_lock()  # held while NCCL is asked, and while the communicators are taken to be ended
        self._release = weakref.finalize(self, _abort_all, nccl, enter, self._made)
        self._release.atexit = False  # the end of the process ends them

    def of(self, groups: Groups) -> c_void_p:
        """Return this rank's communicator for ``groups``; at first use all ranks make it together.

        Raises
        ------
        RankLost
            If a rank ends meanwhile.
        CallError
            If NCCL cannot connect the GPUs.
        """
        if groups not in self._made:
            made = self._make(groups)
            with self._lock:
                self._made[groups] = made
        return self._made[groups]

    def async_error(self) -> str:
        """Return an error that NCCL has met since the last call; empty if there is none."""
        with self._lock:
            return next((text for c in self._made.values() if (text := self.nccl.async_error(c))), "")

    def end(self, function: str, destroy_collective_graphs: Callable[[], None]) -> bool:
        """End all communicators by ``ncclCommAbort`` or ``ncclCommDestroy``, and the graphs with collectives.

        Return False if they do not end in time. All end at once, each in a thread: a communicator waits for its graphs,
        and a graph that runs for its communicator to be aborted.
        """
        with self._lock:
            made = list(self._made.values())
            self._made.clear()
        steps: list[Callable[[], None]] = [
            partial(_destroy_or_abort, self.nccl, self._enter, function, communicator) for communicator in made
        ]
        steps.append(destroy_collective_graphs)
        threads = [threading.Thread(target=step, daemon=True) for step in steps]
        for thread in threads:
            thread.start()
        deadline = monotonic() + END_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _make(self, groups: Groups) -> c_void_p:
        """Create the NCCL communicator of this rank's group; raise if a rank is lost or the start takes too long.

        A thread calls NCCL, because NCCL waits for ranks that may be lost.
        """
        group = next(group for group in groups if self._link.rank in group)
        one, failures = c_void_p(), list[CallError]()
        own = self._shared_id(group)

        def start() -> None:
            """Create the communicator, or record the error, on a thread of its own."""
            self._enter()
            config = Config.of_blocking()
            arguments = len(group), own, group.index(self._link.rank), byref(config)
            try:
                self.nccl.call("ncclCommInitRankConfig", byref(one), *arguments)
            except CallError as error:
                failures.append(error)

        thread = threading.Thread(target=start, daemon=True)  # in it NCCL waits for ranks that may be gone
        thread.start()
        what, deadline = f"the start of NCCL between {rank_list(sorted(group))}", monotonic() + _START_SECONDS
        while thread.is_alive():
            if lost := self._link.lost(what):
                raise lost
            if monotonic() > deadline:
                raise CallError("", f"{what} takes more than {_START_SECONDS} s", hint="NCCL_DEBUG=INFO says where")
            thread.join(POLL_SECONDS)
        if failures:
            hint = "each rank needs a GPU of its own; ranks that share one exchange by AOTC_RANKS_GPUS=host"
            raise CallError("", f"NCCL cannot connect {rank_list(sorted(group))}", failures[0].args[0], hint=hint)
        return one

    def _shared_id(self, group: tuple[int, ...]) -> UniqueId:
        """Return the id that the first rank of the group has made."""
        data = np.zeros(ID_BYTES, np.uint8)
        what = f"NCCL's id for {rank_list(sorted(group))}"
        if group[0] == self._link.rank:
            own = UniqueId()
            self.nccl.call("ncclGetUniqueId", byref(own))
            data[:] = np.frombuffer(bytes(own), np.uint8)
            if len(group) > 1:
                self._link.exchange(dict.fromkeys(group[1:], data), {}, what)
        else:
            self._link.exchange({}, {group[0]: data}, what)
        return UniqueId.from_buffer_copy(data.tobytes())


def _destroy_or_abort(nccl: Nccl, enter: Callable[[], None], function: str, communicator: c_void_p) -> None:
    """Call ``function`` (``ncclCommDestroy`` or ``ncclCommAbort``) on a communicator, after ``enter()``.

    Errors are ignored: nothing uses the communicator afterwards.
    """
    with suppress(CallError):
        enter()
        nccl.call(function, communicator)


def _abort_all(nccl: Nccl, enter: Callable[[], None], made: dict[Groups, c_void_p]) -> None:
    """Abort the communicators of a module that was dropped without ``close``, each in a thread: NCCL may wait."""
    for communicator in made.values():
        step = partial(_destroy_or_abort, nccl, enter, "ncclCommAbort", communicator)
        threading.Thread(target=step, daemon=True).start()
