"""Queues (lanes) of submissions that need the same GPU streams, so that they occupy few dispatcher threads."""

from __future__ import annotations

from collections import deque
from threading import get_ident
from weakref import WeakKeyDictionary

from aotc.vmfb.host.locks import after_fork
from aotc.vmfb.limits import STREAMS
from aotc.vmfb.submit.dispatcher_threads import PROCESS, Box, Task, take_from_box


class Lane:
    """Queue of ready submissions of one executable with GPUs, in the order in which they became ready.

    :meth:`enter` and :meth:`leave` bound its number of dispatchers: one for each of its streams. With all streams in
    use, a further dispatcher could only wait.
    """

    def __init__(self, count: int = STREAMS) -> None:
        self._ready: deque[Box] = deque()
        self._free = [None] * count
        self._last: Box = []  # the box that was last posted for a dispatcher
        self._threads: set[int] = set()  # dispatchers that work on this lane

    def post(self, box: Box) -> None:
        """Queue the submission in ``box``."""
        self._ready.append(box)
        self._send()

    def enter(self) -> bool:
        """Reserve one more dispatcher; return False if the limit is reached."""
        try:
            self._free.pop()
        except IndexError:
            return False
        return True

    def leave(self) -> None:
        """Release a dispatcher, and continue with ready submissions."""
        self._free.append(None)
        self.go_on()

    def go_on(self) -> None:
        """Request a dispatcher if any submission is ready."""
        if self._ready:
            self._send()

    def withdraw(self, box: Box) -> None:
        """Remove an empty box if it was queued last, and cancel the dispatcher that was requested for it."""
        try:
            last = self._ready.pop()
        except IndexError:
            return
        if last is not box:
            self._ready.append(last)
        elif not self._ready and take_from_box(self._last) is not None:  # no dispatcher has started
            PROCESS.dispatchers.withdraw(self._last)
            self.leave()
        self.go_on()  # a dispatcher may have polled in between

    def admit(self) -> bool:
        """Return True if a thread that waits for a submission may run it itself."""
        return True

    def release(self) -> None:
        """Report that a waiting thread has finished the submission that it ran."""

    def keeps(self) -> bool:
        """Return True if a dispatcher may continue here: enough threads are coming for all other ready submissions."""
        PROCESS.dispatchers.send()
        return PROCESS.dispatchers.are_enough()

    def _send(self) -> None:
        if get_ident() in self._threads and PROCESS.dispatchers.defer(self):
            return
        if not self.enter():
            return  # a running dispatcher polls again
        self._last = [_Next(self)]
        PROCESS.dispatchers.post(self._last)

    def run(self) -> None:
        """Run ready submissions as long as this dispatcher may continue here."""
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
                task = take_from_box(self._ready.popleft())
            except IndexError:  # another thread took the last one
                break
        return task


class _Next:
    """Dispatcher task for the next submission of a lane."""

    __slots__ = ("_lane",)

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def run(self) -> None:
        """Run the lane."""
        self._lane.run()


_LANES: WeakKeyDictionary[object, Lane] = WeakKeyDictionary()
after_fork(_LANES.clear)  # no dispatcher of the parent exists in the child


def lane_of(executable: object) -> Lane:
    """Return the lane of an executable; create it on first use."""
    found = _LANES.get(executable)
    return _LANES.setdefault(executable, Lane()) if found is None else found
