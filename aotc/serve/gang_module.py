"""A sharded model in the server: a gang of ranks, which restarts after a rank is lost."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from logging import getLogger
from time import monotonic, sleep
from typing import Any, TypeVar

import numpy as np

from aotc.serve.background_threads import run_in_background
from aotc.serve.errors import CLOSED, RequestFault
from aotc.serve.logs import LOGGER
from aotc.vmfb.api.entry import Entry
from aotc.vmfb.arguments import Signature
from aotc.vmfb.errors import BundleError, Error, RankLost
from aotc.vmfb.gang.base import BaseGang, GangState
from aotc.vmfb.host.locks import new_lock
from aotc.vmfb.ranks.layout import Layout

_LOG = getLogger(LOGGER)

Result = TypeVar("Result")

# Seconds between two attempts to start the ranks again: the first one, and the most. A device may need some seconds
# until it is free; a model that never starts must not fill the machine with processes.
_FIRST_PAUSE, _MOST_PAUSE = 0.5, 30.0


class GangModule:
    """Gang of ranks with the part of a module's interface that the server uses.

    Calls run one after another, as the ranks exchange data in each. During a restart of the ranks, requests are refused
    with a hint when to retry.

    Parameters
    ----------
    name : str
        The model, for messages.
    start : callable
        Starts the ranks; its gang ends with the first loss.
    target : str
        The target of the bundle's code.

    Attributes
    ----------
    functions : dict of str to Entry
        The functions of the bundle.
    gpus : tuple
        Empty: calls take and return arrays of the host.
    """

    gpus = ()

    def __init__(self, name: str, start: Callable[[], BaseGang], target: str) -> None:
        self._name, self._start, self._target = name, start, target
        self._lock = new_lock()
        begin = monotonic()
        gang = start()
        self._gang: BaseGang | None = gang
        self._start_seconds = monotonic() - begin
        self._mesh = str(gang.mesh)
        self.functions: Mapping[str, Entry] = dict(gang.functions)
        self._default = gang.default_name
        self._signatures = _signatures(gang)
        self._starts, self._is_closed = 1, False

    @property
    def is_ready(self) -> bool:
        """Return True unless the ranks are restarting."""
        return self._gang is not None

    def default_name(self) -> str:
        """Return the name of the function for calls without a name."""
        return self._default()

    async def submit(self, name: str, *arrays: np.ndarray, results: str = "") -> list[np.ndarray]:
        """Run a function on whole arrays, and return whole results.

        Raises
        ------
        RequestFault
            If the ranks are starting again, or a rank is lost in this call.
        """
        gang = self._running()
        return await self._run(gang, partial(gang.invoke, name, *arrays))

    def new_state(self) -> GangState:
        """Return an empty state on the ranks, for a sequence.

        Raises
        ------
        RequestFault
            If the ranks are starting again.
        """
        return self._running().new_state()

    async def step(self, name: str, array: np.ndarray, state: GangState) -> np.ndarray:
        """Run a function on an array and on a state, which stays on the ranks; return the first result.

        Raises
        ------
        RequestFault
            If the ranks have started again since the state was made, are starting again, or one is lost in this call.
        """
        gang = self._running()
        if state.gang is not gang:
            hint = "the sequence again, with all its tokens"
            raise RequestFault(CLOSED, self._name, "the state of the sequence is lost: a rank has ended", hint=hint)
        return await self._run(gang, partial(gang.step, name, array, state))

    def layouts(self, name: str) -> list[tuple[list[Layout], list[Layout]]]:
        """Return the layouts of arguments and of results of a function, or of each of its buckets."""
        return self._running().layouts(name)

    def fixed_signatures(self, name: str) -> list[Signature]:
        """Return the signature of a function, or of each of its buckets."""
        return self._running().fixed_signatures(name)

    def _running(self) -> BaseGang:
        gang = self._gang
        if gang is None or gang.has_ended:
            raise self._unavailable("its ranks are starting again")
        return gang

    async def _run(self, gang: BaseGang, call: Callable[[], Result]) -> Result:
        """Run a call in the background; start the ranks again if it has ended them."""
        try:
            return await run_in_background(call)
        except Error as error:
            if not gang.has_ended:
                raise
            if not self._restart(gang, error):  # another request has met the loss
                raise self._unavailable("its ranks are starting again") from None
            if not isinstance(error, RankLost):  # this request's own values ended the ranks
                raise
            raise self._unavailable(f"{_first_line(error)}; the ranks are started again") from None

    def stats(self) -> dict[str, Any]:
        """Return target, mesh and number of starts for the status page."""
        return {"target": f"{self._target}, {self._mesh}", "devices": {"ranks": self._mesh}, "starts": self._starts}

    def close(self) -> None:
        """End the ranks, without a restart."""
        with self._lock:
            self._is_closed = True
            gang, self._gang = self._gang, None
        if gang is not None:
            gang.close()

    def _unavailable(self, what: str) -> RequestFault:
        hint = "the request again; the state of a sequence of requests is lost"
        return RequestFault(CLOSED, self._name, what, hint=hint, retry=max(1, round(self._start_seconds)))

    def _restart(self, lost: BaseGang, error: Exception) -> bool:
        """Restart the ranks in the background, once for each lost gang; return False if a restart has begun."""
        with self._lock:
            if self._gang is not lost or self._is_closed:
                return False
            self._gang = None
        _LOG.warning("%s: %s; the ranks are started again", self._name, _first_line(error))
        arguments = weakref.ref(self), lost
        threading.Thread(target=_start_again, args=arguments, name="aotc-serve-gang", daemon=True).start()
        return True

    def start_new_ranks(self, pause: float) -> bool:
        """Start new ranks; return False, with a log entry, if they do not start.

        The caller then waits ``pause`` seconds, which the log entry names, before the next attempt.
        """
        if self._is_closed:
            return True
        begin = monotonic()
        try:
            started = self._start()
            if _signatures(started) != self._signatures:
                started.close()
                raise BundleError(self._name, "the file was replaced by one with other functions")
        except Exception as error:
            text = "%s: the ranks do not start, next attempt in %g s: %s"
            _LOG.warning(text, self._name, pause, error, exc_info=not isinstance(error, Error))
            return False
        with self._lock:
            is_served = not self._is_closed
            if is_served:
                self._gang, self._starts = started, self._starts + 1
                self._start_seconds = monotonic() - begin
        if is_served:
            _LOG.info("%s: the ranks run again after %.1f s", self._name, self._start_seconds)
        else:
            started.close()
        return True


def _start_again(module: weakref.ref[GangModule], lost: BaseGang) -> None:
    """Start the ranks of a module repeatedly until they run, or the server drops the module."""
    with suppress(Exception):  # its processes are dead or killed
        lost.close()
    pause = _FIRST_PAUSE
    while (found := module()) is not None and not found.start_new_ranks(pause):
        del found
        sleep(pause)
        pause = min(2 * pause, _MOST_PAUSE)


def _signatures(gang: BaseGang) -> dict[str, str]:
    return {name: repr(entry.signature) for name, entry in gang.functions.items()}


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
