"""Arrays that say on which device they are."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from aotc.vmfb.dtypes import from_numpy
from aotc.vmfb.errors import VmError
from aotc.vmfb.memory.pointers import address_of


def converted(found: np.ndarray, dtype: Any, copy: bool | None, is_copy: bool = False) -> np.ndarray:
    """Return what ``__array__`` owes its caller, from elements that are a copy already or not.

    Raises
    ------
    ValueError
        If no copy is wanted where one is needed.
    """
    if copy is False and (is_copy or dtype not in (None, found.dtype)):
        raise ValueError("the elements cannot be had without a copy: they are on a GPU, or of another dtype")
    if copy and not is_copy:
        return np.array(found, dtype=dtype)
    return found if dtype is None else found.astype(dtype, copy=False)


class DeviceArray:
    """An array on a device of the model; a subclass has those of GPUs.

    Parameters
    ----------
    array : numpy.ndarray
        Its elements, in memory of the host.
    device : str
        The device's name in the model, or ``cpu:0``.

    Attributes
    ----------
    device : str
    shape : tuple of int
    dtype : numpy.dtype
    nbytes : int
    ordinal : int
        The number of the GPU in whose memory it is, or -1.
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
        """Return the size of each dimension."""
        return self._shape

    @property
    def dtype(self) -> np.dtype:
        """Return the type of the elements."""
        return self._dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of the elements."""
        return prod(self._shape) * self._dtype.itemsize

    @property
    def donated(self) -> bool:
        """Was it given to a call, which has overwritten it? Then its elements are nobody's to read."""
        return self._array is None

    @property
    def read_only(self) -> bool:
        """Does the memory belong to somebody who lets nobody write to it?"""
        return not self.numpy().flags.writeable

    @property
    def buffer(self) -> Any:
        """Return its memory.

        Raises
        ------
        VmError
            If the array was donated to a call.
        """
        return self.numpy()

    @property
    def address(self) -> int:
        """Return where its elements are."""
        return address_of(self.numpy())

    def numpy(self) -> np.ndarray:
        """Return the elements as a NumPy array, which is not a copy where the device's memory is the host's."""
        if self._array is None:
            raise self._refusal()
        return self._array

    def wait(self) -> DeviceArray:
        """Wait until the elements are there; return the array."""
        return self

    def copy(self) -> DeviceArray:
        """Return a copy on the same device."""
        return DeviceArray(self.numpy().copy(order="C"), self.device)

    def assign(self, value: Any) -> None:
        """Copy the elements of an array of the same shape and dtype into this one."""
        self.numpy()[...] = value

    def reader(self) -> DeviceArray:
        """Return an array of the same memory for a submission: it can be read though this one is given to a later."""
        if self._reader is None:
            self._reader = self._twin()
        return self._reader

    def give_away(self, now: bool = True) -> DeviceArray:
        """Return another array of the same memory; this one cannot be used any more.

        Nor can its reader, unless that is not ``now``: the memory is written when earlier submissions have read it.
        """
        other = self._twin()
        if not now:
            self._reader = None
        self.lose()
        return other

    def lose(self) -> None:
        """Note that the memory was given away."""
        reader, self._reader, self._array = self._reader, None, None
        if reader is not None:
            reader.lose()

    def _twin(self) -> DeviceArray:
        return DeviceArray(self.numpy(), self.device)

    def _refusal(self) -> VmError:
        text = f"{from_numpy(self.dtype)}{list(self.shape)} on {self.device}"
        return VmError("", "this array was donated to a call, which has overwritten it", text, "a result of that call")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self.numpy()
        return converted(found, dtype, copy)

    def __dlpack__(self, **kwargs: Any) -> Any:
        found = self.numpy()
        if self._dtype.isbuiltin == 1 or not found.flags.c_contiguous:
            return found.__dlpack__(**kwargs)
        from aotc.vmfb.devices.interop.dlpack import capsule  # NumPy hands over no type that is not its own

        return capsule(self, **kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.numpy().__dlpack_device__()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without dimensions has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        elements = "<donated>" if self.donated else repr(self.numpy())
        return f"DeviceArray({elements}, device={self.device!r})"
