"""Queues of submissions that need the same GPU streams: at most one dispatcher thread for each stream."""

from __future__ import annotations

from collections import deque
from threading import get_ident
from weakref import WeakKeyDictionary

from aotc.vmfb.host.locks import after_fork
from aotc.vmfb.limits import STREAMS
from aotc.vmfb.submit.dispatcher_threads import PROCESS, Box, Task, take_from_box


class Lane:
    """Queue of ready submissions of one executable with GPUs, in the order in which they became ready.

    :meth:`reserve_dispatcher` and :meth:`release_dispatcher` limit its number of dispatchers to the number of streams.
    With all streams in use, a further dispatcher could only wait.
    """

    def __init__(self, count: int = STREAMS) -> None:
        self._ready: deque[Box] = deque()
        self._free = [None] * count
        self._last: Box = []  # the box that was last posted for a dispatcher
        self._threads: set[int] = set()  # dispatchers that work on this lane

    def enqueue(self, box: Box) -> None:
        """Append a ready submission to the queue, and request a dispatcher."""
        self._ready.append(box)
        self._send_dispatcher()

    def reserve_dispatcher(self) -> bool:
        """Count one more dispatcher of this queue; return False if the limit is reached."""
        try:
            self._free.pop()
        except IndexError:
            return False
        return True

    def release_dispatcher(self) -> None:
        """Count one dispatcher less, and request one if submissions are ready."""
        self._free.append(None)
        self.request_dispatcher()

    def request_dispatcher(self) -> None:
        """Request a dispatcher if any submission is ready."""
        if self._ready:
            self._send_dispatcher()

    def remove_box(self, box: Box) -> None:
        """Remove an empty box if it was queued last, and cancel the dispatcher that was requested for it."""
        try:
            last = self._ready.pop()
        except IndexError:
            return
        if last is not box:
            self._ready.append(last)
        elif not self._ready and take_from_box(self._last) is not None:  # no dispatcher has started
            PROCESS.dispatchers.remove_box(self._last)
            self.release_dispatcher()
        self.request_dispatcher()  # a dispatcher may have polled in between

    def may_run_on_waiting_thread(self) -> bool:
        """Return True: a thread that waits for a ready submission may run it itself."""
        return True

    def waiting_thread_finished(self) -> None:
        """Do nothing: waiting threads that run submissions are not counted here."""

    def may_continue(self) -> bool:
        """Return True if this dispatcher may run its next submission: enough threads are awake for other queues."""
        PROCESS.dispatchers.wake_threads()
        return PROCESS.dispatchers.are_enough_awake()

    def _send_dispatcher(self) -> None:
        """Post a task that runs this queue to the process's dispatchers, unless the limit is reached."""
        if get_ident() in self._threads and PROCESS.dispatchers.poll_queue_later(self):
            return
        if not self.reserve_dispatcher():
            return  # a running dispatcher polls again
        self._last = [_LaneTask(self)]
        PROCESS.dispatchers.enqueue(self._last)

    def run_ready(self) -> None:
        """Run ready submissions of this queue as long as the dispatcher may continue here."""
        me = get_ident()
        self._threads.add(me)
        try:
            task = self._next_submission()
            while task is not None:
                task.run()
                task = self._next_submission() if self.may_continue() else None
                if task is not None:
                    self.request_dispatcher()
        finally:
            self._threads.discard(me)
            self.release_dispatcher()

    def _next_submission(self) -> Task | None:
        """Pop the next submission that no other thread has taken; None without one."""
        task = None
        while task is None and self._ready:
            try:
                task = take_from_box(self._ready.popleft())
            except IndexError:  # another thread took the last one
                break
        return task


class _LaneTask:
    """Dispatcher task that runs ready submissions of a queue."""

    __slots__ = ("_lane",)

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def run(self) -> None:
        """Run ready submissions of the queue."""
        self._lane.run_ready()


_LANES: WeakKeyDictionary[object, Lane] = WeakKeyDictionary()
after_fork(_LANES.clear)  # no dispatcher of the parent exists in the child


def lane_of_executable(executable: object) -> Lane:
    """Return the queue of an executable; create it on first use."""
    found = _LANES.get(executable)
    return _LANES.setdefault(executable, Lane()) if found is None else found
