"""Commands of a command buffer on a GPU: launches and copies that were given their addresses, and can be given others.

A command that is recorded in a graph knows its node there. When an argument or a result lies elsewhere in another
call, the nodes that name it are told so, and the graph runs with the rest as it was.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from aotc.vmfb.abi import MAP_BYTES
from aotc.vmfb.devices import tensor_map
from aotc.vmfb.devices.gpu.driver_library import failure
from aotc.vmfb.devices.gpu.graph_nodes import CopyNode, KernelNode
from aotc.vmfb.devices.launch import LaunchShape
from aotc.vmfb.devices.loaded_gpu import LoadedGpu


class GpuCommand:
    """A command.

    Attributes
    ----------
    recorded : tuple or None
        The graph and its node, if it is recorded.
    """

    __slots__ = ("_gpu", "_set", "recorded")

    def __init__(self, executable: LoadedGpu) -> None:
        self._gpu: Any = executable.gpu
        self.recorded: tuple[Any, Any] | None = None
        self._set: Callable[[], int] | None = None

    def run(self) -> None:
        """Put it on the stream."""
        raise NotImplementedError

    def put(self, number: int, address: int) -> None:
        """Write down where one of the arrays that it names is."""
        raise NotImplementedError

    def _setter(self) -> Callable[[], int]:
        raise NotImplementedError

    def update(self) -> None:
        """Tell the graph what was written down."""
        if self._set is None:
            self._set = self._setter()
        status = self._set()
        if status:
            raise failure("a change of a graph", status)


class CopyCommand(GpuCommand):
    """A copy of ``size`` bytes."""

    __slots__ = ("_copy",)

    def __init__(self, executable: LoadedGpu, addresses: Sequence[int], size: int) -> None:
        super().__init__(executable)
        source, to = addresses
        self._copy = CopyNode(source, to, size)

    def run(self) -> None:
        """Put it on the stream."""
        self._gpu.copy(self._copy.to, self._copy.source, self._copy.size)

    def put(self, number: int, address: int) -> None:
        """Write down where its source (0) or its target (1) is."""
        self._copy.put(number, address)

    def _setter(self) -> Callable[[], int]:
        assert self.recorded is not None
        found: Callable[[], int] = self._gpu.copy_setter(*self.recorded, self._copy)
        return found


class LaunchCommand(GpuCommand):
    """A launch of the kernel of a number, with dims and the size of the grid behind its pointers."""

    __slots__ = ("_dims", "_launch", "_maps", "_values", "_where")

    def __init__(
        self, executable: LoadedGpu, number: int, addresses: Sequence[int], shape: LaunchShape, dims: Sequence[int]
    ) -> None:
        super().__init__(executable)
        self._where, self._dims = executable.where, dims[:-1]
        self._maps = executable.kernels[number].get("launch", {}).get("maps", ())
        maps = [self._encoded(row, addresses[row["buffer"]]) for row in self._maps]
        self._launch = KernelNode(executable.functions[number], shape, maps, [*addresses, *dims])
        self._values = self._launch.values

    def _encoded(self, row: Any, address: int) -> Any:
        return tensor_map.encode_map(self._where, row, address, self._dims)

    def run(self) -> None:
        """Put it on the stream."""
        self._gpu.launch(self._launch.function, self._launch.shape, self._launch.table)

    def put(self, number: int, address: int) -> None:
        """Write down where the buffer of a number is."""
        self._values[number] = address
        for row, held in zip(self._maps, self._launch.maps):
            if row["buffer"] == number:
                ctypes.memmove(held, self._encoded(row, address), MAP_BYTES)

    def _setter(self) -> Callable[[], int]:
        assert self.recorded is not None
        found: Callable[[], int] = self._gpu.kernel_setter(*self.recorded, self._launch)
        return found
