"""Run kernels of blocks of threads, and see which elements two threads touch between the same barriers."""

from aotc.ir import loop_run


class Races:
    """Who has read and written each element of memory that threads share since the last barrier."""

    ALL = -1  # what stands outside of loops over threads each of them does

    def __init__(self):
        self.thread, self.readers, self.writers, self.found = self.ALL, {}, {}, []

    def barrier(self):
        self.readers, self.writers = {}, {}

    def threads(self, first, last, step=1):
        for self.thread in range(first, last, step):
            yield self.thread
        self.thread = self.ALL

    def touch(self, memory, index, writes):
        place = id(memory), index if isinstance(index, tuple) else (index,)
        mine = set() if writes and self.thread == self.ALL else {self.thread}
        others = self.writers.get(place, set()) | (self.readers.get(place, set()) if writes else set())
        if others - mine or (writes and not mine):
            self.found.append((place[1], sorted(others), self.thread, writes))
        (self.writers if writes else self.readers).setdefault(place, set()).add(self.thread)


def checked(races):
    """What takes the place of ``run_kernel``; one whose items are threads of their own is not looked at."""
    functions, memory = loop_run._functions, loop_run._Memory

    class Watched(memory):
        def __getitem__(self, index):
            races.touch(self.array, index, False)
            return super().__getitem__(index)

        def __setitem__(self, index, value):
            races.touch(self.array, index, True)
            super().__setitem__(index, value)

    def instead(*arguments):
        made = functions(*arguments)
        own = {name: lambda *parts: memory(made["shared"](*parts).array) for name in ("private", "scratch")}
        return made | own | {"thread": races.threads, "barrier": races.barrier}

    def run(text, arrays, dims):
        if "thread(" not in text:
            return loop_run.run_kernel(text, arrays, dims)
        races.barrier()
        loop_run._functions, loop_run._Memory = instead, Watched
        try:
            return loop_run.run_kernel(text, arrays, dims)
        finally:
            loop_run._functions, loop_run._Memory = functions, memory

    return run
