"""Element types: names, sizes, and NumPy representations.

The name of a dtype (``"f32"``, ``"bf16"``, ``"i1"``...) identifies it in every IR, in the bundle and in the API.
``ml_dtypes`` is imported only when one of its types is needed, which makes f32 models start faster.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np


class DType:
    """One row of :data:`DTYPES`; a plain class for fast start-up (:class:`aotc.vmfb.abi.Record`).

    ``kind`` is ``b`` bool, ``i`` signed, ``u`` unsigned, ``f`` float, ``c``
    complex; ``numpy`` is the NumPy (or ml_dtypes) type name; ``size`` is bytes
    of one element in a buffer (sub-byte types take a byte each).
    """

    __slots__ = ("bits", "kind", "name", "numpy", "size")

    def __init__(self, name: str, kind: str, bits: int, numpy: str) -> None:
        self.name = name
        self.kind = kind
        self.bits = bits
        self.numpy = numpy
        self.size = max(bits // 8, 1)


_ROWS = (
    ("i1", "b", 1, "bool"),
    ("i2", "i", 2, "int2"),
    ("i4", "i", 4, "int4"),
    ("i8", "i", 8, "int8"),
    ("i16", "i", 16, "int16"),
    ("i32", "i", 32, "int32"),
    ("i64", "i", 64, "int64"),
    ("u2", "u", 2, "uint2"),
    ("u4", "u", 4, "uint4"),
    ("u8", "u", 8, "uint8"),
    ("u16", "u", 16, "uint16"),
    ("u32", "u", 32, "uint32"),
    ("u64", "u", 64, "uint64"),
    ("f4E2M1FN", "f", 4, "float4_e2m1fn"),
    ("f6E2M3FN", "f", 6, "float6_e2m3fn"),
    ("f6E3M2FN", "f", 6, "float6_e3m2fn"),
    ("f8E3M4", "f", 8, "float8_e3m4"),
    ("f8E4M3", "f", 8, "float8_e4m3"),
    ("f8E4M3FN", "f", 8, "float8_e4m3fn"),
    ("f8E4M3FNUZ", "f", 8, "float8_e4m3fnuz"),
    ("f8E4M3B11FNUZ", "f", 8, "float8_e4m3b11fnuz"),
    ("f8E5M2", "f", 8, "float8_e5m2"),
    ("f8E5M2FNUZ", "f", 8, "float8_e5m2fnuz"),
    ("f8E8M0FNU", "f", 8, "float8_e8m0fnu"),
    ("f16", "f", 16, "float16"),
    ("bf16", "f", 16, "bfloat16"),
    ("f32", "f", 32, "float32"),
    ("f64", "f", 64, "float64"),
    ("c64", "c", 64, "complex64"),
    ("c128", "c", 128, "complex128"),
)

DTYPES: dict[str, DType] = {row[0]: DType(*row) for row in _ROWS}
_BY_NUMPY = {row.numpy: row.name for row in DTYPES.values()}

COMPLEX_OF = {"f32": "c64", "f64": "c128"}
"""The complex dtype whose parts have a given dtype."""

_REAL_OF = {whole: part for part, whole in COMPLEX_OF.items()}


@cache
def to_numpy(name: str) -> np.dtype:
    """Return the NumPy dtype of dtype ``name``.

    Raises
    ------
    KeyError
        If ``name`` is not in :data:`DTYPES`.
    """
    numpy_name = DTYPES[name].numpy
    try:
        return np.dtype(numpy_name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, numpy_name))


@cache
def from_numpy(dtype: np.dtype) -> str:
    """Return the dtype name of a NumPy dtype.

    Raises
    ------
    KeyError
        If NumPy's dtype has no counterpart (strings, objects, dates).
    """
    return _BY_NUMPY[np.dtype(dtype).name]


def size_of(name: str) -> int:
    """Return the bytes of one element of dtype ``name`` in a buffer."""
    return DTYPES[name].size


def kind_of(name: str) -> str:
    """Return the kind letter (``b i u f c``) of dtype ``name``."""
    return DTYPES[name].kind


def real_of(name: str) -> str:
    """Return the dtype of the real part of a complex dtype; other dtypes are returned unchanged."""
    return _REAL_OF.get(name, name)


def limits(name: str) -> tuple[float, float]:
    """Return the minimum and maximum of dtype ``name``, infinite if the dtype has infinities.

    Raises
    ------
    ValueError
        If the dtype is not ordered.
    """
    from aotc.vmfb.float_formats import SMALL_FLOATS  # not needed to load a bundle

    row = DTYPES[name]
    match row.kind:
        case "b":
            return 0, 1
        case "i":
            return -(1 << (row.bits - 1)), (1 << (row.bits - 1)) - 1
        case "u":
            return 0, (1 << row.bits) - 1
        case "f" if name not in SMALL_FLOATS or SMALL_FLOATS[name].special == "ieee":
            return -math.inf, math.inf
        case "f":
            form = SMALL_FLOATS[name]
            least = 0 if form.special == "power" else form.largest | form.sign
            low, high = np.array([least, form.largest], np.uint8).view(to_numpy(name)).astype(np.float32)
            return float(low), float(high)
    raise ValueError(f"{name} has no order")
