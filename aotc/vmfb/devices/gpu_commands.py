"""Commands of a command buffer on a GPU: launches and copies that were given their addresses, and can be given others.

A command that is recorded in a graph knows its node there. When an argument or a result lies elsewhere in another
call, the nodes that name it are told so, and the graph runs with the rest as it was.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from aotc.vmfb.abi import MAP_BYTES
from aotc.vmfb.devices import tensor_map
from aotc.vmfb.devices.graph_nodes import CopyNode, KernelNode
from aotc.vmfb.devices.launch import LaunchShape
from aotc.vmfb.devices.loaded_gpu import LoadedGpu

_Places = Sequence[tuple[Any, int, int]]  # pointer table, slot, bytes behind what is there


class GpuCommand:
    """A command.

    Attributes
    ----------
    recording, node
        Where it is recorded, if it is.
    slots : list of int
        Of the pointer table: what it names.
    """

    __slots__ = ("_gpu", "_places", "node", "recording")

    def __init__(self, executable: LoadedGpu, places: _Places) -> None:
        self._gpu: Any = executable.gpu
        self._places = places
        self.recording: Any = None
        self.node: Any = None

    @property
    def slots(self) -> list[int]:
        """Return the slots that it names."""
        return [slot for _, slot, _ in self._places]

    def _addresses(self) -> list[int]:
        return [slots[slot] + offset for slots, slot, offset in self._places]

    def run(self) -> None:
        """Put it on the stream."""
        raise NotImplementedError

    def move(self) -> None:
        """Put the addresses that its slots have now into the graph."""
        raise NotImplementedError


class CopyCommand(GpuCommand):
    """A copy of ``size`` bytes."""

    __slots__ = ("_copy",)

    def __init__(self, executable: LoadedGpu, places: _Places, size: int) -> None:
        super().__init__(executable, places)
        source, to = self._addresses()
        self._copy = CopyNode(to, source, size)

    def run(self) -> None:
        """Put it on the stream."""
        self._gpu.copy(self._copy.to, self._copy.source, self._copy.size)

    def move(self) -> None:
        """Put the addresses that its slots have now into the graph."""
        self._copy.source, self._copy.to = self._addresses()
        self._gpu.set_copy(self.recording, self.node, self._copy)


class LaunchCommand(GpuCommand):
    """A launch of the kernel of a number, with dims and the size of the grid behind its pointers."""

    __slots__ = ("_dims", "_function", "_launch", "_maps", "_shape", "_where")

    def __init__(
        self, executable: LoadedGpu, number: int, places: _Places, shape: LaunchShape, dims: Sequence[int]
    ) -> None:
        super().__init__(executable, places)
        self._function, self._where, self._dims = executable.functions[number], executable.where, dims[:-1]
        self._maps = executable.kernels[number].get("launch", {}).get("maps", ())
        self._shape = shape
        addresses = self._addresses()
        self._launch = KernelNode(self._function, shape, self._encoded(addresses), [*addresses, *dims])

    def _encoded(self, addresses: Sequence[int]) -> list[Any]:
        return [tensor_map.encode_map(self._where, row, addresses[row["buffer"]], self._dims) for row in self._maps]

    def run(self) -> None:
        """Put it on the stream."""
        self._gpu.launch(self._function, self._shape, self._launch.table)

    def move(self) -> None:
        """Put the addresses that its slots have now into the graph."""
        addresses = self._addresses()
        for old, new in zip(self._launch.maps, self._encoded(addresses)):
            ctypes.memmove(old, new, MAP_BYTES)
        self._launch.values[: len(addresses)] = addresses
        self._gpu.set_kernel(self.recording, self.node, self._launch)
