"""How a kernel is launched: its blocks, their memory, and the tensor maps that it reads arrays through.

A kernel whose entry has no ``launch`` runs on a row of blocks, as many as its grid fills. Another's entry says how many
blocks there are in each of three directions, as sizes of its dims, but not more in the first than ``resident`` for
each multiprocessor if that is not 0, how many make a cluster, how much dynamic shared memory a block has, and which
arrays are copied by the tensor memory accelerator::

    {"blocks": [size, size, size], "resident": 1, "cluster": [2, 1, 1], "shared": 196608, "maps": [
        {"buffer": 0, "offset": size, "type": "bf16", "sizes": [size, size], "strides": [size], "box": [64, 128],
         "swizzle": 128}]}

A map with a ``window`` is of an array of images, channels side by side, and a box so many channels of so many pixels of
a convolution's result: along each spatial dim the padding before the first element, ``low``, the ``pixels`` of the
result and the ``strides`` from a pixel to the next, innermost first. An offset is in bytes and may be missing. Sizes
and strides begin with the innermost dimension, whose elements lie side by side. ``"cooperative": true`` says that the
blocks wait for each other, so that all must run at once. Parameters of the kernel are the tensor
maps, then pointers, dims and the size of the grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, c_uint, c_void_p
from dataclasses import dataclass
from math import prod
from typing import Any

from aotc.vmfb.errors import VmError
from aotc.vmfb.verify.kernel_interface import evaluate

_CLUSTER, _COOPERATIVE = 4, 2  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, _COOPERATIVE


class _Attribute(Structure):
    """CUlaunchAttribute: a cluster's shape, or that all blocks run at once."""

    _fields_ = (("id", c_uint), ("pad", c_uint), ("value", c_uint * 16))


class _Config(Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("blocks", c_uint * 3),
        ("threads", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("count", c_uint),
    )


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """The shape of a launch.

    Attributes
    ----------
    blocks : tuple of int
        How many, in x, y and z.
    threads : int
        Of a block.
    shared : int
        Bytes of dynamic shared memory of a block.
    cluster : tuple of int
        The blocks of a cluster in each direction.
    cooperative : bool
        Must all blocks run at once, as they wait for each other?
    """

    blocks: tuple[int, int, int]
    threads: int
    shared: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    cooperative: bool = False

    @property
    def attributes(self) -> list[tuple[int, Any]]:
        """Return the driver's number and value of each attribute that the launch has."""
        found: list[tuple[int, Any]] = [] if self.cluster == (1, 1, 1) else [(_CLUSTER, self.cluster)]
        return [*found, (_COOPERATIVE, (1,))] if self.cooperative else found

    def config(self, stream: c_void_p) -> Structure:
        """Return what cuLaunchKernelEx takes, for a launch on ``stream``."""
        rows = self.attributes
        table = (_Attribute * max(len(rows), 1))(*(_Attribute(number, 0, value) for number, value in rows))
        return _Config(self.blocks, (self.threads, 1, 1), self.shared, stream.value, table, len(rows))

    @property
    def is_empty(self) -> bool:
        """Is there no block?"""
        return not all(self.blocks)


# Maximum grid size in x, in blocks. The driver would refuse a larger launch too, but aotc's error names the kernel.
# Source: CUDA C++ Programming Guide, technical specifications per compute capability.
MAX_BLOCKS = (1 << 31) - 1
# Maximum grid size in y and in z, in blocks; see MAX_BLOCKS. Source: CUDA C++ Programming Guide, technical
# specifications per compute capability.
MAX_BLOCKS_ACROSS = (1 << 16) - 1


def launch_of(
    where: str, kernel: Mapping[str, Any], dims: Sequence[int], items: int, multiprocessors: int
) -> LaunchShape:
    """Return how ``kernel``, an entry of the manifest, is launched for ``dims`` and a grid of ``items``.

    Raises
    ------
    VmError
        If there are more blocks than a GPU takes.
    """
    row = kernel.get("launch")
    if row is None:
        found = LaunchShape((-(-items // kernel["items"]), 1, 1), kernel["threads"])
    else:
        x, y, z = (max(evaluate(size, dims), 0) for size in row["blocks"])
        x = min(x, row["resident"] * multiprocessors) if row["resident"] else x
        together = row.get("cooperative", False)
        found = LaunchShape((x, y, z), kernel["threads"], row["shared"], tuple(row["cluster"]), together)
    for count, most in zip(found.blocks, (MAX_BLOCKS, MAX_BLOCKS_ACROSS, MAX_BLOCKS_ACROSS)):
        if count > most:
            raise VmError(where, f"kernel {kernel['name']!r} has too large a grid", count, most)
    return found


# Maximum number of blocks in a cluster. Larger clusters do not run on every GPU that supports clusters. Source: CUDA
# C++ Programming Guide, thread block clusters.
MAX_CLUSTER = 8
# Maximum dynamic shared memory of a block in bytes; see MAX_THREADS. A GPU with less refuses the launch. Source: CUDA
# C++ Programming Guide, technical specifications per compute capability.
MAX_SHARED = 227 << 10
# Maximum number of threads in a block. A bundle with a larger number is refused at load. Source: CUDA C++ Programming
# Guide, technical specifications per compute capability.
MAX_THREADS = 1024


def fits(kernel: Mapping[str, Any]) -> bool:
    """Is what the entry of a kernel says of its launch something that a GPU can do?"""
    if not 0 < kernel.get("threads", 0) <= MAX_THREADS or kernel.get("items", 0) < 1:
        return False
    row = kernel.get("launch")
    if row is None:
        return True
    return (
        len(row["blocks"]) == len(row["cluster"]) == 3
        and min(row["cluster"]) >= 1
        and prod(row["cluster"]) <= MAX_CLUSTER
        and 0 <= row["shared"] <= MAX_SHARED
        and row["resident"] >= 0
    )
