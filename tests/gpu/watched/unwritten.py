"""Simulated GPUs that know which bytes of their memory anybody has written, as compute-sanitizer's initcheck does."""

import bisect
import ctypes

import numpy as np
from vmfb import simulated_gpu
from vmfb.simulated_gpu import SimulatedGpu

from aotc.ir.loop import run as loop_run


class Unwritten:
    """Which kernels read what nothing has written: ``found``, a buffer's shape, the index and the kernel."""

    def __init__(self, monkeypatch):
        self.blocks, self.found, self.kernel = {}, [], ""
        allocate = SimulatedGpu.allocate

        def fresh(gpu, size):
            address = allocate(gpu, size)
            self.blocks[address] = np.zeros(size, bool)
            return address

        def moved(gpu, what, to, source, size):
            if size:
                gpu._do(what, lambda: self.move(to, source, size))

        monkeypatch.setattr(SimulatedGpu, "allocate", fresh)
        monkeypatch.setattr(SimulatedGpu, "_move", moved)
        monkeypatch.setattr(SimulatedGpu, "copying", lambda gpu, *arguments: lambda: self.move(*arguments))
        monkeypatch.setattr(simulated_gpu, "run_kernel", self.run)

    def marks(self, address, size):
        """Return which of these bytes are written, for who writes them to note it; None of the host's."""
        starts = sorted(self.blocks)
        at = bisect.bisect_right(starts, address) - 1
        if at < 0 or address + size > starts[at] + len(self.blocks[starts[at]]):
            return None
        return self.blocks[starts[at]][address - starts[at] :][:size]

    def move(self, to, source, size):
        ctypes.memmove(to, source, size)
        target, known = self.marks(to, size), self.marks(source, size)
        if target is not None:
            target[:] = True if known is None else known

    def run(self, text, arrays, dims):
        """Take the place of ``run_kernel``."""
        memory, own = loop_run._Memory, self

        class Watched(memory):
            __slots__ = ("written",)

            def __init__(self, array):
                super().__init__(array)
                marks = own.marks(array.__array_interface__["data"][0], array.nbytes)
                if marks is not None:
                    marks = marks[:: array.itemsize].reshape(array.shape)
                self.written = marks

            def __getitem__(self, index):
                if self.written is not None and not np.all(self.written[index]):
                    own.found.append((self.array.shape, index, own.kernel))
                return super().__getitem__(index)

            def __setitem__(self, index, value):
                super().__setitem__(index, value)
                if self.written is not None:
                    self.written[index] = True

        self.kernel = text.partition("(")[0].removeprefix("def ")
        loop_run._Memory = Watched
        try:
            return loop_run.run_kernel(text, arrays, dims)
        finally:
            loop_run._Memory = memory
            for array in arrays:  # a word whose first byte is written is written
                marks = self.marks(array.__array_interface__["data"][0], array.nbytes)
                if marks is not None and array.size:
                    words = marks.reshape(-1, array.itemsize)
                    words[:] = words[:, :1]
