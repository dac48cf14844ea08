"""Kernel launches and copies with their addresses filled in, which can be changed after they are recorded in a graph.

A command that is recorded in a graph stores its node. When an argument or a result has another address in a later call,
the address is written to the command's parameters, and the graph's node is updated from them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aotc.vmfb.devices.cuda import tensor_map
from aotc.vmfb.devices.cuda.launch import LaunchShape
from aotc.vmfb.devices.cuda.libcuda.graphs import Cell, CopyParameters, Recording
from aotc.vmfb.devices.cuda.loaded_kernels import LoadedGpu
from aotc.vmfb.ranks.gpu_calls import GpuCall

Change = Callable[[], int]


class GpuCommand:
    """A kernel launch, copy, signal or collective with its addresses filled in.

    Attributes
    ----------
    method_call : tuple
        Name and arguments of the method that runs the command on a GPU, or adds it to a graph.
    cells : list of (ctypes array, int)
        For each array the position of its address in the command's parameters.
    change : callable or None
        Updates the graph's node from the parameters and returns the driver's status; :meth:`node_setter` creates it.
    """

    __slots__ = ("_gpu", "_node", "cells", "change", "method_call")

    def __init__(self, executable: LoadedGpu, method_call: tuple[str, tuple[Any, ...]], cells: list[Cell]) -> None:
        self._gpu = executable.gpu
        self.method_call, self.cells = method_call, cells
        self._node: tuple[Recording, int]  # set by :meth:`set_graph_node`
        self.change: Change | None = None

    def set_graph_node(self, recording: Recording, node: int) -> None:
        """Store the command's node in a CUDA graph, so that :meth:`node_setter` can update the node."""
        self._node = recording, node

    def node_setter(self) -> Change:
        """Return the function that updates this command's recorded node; create it on first use."""
        self.change = made = self._make_node_setter(*self._node)
        return made

    def _make_node_setter(self, recording: Recording, node: int) -> Change:
        raise NotImplementedError


class CopyCommand(GpuCommand):
    """A copy of ``size`` bytes on the GPU."""

    __slots__ = ("_copy",)

    def __init__(self, executable: LoadedGpu, addresses: Sequence[int], size: int) -> None:
        source, to = addresses
        self._copy = CopyParameters.of(to, source, size)
        super().__init__(executable, ("copy", (to, source, size)), self._copy.cells())

    def _make_node_setter(self, recording: Recording, node: int) -> Change:
        found = self._gpu.copy_setter(recording, node, self._copy)
        return found


class SignalCommand(GpuCommand):
    """A store of 1 to a fixed word of page-locked host memory, by which the host sees that earlier work is complete."""

    __slots__ = ()

    def __init__(self, executable: LoadedGpu, address: int) -> None:
        super().__init__(executable, ("signal", (address,)), [])


class CollectiveCommand(GpuCommand):
    """A collective of several ranks on fixed addresses."""

    __slots__ = ()

    def __init__(self, executable: LoadedGpu, call: GpuCall, addresses: Sequence[int]) -> None:
        super().__init__(executable, ("collective", (call, tuple(addresses))), [])


class LaunchCommand(GpuCommand):
    """A kernel launch; its parameters are tensor maps, pointers, dims and the size of the grid."""

    __slots__ = ("_maps",)

    def __init__(
        self, executable: LoadedGpu, number: int, addresses: Sequence[int], shape: LaunchShape, dims: Sequence[int]
    ) -> None:
        """Fill in the parameters of kernel ``number``: tensor maps, pointers, dims and the size of the grid."""
        where, rows = executable.where, executable.kernels[number].get("launch", {}).get("maps", ())
        held = [tensor_map.encode_tensor_map(where, row, addresses[row["buffer"]], dims[:-1]) for row in rows]
        values = (ctypes.c_int64 * (len(addresses) + len(dims)))(*addresses, *dims)
        start = ctypes.addressof(values)
        places = [*map(ctypes.addressof, held), *(start + 8 * n for n in range(len(values)))]
        table = (ctypes.c_void_p * len(places))(*places)
        cells = [(values, number) for number in range(len(addresses))]
        self._maps = [  # they keep the encoded maps alive
            (cells[row["buffer"]], partial(tensor_map.retarget_tensor_map, where, row, one, dims[:-1]))
            for row, one in zip(rows, held)
        ]
        super().__init__(executable, ("launch", (executable.functions[number], shape, table)), cells)

    def _make_node_setter(self, recording: Recording, node: int) -> Change:
        found = self._gpu.kernel_setter(recording, node, *self.method_call[1])
        return partial(_change_with_maps, self._maps, found) if self._maps else found


def _change_with_maps(maps: Sequence[tuple[Cell, Callable[[int], None]]], change: Change) -> int:
    """Encode the addresses of arrays in their tensor maps, then update the graph's node by ``change``."""
    for (values, number), move in maps:
        move(values[number])
    return change()
