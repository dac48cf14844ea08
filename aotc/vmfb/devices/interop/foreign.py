"""Arrays of other libraries in memory of a GPU, taken as they are: DLPack, else ``__cuda_array_interface__``.

The producer may still be at work on an array. By DLPack it is told a stream of ours, which it lets wait; of the
interface we read its stream, for which ours waits. A call that touches the array has its own streams wait for that one,
and returns when the GPU is done: what the producer does with the array next knows nothing of our streams.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aotc.vmfb.abi import GPU_ALIGNMENT
from aotc.vmfb.devices.array import DeviceArray
from aotc.vmfb.devices.cuda import driver as cuda_driver
from aotc.vmfb.devices.cuda.array import CudaArray, CudaBuffer, keeper
from aotc.vmfb.devices.interop.dlpack import CUDA, MANAGED, Handed, handed
from aotc.vmfb.devices.interop.host import on_host

_LEGACY = 1  # the legacy default stream in both protocols: it orders itself with all other streams


class _Borrowed(CudaBuffer):
    """Memory that belongs to another library; ``kept`` is what keeps it."""

    __slots__ = ("kept", "read_only")

    def __init__(self, ordinal: int, found: Handed, kept: Any) -> None:
        mark = keeper(ordinal).gpu.mark  # whose stream waits for the producer's
        super().__init__(keeper(ordinal), found.address, 0, {mark}, mark)
        self.kept, self.read_only, self.shared = kept, found.read_only, True

    def __del__(self) -> None:
        """Do nothing: the memory is not ours to use again."""


def taken(value: Any, writes: bool = False) -> CudaArray | None:
    """Return an array of another library that is on a GPU as one of ours, of the same memory; None if it is not.

    One that begins where kernels cannot read vectors, as a slice may, is copied on its GPU.

    Parameters
    ----------
    value : object
    writes : bool
        It is to be written to.

    Raises
    ------
    BufferError
        If its elements do not lie one after the other, cannot be written to, or are of an unknown type.
    """
    found = _seen(value, writes)
    if found is None or found.address % GPU_ALIGNMENT == 0:
        return found
    if writes:
        behind = f"{found.address % GPU_ALIGNMENT} bytes behind a multiple of {GPU_ALIGNMENT}"
        raise BufferError(f"it begins {behind}, and kernels write vectors: give a whole array, and copy that")
    return found.copy()


def _seen(value: Any, writes: bool = False) -> CudaArray | None:
    """Return an array of another library on a GPU as one of ours, wherever it begins; see :func:`taken`."""
    device = getattr(value, "__dlpack_device__", None)
    if device is not None:
        type_, ordinal = device()
        if type_ not in (CUDA, MANAGED):
            return None
        kept = _capsule(value, keeper(ordinal).gpu.handle)
        found = handed(kept)
    elif hasattr(value, "__cuda_array_interface__"):
        row, kept = value.__cuda_array_interface__, value
        (address, read_only), shape = row["data"], tuple(row["shape"])
        found = Handed(address, shape, np.dtype(row["typestr"]), row.get("strides"), read_only)
        ordinal = cuda_driver.ordinal_of(found.address) if found.address else 0
        if row.get("stream") is not None:
            keeper(ordinal).gpu.follow(row["stream"])
        elif row.get("version", 0) < 3:  # it says nothing of streams
            keeper(ordinal).gpu.follow(_LEGACY)
    else:
        return None
    if not found.is_row_major:
        steps = f"strides of {found.strides} bytes for shape {found.shape}"
        raise BufferError(f"its elements are not in row-major order ({steps}): .contiguous(), ascontiguousarray(...)")
    if writes and found.read_only:
        raise BufferError("it is read-only")
    return CudaArray(_Borrowed(ordinal, found, kept), found.shape, found.dtype, f"cuda:{ordinal}")


def _capsule(value: Any, stream: int) -> Any:
    """Ask a producer for its memory, which what it does after this call must not wait for."""
    try:
        return value.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:  # of before DLPack 1.0
        return value.__dlpack__(stream=stream)


def buffer_of(out: Any) -> np.ndarray | DeviceArray | None:
    """Return the memory of a buffer for a result, as far as the order of submissions knows it."""
    if out is None or isinstance(out, np.ndarray | DeviceArray):
        return out
    found = _seen(out)
    return on_host(out) if found is None else found


def as_array(value: Any) -> np.ndarray | DeviceArray:
    """Return any array as one of NumPy, or as one of ours where it is one or is on a GPU."""
    if isinstance(value, np.ndarray | DeviceArray):
        return value
    found = taken(value)
    if found is not None:
        return found
    try:
        return np.asarray(value)
    except TypeError:  # a type that NumPy has not
        made = on_host(value)
        if made is None:
            raise
        return made
