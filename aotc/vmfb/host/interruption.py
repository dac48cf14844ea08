"""Interruption of running calls by signals, cancellation and deadlines; the executor checks every few milliseconds.

Signals need no support here: the interpreter runs their handlers when :func:`raise_if_interrupted` starts, on the main
thread as usual, and an exception of a handler ends the call. asyncio cannot raise an exception in a thread that
computes. On the event loop's own thread it only marks the task as cancelled. If a task awaits another thread, it
cancels the awaited future. :func:`raise_if_interrupted` tests both states, so that they end the call too.
"""

from __future__ import annotations

import sys
from _thread import get_ident
from collections.abc import Callable
from time import monotonic_ns
from types import FrameType
from typing import Any

from aotc.vmfb.host.release import keep_alive_forever
from aotc.vmfb.limits import NOTICE_NANOSECONDS

RUNNING: dict[int, Any] = {}  # by thread: the submission that it runs
_ASK: list[Callable[[], None]] = []


def register_check_request(function: Callable[[], None]) -> None:
    """Register a function that makes every running native call check for interruption soon; one for each executor."""
    _ASK.append(function)


def request_interruption_checks() -> None:
    """Make every running call check for cancellation now, without waiting for its next regular check."""
    for function in _ASK:
        function()


@keep_alive_forever
def raise_if_interrupted(is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
    """Raise the exception of a signal handler, cancellation or deadline that ends this thread's call, if there is one.

    No exception is raised once the interpreter clears its modules: a call made by a finalizer then runs to its end.

    Raises
    ------
    CallError
        If this thread runs a submission that was cancelled, or whose deadline has passed.
    asyncio.CancelledError
        If the task on this thread, or the one that awaits this thread, is cancelled.
    """
    if is_finalizing():
        return
    raise_if_submission_stopped()
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and (_task_is_cancelled(asyncio) or _awaiting_is_cancelled()):
        raise asyncio.CancelledError


def raise_if_submission_stopped() -> None:
    """Raise the error of the submission that this thread runs, if that was cancelled or its deadline has passed."""
    if RUNNING:
        running = RUNNING.get(get_ident())
        if running is not None and running.stopped is not None:
            raise running.stopped


def runs_submission() -> bool:
    """Return True if this thread runs a submission."""
    return bool(RUNNING) and get_ident() in RUNNING


class Watch:
    """Checks for interruption in a waiting loop on the host.

    A submission's stop flag is read in each iteration; signals and other cancellations every few milliseconds.
    """

    __slots__ = ("_due",)

    def __init__(self) -> None:
        self._due = monotonic_ns() + NOTICE_NANOSECONDS

    def raise_pending_exception(self) -> None:
        """Raise the exception that ends this thread's call, if there is one."""
        raise_if_submission_stopped()
        now = monotonic_ns()
        if now >= self._due:
            raise_if_interrupted()
            self._due = now + NOTICE_NANOSECONDS


def _task_is_cancelled(asyncio: Any) -> bool:
    try:
        task = asyncio.current_task()
    except (AttributeError, RuntimeError):  # asyncio is being imported; no loop runs on this thread
        return False
    return bool(getattr(task, "_must_cancel", False))  # requested and not yet raised


def _awaiting_is_cancelled() -> bool:
    """Return True if this thread works for a cancelled asyncio future, for instance of ``asyncio.to_thread``.

    The pool's own future cannot be cancelled once it runs. The asyncio future chained to it can; it is accessible only
    in a closure. If these private names do not exist, the result is False.
    """
    pools = sys.modules.get("concurrent.futures.thread")
    code = getattr(getattr(getattr(pools, "_WorkItem", None), "run", None), "__code__", None)
    if code is None:  # before a frame is read: one that refers to itself would keep the caller's arrays alive
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is code:
            item = frame.f_locals.get("self")
            callbacks = list(getattr(getattr(item, "future", None), "_done_callbacks", ()))
            waiting = [future for f in callbacks if (future := _future_of_callback(f)) is not None]
            return bool(waiting) and all(future.cancelled() for future in waiting)
        frame = frame.f_back
    return False


def _future_of_callback(callback: Any) -> Any:
    """Return the future that receives the result in a callback of ``asyncio.futures._chain_future``.

    None for others.
    """
    names = getattr(getattr(callback, "__code__", None), "co_freevars", ())
    if "destination" not in names:
        return None
    found = callback.__closure__[names.index("destination")].cell_contents
    return found if hasattr(found, "cancelled") else None


def is_module_in_native_call(module: str) -> bool:
    """Return True if another thread is in native code called from Python module ``module``."""
    me = get_ident()
    return any(f.f_globals.get("__name__") == module for n, f in sys._current_frames().items() if n != me)
