"""Recorded graphs, and what the driver is told of their nodes: so that a graph can run with arrays elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, Structure, addressof, byref, c_int64, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, NamedTuple

from aotc.vmfb.devices.launch import LaunchShape

_DEVICE = 2  # CU_MEMORYTYPE_DEVICE


class Recording(NamedTuple):
    """A graph.

    Attributes
    ----------
    ready : c_void_p
        What runs.
    source : c_void_p
        What it was made from, and its nodes belong to.
    """

    ready: Any
    source: Any


class _Launch(Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", c_void_p), ("blocks", c_uint * 3), ("threads", c_uint * 3), ("shared", c_uint),
        ("parameters", c_void_p), ("extra", c_void_p), ("kernel", c_void_p), ("context", c_void_p),
    )  # fmt: skip


class _End(Structure):
    """One side of CUDA_MEMCPY3D."""

    _fields_ = (
        ("x", c_size_t), ("y", c_size_t), ("z", c_size_t), ("level", c_size_t), ("kind", c_uint), ("host", c_void_p),
        ("device", c_uint64), ("array", c_void_p), ("reserved", c_void_p), ("pitch", c_size_t), ("height", c_size_t),
    )  # fmt: skip


class _Copy(Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = (("source", _End), ("target", _End), ("width", c_size_t), ("height", c_size_t), ("depth", c_size_t))


class KernelNode:
    """A launch of a kernel: its parameters lie where the driver reads them, and can be written again.

    Attributes
    ----------
    function, shape
        What is launched, and how.
    table : ctypes array of void pointers
        Where each parameter is: the tensor maps, then the numbers.
    values : ctypes array of int64
        Pointers, dims, the size of the grid.
    maps : list of ctypes arrays
    """

    __slots__ = ("_described", "function", "maps", "shape", "table", "values")

    def __init__(self, function: Any, shape: LaunchShape, maps: list[Any], values: Sequence[int]) -> None:
        self.function, self.shape, self.maps = function, shape, maps
        self.values: Array[c_int64] = (c_int64 * len(values))(*values)
        start = addressof(self.values)
        places = [*map(addressof, maps), *(start + 8 * n for n in range(len(values)))]
        self.table = (c_void_p * len(places))(*places)
        self._described: Any = None

    @property
    def described(self) -> Any:
        """Return what the driver takes to change it."""
        if self._described is None:
            shape, table = self.shape, addressof(self.table)
            row = _Launch(self.function, shape.blocks, (shape.threads, 1, 1), shape.shared, table, None, None, None)
            self._described = byref(row)
        return self._described


class CopyNode:
    """A copy of ``size`` bytes on a GPU, from ``source``, to ``to``: addresses that can be written again."""

    __slots__ = ("_row", "size")

    def __init__(self, source: int, to: int, size: int) -> None:
        ends = [_End(kind=_DEVICE, device=address, pitch=size, height=1) for address in (source, to)]
        self._row = _Copy(*ends, size, 1, 1)
        self.size = size

    @property
    def source(self) -> int:
        """Return where the bytes are."""
        return int(self._row.source.device)

    @property
    def to(self) -> int:
        """Return where they go."""
        return int(self._row.target.device)

    def put(self, number: int, address: int) -> None:
        """Write the address of the source (0) or of the target (1)."""
        (self._row.target if number else self._row.source).device = address

    @property
    def described(self) -> Any:
        """Return what the driver takes to change it."""
        return byref(self._row)
