"""Host memory that simulated GPUs copy from and to."""

from typing import ClassVar
from weakref import WeakSet

import numpy as np

LOCKED = []  # buffers of the host: the process keeps them


def page_locked(size):
    """Return the address of new host memory of ``size`` bytes."""
    LOCKED.append(np.full(size, 0x5A, np.uint8))
    return LOCKED[-1].ctypes.data


class PageLock:
    """Page-locked host memory; ``made`` counts the locks."""

    made = 0
    every: ClassVar[WeakSet] = WeakSet()

    def __init__(self, gpu, memory, address, size):
        self.memory, self.begin, self.end = memory, address, address + size
        assert not any(self.begin < lock.end and lock.begin < self.end for lock in PageLock.every)
        PageLock.every.add(self)
        PageLock.made += 1
