"""Limits of a module: concurrent calls, and the duration of a call.

All calls of a module with limits are submissions, including those that the caller waits for at once
(:mod:`aotc.vmfb.api.limited`).
"""

from __future__ import annotations

from numbers import Integral, Real
from sys import float_info
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from aotc.vmfb.errors import VmError
from aotc.vmfb.host.locks import after_fork
from aotc.vmfb.limits import STREAMS
from aotc.vmfb.submit.device_slots import lane_of_devices
from aotc.vmfb.submit.stream_queue import Lane, lane_of


class Limits(NamedTuple):
    """Limits for all calls of a module.

    Attributes
    ----------
    in_flight : int
        Maximum number of concurrent calls, others wait; 0 for no limit.
    seconds : float or None
        Maximum duration of a call, counted from its submission.
    """

    in_flight: int = 0
    seconds: float | None = None

    def deadline(self, where: str, asked: Any) -> float | None:
        """Return the seconds that a call may take: the smaller of the module's limit and ``asked``.

        Raises
        ------
        VmError
            If ``asked`` is not a finite number of at least 0.
        """
        if asked is None:
            return self.seconds
        number = isinstance(asked, int | float | np.integer | np.floating) and not isinstance(asked, bool)
        if not number or not 0 <= asked <= float_info.max:  # also refuses NaN
            raise VmError(where, "the deadline is no time to come", repr(asked)[:80], "seconds from now, 0 or more")
        return float(asked) if self.seconds is None else min(float(asked), self.seconds)


NO_LIMITS = Limits()


def checked_limits(max_in_flight: Any, timeout: Any) -> Limits:
    """Validate the limits of a module.

    Raises
    ------
    VmError
        If a limit is not positive.
    """
    number = isinstance(max_in_flight, Integral) and not isinstance(max_in_flight, bool) and int(max_in_flight) > 0
    if max_in_flight is not None and not number:
        raise VmError("", f"max_in_flight is {max_in_flight!r}"[:80], expected="a number of calls, 1 or more")
    real = isinstance(timeout, Real) and not isinstance(timeout, bool) and 0 < float(timeout) < float("inf")
    if timeout is not None and not real:
        raise VmError("", f"timeout is {timeout!r}"[:80], expected="seconds for each call, more than 0")
    return Limits(int(max_in_flight or 0), None if timeout is None else float(timeout))


class LimitedLane(Lane):
    """Queue of a module with a limit: at most ``count`` of its submissions run at a time, on any threads."""

    def __init__(self, count: int) -> None:
        super().__init__(count)

    def begin(self) -> bool:
        """Return True if a thread may run a call that was not submitted; it must call :meth:`leave` afterwards."""
        return not self._ready and self.enter()

    def admit(self) -> bool:
        """Return True if a thread may run a submission that it waits for; it must call :meth:`release` afterwards."""
        return self.enter()

    def release(self) -> None:
        """Report that the submission has ended."""
        self.leave()


_LANES: WeakKeyDictionary[Any, LimitedLane] = WeakKeyDictionary()
after_fork(_LANES.clear)  # no dispatcher of the parent exists in the child


def queue_of(call: Any) -> Lane | None:
    """Return the lane in which submissions of a ``SubmittedCall`` wait; None for the queue of the process."""
    most = call.limits.in_flight
    if not most:
        return lane_of(call.executable) if call.remote else lane_of_devices(call.executable)
    return _limited_lane(call.executable, min(most, STREAMS) if call.remote else most)


def _limited_lane(executable: Any, most: int) -> LimitedLane:
    found = _LANES.get(executable)
    return _LANES.setdefault(executable, LimitedLane(most)) if found is None else found


def turns_of(executable: Any) -> LimitedLane | None:
    """Return the lane of GPU calls with a limit of their number but none of their duration, else None."""
    limits: Limits = executable.limits
    if not limits.in_flight or limits.seconds is not None:
        return None
    return _limited_lane(executable, min(limits.in_flight, STREAMS))
