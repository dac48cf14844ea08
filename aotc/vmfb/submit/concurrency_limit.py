"""Queues of modules with a limit on concurrent calls.

All calls of a module with limits are submissions, including those that the caller waits for at once
(:mod:`aotc.vmfb.api.limited_function`).
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from aotc.vmfb.call_limits import Limits
from aotc.vmfb.host.locks import after_fork
from aotc.vmfb.limits import STREAMS
from aotc.vmfb.submit.device_slots import lane_of_devices
from aotc.vmfb.submit.stream_queue import Lane, lane_of_executable


class LimitedLane(Lane):
    """Queue of submissions of a module with a limit: at most ``count`` calls run at a time, on any threads."""

    def __init__(self, count: int) -> None:
        super().__init__(count)

    def try_begin_call(self) -> bool:
        """Return True if this thread may run a call without submission.

        It must call :meth:`release_dispatcher` afterwards.
        """
        return not self._ready and self.reserve_dispatcher()

    def may_run_on_waiting_thread(self) -> bool:
        """Return True if a thread may run the submission that it waits for.

        :meth:`waiting_thread_finished` must follow.
        """
        return self.reserve_dispatcher()

    def waiting_thread_finished(self) -> None:
        """Record that a waiting thread has finished the submission that it ran itself."""
        self.release_dispatcher()


_LANES: WeakKeyDictionary[object, LimitedLane] = WeakKeyDictionary()
after_fork(_LANES.clear)  # no dispatcher of the parent exists in the child


def lane_for_calls(executable: object, limits: Limits, remote: bool) -> Lane | None:
    """Return the queue for submitted calls of an executable; None for the queue of the process.

    ``remote`` is True for calls on GPUs.
    """
    most = limits.in_flight
    if not most:
        return lane_of_executable(executable) if remote else lane_of_devices(executable)
    return _limited_lane(executable, min(most, STREAMS) if remote else most)


def _limited_lane(executable: object, most: int) -> LimitedLane:
    found = _LANES.get(executable)
    return _LANES.setdefault(executable, LimitedLane(most)) if found is None else found


def counting_lane(executable: object, limits: Limits) -> LimitedLane | None:
    """Return the queue that counts concurrent GPU calls; None if calls are not limited, or have a deadline.

    A call with a deadline must be a submission; a call that is only counted need not be.
    """
    if not limits.in_flight or limits.seconds is not None:
        return None
    return _limited_lane(executable, min(limits.in_flight, STREAMS))
