"""Order of streams that access the same GPU memory: later work waits on the GPU, the host does not wait.

A call returns before the GPU is done. Its arrays record the stream that writes them and the streams that read them.
Another stream waits for these by an event, recorded on demand behind all work that the stream has by then. Work of one
stream is ordered anyway. Freed memory keeps this record for its next user.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Protocol

from aotc.vmfb.host.locks import new_recursive_lock

_LOCK = new_recursive_lock()
CHANGES = count()  # incremented whenever the recorded state of some memory becomes invalid


def change_counter() -> int:
    """Return the number of times that memory in use by a stream was written by another stream, or donated."""
    return _LAST[0]


def count_change() -> None:
    """Record that memory in use by a stream was written by another stream, or donated."""
    _LAST[0] = next(CHANGES)


_LAST = [next(CHANGES)]


class Mark:
    """Identifies a stream as a user of memory; the mark outlives the stream.

    Attributes
    ----------
    handle : int
        The driver's handle of the stream; 0 after its end.
    """

    __slots__ = ("_lock", "handle")

    def __init__(self, handle: int) -> None:
        self._lock = new_recursive_lock()
        self.handle = handle

    def end(self) -> None:
        """Record that the stream is complete and is being destroyed."""
        with self._lock:
            self.handle = 0

    def lead(self, gpu: MarkedStream) -> None:
        """Make a GPU's stream wait for the current work of the marked stream."""
        with self._lock:
            if self.handle:
                gpu.follow(self.handle)

    def lead_stream(self, gpu: MarkedStream, stream: int) -> None:
        """Make a stream of another library wait for the current work of the marked stream."""
        with self._lock:
            if self.handle:
                gpu.link(stream, self.handle)


class MarkedStream(Protocol):
    """Interface of a GPU's stream: see :class:`aotc.vmfb.devices.cuda.driver.Gpu`."""

    @property
    def mark(self) -> Mark:
        """Return the stream's mark on memory that it may access."""

    def follow(self, stream: int) -> None:
        """Let the stream wait for the current work of another stream."""

    def link(self, stream: int, other: int) -> None:
        """Let a stream of any library wait for the current work of another one."""


class Tracked:
    """GPU memory, and the streams that may be accessing it.

    Attributes
    ----------
    writer : Mark or None
        The last stream that wrote the memory, unless the host has waited for that stream.
    users : set of Mark
        Streams that have accessed the memory since: the writer, and all readers.
    """

    __slots__ = ("users", "writer")
    users: set[Mark]
    writer: Mark | None

    def read_by(self, gpu: MarkedStream) -> None:
        """Order a stream's subsequent reads behind the last write."""
        if gpu.mark not in self.users:
            let_read(gpu, (self,))

    def written_by(self, gpu: MarkedStream) -> None:
        """Order a stream's subsequent writes behind all other accesses."""
        mark = gpu.mark
        with _LOCK:
            others = self.wait_on(gpu)
            self.users = {mark}
            self.writer = mark
        if others:
            count_change()

    def wait_on(self, gpu: MarkedStream) -> bool:
        """Let a stream wait for the accesses of all other streams; return True if there are any."""
        others = [mark for mark in tuple(self.users) if mark is not gpu.mark]
        for mark in others:
            mark.lead(gpu)
        return bool(others)

    def wait_for_writer(self, gpu: MarkedStream) -> None:
        """Let a stream wait for the last write; only for reads that the host waits for."""
        writer = self.writer
        if writer is not None and writer is not gpu.mark:
            writer.lead(gpu)

    def hand_over(self, gpu: MarkedStream, stream: int) -> None:
        """Make a stream of another library wait for all accesses to the memory."""
        for mark in tuple(self.users):
            mark.lead_stream(gpu, stream)


def let_read(gpu: MarkedStream, every: Iterable[Tracked]) -> None:
    """Make a stream wait for the last writes to all this memory before it reads."""
    mark = gpu.mark
    unread = [memory for memory in every if mark not in memory.users]
    if not unread:
        return
    with _LOCK:
        for memory in unread:
            if memory.writer is not None:
                memory.writer.lead(gpu)
            memory.users.add(mark)
