"""Elements of MLIR constants as NumPy arrays, read as raw bytes, never as text."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from aotc.frontend.tensor_ir import TensorType
from aotc.vmfb.dtypes import DTYPES, to_numpy


def elements(attribute: Any, t: TensorType) -> np.ndarray:
    """Return the elements of a dense attribute as a read-only array.

    A splat comes back with shape ``()``; else the shape is that of ``t``.

    Raises
    ------
    ValueError
        If the attribute is of a kind that holds no readable elements.
    """
    dtype = to_numpy(t.dtype)
    if isinstance(attribute, ir.DenseResourceElementsAttr):
        return _resource(attribute, t, dtype)
    if getattr(attribute, "is_splat", False):
        return np.array(_scalar(attribute.get_splat_value(), dtype))
    if not isinstance(attribute, ir.DenseElementsAttr):
        raise ValueError(f"elements of {type(attribute).__name__} cannot be read")
    if 0 in t.shape:
        return np.zeros(t.shape, dtype)
    if _has_buffer(t.dtype):
        array = np.array(attribute)
        return array.view(dtype).reshape(t.shape) if array.dtype != dtype else array.reshape(t.shape)
    return _raw(attribute, t).view(dtype).reshape(t.shape)


def _has_buffer(dtype: str) -> bool:
    row = DTYPES[dtype]
    return row.kind in "bc" or (row.bits >= 8 and row.kind in "iu") or dtype in ("f16", "f32", "f64")


def _scalar(value: Any, dtype: np.dtype) -> Any:
    if isinstance(value, ir.ArrayAttr):
        return dtype.type(complex(*(float(v.value) for v in value)))
    if not hasattr(value, "value"):
        return _complex_text(str(value), dtype)
    number = value.value
    if dtype.kind == "b":
        return bool(number)
    if isinstance(number, int):
        bits = np.array(number, np.int64 if number < 1 << 63 else np.uint64)
        return bits.astype(dtype)
    return np.array(number, np.float64).astype(dtype)


def _complex_text(text: str, dtype: np.dtype) -> Any:
    """A complex splat has no typed accessor; its one number pair is read from text."""
    body = text.split(":")[0].replace("#complex.number", "").strip(" <>()")
    real, imag = (float(part) for part in body.split(","))
    return dtype.type(complex(real, imag))


def _resource(attribute: Any, t: TensorType, dtype: np.dtype) -> np.ndarray:
    raw = np.frombuffer(memoryview(attribute), np.uint8)
    if t.dtype == "i1" and raw.size * 8 < int(np.prod(t.shape)) * 8:
        raw = np.unpackbits(raw, bitorder="little")[: int(np.prod(t.shape))]
    return np.array(raw).view(dtype).reshape(t.shape)


def _raw(attribute: Any, t: TensorType) -> np.ndarray:
    """Return the element bytes of a type whose buffer the bindings refuse (bf16, f8, 4-bit).

    Bytecode holds the bytes as they are. Where they start is where the bytecodes
    of two attributes of the same type with all bytes different differ first.
    """
    word = np.dtype(f"u{DTYPES[t.dtype].size}")
    count = int(np.prod(t.shape))
    one, two = (int.from_bytes(bytes([b]) * word.itemsize, "little") for b in (1, 2))
    pattern = np.where(np.arange(count) % 2 == 0, one, two).astype(word)
    element = attribute.type.element_type
    codes = [
        np.frombuffer(_bytecode(ir.DenseElementsAttr.get(p, type=element, shape=list(t.shape))), np.uint8)
        for p in (pattern, (one + two - pattern).astype(word))
    ]
    start = int(np.argmax(codes[0] != codes[1]))
    code = np.frombuffer(_bytecode(attribute), np.uint8)
    return np.array(code[start : start + count * word.itemsize])


def _bytecode(attribute: Any) -> bytes:
    with ir.Location.unknown(attribute.context):
        module = ir.Module.create()
    module.operation.attributes["v"] = attribute
    stream = io.BytesIO()
    module.operation.write_bytecode(stream)
    return stream.getvalue()
