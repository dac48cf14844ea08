"""Lanes: ready submissions that want the same streams take few dispatchers, however many there are."""

from __future__ import annotations

from collections import deque
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

from aotc.vmfb.host.locks import after_fork
from aotc.vmfb.limits import STREAMS
from aotc.vmfb.submit.dispatcher_threads import PROCESS, Box, Task, take


class Lane:
    """The ready submissions of one executable with GPUs, in the order in which they became ready.

    :meth:`enter` and :meth:`leave` decide how many dispatchers it has: one for each of its streams. While as many calls
    are on GPUs, no further dispatcher could do anything.
    """

    def __init__(self, count: int = STREAMS) -> None:
        self._ready: deque[Box] = deque()
        self._free = [None] * count
        self._last: Box = []  # what was posted for a dispatcher last
        self._threads: set[int] = set()  # the dispatchers that are at work here

    def post(self, box: Box) -> None:
        """Have what is in ``box`` run soon."""
        self._ready.append(box)
        self._send()

    def enter(self) -> bool:
        """Take one more dispatcher, if there may be one."""
        try:
            self._free.pop()
        except IndexError:
            return False
        return True

    def leave(self) -> None:
        """Give a dispatcher back; what is ready goes on."""
        self._free.append(None)
        self.go_on()

    def go_on(self) -> None:
        """Have a dispatcher look, if there is anything ready."""
        if self._ready:
            self._send()

    def withdraw(self, box: Box) -> None:
        """Forget a box that is empty, if it was the last one to come, and do not wake a dispatcher for it."""
        try:
            last = self._ready.pop()
        except IndexError:
            return
        if last is not box:
            self._ready.append(last)
        elif not self._ready and take(self._last) is not None:  # no dispatcher has begun
            PROCESS.dispatchers.withdraw(self._last)
            self.leave()
        self.go_on()  # a dispatcher may have looked in between

    def admit(self) -> bool:
        """May a thread that waits for one of them run it itself?"""
        return True

    def release(self) -> None:
        """Note that it has."""

    def keeps(self) -> bool:
        """Tell whether a dispatcher may go on here, as nothing else is ready that none comes for."""
        PROCESS.dispatchers.send()
        return PROCESS.dispatchers.are_enough()

    def _send(self) -> None:
        if get_ident() in self._threads and PROCESS.dispatchers.defer(self):
            return
        if not self.enter():
            return  # a dispatcher that is at work looks again
        self._last = [_Next(self)]
        PROCESS.dispatchers.post(self._last)

    def run(self) -> None:
        """Run what is ready and nobody has taken, as long as this dispatcher may."""
        me = get_ident()
        self._threads.add(me)
        try:
            task = self._next()
            while task is not None:
                task.run()
                task = self._next() if self.keeps() else None
                if task is not None:
                    self.go_on()
        finally:
            self._threads.discard(me)
            self.leave()

    def _next(self) -> Task | None:
        task = None
        while task is None and self._ready:
            try:
                task = take(self._ready.popleft())
            except IndexError:  # another thread took the last one
                break
        return task


class _Next:
    """The next submission of a lane, for a dispatcher."""

    __slots__ = ("_lane",)

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def run(self) -> None:
        """Run it."""
        self._lane.run()


_LANES: WeakKeyDictionary[Any, Lane] = WeakKeyDictionary()
after_fork(_LANES.clear)  # no dispatcher of the parent is there


def lane_of(executable: Any) -> Lane:
    """Return the lane of an executable."""
    found = _LANES.get(executable)
    return _LANES.setdefault(executable, Lane()) if found is None else found
