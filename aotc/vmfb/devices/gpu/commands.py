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
from aotc.vmfb.devices.launch import LaunchShape
from aotc.vmfb.devices.libcuda.graphs import CopyParameters
from aotc.vmfb.devices.libcuda.library import failure
from aotc.vmfb.devices.loaded_gpu import LoadedGpu


class GpuCommand:
    """A command.

    Attributes
    ----------
    asked : tuple
        A method of a GPU, which a graph has too, and what it takes.
    """

    __slots__ = ("_change", "_gpu", "asked")

    def __init__(self, executable: LoadedGpu, asked: tuple[str, tuple[Any, ...]]) -> None:
        self._gpu: Any = executable.gpu
        self.asked = asked
        self._change: Callable[[], int] | None = None

    def put(self, number: int, address: int) -> None:
        """Write down where one of the arrays that it names is."""
        raise NotImplementedError

    def _setter(self, recording: Any, node: int) -> Callable[[], int]:
        raise NotImplementedError

    def update(self, recording: Any, node: int) -> None:
        """Tell the graph, in which it always is the same node, what was written down."""
        if self._change is None:
            self._change = self._setter(recording, node)
        status = self._change()
        if status:
            raise failure("a change of a graph", status)


class CopyCommand(GpuCommand):
    """A copy of ``size`` bytes."""

    __slots__ = ("_copy",)

    def __init__(self, executable: LoadedGpu, addresses: Sequence[int], size: int) -> None:
        source, to = addresses
        super().__init__(executable, ("copy", (to, source, size)))
        self._copy = CopyParameters.of(to, source, size)

    def put(self, number: int, address: int) -> None:
        """Write down where its source (0) or its target (1) is."""
        (self._copy.target if number else self._copy.source).device = address

    def _setter(self, recording: Any, node: int) -> Callable[[], int]:
        found: Callable[[], int] = self._gpu.copy_setter(recording, node, self._copy)
        return found


class LaunchCommand(GpuCommand):
    """A launch of the kernel of a number, with dims and the size of the grid behind its pointers."""

    __slots__ = ("_dims", "_held", "_maps", "_values", "_where")

    def __init__(
        self, executable: LoadedGpu, number: int, addresses: Sequence[int], shape: LaunchShape, dims: Sequence[int]
    ) -> None:
        self._where, self._dims = executable.where, dims[:-1]
        self._maps = executable.kernels[number].get("launch", {}).get("maps", ())
        self._held = [self._encoded(row, addresses[row["buffer"]]) for row in self._maps]
        self._values = (ctypes.c_int64 * (len(addresses) + len(dims)))(*addresses, *dims)
        start = ctypes.addressof(self._values)
        places = [*map(ctypes.addressof, self._held), *(start + 8 * n for n in range(len(self._values)))]
        table = (ctypes.c_void_p * len(places))(*places)
        super().__init__(executable, ("launch", (executable.functions[number], shape, table)))

    def _encoded(self, row: Any, address: int) -> Any:
        return tensor_map.encode_map(self._where, row, address, self._dims)

    def put(self, number: int, address: int) -> None:
        """Write down where the buffer of a number is."""
        self._values[number] = address
        for row, held in zip(self._maps, self._held):
            if row["buffer"] == number:
                ctypes.memmove(held, self._encoded(row, address), MAP_BYTES)

    def _setter(self, recording: Any, node: int) -> Callable[[], int]:
        found: Callable[[], int] = self._gpu.kernel_setter(recording, node, *self.asked[1])
        return found
