"""Memory of results that nobody has any more: the next results are written to it.

New memory costs a page fault for every few kilobytes that are written, which may take longer than the kernel, above all
where threads of a process take faults at the same time. So a large result is an array on a *lease*, an object of its
own that is the array's ``base``: every view, buffer and capsule of the array keeps it alive, and when it goes its block
of memory is kept, up to so many bytes, for the next result of that size.
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
"""What :meth:`ResultMemory.plan` returns: arguments of the function that makes each result."""
_Block = tuple[np.ndarray, int]  # the memory, and the first aligned address in it


class _Lease:
    """Mixed into arrays of bytes of ctypes, which have the address and the length; they do not own the memory.

    What it does when it goes is written out here: it is half of what a lease costs.
    """

    __slots__ = ()
    size: _Size
    block: _Block

    def __del__(self) -> None:
        size = self.size
        home = size.home
        size.idle.append(self.block)
        home.kept += size.bytes
        if home.kept > home.watched:
            home.shrink()


class _Size:
    """Blocks of one size: the last that came is the first to be taken, for its pages are warm."""

    __slots__ = ("asked", "bytes", "home", "idle", "lease")

    def __init__(self, home: ResultMemory, size: int) -> None:
        self.home, self.bytes = home, size
        self.idle: list[_Block] = []
        self.asked = 0
        self.lease: Any = type("Lease", (_Lease, ctypes.c_uint8 * size), {})


# Block sizes per power of two in the pool of results. Results of similar size reuse each other's blocks, at up to an
# eighth more address space, whose pages are never touched.
SIZE_CLASSES = 8


def class_of(size: int) -> int:
    """Return the bytes of the block that a result of ``size`` bytes lies in."""
    step = max(1 << (size.bit_length() - 1), SIZE_CLASSES) // SIZE_CLASSES
    return -(-size // step) * step


# Result size in bytes from which freed memory is pooled for later results. Pooling costs 0.6 us; new memory up to 400
# us. A loop that drops each result, for which the C library caches memory too, loses 1 to 2 us of 22.
LEASED_BYTES = 1 << 20


class ResultMemory:
    """Blocks for results, by size: those that nobody has, of ``limit`` bytes in all.

    Where there are too many bytes, blocks go whose size was asked for longest ago. Blocks come back from any thread and
    between any two instructions, wherever the last view of a result is dropped: no lock is held then, lists of blocks
    stay, and ``kept`` is counted anew where it matters.

    Attributes
    ----------
    kept : int
        About how many bytes there are.
    watched : int
        With more than these :meth:`shrink` looks.
    """

    def __init__(self, limit: int = KEPT_RESULTS) -> None:
        self.limit = self.watched = limit
        self.lock = new_recursive_lock()
        self.kept = 0
        self._sizes: dict[int, _Size] = {}
        self._turns = count()

    def plan(self, results: Sequence[tuple[tuple[int, ...], np.dtype]]) -> tuple[Callable[[Any, Any], Any], Rows]:
        """Return a function, and what it is to be called with for each result of these shapes and dtypes."""
        if max([prod(shape) * dtype.itemsize for shape, dtype in results], default=0) < LEASED_BYTES:
            return np.empty, tuple(results)
        return self._take, tuple([(self._size_of(*row), row) for row in results])

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array of unspecified contents, as :func:`numpy.empty` does.

        Raises
        ------
        MemoryError, ValueError
            If there is no memory for it, or can be none.
        """
        return self._take(self._size_of(shape, dtype), (shape, dtype))

    def _size_of(self, shape: tuple[int, ...], dtype: np.dtype) -> _Size | None:
        """Return whose blocks a result lies in; None if it has memory of its own."""
        needed = prod(shape) * dtype.itemsize
        if not LEASED_BYTES <= needed <= self.limit:
            return None
        size = class_of(needed)
        return self._sizes.get(size) or self._sizes.setdefault(size, _Size(self, size))

    def _take(self, size: _Size | None, row: tuple[tuple[int, ...], np.dtype]) -> np.ndarray:
        if size is None:
            return self.new(*row)
        size.asked = next(self._turns)
        try:
            block = size.idle.pop()
            self.kept -= size.bytes
        except IndexError:
            memory = self.new((size.bytes + ALIGNMENT,), np.dtype(np.uint8))
            block = memory, -(-address_of(memory) // ALIGNMENT) * ALIGNMENT
        lease = size.lease.from_address(block[1])
        lease.size, lease.block = size, block
        return np.ndarray(*row, lease)

    def shrink(self) -> None:
        """Free what is too much."""
        self.keep_within(self.limit)

    def keep_within(self, room: int) -> None:
        """Free blocks until those that are kept have ``room`` bytes at most."""
        with self.lock:
            while self.idle_bytes() > room:
                rows = [size for size in list(self._sizes.values()) if size.idle]
                with suppress(IndexError, ValueError):  # another thread takes blocks meanwhile
                    min(rows, key=lambda size: size.asked).idle.pop(0)
            self.kept = self.idle_bytes()

    def idle_bytes(self) -> int:
        """Return the bytes that are kept."""
        return sum(size.bytes * len(size.idle) for size in list(self._sizes.values()))

    def trim(self) -> int:
        """Free all that is kept; return how many bytes that were."""
        freed = self.idle_bytes()
        self.keep_within(0)
        return freed

    def new(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return new memory; where the system has none, what is kept is freed first."""
        try:
            return np.empty(shape, dtype)
        except MemoryError:
            if not self.trim():
                raise
        return np.empty(shape, dtype)
