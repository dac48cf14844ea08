"""Commands of a command buffer on a GPU: launches and copies that were given their addresses, and can be given others.

A command that is recorded in a graph knows its node there. When an argument or a result lies elsewhere in another
call, its address is written where the command has it, and the node is told to read what it has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aotc.vmfb.devices.cuda import tensor_map
from aotc.vmfb.devices.cuda.launch import LaunchShape
from aotc.vmfb.devices.cuda.libcuda.graphs import Cell, CopyParameters
from aotc.vmfb.devices.cuda.loaded_kernels import LoadedGpu

Change = Callable[[], int]


class GpuCommand:
    """A command.

    Attributes
    ----------
    asked : tuple
        A method of a GPU, which a graph has too, and what it takes.
    cells : list of (ctypes array, int)
        Where the address of each array that it names stands.
    change : callable or None
        Has the graph that it is recorded in read the cells, and returns the driver's status; :meth:`setter` makes it.
    """

    __slots__ = ("_gpu", "_node", "asked", "cells", "change")

    def __init__(self, executable: LoadedGpu, asked: tuple[str, tuple[Any, ...]], cells: list[Cell]) -> None:
        self._gpu: Any = executable.gpu
        self.asked, self.cells = asked, cells
        self._node: tuple[Any, int] = None, 0
        self.change: Change | None = None

    def record(self, recording: Any, node: int) -> None:
        """Note in which graph it is, and as which node, for good."""
        self._node = recording, node

    def setter(self) -> Change:
        """Make what changes the graph; most that are recorded are never changed."""
        self.change = made = self._setter(*self._node)
        return made

    def _setter(self, recording: Any, node: int) -> Change:
        raise NotImplementedError


class CopyCommand(GpuCommand):
    """A copy of ``size`` bytes."""

    __slots__ = ("_copy",)

    def __init__(self, executable: LoadedGpu, addresses: Sequence[int], size: int) -> None:
        source, to = addresses
        self._copy = CopyParameters.of(to, source, size)
        super().__init__(executable, ("copy", (to, source, size)), self._copy.cells())

    def _setter(self, recording: Any, node: int) -> Change:
        found: Change = self._gpu.copy_setter(recording, node, self._copy)
        return found


class LaunchCommand(GpuCommand):
    """A launch of the kernel of a number, with dims and the size of the grid behind its pointers."""

    __slots__ = ("_maps",)

    def __init__(
        self, executable: LoadedGpu, number: int, addresses: Sequence[int], shape: LaunchShape, dims: Sequence[int]
    ) -> None:
        where, rows = executable.where, executable.kernels[number].get("launch", {}).get("maps", ())
        held = [tensor_map.encode_map(where, row, addresses[row["buffer"]], dims[:-1]) for row in rows]
        values = (ctypes.c_int64 * (len(addresses) + len(dims)))(*addresses, *dims)
        start = ctypes.addressof(values)
        places = [*map(ctypes.addressof, held), *(start + 8 * n for n in range(len(values)))]
        table = (ctypes.c_void_p * len(places))(*places)
        cells = [(values, number) for number in range(len(addresses))]
        self._maps = [  # which have what is held
            (cells[row["buffer"]], partial(tensor_map.move_map, where, row, one, dims[:-1]))
            for row, one in zip(rows, held)
        ]
        super().__init__(executable, ("launch", (executable.functions[number], shape, table)), cells)

    def _setter(self, recording: Any, node: int) -> Change:
        found: Change = self._gpu.kernel_setter(recording, node, *self.asked[1])
        return partial(_change_with_maps, self._maps, found) if self._maps else found


def _change_with_maps(maps: Sequence[tuple[Cell, Callable[[int], None]]], change: Change) -> int:
    """Put the addresses of arrays into their tensor maps before the node reads these."""
    for (values, number), move in maps:
        move(values[number])
    return change()
