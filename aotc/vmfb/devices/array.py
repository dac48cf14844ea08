"""Device arrays: arrays with the name of the model's device that stores their elements."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from aotc.vmfb.dtypes import from_numpy
from aotc.vmfb.errors import CallError
from aotc.vmfb.memory.pointers import address_of
from aotc.vmfb.public_names import public_names


def converted_elements(found: np.ndarray, dtype: Any, copy: bool | None, is_copy: bool = False) -> np.ndarray:
    """Convert ``found`` to ``dtype`` as the protocol ``__array__`` requires; copy it if ``copy`` is True.

    ``is_copy`` is True if ``found`` already is a copy of the elements.

    Raises
    ------
    ValueError
        If ``copy`` is False and a copy is necessary.
    """
    if copy is False and (is_copy or dtype not in (None, found.dtype)):
        raise ValueError("the elements cannot be had without a copy: they are on a GPU, or of another dtype")
    if copy and not is_copy:
        return np.array(found, dtype=dtype)
    return found if dtype is None else found.astype(dtype, copy=False)


@public_names(
    "address", "buffer", "copy", "device", "donated", "dtype", "nbytes", "numpy", "ordinal", "read_only", "shape",
    "wait",
)  # fmt: skip
class DeviceArray:
    """An array on a device of the model; the subclass :class:`~aotc.vmfb.devices.cuda.array.CudaArray` is on a GPU.

    Parameters
    ----------
    array : numpy.ndarray
        The elements, in host memory.
    device : str
        The device's name in the model, or ``cpu:0``.

    Attributes
    ----------
    device : str
    shape : tuple of int
    dtype : numpy.dtype
    nbytes : int
    ordinal : int
        The number of the GPU whose memory it is in, or -1.
    """

    __slots__ = ("__weakref__", "_array", "_dtype", "_reader", "_shape", "device")
    ordinal: int = -1
    kind: Any = None

    def __init__(self, array: np.ndarray, device: str) -> None:
        self._array: np.ndarray | None = array
        self._reader: DeviceArray | None = None
        self._shape, self._dtype, self.device = array.shape, array.dtype, device

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dimension."""
        return self._shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the elements."""
        return self._dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return prod(self._shape) * self._dtype.itemsize

    @property
    def donated(self) -> bool:
        """Return True if the array was donated to a call, which may overwrite it.

        Its elements can no longer be read.
        """
        return self._array is None

    @property
    def read_only(self) -> bool:
        """Return True if the memory must not be written."""
        return not self.numpy().flags.writeable

    @property
    def buffer(self) -> Any:
        """The array's memory.

        Raises
        ------
        CallError
            If the array was donated to a call.
        """
        return self.numpy()

    @property
    def address(self) -> int:
        """The address of the first element."""
        return address_of(self.numpy())

    def numpy(self) -> np.ndarray:
        """Return the elements as a NumPy array, without a copy if they are in host memory."""
        if self._array is None:
            raise self._donated_error()
        return self._array

    def wait(self) -> DeviceArray:
        """Wait until the elements have been computed; return this array."""
        return self

    def copy(self) -> DeviceArray:
        """Return a copy on the same device."""
        return DeviceArray(self.numpy().copy(order="C"), self.device)

    def assign(self, value: Any) -> None:
        """Copy the elements of an array of the same shape and dtype into this one."""
        self.numpy()[...] = value

    def reader(self) -> DeviceArray:
        """Return another array object of the same memory that remains readable if this object is donated later."""
        if self._reader is None:
            self._reader = self._same_memory()
        return self._reader

    def give_away(self, now: bool = True) -> DeviceArray:
        """Donate the array: return a new object of its memory, and make this object unusable.

        With ``now``, the array of :meth:`reader` becomes unusable too. Otherwise earlier submissions can still read
        through it, before the memory is overwritten.
        """
        other = self._same_memory()
        if not now:
            self._reader = None
        self.lose()
        return other

    def lose(self) -> None:
        """Make this object unusable, because its memory was donated."""
        reader, self._reader, self._array = self._reader, None, None
        if reader is not None:
            reader.lose()

    def _same_memory(self) -> DeviceArray:
        return DeviceArray(self.numpy(), self.device)

    def _donated_error(self) -> CallError:
        text = f"{from_numpy(self.dtype)}{list(self.shape)} on {self.device}"
        what = "this array was donated to a call, which has overwritten it"
        return CallError("", what, text, "a result of that call")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self.numpy()
        return converted_elements(found, dtype, copy)

    def __dlpack__(self, **kwargs: Any) -> Any:
        """Export the array by DLPack, without a copy."""
        found = self.numpy()
        if self._dtype.isbuiltin == 1 or not found.flags.c_contiguous:
            return found.__dlpack__(**kwargs)
        from aotc.vmfb.devices.dlpack import make_capsule  # NumPy's exporter supports only its built-in dtypes

        return make_capsule(self, **kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.numpy().__dlpack_device__()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without dimensions has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        elements = "<donated>" if self.donated else repr(self.numpy())
        return f"DeviceArray({elements}, device={self.device!r})"
