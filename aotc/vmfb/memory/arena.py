"""Arenas: the working memory of calls, cached between calls and shared by all functions of a process."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from aotc.vmfb.abi import ALIGNMENT
from aotc.vmfb.errors import CallError
from aotc.vmfb.host.machine import GUARDED
from aotc.vmfb.memory.pointers import address_of
from aotc.vmfb.memory.result_pool import ResultMemory


class Arena:
    """Working memory of a call.

    ``address`` is a multiple of 64; the ``size`` bytes from there belong to the call. ``held`` maps arenas to their
    bytes until they are freed. ``lock`` is the object that page-locks its first ``locked`` bytes for GPUs, or None; it
    is released before the memory.
    """

    __slots__ = ("address", "held", "lock", "locked", "memory", "size")

    def __init__(self, address: int, size: int, memory: np.ndarray, allocated: dict[int, int]) -> None:
        self.address = address
        self.size = size
        self.memory = memory
        self.held = allocated
        self.lock: object = None
        self.locked = 0
        allocated[id(self)] = size

    def __del__(self) -> None:
        self.held.pop(id(self), None)

    def free(self) -> None:
        """Free the memory now, even if references to the arena exist."""
        self.held.pop(id(self), None)
        self.lock = None
        del self.memory


class ArenaPool:
    """Cached arenas, last in, first out: the pages of the last one are still in the cache.

    An arena that is too small for a request is replaced by a larger one, so that the pool never has more arenas than
    there were concurrent calls. Allocation and release are atomic list operations without a lock.

    Attributes
    ----------
    high_water : int
        Maximum bytes of used and cached arenas so far.
    made : int
        Number of allocated arenas.
    results : ResultMemory
        Allocator of the results of these calls.
    """

    def __init__(self) -> None:
        self.results = ResultMemory()
        self._idle: list[Arena] = []
        self._held: dict[int, int] = {}
        self.high_water = 0
        self.made = 0

    def take(self, size: int) -> Arena:
        """Return an arena of at least ``size`` bytes with undefined content."""
        try:
            arena = self._idle.pop()
        except IndexError:
            return self._make(size)
        if arena.size >= size:
            return arena
        arena.free()  # before its replacement is allocated
        return self._make(size)

    def give(self, arena: Arena) -> None:
        """Return an arena to the pool."""
        self._idle.append(arena)

    def trim(self) -> int:
        """Free unused arenas and cached memory of results; return the number of bytes."""
        freed = self.results.trim()
        with suppress(IndexError):  # other threads use arenas meanwhile
            while True:
                arena = self._idle.pop()
                freed += arena.size
                arena.free()
        return freed

    def idle_bytes(self) -> int:
        """Return the bytes of cached arenas."""
        return sum(arena.size for arena in tuple(self._idle))

    def allocated_bytes(self) -> int:
        """Return the bytes of used and cached arenas."""
        return sum(tuple(self._held.values()))

    def stats(self) -> dict[str, int]:
        """Return counters in bytes: used by calls, cached for later calls, and the maximum so far.

        ``idle_results`` is the cached memory of freed results.
        """
        held, idle = self.allocated_bytes(), self.idle_bytes()
        found = {"in_use": max(held - idle, 0), "idle": idle, "high_water": self.high_water}
        return {**found, "idle_results": self.results.idle_bytes()}

    def grow(self, size: int, held_bytes: int) -> Arena:
        """Allocate a further arena for a call that already has ``held_bytes`` bytes."""
        return self.take(size)

    def begin(self) -> None:
        """Start a call that allocates several arenas in sequence."""

    def end(self) -> None:
        """End a call started by :meth:`begin`."""

    def _make(self, size: int) -> Arena:
        try:
            # Larger than requested: an array at the end may be empty, see EMPTY.
            memory = self.results.new((size + 2 * ALIGNMENT,), np.dtype(np.uint8))
        except (MemoryError, ValueError):
            raise CallError("", f"this call needs {size:,} bytes of working memory, which the system refuses") from None
        start = address_of(memory)
        arena = Arena(-(-start // ALIGNMENT) * ALIGNMENT, size, memory, self._held)
        self.high_water = max(self.high_water, self.allocated_bytes())
        self.made += 1
        return arena


def give_back() -> None:
    """Let the C library (glibc) return cached free pages to the system."""
    import ctypes  # not needed elsewhere here

    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


class GuardedPool(ArenaPool):
    """Arenas for debugging: not reused, each with the requested size plus a cache line, before a guard page."""

    def take(self, size: int) -> Arena:
        """Return an arena that ends at a guard page."""
        from aotc.vmfb.memory.guard_pages import guarded_bytes  # only for debugging

        memory = guarded_bytes(size + 1, ALIGNMENT)
        arena = Arena(memory.ctypes.data, size, memory, self._held)
        self.high_water = max(self.high_water, self.allocated_bytes())
        self.made += 1
        return arena

    def give(self, arena: Arena) -> None:
        """Drop the arena: it is unmapped."""


ARENAS = GuardedPool() if GUARDED else ArenaPool()
"""The arenas of all functions in this process."""
