"""Fast access to the address of a NumPy array's elements.

``ndarray.ctypes.data`` and ``__array_interface__`` take a microsecond, as much as the rest of a small call. The address
is a field at a fixed offset in NumPy's array object and is read from there; :data:`DATA_FIELD` is determined and
checked once.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, TypeAlias

import numpy as np

from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.host.machine import GUARDED

# The whole address space as arrays of words and of bytes: a read is a single indexing operation.
WORDS: Any = (ctypes.c_int64 * (1 << 59)).from_address(0)
BYTES: Any = (ctypes.c_uint8 * (1 << 62)).from_address(0)


def _find_data_field() -> int:
    """Return the byte offset of the data pointer in NumPy's array object, or 0 if it cannot be determined."""
    if sys.implementation.name != "cpython" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return 0
    read_only = np.frombuffer(b"12345678", np.uint8)
    probes: list[np.ndarray] = [np.zeros(3, np.float32), np.zeros((2, 5))[1:], np.zeros(()), read_only]
    for offset in range(16, object.__basicsize__ + 32, 8):
        if all(WORDS[(id(x) + offset) >> 3] == x.ctypes.data for x in probes):
            return offset
    return 0


DATA_FIELD = _find_data_field()


def _slow_address(array: np.ndarray) -> int:
    return array.ctypes.data


def _fast_address(array: np.ndarray) -> int:
    return WORDS[(id(array) + DATA_FIELD) >> 3]


address_of = _fast_address if DATA_FIELD else _slow_address
address_of.__doc__ = "Return the address of an array's first element."


PointerTable: TypeAlias = "ctypes.Array[ctypes.c_int64]"
"""The address of each slot of a call: see :class:`aotc.vmfb.abi.Slots`."""


def read_scalar(slots: PointerTable, slot: int, offset: int, dtype: str) -> int:
    """Read the integer of type ``dtype`` at a byte offset of a slot of the pointer table ``slots``, in host memory."""
    element = to_numpy(dtype)
    return int(np.frombuffer(ctypes.string_at(slots[slot] + offset, element.itemsize), element)[0])


def aligned_bytes(size: int, alignment: int) -> tuple[np.ndarray, int]:
    """Allocate zeroed memory and return it with its first aligned address.

    Parameters
    ----------
    size : int
        Bytes from that address on.
    alignment : int
        A power of two.

    Returns
    -------
    memory : numpy.ndarray
        Owner of the bytes.
    address : int
    """
    memory = np.zeros(size + alignment, np.uint8)
    return memory, -(-address_of(memory) // alignment) * alignment


def _empty_array() -> np.ndarray:
    if not GUARDED:
        return np.zeros(64, np.uint8)
    from aotc.vmfb.memory.guard_pages import guarded_bytes

    return guarded_bytes(16, 16)


EMPTY = _empty_array()
"""Replacement for arrays without elements: a kernel may read an element that it does not use."""
