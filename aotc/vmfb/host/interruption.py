"""Who may end a call that is under way: what the executor asks Python every few milliseconds.

Signals need nothing of ours: the interpreter runs their handlers when :func:`notice` begins, on the main thread as
ever, and what a handler raises ends the call. asyncio raises nothing where a loop's own thread computes: it notes that
the task is to be cancelled. Nor does it where another thread computes for a task: the future is cancelled that the task
awaits. Both are looked up here, so that they end the call too.
"""

from __future__ import annotations

import sys
from _thread import get_ident
from collections.abc import Callable
from time import monotonic_ns
from types import FrameType
from typing import Any

from aotc.vmfb.host.release import never_freed
from aotc.vmfb.limits import NOTICE_NANOSECONDS

RUNNING: dict[int, Any] = {}  # by thread: the submission that it runs
_ASK: list[Callable[[], None]] = []


def on_ask(function: Callable[[], None]) -> None:
    """Have ``function`` called when somebody wants a call to end: it lets every call under way call :func:`notice`."""
    _ASK.append(function)


def ask() -> None:
    """Let every call under way look soon whether it is to end, not only when its time has come."""
    for function in _ASK:
        function()


@never_freed
def notice(is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
    """Raise what is to end the call of this thread, if anything is.

    Nothing is, once the interpreter clears its modules: a call that a finalizer makes then goes on to its end.

    Raises
    ------
    VmError
        If this thread runs a submission that was cancelled, or whose deadline has passed.
    asyncio.CancelledError
        If the task is cancelled that runs on this thread, or awaits what this thread computes.
    """
    if is_finalizing():
        return
    end_if_stopped()
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and (_task_is_cancelled(asyncio) or _awaiting_is_cancelled()):
        raise asyncio.CancelledError


def end_if_stopped() -> None:
    """Raise what is to end the submission that this thread runs, if anything is."""
    if RUNNING:
        running = RUNNING.get(get_ident())
        if running is not None and running.stopped is not None:
            raise running.stopped


def is_submitted() -> bool:
    """Does this thread run a submission?"""
    return bool(RUNNING) and get_ident() in RUNNING


class Watch:
    """Looks who may end a call whose loop the host runs: for submissions in each turn, else every few milliseconds."""

    __slots__ = ("_due",)

    def __init__(self) -> None:
        self._due = monotonic_ns() + NOTICE_NANOSECONDS

    def look(self) -> None:
        """Raise what is to end the call, if anything is."""
        end_if_stopped()
        now = monotonic_ns()
        if now >= self._due:
            notice()
            self._due = now + NOTICE_NANOSECONDS


def _task_is_cancelled(asyncio: Any) -> bool:
    try:
        task = asyncio.current_task()
    except (AttributeError, RuntimeError):  # asyncio is being imported; no loop runs on this thread
        return False
    return bool(getattr(task, "_must_cancel", False))  # asked for, and not yet raised


def _awaiting_is_cancelled() -> bool:
    """Tell whether this thread works for a future of asyncio's, as ``asyncio.to_thread`` makes one, that is cancelled.

    The pool's own future cannot be cancelled once it runs. The one of asyncio that was chained to it can; it stands in
    a closure alone. Where these private names are not found, nothing is cancelled.
    """
    pools = sys.modules.get("concurrent.futures.thread")
    code = getattr(getattr(getattr(pools, "_WorkItem", None), "run", None), "__code__", None)
    frame: FrameType | None = sys._getframe()
    while code is not None and frame is not None:
        if frame.f_code is code:
            item = frame.f_locals.get("self")
            callbacks = list(getattr(getattr(item, "future", None), "_done_callbacks", ()))
            waiting = [future for f in callbacks if (future := _chained(f)) is not None]
            return bool(waiting) and all(future.cancelled() for future in waiting)
        frame = frame.f_back
    return False


def _chained(callback: Any) -> Any:
    """Return the future that a callback of ``asyncio.futures._chain_future`` passes results on to, or None."""
    names = getattr(getattr(callback, "__code__", None), "co_freevars", ())
    if "destination" not in names:
        return None
    found = callback.__closure__[names.index("destination")].cell_contents
    return found if hasattr(found, "cancelled") else None


def is_calling(module: str) -> bool:
    """Tell whether another thread is in a function of ``module``, which it called native code from."""
    me = get_ident()
    return any(f.f_globals.get("__name__") == module for n, f in sys._current_frames().items() if n != me)
