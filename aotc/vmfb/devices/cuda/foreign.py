"""Zero-copy import of GPU arrays of other libraries: DLPack, else ``__cuda_array_interface__``.

The producer's kernels may still write the array. With DLPack, the producer makes an aotc stream wait for them. With the
interface, an aotc stream waits for the producer's stream. A call that accesses the array makes its streams wait for
this aotc stream. The call returns only when the GPU is done, because the producer's later work does not wait for the
call's streams.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aotc.vmfb.abi import GPU_ALIGNMENT
from aotc.vmfb.devices.array import DeviceArray
from aotc.vmfb.devices.cuda import driver as cuda_driver
from aotc.vmfb.devices.cuda.array import CudaArray, CudaBuffer, memory_keeper
from aotc.vmfb.devices.dlpack import CUDA, MANAGED, Handed, capsule_description
from aotc.vmfb.devices.host_arrays import import_host_array, random_key_words

_LEGACY = 1  # the legacy default stream in both protocols: it orders itself with all other streams


class _Borrowed(CudaBuffer):
    """GPU memory of another library; ``kept`` is the foreign object that owns the memory."""

    __slots__ = ("kept", "read_only")

    def __init__(self, ordinal: int, found: Handed, owner: Any) -> None:
        mark = memory_keeper(ordinal).gpu.mark  # its stream waits for the producer's
        super().__init__(memory_keeper(ordinal), found.address, 0, {mark}, mark)
        self.kept, self.read_only, self.shared = owner, found.read_only, True

    def __del__(self) -> None:
        """Do nothing: the memory belongs to another library."""


def imported_array(value: Any, writes: bool = False) -> CudaArray | None:
    """Import a GPU array of another library as a :class:`CudaArray` of the same memory; return None for other values.

    An array whose start is not aligned for vector accesses, such as a slice, is copied on its GPU.

    Parameters
    ----------
    value : object
    writes : bool
        True if the array will be written.

    Raises
    ------
    BufferError
        If the array is not C-contiguous, is read-only but would be written, or has an unknown dtype.
    """
    found = _import_unaligned(value, writes)
    if found is None or found.address % GPU_ALIGNMENT == 0:
        return found
    if writes:
        behind = f"{found.address % GPU_ALIGNMENT} bytes behind a multiple of {GPU_ALIGNMENT}"
        raise BufferError(f"it begins {behind}, and kernels write vectors: give a whole array, and copy that")
    return found.copy()


def _import_unaligned(value: Any, writes: bool = False) -> CudaArray | None:
    """Import a GPU array of another library at any alignment; see :func:`imported_array`."""
    device = getattr(value, "__dlpack_device__", None)
    if device is not None:
        type_, ordinal = device()
        if type_ not in (CUDA, MANAGED):
            return None
        owner = _request_capsule(value, memory_keeper(ordinal).gpu.handle)
        found = capsule_description(owner)
    elif hasattr(value, "__cuda_array_interface__"):
        row, owner = value.__cuda_array_interface__, value
        (address, read_only), shape = row["data"], tuple(row["shape"])
        found = Handed(address, shape, np.dtype(row["typestr"]), row.get("strides"), read_only)
        ordinal = cuda_driver.ordinal_of(found.address) if found.address else 0
        if row.get("stream") is not None:
            memory_keeper(ordinal).gpu.wait_for_stream(row["stream"])
        elif row.get("version", 0) < 3:  # older versions have no stream
            memory_keeper(ordinal).gpu.wait_for_stream(_LEGACY)
    else:
        return None
    if not found.is_row_major:
        steps = f"strides of {found.strides} bytes for shape {found.shape}"
        raise BufferError(f"its elements are not in row-major order ({steps}): .contiguous(), ascontiguousarray(...)")
    if writes and found.read_only:
        raise BufferError("it is read-only")
    return CudaArray(_Borrowed(ordinal, found, owner), found.shape, found.dtype, f"cuda:{ordinal}")


def _request_capsule(value: Any, stream: int) -> Any:
    """Request a DLPack capsule from a GPU array; ``stream`` will wait for the producer's work up to now."""
    try:
        return value.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:  # the producer is older than DLPack 1.0
        return value.__dlpack__(stream=stream)


def import_output_buffer(out: Any) -> np.ndarray | DeviceArray | None:
    """Import an ``out=`` buffer of another library as an array; return None if it cannot be imported."""
    if out is None or isinstance(out, np.ndarray | DeviceArray):
        return out
    found = _import_unaligned(out)
    return import_host_array(out) if found is None else found


def as_device_or_host_array(value: Any) -> np.ndarray | DeviceArray:
    """Convert a value to a :class:`DeviceArray` if it is one or is on a GPU, else to a NumPy array."""
    if isinstance(value, np.ndarray | DeviceArray):
        return value
    found = imported_array(value)
    if found is not None:
        return found
    try:
        return np.asarray(value)
    except TypeError:  # a dtype unknown to NumPy
        if (words := random_key_words(value)) is not value:
            return as_device_or_host_array(words)
        made = import_host_array(value)
        if made is None:
            raise
        return made
