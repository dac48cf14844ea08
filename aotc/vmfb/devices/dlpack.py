"""DLPack export and import of arrays, with the protocol's structures defined in ctypes.

A consumer takes over the capsule's struct and calls its deleter when it is done; struct and array memory stay alive
until then. An imported capsule is kept alive itself: it frees its struct when it is destroyed. Source: DLPack's
``dlpack.h``: 0.8 (unversioned capsules), 1.0 (versioned ones, for consumers that request them).
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from aotc.vmfb.dtypes import from_numpy, to_numpy

CPU, PINNED = 1, 3  # kDLCPU, and kDLCUDAHost, which the host can read too
CUDA, MANAGED = 2, 13  # kDLCUDA, and kDLCUDAManaged, which GPUs can read too
_CODES = {"i": 0, "u": 1, "f": 2, "bf16": 4, "c": 5, "b": 6}  # DLDataTypeCode
_KINDS = {code: kind for kind, code in _CODES.items()}
_NAME, _VERSIONED_NAME = b"dltensor", b"dltensor_versioned"
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY


class _Tensor(ctypes.Structure):
    """ctypes form of DLTensor: address, device, dtype, shape and strides of an array."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _Managed(ctypes.Structure):
    """ctypes form of DLManagedTensor: an array, and the function that releases it."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    """ctypes form of DLManagedTensorVersioned, of DLPack 1.0."""

    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor),
    )  # fmt: skip


_HELD: dict[int, tuple[Any, ...]] = {}  # by address of a struct: the struct, its shape and strides, the memory


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete_managed_tensor(managed: int) -> None:
    _HELD.pop(managed, None)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _drop_unused_capsule(capsule: int) -> None:
    """Free the struct of a capsule that is destroyed without having been consumed."""
    for name in (_NAME, _VERSIONED_NAME):
        if _VALID(capsule, name):
            _HELD.pop(_POINTER(capsule, name), None)


# Called with the address, not an object: the capsule is being destroyed and must not get a new reference.
_VALID = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_POINTER = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_NEW = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
for _kept in (_delete_managed_tensor, _drop_unused_capsule):  # other libraries may call them until the process ends
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))


def make_capsule(
    array: Any, *, stream: Any = None, copy: bool | None = None, max_version: tuple[int, int] | None = None, **rest: Any
) -> Any:
    """Create a DLPack capsule for the memory of a C-contiguous ``DeviceArray``; the caller synchronises streams.

    Raises
    ------
    BufferError
        If DLPack has no type for the elements, another device is requested, or ``stream`` is invalid.
    """
    type_, ordinal = array.__dlpack_device__()
    if rest.get("dl_device") not in (None, (type_, ordinal)):
        raise BufferError(f"the array is on {(type_, ordinal)}; .numpy() copies it to the host")
    if type_ == CUDA and stream == 0 and stream is not None:
        raise BufferError("stream 0 is ambiguous in DLPack: 1 is the legacy default stream, 2 that of the thread")
    array = array.copy() if copy else array
    name = from_numpy(array.dtype)
    kind = array.dtype.kind if array.dtype.isbuiltin == 1 else name
    if kind not in _CODES:
        raise BufferError(f"DLPack has no type for {name}; .numpy() copies the elements")
    rank, item = len(array.shape), array.dtype.itemsize
    shape = (ctypes.c_int64 * max(rank, 1))(*array.shape)
    strides = (ctypes.c_int64 * max(rank, 1))(*_row_major_strides(array.shape))
    tensor = _Tensor(
        array.address if array.nbytes else None, type_, ordinal, rank, _CODES[kind], 8 * item, 1,
        ctypes.addressof(shape), ctypes.addressof(strides), 0,
    )  # fmt: skip
    deleter = ctypes.cast(_delete_managed_tensor, ctypes.c_void_p)
    versioned = max_version is not None and max_version[0] >= 1
    flags = _READ_ONLY * bool(getattr(array, "read_only", False))
    managed = _Versioned(1, 0, None, deleter, flags, tensor) if versioned else _Managed(tensor, None, deleter)
    address = ctypes.addressof(managed)
    _HELD[address] = managed, shape, strides, array.buffer
    return _NEW(address, _VERSIONED_NAME if versioned else _NAME, ctypes.cast(_drop_unused_capsule, ctypes.c_void_p))


def _row_major_strides(shape: tuple[int, ...]) -> list[int]:
    """Return the strides, in elements, of a C-contiguous array."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]


class Handed(NamedTuple):
    """Description of another library's array, from a DLPack capsule or from ``__cuda_array_interface__``.

    Attributes
    ----------
    address : int
    shape : tuple of int
    dtype : numpy.dtype
    strides : tuple of int or None
        In bytes; None for a C-contiguous array.
    read_only : bool
    """

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype
    strides: tuple[int, ...] | None
    read_only: bool

    @property
    def is_row_major(self) -> bool:
        """Return True if the array is C-contiguous."""
        if self.strides is None or 0 in self.shape:
            return True
        wanted = _row_major_strides(self.shape)
        return all(n == 1 or s == w * self.dtype.itemsize for n, s, w in zip(self.shape, self.strides, wanted))


def capsule_description(capsule: Any) -> Handed:
    """Describe the array in a DLPack capsule: address, shape, dtype, strides.

    The caller must keep the capsule alive while it uses the memory.

    Raises
    ------
    BufferError
        If aotc has no dtype for the elements.
    """
    versioned = bool(_VALID(id(capsule), _VERSIONED_NAME))
    place = _POINTER(id(capsule), _VERSIONED_NAME if versioned else _NAME)
    managed: Any = (_Versioned if versioned else _Managed).from_address(place)
    t = managed.tensor
    kind = _KINDS.get(t.code)
    if kind is None or t.lanes != 1 or t.bits % 8:
        raise BufferError(f"its elements are of DLPack's type {t.code} with {t.bits} bits in {t.lanes} lanes")
    dtype = to_numpy(kind) if kind == "bf16" else np.dtype(f"{kind}{t.bits // 8}")
    numbers = ctypes.c_int64 * t.ndim
    shape = tuple(numbers.from_address(t.shape)) if t.ndim else ()
    strides = tuple(n * dtype.itemsize for n in numbers.from_address(t.strides)) if t.ndim and t.strides else None
    read_only = versioned and bool(managed.flags & _READ_ONLY)
    return Handed((t.data or 0) + t.byte_offset, shape, dtype, strides, read_only)
