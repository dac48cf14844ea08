"""Arrays in GPU memory."""

from __future__ import annotations

import sys
from math import prod
from typing import Any, Protocol
from weakref import WeakValueDictionary, ref

import numpy as np

from aotc.vmfb.devices.array import DeviceArray, converted_elements
from aotc.vmfb.devices.cuda import driver as cuda_driver
from aotc.vmfb.devices.cuda.driver import Gpu
from aotc.vmfb.devices.cuda.staging import download, upload
from aotc.vmfb.devices.cuda.stream_order import Mark, Tracked, count_change
from aotc.vmfb.devices.dlpack import CUDA, make_capsule
from aotc.vmfb.dtypes import from_numpy
from aotc.vmfb.errors import CallError
from aotc.vmfb.host.locks import after_fork, new_recursive_lock
from aotc.vmfb.memory.pointers import address_of

_WAITS_ITSELF = -1  # a stream value of DLPack: the consumer synchronises itself


class Owner(Protocol):
    """Interface of the allocator of an array's memory, to which the memory returns."""

    gpu: Gpu
    ordinal: int

    def empty_array(self, shape: tuple[int, ...], dtype: np.dtype, device: str) -> CudaArray: ...
    def reclaim_memory(self, address: int, size: int, users: set[Mark], writer: Mark | None) -> None: ...


class Keeper:
    """A GPU with a stream of its own for work outside of calls: copies of arrays, and imported arrays.

    Attributes
    ----------
    gpu : Gpu
    ordinal : int
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal, self.gpu = ordinal, cuda_driver.Gpu(ordinal)
        self._lock = new_recursive_lock()

    def empty_array(self, shape: tuple[int, ...], dtype: np.dtype, device: str) -> CudaArray:
        """Return an uninitialised array in this GPU's memory."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return CudaArray(CudaBuffer(self, self.gpu.allocate(size), size), shape, dtype, device)

    def reclaim_memory(self, address: int, size: int, users: set[Mark], writer: Mark | None) -> None:
        """Free an array's memory; the driver waits for the streams that access it. Callable from any thread."""
        self.gpu.free([address])

    def download_buffer(self, array: np.ndarray, buffer: CudaBuffer) -> None:
        """Copy the elements of a GPU array to a host array, after the GPU work that writes them, and wait."""
        with self._lock:
            self.gpu.make_context_current()
            buffer.wait_for_writer(self.gpu)
            self.download_elements(array, buffer.address)

    def download_elements(self, array: np.ndarray, address: int) -> None:
        """Copy complete elements at a GPU address to a host array, and wait for the copy only."""
        with self._lock:
            self.gpu.make_context_current()
            download(self.gpu, address_of(array), address, array.nbytes)
            self.gpu.wait()

    def upload_to_buffer(self, buffer: CudaBuffer, array: np.ndarray) -> None:
        """Copy a host array to a GPU array, after all GPU work that accesses it, and wait."""
        with self._lock:
            self.gpu.make_context_current()
            buffer.wait_for_accesses(self.gpu)
            upload(self.gpu, buffer.address, address_of(array), array.nbytes)
            self.gpu.wait()

    def copy_buffer(self, to: CudaBuffer, source: CudaBuffer, size: int) -> None:
        """Copy ``size`` bytes between two arrays on the GPU, after the work that accesses them, and wait."""
        with self._lock:
            self.gpu.make_context_current()
            to.wait_for_accesses(self.gpu)
            source.wait_for_writer(self.gpu)
            self.gpu.copy(to.address, source.address, size)
            self.gpu.wait()

    def wait_for_streams(self, buffer: CudaBuffer) -> None:
        """Wait on the host until no stream accesses the memory."""
        with self._lock:
            self.gpu.make_context_current()
            buffer.wait_for_accesses(self.gpu)
            self.gpu.wait()


_KEEPERS: dict[int, Keeper] = {}
after_fork(_KEEPERS.clear)  # not valid in a child


def memory_keeper(ordinal: int) -> Keeper:
    """Return the :class:`Keeper` of a GPU; create it on first use.

    Raises
    ------
    CallError
        If the GPU does not exist.
    """
    found = _KEEPERS.get(ordinal)
    if found is None:
        problem = cuda_driver.missing()
        if problem or not 0 <= ordinal < cuda_driver.device_count():
            raise CallError("", f"there is no GPU {ordinal}", problem)
        found = _KEEPERS.setdefault(ordinal, Keeper(ordinal))
    return found


class CudaBuffer(Tracked):
    """GPU memory of an array, which returns to its owner when the last reference is dropped.

    At interpreter exit the driver frees it.

    Attributes
    ----------
    owner : Owner
    address : int
    size : int
        In bytes.
    shared : bool
        True if other libraries may access the memory. Calls that use it then wait for the GPU, and at the end it is
        freed, not reused, because work of these libraries may still be running.
    """

    __slots__ = ("__weakref__", "address", "owner", "shared", "size")

    def __init__(
        self, owner: Owner, address: int, size: int, users: set[Mark] | None = None, writer: Mark | None = None
    ) -> None:
        self.owner, self.address, self.size, self.shared = owner, address, size, False
        self.users, self.writer = set() if users is None else users, writer

    def __del__(self) -> None:
        """Return the memory to its owner, unless the interpreter exits."""
        if sys is None or sys.is_finalizing():
            return
        if self.shared:
            self.owner.gpu.free([self.address])  # the driver waits for all work submitted to the GPU
        else:
            self.owner.reclaim_memory(self.address, self.size, self.users, self.writer)


class ArrayType:
    """Interned combination of shape, dtype and GPU: one object for each, so that types are compared by identity.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    ordinal : int
    size : int
        In bytes.
    """

    __slots__ = ("__weakref__", "dtype", "ordinal", "shape", "size")

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, ordinal: int) -> None:
        self.shape, self.dtype, self.ordinal = shape, dtype, ordinal
        self.size = prod(shape) * dtype.itemsize


_TYPES: WeakValueDictionary[Any, ArrayType] = WeakValueDictionary()


def array_type(shape: tuple[int, ...], dtype: np.dtype, ordinal: int) -> ArrayType:
    """Return the interned :class:`ArrayType` for a shape, dtype and GPU."""
    key = shape, dtype, ordinal
    found = _TYPES.get(key)
    return _TYPES.setdefault(key, ArrayType(*key)) if found is None else found


class CudaArray(DeviceArray):
    """A C-contiguous array in GPU memory; readers wait for GPU work that is still writing it.

    Parameters
    ----------
    buffer : CudaBuffer
    shape : tuple of int
    dtype : numpy.dtype
    device : str
        The device's name in the model, or ``cuda:0``.

    Attributes
    ----------
    kind : ArrayType or None
        Lookup key of calls; None if the array was donated, or other libraries may access it.
    """

    __slots__ = ("_buffer", "_type", "kind")

    def __init__(self, buffer: CudaBuffer, shape: tuple[int, ...], dtype: np.dtype, device: str) -> None:
        self._buffer: CudaBuffer | None = buffer
        self._reader = None
        self._type = array_type(tuple(shape), dtype, buffer.owner.ordinal)
        self.kind = None if buffer.shared else self._type
        self.device = device

    @property
    def ordinal(self) -> int:  # type: ignore[override]
        """Return the number of the GPU."""
        return self._type.ordinal

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dimension."""
        return self._type.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the elements."""
        return self._type.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return self._type.size

    @property
    def donated(self) -> bool:
        """Return True if the array was donated to a call, which may overwrite it."""
        return self._buffer is None

    @property
    def buffer(self) -> CudaBuffer:
        """The array's memory.

        Raises
        ------
        CallError
            If the array was donated to a call.
        """
        if self._buffer is None:
            raise self._donated_error()
        return self._buffer

    @property
    def address(self) -> int:
        """The address of the first element."""
        return self.buffer.address

    @property
    def read_only(self) -> bool:
        """Return True if the memory must not be written."""
        return bool(getattr(self.buffer, "read_only", False))

    def wait(self) -> CudaArray:
        """Wait until no stream accesses the array; return it."""
        memory_keeper(self.ordinal).wait_for_streams(self.buffer)
        return self

    def numpy(self) -> np.ndarray:
        """Return a copy of the elements in host memory."""
        made = np.empty(self.shape, self.dtype)
        memory_keeper(self.ordinal).download_buffer(made, self.buffer)
        return made

    def copy(self) -> CudaArray:
        """Return a copy on the same GPU."""
        made = self.buffer.owner.empty_array(self.shape, self.dtype, self.device)
        memory_keeper(self.ordinal).copy_buffer(made.buffer, self.buffer, self.nbytes)
        return made

    def assign(self, value: np.ndarray | CudaArray) -> None:
        """Copy the elements of a host array, or of one on the same GPU, into this one."""
        if isinstance(value, CudaArray):
            memory_keeper(self.ordinal).copy_buffer(self.buffer, value.buffer, self.nbytes)
        else:
            memory_keeper(self.ordinal).upload_to_buffer(self.buffer, value)

    def lose(self) -> None:
        """Make this object unusable, because its memory was donated."""
        self._buffer = self.kind = None
        super().lose()
        count_change()

    def early(self, is_running: bool) -> CudaArray:
        """Return a read-only array of the same memory: a complete result of a call that may still read it.

        If the call is running, readers of the array do not wait for the rest of the call; writers of the memory do.
        """
        made = EarlyArray(self)
        if is_running:
            made.buffer.writer = None
        if self._reader is None:
            self._reader = made
        return made

    def _same_memory(self) -> CudaArray:
        return CudaArray(self.buffer, self.shape, self.dtype, self.device)

    def _share_with_other_libraries(self) -> CudaBuffer:
        """Return the memory for export; from now on other libraries may access it."""
        buffer = self.buffer
        buffer.shared, self.kind = True, None
        if self._reader is not None:
            self._reader.kind = None
        count_change()
        return buffer

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Return the array for other CUDA libraries, after the work that writes it."""
        if self.dtype.isbuiltin != 1:
            what = f"NumPy's protocol has no name for {from_numpy(self.dtype)}"
            raise AttributeError(f"{what}; .numpy() copies the elements, __dlpack__ hands them over")
        buffer = self._share_with_other_libraries()
        memory_keeper(self.ordinal).wait_for_streams(buffer)  # some libraries ignore the stream of the interface
        pointer = self.address if self.nbytes else 0
        row = {"shape": self.shape, "typestr": self.dtype.str, "data": (pointer, self.read_only)}
        return {**row, "strides": None, "stream": None, "version": 3}

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = np.empty(0, self.dtype) if copy is False else self.numpy()
        return converted_elements(found, dtype, copy, is_copy=True)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.ordinal

    def __dlpack__(self, **kwargs: Any) -> Any:
        """Export the array by DLPack; the consumer's stream waits for the work that writes it."""
        if kwargs.pop("copy", None):
            return self.copy().__dlpack__(**kwargs)
        made, stream = make_capsule(self, **kwargs), kwargs.get("stream")
        buffer, gpu = self._share_with_other_libraries(), memory_keeper(self.ordinal).gpu
        if stream is None:
            self.wait()
        elif stream != _WAITS_ITSELF:
            buffer.hand_over_to_stream(gpu, stream)
        return made


class EarlyArray(CudaArray):
    """A result that was read before its call ended. It is read-only, so a call to which it is donated copies it."""

    __slots__ = ("_result",)

    def __init__(self, result: CudaArray) -> None:
        super().__init__(result.buffer, result.shape, result.dtype, result.device)
        self.kind = None
        self._result = ref(result)

    @property
    def read_only(self) -> bool:
        """Return True, because the running call may still read the memory."""
        return True

    def wait(self) -> CudaArray:
        """Return this array at once, because its elements are complete."""
        return self

    def _same_memory(self) -> CudaArray:
        return EarlyArray(self)

    def _share_with_other_libraries(self) -> CudaBuffer:
        result = self._result()
        if result is not None and not result.donated:
            result._share_with_other_libraries()
        return super()._share_with_other_libraries()
