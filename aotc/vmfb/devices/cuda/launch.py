"""Launch parameters of kernels: grid, cluster, shared memory, and tensor maps.

A kernel whose entry has no ``launch`` runs on a one-dimensional grid that covers its items. Otherwise ``launch`` has
the number of blocks in each direction, as expressions of its dims. The first number is limited to ``resident`` blocks
for each multiprocessor, unless that is 0. It also has the shape of a cluster, the dynamic shared memory of a block, and
the tensor maps through which the tensor memory accelerator copies arrays::

    {"blocks": [size, size, size], "resident": 1, "cluster": [2, 1, 1], "shared": 196608, "maps": [
        {"buffer": 0, "offset": size, "type": "bf16", "sizes": [size, size], "strides": [size], "box": [64, 128],
         "swizzle": 128}]}

A map with a ``window`` describes an array of images with the channels innermost (im2col mode); its box is a number of
channels and a number of pixels of a convolution's result. For each spatial dim, innermost first, the window has
``low``, the padding before the first element, ``pixels``, the size of the result, and ``strides``, the convolution's
strides. ``offset`` is in bytes and may be missing. Sizes and strides start with the innermost dimension, which is
contiguous. ``"cooperative": true`` launches all blocks at once, because they wait for each other. The parameters of the
kernel are the tensor maps, then pointers, dims and the size of the grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, c_uint, c_void_p
from dataclasses import dataclass
from math import prod
from typing import Any

from aotc.vmfb.errors import CallError
from aotc.vmfb.verify.kernel_interface import evaluate_size

_CLUSTER, _COOPERATIVE = 4, 2  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, _COOPERATIVE


class _Attribute(Structure):
    """ctypes form of CUlaunchAttribute: the shape of a cluster, or a cooperative launch."""

    _fields_ = (("id", c_uint), ("pad", c_uint), ("value", c_uint * 16))


class _Config(Structure):
    """ctypes form of CUlaunchConfig."""

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
    """Grid, block, cluster and shared memory of a kernel launch.

    Attributes
    ----------
    blocks : tuple of int
        The number of blocks in x, y and z.
    threads : int
        Threads of a block.
    shared : int
        Bytes of dynamic shared memory of a block.
    cluster : tuple of int
        Blocks of a cluster in each direction.
    cooperative : bool
        True if all blocks must run at the same time, because they wait for each other.
    """

    blocks: tuple[int, int, int]
    threads: int
    shared: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    cooperative: bool = False

    @property
    def attributes(self) -> list[tuple[int, Any]]:
        """Return the driver's number and the value of each launch attribute."""
        found: list[tuple[int, Any]] = [] if self.cluster == (1, 1, 1) else [(_CLUSTER, self.cluster)]
        return [*found, (_COOPERATIVE, (1,))] if self.cooperative else found

    def config(self, stream: c_void_p) -> Structure:
        """Return the driver's configuration structure (cuLaunchKernelEx) for a launch on ``stream``."""
        rows = self.attributes
        table = (_Attribute * max(len(rows), 1))(*(_Attribute(number, 0, value) for number, value in rows))
        return _Config(self.blocks, (self.threads, 1, 1), self.shared, stream.value, table, len(rows))

    @property
    def is_empty(self) -> bool:
        """Return True if the grid has no blocks."""
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
    """Compute the launch shape of ``kernel``, an entry of the manifest, for its ``dims`` and a grid of ``items``.

    Raises
    ------
    CallError
        If the grid exceeds the limits of a GPU.
    """
    row = kernel.get("launch")
    if row is None:
        found = LaunchShape((-(-items // kernel["items"]), 1, 1), kernel["threads"])
    else:
        x, y, z = (max(evaluate_size(size, dims), 0) for size in row["blocks"])
        x = min(x, row["resident"] * multiprocessors) if row["resident"] else x
        together = row.get("cooperative", False)
        found = LaunchShape((x, y, z), kernel["threads"], row["shared"], tuple(row["cluster"]), together)
    for count, most in zip(found.blocks, (MAX_BLOCKS, MAX_BLOCKS_ACROSS, MAX_BLOCKS_ACROSS)):
        if count > most:
            raise CallError(where, f"kernel {kernel['name']!r} has too large a grid", count, most)
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


def fits_gpu_limits(kernel: Mapping[str, Any]) -> bool:
    """Return True if the launch parameters in a kernel's manifest entry are within the limits of all GPUs."""
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
