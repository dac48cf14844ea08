"""Run kernels of blocks of threads, and see which elements two threads touch between the same barriers."""

from aotc.ir.loop import run as loop_run
from aotc.ir.loop.ir import WARP


class Races:
    """Who has read and written each element of memory that threads share since they waited for each other.

    What a thread did before a barrier of warps it did before those of its own warp alone.
    """

    ALL = -1  # what stands outside of loops over threads each of them does, outside of those over blocks each block

    def __init__(self):
        self.block = self.thread = self.ALL
        self.readers, self.writers, self.found, self.waits, self.iteration = {}, {}, [], {}, 0
        self.shared = []  # each block has its own; kept, so that no other memory is taken for it

    def begin(self):
        self.readers, self.writers, self.waits, self.shared = {}, {}, {}, []

    def barrier(self):
        self.waits[self.block] = self.waits.get(self.block, 0) + 1

    def grid_barrier(self, counter):
        assert self.block == self.thread == self.ALL  # some blocks would never come
        self.readers, self.writers = {}, {}

    def warp_barrier(self):
        self.iteration += 1

    def threads(self, first, last, step=1):
        for self.thread in range(first, last, step):
            yield self.thread
        self.thread = self.ALL

    def blocks(self, first, last, step=1):
        for self.block in range(first, last, step):
            yield self.block
        self.block = self.ALL

    def _collides(self, other, shared):
        block, thread, waits, iteration = other
        if block != self.block:
            return not shared
        waited = (
            iteration < self.iteration
            and thread // WARP == self.thread // WARP
            and self.ALL not in (thread, self.thread)
        )
        return thread != self.thread and waits == self.waits.get(self.block, 0) and not waited

    def touch(self, memory, index, writes):
        place = id(memory), index if isinstance(index, tuple) else (index,)
        shared = any(memory is one for one in self.shared)
        others = self.writers.get(place, set()) | (self.readers.get(place, set()) if writes else set())
        others = {other for other in others if self._collides(other, shared)}
        if others or (writes and self.thread == self.ALL):
            self.found.append((place[1], sorted(others), self.block, self.thread, writes))
        me = self.block, self.thread, self.waits.get(self.block, 0), self.iteration
        (self.writers if writes else self.readers).setdefault(place, set()).add(me)


def checked(races):
    """What takes the place of ``run_kernel``; one whose items are threads of their own is not looked at."""
    functions, memory = loop_run._interpreter_functions, loop_run._Memory

    class Watched(memory):
        def __getitem__(self, index):
            races.touch(self.array, index, False)
            return super().__getitem__(index)

        def __setitem__(self, index, value):
            races.touch(self.array, index, True)
            super().__setitem__(index, value)

    def instead(*arguments):
        made = functions(*arguments)

        def shared(*parts):
            found = made["shared"](*parts)
            races.shared.append(found.array)
            return found

        own = {name: lambda *parts: memory(made["shared"](*parts).array) for name in ("private", "scratch")}
        waits = {name: getattr(races, name) for name in ("barrier", "grid_barrier", "warp_barrier")}
        return made | own | waits | {"thread": races.threads, "blocks": races.blocks, "shared": shared}

    def run(text, arrays, dims):
        if "thread(" not in text:
            return loop_run.run_kernel(text, arrays, dims)
        races.begin()
        loop_run._interpreter_functions, loop_run._Memory = instead, Watched
        try:
            return loop_run.run_kernel(text, arrays, dims)
        finally:
            loop_run._interpreter_functions, loop_run._Memory = functions, memory

    return run
