"""Arrays handed to other libraries by DLPack where NumPy does not: its structures are made here by ctypes.

A consumer takes the capsule's struct over and calls its deleter when it is done; the struct and the array's memory are
kept until then. Source: DLPack's ``dlpack.h``, version 0.8 (unversioned capsules).
"""

from __future__ import annotations

import ctypes
from typing import Any

from aotc.vmfb.dtypes import from_numpy

_CODES = {"i": 0, "u": 1, "f": 2, "bf16": 4, "c": 5, "b": 6}  # DLDataTypeCode
_NAME = b"dltensor"


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_HELD: dict[int, tuple[Any, ...]] = {}  # by the address of a struct: it, its arrays of numbers, the memory


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(managed: int) -> None:
    _HELD.pop(managed, None)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _drop(capsule: int) -> None:
    """Give up what nobody has taken over when its capsule goes."""
    if _VALID(capsule, _NAME):
        _HELD.pop(_POINTER(capsule, _NAME), None)


# By address, not as an object: the capsule that is being dropped must not be referred to.
_VALID = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_POINTER = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_NEW = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
for _kept in (_delete, _drop):  # other libraries call them until the very end of the process
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))


def capsule(array: Any, *, stream: Any = None, copy: bool | None = None, **rest: Any) -> Any:
    """Return a DLPack capsule of the memory of a ``DeviceArray`` that is C-contiguous.

    Nothing has to be waited for, whatever ``stream`` the consumer names: calls return when the GPU is done.

    Raises
    ------
    BufferError
        If the type of the elements has no name in DLPack, or the array is wanted on another device.
    """
    if rest.get("dl_device") not in (None, array.__dlpack_device__()):
        raise BufferError(f"the array is on {array.__dlpack_device__()}; .numpy() copies it to the host")
    array = array.copy() if copy else array
    name = from_numpy(array.dtype)
    kind = array.dtype.kind if array.dtype.isbuiltin == 1 else name
    if kind not in _CODES:
        raise BufferError(f"DLPack has no type for {name}; .numpy() copies the elements")
    rank, item = len(array.shape), array.dtype.itemsize
    shape = (ctypes.c_int64 * max(rank, 1))(*array.shape)
    strides = (ctypes.c_int64 * max(rank, 1))()
    step = 1
    for axis in reversed(range(rank)):
        strides[axis] = step
        step *= array.shape[axis]
    type_, ordinal = array.__dlpack_device__()
    tensor = _Tensor(
        array.address if array.nbytes else None, type_, ordinal, rank, _CODES[kind], 8 * item, 1,
        ctypes.addressof(shape), ctypes.addressof(strides), 0,
    )  # fmt: skip
    managed = _Managed(tensor, None, ctypes.cast(_delete, ctypes.c_void_p))
    address = ctypes.addressof(managed)
    _HELD[address] = managed, shape, strides, array.buffer
    return _NEW(address, _NAME, ctypes.cast(_drop, ctypes.c_void_p))
