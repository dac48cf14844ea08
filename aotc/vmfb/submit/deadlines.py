"""Deadlines of submissions: one thread of the process, started on demand, sleeps until the next deadline."""

from __future__ import annotations

import sys
from collections import deque
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from time import monotonic
from typing import Protocol
from weakref import ref

from aotc.vmfb.host.locks import after_fork
from aotc.vmfb.submit.dispatcher_threads import Bell, start_thread


class HasDeadline(Protocol):
    """Interface of an object that must be notified when its deadline passes."""

    @property
    def done(self) -> object:
        """Return True if the object has ended, so that its deadline no longer matters."""

    def expire(self) -> None:
        """Handle the passed deadline."""


Row = tuple[float, int, ref[HasDeadline]]


# Entries that may be added to the deadline heap before those of finished submissions are removed: about 200 KB.
DEADLINES = 1000


def _expire(late: HasDeadline) -> None:
    """Call ``late.expire()``, and print its exception: the thread must survive to handle later deadlines."""
    try:
        late.expire()
    except BaseException:
        sys.excepthook(*sys.exc_info())


class DeadlineClock:
    """All deadlines of the process, and the thread that calls ``expire`` of each object whose deadline passes.

    Only the clock's thread reads the heap; other threads append to a deque.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self.reset()

    def reset(self) -> None:
        """Drop all deadlines and the thread, at the start and in a forked child."""
        self._added: deque[Row] = deque()
        self._bell = Bell()
        self._next = -inf  # when the thread wakes by itself; while it is awake it reads what was added anyway
        self._threads = [None]  # a list of one token, empty once the thread has been started

    def add_deadline(self, seconds: float, waiter: HasDeadline) -> None:
        """Call ``waiter.expire()`` after ``seconds``, unless ``waiter`` has been freed.

        Raises
        ------
        CallError
            If the system cannot start the thread.
        """
        when = monotonic() + seconds
        self._added.append((when, next(self._numbers), ref(waiter)))
        try:
            self._threads.pop()
        except IndexError:
            if when < self._next or len(self._added) > DEADLINES:
                self._bell.ring()
            return
        try:
            start_thread("aotc-deadlines", self._run_thread)
        except BaseException:
            self._threads.append(None)
            raise

    def _run_thread(self) -> None:
        """Run the clock's thread: move new deadlines to a heap, handle passed ones, sleep until the next."""
        heap: list[Row] = []
        most = DEADLINES
        while True:
            self._next = -inf
            while self._added:
                heappush(heap, self._added.popleft())
            now = monotonic()
            while heap and heap[0][0] <= now:
                late = heappop(heap)[2]()
                if late is not None:
                    _expire(late)
                del late
            if len(heap) > most:
                heap = [row for row in heap if (found := row[2]()) is not None and not found.done]
                found = None
                heapify(heap)
                most = max(DEADLINES, 2 * len(heap))
            self._next = heap[0][0] if heap else inf
            if not self._added:
                self._bell.wait(None if not heap else heap[0][0] - monotonic())


CLOCK = DeadlineClock()
after_fork(CLOCK.reset)
