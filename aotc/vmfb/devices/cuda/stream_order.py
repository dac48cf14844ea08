"""Which streams are at work on memory of a GPU, so that what comes next waits for them; the host waits for nobody.

A call returns before the GPU is done. Its arrays remember the stream that writes them, and those that read them:
another stream waits for these by an event, which is recorded when it is needed, behind all that the stream was asked
for by then. Work of the same stream is in order as it is. Memory that is given back keeps what is known of it for
whoever has it next.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

from aotc.vmfb.host.locks import new_recursive_lock

_LOCK = new_recursive_lock()
CHANGES = count()  # incremented whenever the recorded state of some memory becomes invalid


def changes() -> int:
    """Return a number that is another one if memory that a stream uses was written by another, or given away, since."""
    return _LAST[0]


def changed() -> None:
    """Note that some memory was."""
    _LAST[0] = next(CHANGES)


_LAST = [next(CHANGES)]


class Mark:
    """A stream, for memory that it may be at work on; it outlives the stream, which is done with all when it ends.

    Attributes
    ----------
    handle : int
        The stream as the driver knows it, 0 when it has ended.
    """

    __slots__ = ("_lock", "handle")

    def __init__(self, handle: int) -> None:
        self._lock = new_recursive_lock()
        self.handle = handle

    def end(self) -> None:
        """Note that the stream is done, and goes."""
        with self._lock:
            self.handle = 0

    def lead(self, gpu: Any) -> None:
        """Let a stream go on when this one is done with all that it has by now."""
        with self._lock:
            if self.handle:
                gpu.follow(self.handle)

    def lead_stream(self, gpu: Any, stream: int) -> None:
        """Let a stream of another library go on when this one is done with all that it has by now, on the GPU."""
        with self._lock:
            if self.handle:
                gpu.link(stream, self.handle)


class Tracked:
    """Memory of a GPU, and the streams that may be at work on it.

    Attributes
    ----------
    writer : Mark or None
        The stream that wrote it last, unless the host has waited for it.
    users : set of Mark
        The streams whose work on it comes after that: the writer, and those that have read it since.
    """

    __slots__ = ("users", "writer")
    users: set[Mark]
    writer: Mark | None

    def read_by(self, gpu: Any) -> None:
        """Let a stream read it from now on."""
        if gpu.mark not in self.users:
            let_read(gpu, (self,))

    def written_by(self, gpu: Any) -> None:
        """Let a stream write it from now on, when all others are done with it."""
        mark = gpu.mark
        with _LOCK:
            others = self.wait_on(gpu)
            self.users = {mark}
            self.writer = mark
        if others:
            changed()

    def wait_on(self, gpu: Any) -> bool:
        """Let a stream go on when all others are done with it; tell whether there are any."""
        others = [mark for mark in tuple(self.users) if mark is not gpu.mark]
        for mark in others:
            mark.lead(gpu)
        return bool(others)

    def hand_over(self, gpu: Any, stream: int) -> None:
        """Let a stream of another library go on when all of ours are done with it."""
        for mark in tuple(self.users):
            mark.lead_stream(gpu, stream)


def let_read(gpu: Any, every: Iterable[Tracked]) -> None:
    """Let a stream read all of this memory from now on."""
    mark = gpu.mark
    unread = [memory for memory in every if mark not in memory.users]
    if not unread:
        return
    with _LOCK:
        for memory in unread:
            if memory.writer is not None:
                memory.writer.lead(gpu)
            memory.users.add(mark)
