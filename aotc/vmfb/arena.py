"""Memory that calls borrow: arenas kept between calls and shared by all functions of a process."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from aotc.vmfb.abi import ALIGNMENT
from aotc.vmfb.errors import VmError
from aotc.vmfb.machine import GUARDED


class Arena:
    """Borrowed memory.

    ``address`` is a multiple of 64; ``size`` bytes from there belong to the borrower.
    """

    __slots__ = ("address", "memory", "size")

    def __init__(self, address: int, size: int, memory: np.ndarray) -> None:
        self.address = address
        self.size = size
        self.memory = memory


class ArenaPool:
    """Arenas by last use: the one given back last is taken first, for its pages are warm.

    An arena that is too small for a request is dropped for a larger one, so the
    pool never holds more arenas than there were calls at the same time. Taking
    and giving are atomic list operations: no lock.

    Attributes
    ----------
    high_water : int
        Bytes of the largest arena ever made.
    """

    def __init__(self) -> None:
        self._idle: list[Arena] = []
        self.high_water = 0

    def take(self, size: int) -> Arena:
        """Return an arena of at least ``size`` bytes, of unspecified contents."""
        try:
            arena = self._idle.pop()
        except IndexError:
            return self._make(size)
        return arena if arena.size >= size else self._make(size)

    def give(self, arena: Arena) -> None:
        """Take an arena back."""
        self._idle.append(arena)

    def trim(self) -> int:
        """Free every arena that no call uses; return how many bytes that were."""
        freed = 0
        with suppress(IndexError):  # other threads take arenas meanwhile
            while True:
                freed += self._idle.pop().size
        return freed

    def idle_bytes(self) -> int:
        """Return the bytes held for later calls."""
        return sum(arena.size for arena in tuple(self._idle))

    def _make(self, size: int) -> Arena:
        self.high_water = max(self.high_water, size)
        try:
            memory = np.empty(size + 2 * ALIGNMENT, np.uint8)  # behind the last array, which may be empty: see EMPTY
        except (MemoryError, ValueError):
            raise VmError("", f"this call needs {size:,} bytes of working memory, which the system refuses") from None
        start = memory.ctypes.data
        return Arena(-(-start // ALIGNMENT) * ALIGNMENT, size, memory)


class GuardedPool(ArenaPool):
    """Arenas of the size that was asked for and a line more, each before a guard page and for one call."""

    def take(self, size: int) -> Arena:
        """Return an arena that nothing lies behind."""
        from aotc.vmfb.safety.guard_pages import guarded_bytes  # for debugging alone

        self.high_water = max(self.high_water, size)
        memory = guarded_bytes(size + 1, ALIGNMENT)
        return Arena(memory.ctypes.data, size, memory)

    def give(self, arena: Arena) -> None:
        """Let an arena go: it is unmapped."""


ARENAS = GuardedPool() if GUARDED else ArenaPool()
"""What the functions of this process borrow from."""
