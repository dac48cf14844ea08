"""Copies between arrays of the host and GPUs through page-locked memory, by several threads.

The driver copies pageable memory through a buffer of its own, with one thread. Here large arrays go in blocks: while
one is on its way to or from the GPU, threads move others. A thread has two buffers, so that it never waits for the copy
that it has just asked for.

Working memory of the host that GPUs copy to and from within a call is locked where it is, once, when it is new.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from typing import Any

from aotc.vmfb.devices.cuda import driver as cuda_driver
from aotc.vmfb.errors import VmError
from aotc.vmfb.host.locks import after_fork, new_lock
from aotc.vmfb.host.machine import usable_cores
from aotc.vmfb.memory.arena import Arena

# Threads that copy one array between its memory and page-locked memory. One thread copies 10 GB/s, a GPU's link 55.
# benchmarks/device_arrays.py on an NVIDIA H200 with 16 cores: 47 GB/s up and 48 down for 256 MB.
COPIERS = 6
# Bytes of a page-locked staging buffer: large enough that the launch of a copy is cheap in comparison, small enough
# that many copies are in flight.
STAGED_BLOCK = 2 << 20
# Array size in bytes from which staging threads copy; the driver copies smaller arrays, because waking a thread takes
# longer. benchmarks/device_arrays.py on an NVIDIA H200: 1 MB at 13 GB/s by the driver and 8 in blocks, 16 MB at 18 and
# 21.
STAGED_BYTES = 4 << 20


class _Stage:
    """The threads, and the buffers that nobody uses; made when they are first needed."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._threads: ThreadPoolExecutor | None = None
        self.idle: list[int] = []

    def threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(COPIERS, "aotc-copier")
            return self._threads

    def renew(self) -> None:
        """Begin anew in a forked child, which has neither threads nor page-locked memory."""
        self._threads = None
        self.idle.clear()

    def take(self) -> int:
        """Return the address of a block of page-locked memory."""
        try:
            return self.idle.pop()
        except IndexError:
            return cuda_driver.page_locked(STAGED_BLOCK)


_STAGE = _Stage()
after_fork(_STAGE.renew)


def locked(arena: Arena, size: int, gpu: Any) -> Arena:
    """Return ``arena`` with the pages of its first ``size`` bytes locked; pageable where the driver refuses.

    An arena is kept for later calls, so most find it as it is to be. What is behind those bytes, as scratch memory of
    threads that may never be touched, stays as it is.
    """
    if arena.locked < size:
        whole = min(1 << (size - 1).bit_length(), arena.size)  # not once more for each call that takes a little more
        arena.lock, arena.locked = None, whole
        with suppress(VmError):
            arena.lock = cuda_driver.PageLock(gpu, arena.memory, arena.address, whole)
    return arena


def upload(gpu: Any, to: int, source: int, size: int) -> None:
    """Copy from the host on a GPU's stream; the host's memory may be changed afterwards, if it is that much."""
    if size < STAGED_BYTES:
        gpu.upload(to, source, size)
    else:
        _share(size, lambda places: _up(gpu, to, source, size, places))


def download(gpu: Any, to: int, source: int, size: int) -> None:
    """Copy to the host what a GPU's stream makes; the bytes are there when the stream has come so far."""
    if size < STAGED_BYTES:
        gpu.download(to, source, size)
    else:
        _share(size, lambda places: _down(gpu, to, source, size, places))


def _share(size: int, copy: Callable[[Iterator[int]], None]) -> None:
    """Have several threads copy, this one among them; each takes the next block that nobody has taken."""
    places = iter(range(0, size, STAGED_BLOCK))  # one step of it is one operation of the interpreter
    count = min(COPIERS, usable_cores(), -(-size // STAGED_BLOCK)) - 1
    helpers: list[Future[None]] = [_STAGE.threads().submit(copy, places) for _ in range(count)]
    try:
        copy(places)
    finally:
        wait(helpers)  # whatever happened: they touch the caller's memory
    for helper in helpers:
        helper.result()


class _Buffers:
    """Two buffers of a thread in turn, each with an event that comes when the GPU is done with it."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        gpu.enter()
        self._rows = [(_STAGE.take(), gpu.take_event()) for _ in range(2)]
        self._under_way: list[tuple[int, Any, Callable[[], None]]] = []

    def next(self) -> int:
        """Return the address of the one that was used longest ago, when it is free."""
        if len(self._under_way) == len(self._rows):
            self._settle()
        return self._rows[0][0]

    def used(self, after: Callable[[], None]) -> None:
        """Note that a copy of it was asked for, and what is to be done after it."""
        row = self._rows.pop(0)
        self._rows.append(row)
        self._gpu.record(row[1])
        self._under_way.append((*row, after))

    def _settle(self) -> None:
        _, event, after = self._under_way.pop(0)
        self._gpu.finish(event)
        after()

    def close(self) -> None:
        """Wait for all, and give the buffers back."""
        while self._under_way:
            self._settle()
        for address, event in self._rows:
            _STAGE.idle.append(address)
            self._gpu.give_events([event])


def _up(gpu: Any, to: int, source: int, size: int, places: Iterator[int]) -> None:
    with closing(_Buffers(gpu)) as buffers:
        for at in places:
            count, buffer = min(STAGED_BLOCK, size - at), buffers.next()
            ctypes.memmove(buffer, source + at, count)
            gpu.upload(to + at, buffer, count)
            buffers.used(_nothing)


def _down(gpu: Any, to: int, source: int, size: int, places: Iterator[int]) -> None:
    with closing(_Buffers(gpu)) as buffers:
        for at in places:
            count, buffer = min(STAGED_BLOCK, size - at), buffers.next()
            gpu.download(buffer, source + at, count)
            buffers.used(_move(to + at, buffer, count))


def _nothing() -> None:
    """Do nothing."""


def _move(to: int, source: int, size: int) -> Callable[[], None]:
    def move() -> None:
        ctypes.memmove(to, source, size)

    return move
