"""Arrays in memory of a GPU."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import finalize

import numpy as np

from aotc.vmfb.devices import driver as cuda_driver
from aotc.vmfb.devices.array import DeviceArray, converted
from aotc.vmfb.devices.driver import Gpu
from aotc.vmfb.devices.interop.dlpack import CUDA, capsule
from aotc.vmfb.devices.staging import download, upload
from aotc.vmfb.dtypes import from_numpy
from aotc.vmfb.errors import VmError
from aotc.vmfb.pointers import address_of
from aotc.vmfb.process.locks import after_fork, new_recursive_lock


class Owner(Protocol):
    """Who gave an array its memory, and takes it back."""

    gpu: Gpu
    ordinal: int

    def empty(self, shape: tuple[int, ...], dtype: np.dtype, device: str) -> CudaArray: ...
    def give(self, address: int, size: int) -> None: ...


class Keeper:
    """A GPU, for what belongs to no call: copies of arrays, and arrays of other libraries, on a stream of its own.

    Attributes
    ----------
    gpu : Gpu
    ordinal : int
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal, self.gpu = ordinal, cuda_driver.Gpu(ordinal)
        self._lock = new_recursive_lock()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype, device: str) -> CudaArray:
        """Return an array of unspecified elements in this GPU's memory."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return CudaArray(CudaBuffer(self, self.gpu.allocate(size), size), shape, dtype, device)

    def give(self, address: int, size: int) -> None:
        """Free the memory of an array; a finalizer calls it, on any thread."""
        self.gpu.free([address])

    def read(self, array: np.ndarray, address: int) -> None:
        """Copy elements to an array of the host, and wait for them."""
        with self._lock:
            self.gpu.enter()
            download(self.gpu, address_of(array), address, array.nbytes)
            self.gpu.wait()

    def write(self, address: int, array: np.ndarray) -> None:
        """Copy elements from an array of the host, and wait until they are there."""
        with self._lock:
            self.gpu.enter()
            upload(self.gpu, address, address_of(array), array.nbytes)
            self.gpu.wait()

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy on the GPU, and wait."""
        with self._lock:
            self.gpu.enter()
            self.gpu.copy(to, source, size)
            self.gpu.wait()


_KEEPERS: dict[int, Keeper] = {}
after_fork(_KEEPERS.clear)  # a child has none of them


def keeper(ordinal: int) -> Keeper:
    """Return the keeper of a GPU.

    Raises
    ------
    VmError
        If there is no such GPU.
    """
    found = _KEEPERS.get(ordinal)
    if found is None:
        problem = cuda_driver.missing()
        if problem or not 0 <= ordinal < cuda_driver.device_count():
            raise VmError("", f"there is no GPU {ordinal}", problem)
        found = _KEEPERS.setdefault(ordinal, Keeper(ordinal))
    return found


class CudaBuffer:
    """Memory of a GPU, which goes back to its owner with the last reference to it; at the end the driver has it.

    Attributes
    ----------
    owner : Owner
    address : int
    stream : object or None
        A stream that calls wait for before they touch the memory.
    shared : bool
        Other libraries may be at work on it when it goes: it is freed, and not used again before they are done.
    """

    __slots__ = ("__weakref__", "_users", "address", "owner")
    stream: Any = None

    def __init__(self, owner: Owner, address: int, size: int) -> None:
        self.owner, self.address = owner, address
        self._users: list[None] = []  # an entry if there are any
        finalize(self, _let_go, owner, address, size, self._users).atexit = False

    def share(self) -> None:
        """Note that another library is given the memory."""
        self._users[:] = [None]


def _let_go(owner: Owner, address: int, size: int, users: list[None]) -> None:
    if users:
        owner.gpu.free([address])  # the driver waits until the GPU is done with all that it was given
    else:
        owner.give(address, size)


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

    __slots__ = ("_buffer", "ordinal")

    def __init__(self, buffer: CudaBuffer, shape: tuple[int, ...], dtype: np.dtype, device: str) -> None:
        self._buffer: CudaBuffer | None = buffer
        self.ordinal = buffer.owner.ordinal
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
    def read_only(self) -> bool:
        """Does the memory belong to somebody who lets nobody write to it?"""
        return bool(getattr(self.buffer, "read_only", False))

    def numpy(self) -> np.ndarray:
        """Return a copy of the elements in memory of the host."""
        made = np.empty(self._shape, self._dtype)
        keeper(self.ordinal).read(made, self.address)
        return made

    def copy(self) -> CudaArray:
        """Return a copy on the same GPU."""
        made = self.buffer.owner.empty(self._shape, self._dtype, self.device)
        keeper(self.ordinal).copy(made.address, self.address, self.nbytes)
        return made

    def assign(self, value: np.ndarray | CudaArray) -> None:
        """Copy the elements of an array of the host, or of the same GPU, into this one."""
        if isinstance(value, CudaArray):
            keeper(self.ordinal).copy(self.address, value.address, self.nbytes)
        else:
            keeper(self.ordinal).write(self.address, value)

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
        self.buffer.share()
        pointer = self.address if self.nbytes else 0
        row = {"shape": self._shape, "typestr": self._dtype.str, "data": (pointer, self.read_only)}
        return {**row, "strides": None, "stream": None, "version": 3}

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = np.empty(0, self._dtype) if copy is False else self.numpy()
        return converted(found, dtype, copy, is_copy=True)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.ordinal

    def __dlpack__(self, **kwargs: Any) -> Any:
        self.buffer.share()
        return capsule(self, **kwargs)
