"""Arrays in memory that a gang and its ranks share: each distinct part once.

Both sides compute the same positions from the signature, so messages carry no addresses.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence

import numpy as np

from aotc.vmfb.abi import ALIGNMENT
from aotc.vmfb.arguments import Signature
from aotc.vmfb.ranks.cut import Cut, FunctionCuts
from aotc.vmfb.ranks.layout import Mesh


class SharedFunction(FunctionCuts):
    """The positions of a function's arguments and results in shared memory.

    Attributes
    ----------
    size : int
        Bytes of all parts.
    """

    def __init__(self, mesh: Mesh, signature: Signature) -> None:
        super().__init__(mesh, signature)
        self.size = 0
        self._argument_offsets = self._placed(self.arguments)
        self._result_offsets = self._placed(self.results)

    def _placed(self, cuts: Sequence[Cut]) -> list[dict[int, int]]:
        """Return the offset of each owner's part of each array."""
        found = []
        for cut in cuts:
            offsets = {}
            for rank in cut.distinct:
                offsets[rank] = self.size
                self.size += -(-cut.part_bytes // ALIGNMENT) * ALIGNMENT
            found.append(offsets)
        return found

    def write(self, memory: mmap.mmap, arrays: Sequence[np.ndarray]) -> None:
        """Copy the parts of whole arguments, or of the first ones, to shared memory."""
        for array, cut, offsets in zip(arrays, self.arguments, self._argument_offsets):
            for rank, offset in offsets.items():
                _view_of_part(memory, cut, offset)[...] = array[cut.slices[rank]]

    def read(self, memory: mmap.mmap, most: int | None = None) -> list[np.ndarray]:
        """Return whole results, or ``most`` of them, made of the parts in shared memory."""
        found = []
        for cut, offsets in list(zip(self.results, self._result_offsets, strict=True))[:most]:
            whole = np.empty(cut.whole, cut.dtype)
            for rank, offset in offsets.items():
                whole[cut.slices[rank]] = _view_of_part(memory, cut, offset)
            found.append(whole)
        return found

    def rank_arguments(self, memory: mmap.mmap, rank: int) -> list[np.ndarray]:
        """Return the arguments of a rank, read-only."""
        found = []
        for cut, offsets in zip(self.arguments, self._argument_offsets, strict=True):
            array = _view_of_part(memory, cut, offsets[cut.owners[rank]])
            array.flags.writeable = False
            found.append(array)
        return found

    def rank_results(self, memory: mmap.mmap, rank: int) -> list[np.ndarray | None]:
        """Return the buffer of each result of a rank; None if another rank writes the same part."""
        rows = zip(self.results, self._result_offsets, strict=True)
        return [_view_of_part(memory, cut, offsets[rank]) if rank in offsets else None for cut, offsets in rows]


def _view_of_part(memory: mmap.mmap, cut: Cut, offset: int) -> np.ndarray:
    return np.ndarray(cut.dims, cut.dtype, memory, offset)


def memory_file(size: int) -> int:
    """Return the descriptor of a file in memory without a name; pages are allocated when they are written."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("aotc-gang")
    else:
        with tempfile.TemporaryFile() as opened:
            file = os.dup(opened.fileno())
    os.ftruncate(file, max(size, mmap.PAGESIZE))
    return file


def mapped_memory(file: int) -> mmap.mmap:
    """Return the memory of a descriptor."""
    return mmap.mmap(file, os.fstat(file).st_size)
