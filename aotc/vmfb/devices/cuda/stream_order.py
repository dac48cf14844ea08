"""Order of streams that access the same GPU memory: later work waits on the GPU, without blocking the host.

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
    """Return the number of changes so far: writes by another stream than memory's users, and donations."""
    return _LAST[0]


def count_change() -> None:
    """Count one change: memory in use by a stream was written by another stream, or donated."""
    _LAST[0] = next(CHANGES)


_LAST = [next(CHANGES)]


class Mark:
    """Identity of a stream in the records of memory users; it outlives the stream.

    Attributes
    ----------
    handle : int
        The driver's handle of the stream; 0 after its end.
    """

    __slots__ = ("_lock", "handle")

    def __init__(self, handle: int) -> None:
        self._lock = new_recursive_lock()
        self.handle = handle

    def mark_destroyed(self) -> None:
        """Record that the stream has completed all its work and is being destroyed."""
        with self._lock:
            self.handle = 0

    def make_gpu_wait(self, gpu: MarkedStream) -> None:
        """Make the stream of ``gpu`` wait for the current work of the marked stream."""
        with self._lock:
            if self.handle:
                gpu.wait_for_stream(self.handle)

    def make_foreign_stream_wait(self, gpu: MarkedStream, stream: int) -> None:
        """Make ``stream``, of another library, wait for the current work of the marked stream."""
        with self._lock:
            if self.handle:
                gpu.make_stream_wait(stream, self.handle)


class MarkedStream(Protocol):
    """Interface of a GPU's stream with a mark: see :class:`aotc.vmfb.devices.cuda.driver.Gpu`."""

    @property
    def mark(self) -> Mark:
        """Return the mark by which memory records the stream as a user."""

    def wait_for_stream(self, stream: int) -> None:
        """Make the stream wait for the current work of another stream."""

    def make_stream_wait(self, stream: int, other: int) -> None:
        """Make ``stream``, of any library, wait for the current work of stream ``other``."""


class Tracked:
    """GPU memory with a record of the streams that may be accessing it.

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

    def order_read(self, gpu: MarkedStream) -> None:
        """Order the next reads of a stream behind the last write, and record the stream as a reader."""
        if gpu.mark not in self.users:
            order_reads(gpu, (self,))

    def order_write(self, gpu: MarkedStream) -> None:
        """Order the next writes of a stream behind all other accesses, and record the stream as the writer."""
        mark = gpu.mark
        with _LOCK:
            others = self.wait_for_accesses(gpu)
            self.users = {mark}
            self.writer = mark
        if others:
            count_change()

    def wait_for_accesses(self, gpu: MarkedStream) -> bool:
        """Make a stream wait for the accesses of all other streams; return True if there are any."""
        others = [mark for mark in tuple(self.users) if mark is not gpu.mark]
        for mark in others:
            mark.make_gpu_wait(gpu)
        return bool(others)

    def wait_for_writer(self, gpu: MarkedStream) -> None:
        """Make a stream wait for the last write, without a record; only for reads that the host waits for."""
        writer = self.writer
        if writer is not None and writer is not gpu.mark:
            writer.make_gpu_wait(gpu)

    def hand_over_to_stream(self, gpu: MarkedStream, stream: int) -> None:
        """Make a stream of another library wait for all accesses to the memory."""
        for mark in tuple(self.users):
            mark.make_foreign_stream_wait(gpu, stream)


def order_reads(gpu: MarkedStream, every: Iterable[Tracked]) -> None:
    """Make a stream wait for the last writes to all of this memory, and record it as a reader."""
    mark = gpu.mark
    unread = [memory for memory in every if mark not in memory.users]
    if not unread:
        return
    with _LOCK:
        for memory in unread:
            if memory.writer is not None:
                memory.writer.make_gpu_wait(gpu)
            memory.users.add(mark)
