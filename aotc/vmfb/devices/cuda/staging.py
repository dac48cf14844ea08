"""Copies between host arrays and GPUs by several threads, through page-locked staging buffers.

The driver copies pageable memory through its own staging buffer, with one thread. Here large arrays are copied in
blocks: while one block is in transit to or from the GPU, threads copy others. Each thread has two buffers, so that it
can fill one while the other is in transit.

Host working memory that GPUs access within a call is page-locked in place, once, when it is allocated.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress

from aotc.vmfb.devices.cuda import driver as cuda_driver
from aotc.vmfb.devices.cuda.driver import Gpu
from aotc.vmfb.errors import CallError
from aotc.vmfb.host.locks import after_fork, new_lock
from aotc.vmfb.host.machine import usable_cores
from aotc.vmfb.memory.arena import Arena

# Threads that copy one array between its memory and page-locked memory. One thread copies 10 GB/s, a GPU's link 55.
# benchmarks/gpu/device_arrays.py on an NVIDIA H200 with 16 cores: 47 GB/s up and 48 down for 256 MB.
COPIERS = 6
# Bytes of a page-locked staging buffer: large enough that the launch of a copy is cheap in comparison, small enough
# that many copies are in flight.
STAGED_BLOCK = 2 << 20
# Array size in bytes from which staging threads copy; the driver copies smaller arrays, because waking a thread takes
# longer. benchmarks/gpu/device_arrays.py on an NVIDIA H200: 1 MB at 13 GB/s by the driver and 8 in blocks, 16 MB at 18
# and 21.
STAGED_BYTES = 4 << 20


class _StagingPool:
    """The process's staging threads and unused staging buffers, created on first use."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._threads: ThreadPoolExecutor | None = None
        self.idle: list[int] = []

    def threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(COPIERS, "aotc-copier")
            return self._threads

    def reset_after_fork(self) -> None:
        """Reset the staging buffers in a forked child, which has neither threads nor page-locked memory."""
        self._threads = None
        self.idle.clear()

    def take_buffer(self) -> int:
        """Return the address of an unused page-locked buffer, or allocate one."""
        try:
            return self.idle.pop()
        except IndexError:
            return cuda_driver.allocate_page_locked(STAGED_BLOCK)


_STAGE = _StagingPool()
after_fork(_STAGE.reset_after_fork)


def page_lock_arena(arena: Arena, size: int, gpu: Gpu) -> Arena:
    """Page-lock the first ``size`` bytes of ``arena`` and return the arena.

    The bytes stay pageable if the driver refuses.

    Arenas are reused by later calls, so most are already locked. Memory behind those bytes, such as scratch memory of
    threads that may never be touched, stays pageable.
    """
    if arena.locked < size:
        whole = min(1 << (size - 1).bit_length(), arena.size)  # rounded up: a slightly larger call need not lock again
        arena.lock, arena.locked = None, whole
        with suppress(CallError):
            arena.lock = cuda_driver.PageLock(gpu, arena.memory, arena.address, whole)
    return arena


def upload(gpu: Gpu, to: int, source: int, size: int) -> None:
    """Copy from the host to a GPU on its stream; a staged host array may be modified at once afterwards."""
    if size < STAGED_BYTES:
        gpu.upload(to, source, size)
    else:
        _copy_blocks_on_threads(size, lambda places: _upload_blocks(gpu, to, source, size, places))


def download(gpu: Gpu, to: int, source: int, size: int) -> None:
    """Copy from a GPU to the host on its stream; the bytes are valid when the stream has completed the copy."""
    if size < STAGED_BYTES:
        gpu.download(to, source, size)
    else:
        _copy_blocks_on_threads(size, lambda places: _download_blocks(gpu, to, source, size, places))


def _copy_blocks_on_threads(size: int, copy: Callable[[Iterator[int]], None]) -> None:
    """Copy ``size`` bytes in blocks on several threads, including this one; ``copy`` takes the offsets of blocks."""
    places = iter(range(0, size, STAGED_BLOCK))  # advancing it is atomic: a single operation of the interpreter
    count = min(COPIERS, usable_cores(), -(-size // STAGED_BLOCK)) - 1
    helpers: list[Future[None]] = [_STAGE.threads().submit(copy, places) for _ in range(count)]
    try:
        copy(places)
    finally:
        wait(helpers)  # even after an error: they access the caller's memory
    for helper in helpers:
        helper.result()


class _StagingBuffers:
    """The two staging buffers of a thread, used in turn, each with an event for the end of its last transfer."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        gpu.make_context_current()
        self._rows = [(_STAGE.take_buffer(), gpu.take_event()) for _ in range(2)]
        self._under_way: list[tuple[int, ctypes.c_void_p, Callable[[], None]]] = []

    def next_buffer(self) -> int:
        """Wait until the older buffer is free, and return its address."""
        if len(self._under_way) == len(self._rows):
            self._wait_for_copies()
        return self._rows[0][0]

    def record_transfer(self, after: Callable[[], None]) -> None:
        """Record an event behind a transfer of the current buffer; call ``after`` when the transfer is complete."""
        row = self._rows.pop(0)
        self._rows.append(row)
        self._gpu.record_event(row[1])
        self._under_way.append((*row, after))

    def _wait_for_copies(self) -> None:
        _, event, after = self._under_way.pop(0)
        self._gpu.synchronize_event(event)
        after()

    def close(self) -> None:
        """Wait for all transfers, and return the buffers for reuse."""
        while self._under_way:
            self._wait_for_copies()
        for address, event in self._rows:
            _STAGE.idle.append(address)
            self._gpu.return_events([event])


def _upload_blocks(gpu: Gpu, to: int, source: int, size: int, places: Iterator[int]) -> None:
    """Copy blocks from the host to the GPU: to a staging buffer, then by the driver.

    ``places`` are offsets of blocks.
    """
    with closing(_StagingBuffers(gpu)) as buffers:
        for at in places:
            count, buffer = min(STAGED_BLOCK, size - at), buffers.next_buffer()
            ctypes.memmove(buffer, source + at, count)
            gpu.upload(to + at, buffer, count)
            buffers.record_transfer(_do_nothing)


def _download_blocks(gpu: Gpu, to: int, source: int, size: int, places: Iterator[int]) -> None:
    with closing(_StagingBuffers(gpu)) as buffers:
        for at in places:
            count, buffer = min(STAGED_BLOCK, size - at), buffers.next_buffer()
            gpu.download(buffer, source + at, count)
            buffers.record_transfer(_host_copy_function(to + at, buffer, count))


def _do_nothing() -> None:
    """Do nothing: the completion callback of uploads."""


def _host_copy_function(to: int, source: int, size: int) -> Callable[[], None]:
    def move() -> None:
        ctypes.memmove(to, source, size)

    return move
