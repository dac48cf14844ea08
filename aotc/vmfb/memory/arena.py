"""Memory that calls borrow: arenas kept between calls and shared by all functions of a process."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from aotc.vmfb.abi import ALIGNMENT
from aotc.vmfb.errors import VmError
from aotc.vmfb.host.machine import GUARDED
from aotc.vmfb.memory.pointers import address_of
from aotc.vmfb.memory.result_pool import ResultMemory


class Arena:
    """Borrowed memory.

    ``address`` is a multiple of 64; ``size`` bytes from there belong to the borrower. They are counted in ``held``, by
    arena, until it is gone, whoever drops it. ``lock`` is what locks the pages of its first ``locked`` bytes for GPUs,
    or nothing; it goes before the memory does.
    """

    __slots__ = ("address", "held", "lock", "locked", "memory", "size")

    def __init__(self, address: int, size: int, memory: np.ndarray, held: dict[int, int]) -> None:
        self.address = address
        self.size = size
        self.memory = memory
        self.held = held
        self.lock: object = None
        self.locked = 0
        held[id(self)] = size

    def __del__(self) -> None:
        self.held.pop(id(self), None)

    def free(self) -> None:
        """Free the memory now, whoever still has the arena: it was given back."""
        self.held.pop(id(self), None)
        self.lock = None
        del self.memory


class ArenaPool:
    """Arenas by last use: the one given back last is taken first, for its pages are warm.

    An arena that is too small for a request is dropped for a larger one, so the
    pool never holds more arenas than there were calls at the same time. Taking
    and giving are atomic list operations: no lock.

    Attributes
    ----------
    high_water : int
        The most bytes that there ever were at a time, of calls and kept for later ones.
    made : int
        How many arenas were allocated.
    results : ResultMemory
        Where the results of these calls lie.
    """

    def __init__(self) -> None:
        self.results = ResultMemory()
        self._idle: list[Arena] = []
        self._held: dict[int, int] = {}
        self.high_water = 0
        self.made = 0

    def take(self, size: int) -> Arena:
        """Return an arena of at least ``size`` bytes, of unspecified contents."""
        try:
            arena = self._idle.pop()
        except IndexError:
            return self._make(size)
        if arena.size >= size:
            return arena
        arena.free()  # before its successor is there
        return self._make(size)

    def give(self, arena: Arena) -> None:
        """Take an arena back."""
        self._idle.append(arena)

    def trim(self) -> int:
        """Free every arena that no call uses, and kept memory of results; return how many bytes that were."""
        freed = self.results.trim()
        with suppress(IndexError):  # other threads take arenas meanwhile
            while True:
                arena = self._idle.pop()
                freed += arena.size
                arena.free()
        return freed

    def idle_bytes(self) -> int:
        """Return the bytes held for later calls."""
        return sum(arena.size for arena in tuple(self._idle))

    def held_bytes(self) -> int:
        """Return the bytes that there are: what calls use, and what is held for later ones."""
        return sum(tuple(self._held.values()))

    def stats(self) -> dict[str, int]:
        """Return bytes: what calls use now, what is held for later ones, the most that there ever were.

        ``idle_results`` are bytes of results that are gone, held for those of later calls.
        """
        held, idle = self.held_bytes(), self.idle_bytes()
        found = {"in_use": max(held - idle, 0), "idle": idle, "high_water": self.high_water}
        return {**found, "idle_results": self.results.idle_bytes()}

    def grow(self, size: int, held: int) -> Arena:
        """Return an arena for a call that holds ``held`` bytes of them already."""
        return self.take(size)

    def begin(self) -> None:
        """Begin a call that takes arenas one after the other."""

    def end(self) -> None:
        """End a call that :meth:`begin` began."""

    def _make(self, size: int) -> Arena:
        try:
            # More than is needed: behind the last array, which may be empty: see EMPTY.
            memory = self.results.new((size + 2 * ALIGNMENT,), np.dtype(np.uint8))
        except (MemoryError, ValueError):
            raise VmError("", f"this call needs {size:,} bytes of working memory, which the system refuses") from None
        start = address_of(memory)
        arena = Arena(-(-start // ALIGNMENT) * ALIGNMENT, size, memory, self._held)
        self.high_water = max(self.high_water, self.held_bytes())
        self.made += 1
        return arena


def give_back() -> None:
    """Give the system the pages that the C library keeps of what was freed, where it can (glibc)."""
    import ctypes  # needed by nothing else here

    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


class GuardedPool(ArenaPool):
    """Arenas of the size that was asked for and a line more, each before a guard page and for one call."""

    def take(self, size: int) -> Arena:
        """Return an arena that nothing lies behind."""
        from aotc.vmfb.verify.guard_pages import guarded_bytes  # for debugging alone

        memory = guarded_bytes(size + 1, ALIGNMENT)
        arena = Arena(memory.ctypes.data, size, memory, self._held)
        self.high_water = max(self.high_water, self.held_bytes())
        self.made += 1
        return arena

    def give(self, arena: Arena) -> None:
        """Let an arena go: it is unmapped."""


ARENAS = GuardedPool() if GUARDED else ArenaPool()
"""What the functions of this process borrow from."""
