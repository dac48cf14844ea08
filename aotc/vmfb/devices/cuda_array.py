"""Arrays in memory of a GPU."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import finalize

import numpy as np

from aotc.vmfb.devices.array import DeviceArray, converted
from aotc.vmfb.devices.driver import Gpu
from aotc.vmfb.dtypes import from_numpy
from aotc.vmfb.pointers import address_of

_CUDA = 2  # kDLCUDA


class Owner(Protocol):
    """Who gave an array its memory, and takes it back."""

    gpu: Gpu
    lock: Any
    ordinal: int

    def empty(self, shape: tuple[int, ...], dtype: np.dtype, device: str) -> CudaArray: ...
    def give(self, address: int, size: int) -> None: ...


class CudaBuffer:
    """Memory of a GPU, which goes back to its owner with the last reference to it; at the end the driver has it."""

    __slots__ = ("__weakref__", "address", "owner")

    def __init__(self, owner: Owner, address: int, size: int) -> None:
        self.owner, self.address = owner, address
        finalize(self, owner.give, address, size).atexit = False


class CudaArray(DeviceArray):
    """A C-contiguous array in memory of a GPU.

    What was written to it is there: calls return when the GPU is done.

    Parameters
    ----------
    buffer : CudaBuffer
    shape : tuple of int
    dtype : numpy.dtype
    device : str
        The device's name in the model, or ``cuda:0``.
    """

    __slots__ = ("_buffer",)

    def __init__(self, buffer: CudaBuffer, shape: tuple[int, ...], dtype: np.dtype, device: str) -> None:
        self._buffer: CudaBuffer | None = buffer
        self._shape, self._dtype, self.device = shape, dtype, device

    @property
    def donated(self) -> bool:
        """Was it given to a call, which has overwritten it?"""
        return self._buffer is None

    @property
    def buffer(self) -> CudaBuffer:
        """Return its memory.

        Raises
        ------
        VmError
            If the array was donated to a call.
        """
        if self._buffer is None:
            raise self._refusal()
        return self._buffer

    @property
    def address(self) -> int:
        """Return where its elements are."""
        return self.buffer.address

    @property
    def ordinal(self) -> int:
        """Return the number of its GPU."""
        return self.buffer.owner.ordinal

    def numpy(self) -> np.ndarray:
        """Return a copy of the elements in memory of the host."""
        made = np.empty(self._shape, self._dtype)
        owner, address = self.buffer.owner, self.address
        with owner.lock:
            owner.gpu.enter()
            owner.gpu.download(address_of(made), address, made.nbytes)
            owner.gpu.wait()
        return made

    def copy(self) -> CudaArray:
        """Return a copy on the same GPU."""
        owner = self.buffer.owner
        made = owner.empty(self._shape, self._dtype, self.device)
        with owner.lock:
            owner.gpu.enter()
            owner.gpu.copy(made.address, self.address, self.nbytes)
            owner.gpu.wait()
        return made

    def give_away(self) -> CudaArray:
        """Return another array of the same memory; this one cannot be used any more."""
        other = CudaArray(self.buffer, self._shape, self._dtype, self.device)
        self._buffer = None
        return other

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self._dtype.isbuiltin != 1:
            what = f"NumPy's protocol has no name for {from_numpy(self._dtype)}"
            raise AttributeError(f"{what}; .numpy() copies the elements, __dlpack__ hands them over")
        pointer = self.address if self.nbytes else 0
        row = {"shape": self._shape, "typestr": self._dtype.str, "data": (pointer, False)}
        return {**row, "strides": None, "stream": None, "version": 3}

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = np.empty(0, self._dtype) if copy is False else self.numpy()
        return converted(found, dtype, copy, is_copy=True)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self.ordinal

    def __dlpack__(self, **kwargs: Any) -> Any:
        from aotc.vmfb.devices.dlpack import capsule  # for those who hand arrays on

        return capsule(self, **kwargs)
