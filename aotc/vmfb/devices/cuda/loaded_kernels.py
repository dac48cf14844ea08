"""Kernels and constants of one target, loaded on one GPU, and allocation of arrays in its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from ctypes import c_void_p
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from aotc.vmfb.abi import INTERFACE_BYTES
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.devices.cuda import driver as cuda_driver
from aotc.vmfb.devices.cuda.array import CudaArray, CudaBuffer
from aotc.vmfb.devices.cuda.launch import fits_gpu_limits
from aotc.vmfb.devices.cuda.stream_order import Mark
from aotc.vmfb.devices.cuda.tensor_map import is_valid_tensor_map
from aotc.vmfb.errors import BundleError, CallError
from aotc.vmfb.host.locks import new_recursive_lock
from aotc.vmfb.ranks.gpu_calls import GpuCall
from aotc.vmfb.verify.buffers import check_interface_digest
from aotc.vmfb.verify.kernel_interface import Interface, Invalid
from aotc.vmfb.weights.constants import ConstantMemory


class Usage:
    """Counter of the GPU memory in bytes that a variant uses.

    Attributes
    ----------
    bytes, most_bytes : int
        Current and peak bytes, of constants and working memory.
    limit : int
        Limit of working memory in bytes, 0 for none.
    """

    def __init__(self) -> None:
        self.bytes = self.most_bytes = self.limit = 0
        self._lock = new_recursive_lock()

    def add_bytes(self, size: int) -> None:
        """Add ``size`` bytes to those in use; a negative number subtracts."""
        with self._lock:
            self.bytes += size
            self.most_bytes = max(self.most_bytes, self.bytes)


class _IdleMemory(NamedTuple):
    """Cached memory of a freed array, with the streams that may still access it."""

    address: int
    users: set[Mark]
    writer: Mark | None

    def is_used_only_by(self, mark: Mark) -> bool:
        """Return True if no stream but that of ``mark`` may still access the memory."""
        return not self.users or (mark in self.users and len(self.users) == 1)


# Freed GPU memory blocks of one size that are always cached for later results: a value and its replacement, twice. An
# allocation by the driver takes longer than a small kernel.
IDLE_BUFFERS = 4
# Total bytes of cached GPU memory up to which further blocks of one size are cached, for calls with many results of one
# size. The same as KEPT_RESULTS: an allocation by the driver waits for the GPU, a cached block does not.
IDLE_BYTES = 256 << 20


class LoadedGpu:
    """A variant, or its part for one target, loaded on a GPU.

    Parameters
    ----------
    bundle : OpenedBundle
    part : dict
        The part's entry: images and kernels.
    first : int
        The number of its first kernel.
    constants : ConstantMemory
        The variant's constants.
    pieces : sequence of (int, int, int), optional
        Ranges of the constants to load: source offset, bytes, target offset; None for all.
    ordinal : int
        The number of the GPU.
    custom_calls : mapping of str to GpuFunction, optional
        Among others the collectives of a rank, by name.

    Attributes
    ----------
    collectives : dict of int to GpuCall
        Collectives, by number of the kernel; their kernel entries have no code.

    Raises
    ------
    BundleError
        If an image is damaged, or the driver cannot compile it.
    """

    def __init__(
        self, bundle: OpenedBundle, part: dict[str, Any], first: int, constants: ConstantMemory,
        pieces: Sequence[Sequence[int]] | None, ordinal: int, custom_calls: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        check_kernels(bundle, part)
        self.where = bundle.where
        self.ordinal = ordinal
        self.gpu = cuda_driver.Gpu(ordinal)
        self.kernels = dict(enumerate(part["kernels"], first))
        self.functions = dict(enumerate(self._load(bundle, part), first))
        without = ((number, kernel) for number, kernel in self.kernels.items() if not has_code(kernel))
        self.collectives = {number: self._collective(part, kernel, custom_calls) for number, kernel in without}
        rows = [(0, constants.size, 0)] if pieces is None else pieces
        self.constants_bytes = max((offset + size for _, size, offset in rows), default=0)
        self.constants = self._upload(bundle, constants, rows)
        self.usage = Usage()
        self.usage.add_bytes(self.constants_bytes)
        self._idle: dict[int, list[_IdleMemory]] = {}  # memory of freed arrays, by size

    def _collective(
        self, part: Mapping[str, Any], kernel: Mapping[str, Any], custom_calls: Mapping[str, Any]
    ) -> GpuCall:
        """Prepare the collective of a kernel entry without code."""
        (row,) = (row for row in part["custom_calls"] if row["symbol"] == kernel["symbol"])
        if row["name"] not in custom_calls:
            what = f"kernel {kernel['name']!r} is {row['name']}, which this process does not know"
            raise BundleError(self.where, what, hint="compile the model again")
        found: GpuCall = custom_calls[row["name"]].on_gpu(self.where, self.gpu, row, kernel["extents"])
        return found

    def _load(self, bundle: OpenedBundle, part: dict[str, Any]) -> list[c_void_p | None]:
        """Load the images of all kernels, and return the kernels' handles; None for kernels without code."""
        modules: dict[tuple[int, ...], c_void_p] = {}
        functions: list[c_void_p | None] = []
        for kernel, image in zip(part["kernels"], kernel_images(bundle, part), strict=True):
            if image is None:
                functions.append(None)
                continue
            place = tuple(kernel["image"])
            try:
                if place not in modules:
                    modules[place] = self.gpu.load_module(bytes(image))
                function = self.gpu.kernel_handle(modules[place], kernel["symbol"])
                functions.append(function)
                self.gpu.allow_dynamic_shared_memory(function, kernel.get("launch", {}).get("shared", 0))
            except CallError as error:
                raise BundleError(bundle.where, f"kernel {kernel['name']!r} does not load: {error}") from None
        return functions

    def _upload(self, bundle: OpenedBundle, constants: ConstantMemory, rows: Sequence[Sequence[int]]) -> int:
        """Copy the constants to GPU memory, whole or the ranges ``rows``; return their address."""
        try:
            address = self.gpu.allocate(self.constants_bytes)
        except cuda_driver.OutOfGpuMemory as error:
            what = f"{self.constants_bytes:,} bytes of weights find no room: {error}"
            raise BundleError(bundle.where, what) from None
        for source, size, offset in rows:
            if source + size > constants.size:
                raise BundleError(bundle.where, f"a constant ends at {source + size} of {constants.size} bytes")
            self.gpu.upload(address + offset, constants.address + source, size)
        self.gpu.wait()
        return address

    def on_another_stream(self) -> LoadedGpu:
        """Return an object with the same kernels, constants and memory, and a stream of its own."""
        other = copy(self)
        other.gpu = self.gpu.with_new_stream()
        return other

    # ------------------------------------------------------------ arrays

    def empty_array(self, shape: tuple[int, ...], dtype: np.dtype, device: str) -> CudaArray:
        """Return an uninitialised array in this GPU's memory, for the model's device ``device``."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return CudaArray(self.allocate_buffer(size), shape, dtype, device)

    def allocate_buffer(self, size: int, mark: Mark | None = None) -> CudaBuffer:
        """Return memory of ``size`` bytes, preferably cached memory that no stream but that of ``mark`` may access."""
        blocks = self._idle.get(size)
        try:
            found = blocks.pop() if blocks else None
            if found is not None and blocks and mark is not None and not found.is_used_only_by(mark):
                blocks.insert(0, found)
                found = blocks.pop()
        except IndexError:  # another thread took the last one
            found = None
        if found is None:
            return CudaBuffer(self, self.gpu.allocate(size), size)
        return CudaBuffer(self, found.address, size, found.users, found.writer)

    def upload_array(self, array: np.ndarray, device: str) -> CudaArray:
        """Copy a host array to this GPU's memory."""
        made = self.empty_array(array.shape, array.dtype, device)
        made.assign(array)
        return made

    def reclaim_memory(self, address: int, size: int, users: set[Mark], writer: Mark | None) -> None:
        """Cache the memory of a freed array for later arrays, or free it; callable from any thread."""
        blocks = self._idle.setdefault(size, [])
        limit = self.usage.limit
        few = len(blocks) < IDLE_BUFFERS or (not limit and self._idle_bytes() + size <= IDLE_BYTES)
        if few and (not limit or self.working_bytes() + size <= limit):
            blocks.append(_IdleMemory(address, users, writer))
        else:
            self.gpu.free([address])

    def _idle_bytes(self) -> int:
        return sum(size * len(blocks) for size, blocks in tuple(self._idle.items()))

    def working_bytes(self) -> int:
        """Return the bytes of working memory and of cached memory."""
        return self.usage.bytes - self.constants_bytes + self._idle_bytes()

    def trim(self) -> int:
        """Free the cached memory of freed arrays; return the number of freed bytes."""
        freed = 0
        for size, blocks in self._idle.items():
            taken, blocks[:] = list(blocks), []
            self.gpu.free([block.address for block in taken])
            freed += size * len(taken)
        return freed


def has_code(kernel: Mapping[str, Any]) -> bool:
    """Return True if a kernel entry has machine code; an entry without code is a collective."""
    return "image" in kernel


def check_kernels(bundle: OpenedBundle, part: dict[str, Any]) -> None:
    """Refuse incomplete kernel entries, and tensor maps that exceed their arrays.

    Raises
    ------
    BundleError
        The message has the kernel's name.
    """
    symbols = [row["symbol"] for row in part.get("custom_calls", ())]
    for kernel in part["kernels"]:
        if not has_code(kernel) and symbols.count(kernel.get("symbol")) == 1:
            continue
        maps, buffers = kernel.get("launch", {}).get("maps", ()), len(kernel.get("extents", ()))
        whole = len(kernel.get("image", ())) == 2 and "symbol" in kernel and fits_gpu_limits(kernel)
        if not whole or not all(is_valid_tensor_map(row, buffers) for row in maps):
            raise BundleError(bundle.where, f"the entry of kernel {kernel['name']!r} is incomplete")
        try:
            _ = Interface(kernel) if maps else None
        except Invalid as error:
            raise BundleError(bundle.where, str(error), hint="compile the model again") from None
    if part["kernels"] and not part.keys() & {"cubin", "ptx"}:
        raise BundleError(bundle.where, "the variant has kernels but neither cubins nor PTX")


def kernel_images(bundle: OpenedBundle, part: dict[str, Any]) -> list[memoryview | None]:
    """Return the machine code of each kernel of a part; None for a kernel without code.

    Raises
    ------
    BundleError
        If the code does not match the entries.
    """
    if not part["kernels"]:
        return []
    whole = bundle.verified_segment(part["ptx" if "ptx" in part else "cubin"])
    check_interface_digest(bundle.where, part, bytes(whole[-INTERFACE_BYTES:]))
    data = whole[:-INTERFACE_BYTES]
    found: list[memoryview | None] = []
    for kernel in part["kernels"]:
        if not has_code(kernel):
            found.append(None)
            continue
        begin, size = kernel["image"]
        if not 0 <= begin <= begin + size <= data.nbytes:
            raise BundleError(bundle.where, f"kernel {kernel['name']!r} lies outside of the code")
        found.append(data[begin : begin + size])
    return found
