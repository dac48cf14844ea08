"""Limits of a module: how many of its calls are under way at a time, and how long each may take.

All calls of such a module are submissions, also those that are waited for at once (:mod:`aotc.vmfb.api.limited`).
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
    """What all calls of a module keep to.

    Attributes
    ----------
    in_flight : int
        So many run at a time, others wait; 0 is any number.
    seconds : float or None
        Each ends after so long, counted from when it was made.
    """

    in_flight: int = 0
    seconds: float | None = None

    def deadline(self, where: str, asked: Any) -> float | None:
        """Return the seconds that a call has, for which so many may be ``asked``.

        Raises
        ------
        VmError
            If that is no time to come.
        """
        if asked is None:
            return self.seconds
        number = isinstance(asked, int | float | np.integer | np.floating) and not isinstance(asked, bool)
        if not number or not 0 <= asked <= float_info.max:  # which NaN is not either
            raise VmError(where, "the deadline is no time to come", repr(asked)[:80], "seconds from now, 0 or more")
        return float(asked) if self.seconds is None else min(float(asked), self.seconds)


NO_LIMITS = Limits()


def checked_limits(max_in_flight: Any, timeout: Any) -> Limits:
    """Return the limits that were asked for.

    Raises
    ------
    VmError
        If one is nothing above 0.
    """
    number = isinstance(max_in_flight, Integral) and not isinstance(max_in_flight, bool) and int(max_in_flight) > 0
    if max_in_flight is not None and not number:
        raise VmError("", f"max_in_flight is {max_in_flight!r}"[:80], expected="a number of calls, 1 or more")
    real = isinstance(timeout, Real) and not isinstance(timeout, bool) and 0 < float(timeout) < float("inf")
    if timeout is not None and not real:
        raise VmError("", f"timeout is {timeout!r}"[:80], expected="seconds for each call, more than 0")
    return Limits(int(max_in_flight or 0), None if timeout is None else float(timeout))


class LimitedLane(Lane):
    """The ready submissions of a module with a limit: so many run at a time, whoever runs them."""

    def __init__(self, count: int) -> None:
        super().__init__(count)

    def begin(self) -> bool:
        """Let a thread run a call of its own that was not submitted, if nobody waits; it says when that is done."""
        return not self._ready and self.enter()

    def admit(self) -> bool:
        """Let a thread run one that waits for it; it says when that is done."""
        return self.enter()

    def release(self) -> None:
        """Note that it is done."""
        self.leave()


_LANES: WeakKeyDictionary[Any, LimitedLane] = WeakKeyDictionary()
after_fork(_LANES.clear)  # no dispatcher of the parent is there


def queue_of(call: Any) -> Lane | None:
    """Return the lane that submissions of a ``SubmittedCall`` wait in; none for that of the whole process."""
    most = call.limits.in_flight
    if not most:
        return lane_of(call.executable) if call.remote else lane_of_devices(call.executable)
    return _limited_lane(call.executable, min(most, STREAMS) if call.remote else most)


def _limited_lane(executable: Any, most: int) -> LimitedLane:
    found = _LANES.get(executable)
    return _LANES.setdefault(executable, LimitedLane(most)) if found is None else found


def turns_of(executable: Any) -> LimitedLane | None:
    """Return the lane of calls on GPUs that are limited in number alone: no clock ends them."""
    limits: Limits = executable.limits
    if not limits.in_flight or limits.seconds is not None:
        return None
    return _limited_lane(executable, min(limits.in_flight, STREAMS))
