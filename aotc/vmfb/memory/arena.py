"""Arenas: the working memory of calls on the host, cached between calls and shared by all functions of a process."""

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

    Attributes
    ----------
    address, size : int
        Start, a multiple of 64, and number of bytes.
    held : dict
        Sizes of all arenas of the pool that are not freed, by the identity of the arena.
    lock : object or None
        Page-lock of the first ``locked`` bytes for GPUs, released before the memory.
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
    """Cache of arenas, last in, first out: the pages of the last one are still in the CPU's cache.

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

    def take_arena(self, size: int) -> Arena:
        """Return an arena of at least ``size`` bytes with undefined content."""
        try:
            arena = self._idle.pop()
        except IndexError:
            return self._allocate_arena(size)
        if arena.size >= size:
            return arena
        arena.free()  # before its replacement is allocated
        return self._allocate_arena(size)

    def return_arena(self, arena: Arena) -> None:
        """Return an arena to the pool, for later calls."""
        self._idle.append(arena)

    def trim(self) -> int:
        """Free unused arenas and cached memory of results; return the number of freed bytes."""
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

    def take_further_arena(self, size: int, held_bytes: int) -> Arena:
        """Return an additional arena for a call that already has ``held_bytes`` bytes of arenas."""
        return self.take_arena(size)

    def begin_stepwise_allocation(self) -> None:
        """Start a call that allocates several arenas in sequence, because its sizes depend on data."""

    def end_stepwise_allocation(self) -> None:
        """End a call started by :meth:`begin_stepwise_allocation`."""

    def _allocate_arena(self, size: int) -> Arena:
        """Allocate a new arena; raise a CallError if the system refuses."""
        try:
            # Larger than requested: an array at the end may be empty, see EMPTY.
            memory = self.results.allocate_or_trim((size + 2 * ALIGNMENT,), np.dtype(np.uint8))
        except (MemoryError, ValueError):
            raise CallError("", f"this call needs {size:,} bytes of working memory, which the system refuses") from None
        start = address_of(memory)
        arena = Arena(-(-start // ALIGNMENT) * ALIGNMENT, size, memory, self._held)
        self.high_water = max(self.high_water, self.allocated_bytes())
        self.made += 1
        return arena


def trim_c_library() -> None:
    """Let the C library (glibc) return cached free pages to the system."""
    import ctypes  # not needed elsewhere here

    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


class GuardedPool(ArenaPool):
    """Pool for debugging: each arena is new, and ends at a guard page a cache line behind the requested size."""

    def take_arena(self, size: int) -> Arena:
        """Return a new arena that ends at a guard page."""
        from aotc.vmfb.memory.guard_pages import guarded_bytes  # only for debugging

        memory = guarded_bytes(size + 1, ALIGNMENT)
        arena = Arena(memory.ctypes.data, size, memory, self._held)
        self.high_water = max(self.high_water, self.allocated_bytes())
        self.made += 1
        return arena

    def return_arena(self, arena: Arena) -> None:
        """Unmap the arena."""


ARENAS = GuardedPool() if GUARDED else ArenaPool()
"""The arenas of all functions in this process."""
