"""Deadlines: one thread for the process, started by the first submission that has one, sleeps until the next."""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from time import monotonic
from typing import Protocol
from weakref import ref

from aotc.vmfb.host.locks import after_fork
from aotc.vmfb.submit.dispatcher_threads import Bell, start_thread


class Mortal(Protocol):
    """What has a deadline."""

    @property
    def done(self) -> bool:
        """Is it too late for the deadline to matter?"""

    def expire(self) -> None:
        """The deadline has passed."""


Row = tuple[float, int, ref[Mortal]]


# Entries that may be added to the deadline heap before those of finished submissions are removed: about 200 KB.
DEADLINES = 1000


class Clock:
    """Calls ``expire`` when a deadline passes. Its thread alone looks at the heap; others append to a deque."""

    def __init__(self) -> None:
        self._numbers = count()
        self.begin()

    def begin(self) -> None:
        """Begin without a thread and deadlines."""
        self._added: deque[Row] = deque()
        self._bell = Bell()
        self._next = -inf  # when the thread wakes by itself; while it is awake it looks at what was added anyway
        self._threads = [None]  # empty when the thread has been started

    def add(self, seconds: float, what: Mortal) -> None:
        """Let ``what`` expire in so many seconds.

        Raises
        ------
        VmError
            If the system refuses the thread.
        """
        when = monotonic() + seconds
        self._added.append((when, next(self._numbers), ref(what)))
        try:
            self._threads.pop()
        except IndexError:
            if when < self._next or len(self._added) > DEADLINES:
                self._bell.ring()
            return
        try:
            start_thread("aotc-deadlines", self._live)
        except BaseException:
            self._threads.append(None)
            raise

    def _live(self) -> None:
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
                    late.expire()
                del late
            if len(heap) > most:
                heap = [row for row in heap if (found := row[2]()) is not None and not found.done]
                found = None
                heapify(heap)
                most = max(DEADLINES, 2 * len(heap))
            self._next = heap[0][0] if heap else inf
            if not self._added:
                self._bell.wait(None if not heap else heap[0][0] - monotonic())


CLOCK = Clock()
after_fork(CLOCK.begin)
