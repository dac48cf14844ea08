"""Arrays that say on which device they are."""

from __future__ import annotations

from typing import Any

import numpy as np


class DeviceArray:
    """An array on a device of the model; a subclass has those of GPUs.

    Parameters
    ----------
    array : numpy.ndarray
        Its elements, in memory of the host.
    device : str
        The device's name in the model.

    Attributes
    ----------
    device : str
    shape : tuple of int
    dtype : numpy.dtype
    nbytes : int
    """

    __slots__ = ("__weakref__", "_array", "device")

    def __init__(self, array: np.ndarray, device: str) -> None:
        self._array = array
        self.device = device

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the size of each dimension."""
        return self._array.shape

    @property
    def dtype(self) -> np.dtype:
        """Return the type of the elements."""
        return self._array.dtype

    @property
    def ordinal(self) -> int:
        """Return the number of the GPU in whose memory it is, or -1."""
        return -1

    @property
    def nbytes(self) -> int:
        """Return the bytes of the elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def numpy(self) -> np.ndarray:
        """Return the elements as a NumPy array, which is not a copy where the device's memory is the host's."""
        return self._array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self.numpy()
        if copy:
            return np.array(found, dtype=dtype)
        return found if dtype is None else found.astype(dtype, copy=False)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without dimensions has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"DeviceArray({self.numpy()!r}, device={self.device!r})"
