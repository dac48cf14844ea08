"""Pool of result memory: blocks of freed results are reused for later results.

New memory costs a page fault for every few kilobytes written, which may take longer than the kernel, especially if
several threads of a process fault at the same time. So a large result is an array whose ``base`` is a *lease* object.
Every view, buffer and capsule of the array keeps the lease alive. When the lease is freed, its block is cached, up to a
limit, for the next result of that size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from math import prod
from typing import Any

import numpy as np

from aotc.vmfb.abi import ALIGNMENT
from aotc.vmfb.host.locks import new_recursive_lock
from aotc.vmfb.limits import KEPT_RESULTS
from aotc.vmfb.memory.pointers import address_of

Rows = tuple[tuple[Any, Any], ...]
"""The result of :meth:`ResultMemory.plan`: arguments of the allocation function for each result."""
_Block = tuple[np.ndarray, int]  # the memory, and the first aligned address in it


class _Lease:
    """Owner of a result's elements: a ctypes array over a pooled block, which returns to the pool when freed.

    The work of its finalizer is inlined: it is half of the cost of a lease.
    """

    __slots__ = ()
    size: _SizeClass
    block: _Block

    def __del__(self) -> None:
        """Return the block to the pool; free blocks above the limit."""
        size = self.size
        home = size.home
        size.idle.append(self.block)
        home.kept += size.bytes
        if home.kept > home.watched:
            home.free_excess()


class _SizeClass:
    """Cached blocks of one size, last in, first out: the pages of the last one are still in the CPU's cache."""

    __slots__ = ("asked", "bytes", "home", "idle", "lease")

    def __init__(self, home: ResultMemory, size: int) -> None:
        self.home, self.bytes = home, size
        self.idle: list[_Block] = []
        self.asked = 0
        self.lease: Any = type("Lease", (_Lease, ctypes.c_uint8 * size), {})


# Block sizes per power of two in the pool of results. Results of similar size reuse each other's blocks, at up to an
# eighth more address space, whose pages are never touched.
SIZE_CLASSES = 8


def size_class_of(size: int) -> int:
    """Round a result's size in bytes up to the block size of the pool."""
    step = max(1 << (size.bit_length() - 1), SIZE_CLASSES) // SIZE_CLASSES
    return -(-size // step) * step


# Result size in bytes from which freed memory is pooled for later results. Pooling costs 0.6 us; new memory up to 400
# us. A loop that drops each result, for which the C library caches memory too, loses 1 to 2 us of 22.
LEASED_BYTES = 1 << 20


class ResultMemory:
    """Allocator of results that caches freed blocks by size, ``limit`` bytes in total.

    Above the limit, blocks of the least recently requested size are freed. Blocks are returned on any thread and
    between any two instructions, whenever the last view of a result is dropped: no lock is held then, the lists of
    blocks are never replaced, and ``kept`` is recomputed where accuracy matters.

    Attributes
    ----------
    kept : int
        Approximate number of cached bytes.
    watched : int
        Number of cached bytes above which :meth:`free_excess` is called.
    """

    def __init__(self, limit: int = KEPT_RESULTS) -> None:
        self.limit = self.watched = limit
        self.lock = new_recursive_lock()
        self.kept = 0
        self._sizes: dict[int, _SizeClass] = {}
        self._clock = count()

    def plan_allocations(
        self, results: Sequence[tuple[tuple[int, ...], np.dtype]]
    ) -> tuple[Callable[[Any, Any], Any], Rows]:
        """Prepare the allocation of results for a plan.

        Returns
        -------
        allocate : callable
            Returns a new uninitialised array.
        rows : tuple
            The two arguments of ``allocate`` for each result.
        """
        if max([prod(shape) * dtype.itemsize for shape, dtype in results], default=0) < LEASED_BYTES:
            return np.empty, tuple(results)
        return self._take_block, tuple([(self._size_class(*row), row) for row in results])

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an uninitialised array, as :func:`numpy.empty` does.

        Raises
        ------
        MemoryError, ValueError
            If there is not enough memory, or the size is impossible.
        """
        return self._take_block(self._size_class(shape, dtype), (shape, dtype))

    def _size_class(self, shape: tuple[int, ...], dtype: np.dtype) -> _SizeClass | None:
        """Return the size class of a result; None if the result is too small or too large for the pool."""
        needed = prod(shape) * dtype.itemsize
        if not LEASED_BYTES <= needed <= self.limit:
            return None
        size = size_class_of(needed)
        return self._sizes.get(size) or self._sizes.setdefault(size, _SizeClass(self, size))

    def _take_block(self, size: _SizeClass | None, row: tuple[tuple[int, ...], np.dtype]) -> np.ndarray:
        """Return an array of shape and dtype ``row`` over a cached or new block of a size class; None is not pooled."""
        if size is None:
            return self.allocate_or_trim(*row)
        size.asked = next(self._clock)
        try:
            block = size.idle.pop()
            self.kept -= size.bytes
        except IndexError:
            memory = self.allocate_or_trim((size.bytes + ALIGNMENT,), np.dtype(np.uint8))
            block = memory, -(-address_of(memory) // ALIGNMENT) * ALIGNMENT
        lease = size.lease.from_address(block[1])
        lease.size, lease.block = size, block
        return np.ndarray(*row, lease)

    def free_excess(self) -> None:
        """Free blocks until the cached bytes are within the limit."""
        self.free_until_within(self.limit)

    def free_until_within(self, room: int) -> None:
        """Free blocks of the least recently requested sizes until at most ``room`` bytes are cached."""
        with self.lock:
            while self.idle_bytes() > room:
                rows = [size for size in list(self._sizes.values()) if size.idle]
                with suppress(IndexError, ValueError):  # another thread uses blocks meanwhile
                    min(rows, key=lambda size: size.asked).idle.pop(0)
            self.kept = self.idle_bytes()

    def idle_bytes(self) -> int:
        """Return the number of cached bytes."""
        return sum(size.bytes * len(size.idle) for size in list(self._sizes.values()))

    def trim(self) -> int:
        """Free all cached blocks; return the number of freed bytes."""
        freed = self.idle_bytes()
        self.free_until_within(0)
        return freed

    def allocate_or_trim(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Allocate an uninitialised array; if memory is short, free all cached blocks and try again."""
        try:
            return np.empty(shape, dtype)
        except MemoryError:
            if not self.trim():
                raise
        return np.empty(shape, dtype)
