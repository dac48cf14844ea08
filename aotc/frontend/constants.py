"""Elements of MLIR constants as NumPy arrays, as raw bytes where the bindings provide them."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from aotc.ir.opset.spec import static_sizes
from aotc.ir.tensor.ir import TensorType
from aotc.vmfb.dtypes import DTYPES, kind_of, to_numpy


def constant_elements(op: Any, t: TensorType) -> np.ndarray:
    """Return the elements of a constant op as a read-only array.

    A splat (one number for all elements) has shape ``()``; otherwise the shape is that of ``t``, whose dims are known.

    Raises
    ------
    ValueError
        If the elements are a resource that is missing in the file or has the wrong size.
    """
    dtype, shape = to_numpy(t.dtype), static_sizes(t)
    if kind_of(t.dtype) == "c":
        return _complex_constant(op, t, dtype)
    attribute = op.attributes["value"]
    if isinstance(attribute, ir.IntegerAttr | ir.FloatAttr | ir.BoolAttr):
        return np.array(_scalar_constant(attribute, dtype))
    if getattr(attribute, "is_splat", False):
        return np.array(_scalar_constant(attribute.get_splat_value(), dtype))
    if not isinstance(attribute, ir.DenseElementsAttr):
        return _resource_constant(attribute, t, dtype)
    if 0 in shape:
        return np.zeros(shape, dtype)
    if _has_buffer(t.dtype):
        array = _own_copy_if_small(np.asarray(attribute))
        return array.view(dtype).reshape(shape) if array.dtype != dtype else array.reshape(shape)
    return _raw_constant_bytes(attribute, t).view(dtype).reshape(shape)


# Bytes of a constant up to which it is copied out of MLIR's memory. A larger constant is a view, which keeps that
# memory alive.
OWN_BYTES = 1 << 16


def _own_copy_if_small(view: np.ndarray, alignment: int = 1) -> np.ndarray:
    """Copy a small view of MLIR's memory; return a large view unchanged, which keeps that memory alive."""
    return view if view.nbytes > OWN_BYTES and view.ctypes.data % alignment == 0 else view.copy()


def _has_buffer(dtype: str) -> bool:
    row = DTYPES[dtype]
    return row.kind in "bc" or (row.bits >= 8 and row.kind in "iu") or dtype in ("f16", "f32", "f64")


def _scalar_constant(value: Any, dtype: np.dtype) -> Any:
    """Convert a scalar MLIR attribute to a NumPy scalar of ``dtype``; an integer holds the bits."""
    number = value.value
    if dtype.kind == "b":
        return bool(number)
    if isinstance(number, int):
        bits = np.array(number, np.int64 if number < 1 << 63 else np.uint64)
        return bits.astype(dtype)
    return np.array(number, np.float64).astype(dtype)


def _complex_constant(op: Any, t: TensorType, dtype: np.dtype) -> np.ndarray:
    """Return complex elements, parsed from MLIR's text: the bindings have no accessor, and the text is exact."""
    text, shape = op.get_asm(), static_sizes(t)
    if "dense_resource<" in text:
        return _resource_constant(op.attributes["value"], t, dtype)
    raw = re.search(r'dense<"0x([0-9A-F]*)">', text)
    if raw:
        return np.frombuffer(bytes.fromhex(raw[1]), dtype).reshape(shape)
    part = np.dtype(f"f{dtype.itemsize // 2}")
    pairs = re.findall(r"\(([-+.\w]+), *([-+.\w]+)\)", text[text.index("dense<") : text.rindex(">")])
    flat = np.array([_parse_mlir_float(x, part) for pair in pairs for x in pair], part).view(dtype)
    return flat.reshape(() if len(pairs) == 1 else shape)


def _parse_mlir_float(text: str, dtype: np.dtype) -> Any:
    """Parse a number as MLIR prints it: decimal, or its bits in hexadecimal."""
    if text.startswith("0x"):
        return np.array(int(text, 16), f"u{dtype.itemsize}").view(dtype)
    return float(text)


def _resource_constant(attribute: Any, t: TensorType, dtype: np.dtype) -> np.ndarray:
    """Return the elements of a resource, parsed from the end of the module's text: the bindings have no accessor.

    The text has hexadecimal digits: four bytes of alignment, then the elements. An i1 is a byte, or packed in bits.
    """
    blob = re.search(
        r'"0x[0-9A-Fa-f]{8}([0-9A-Fa-f]*)"', str(_module_holding_attribute(attribute)).partition("dialect_resources")[2]
    )
    if blob is None:
        raise ValueError(f"the elements of {attribute} are not in this file")
    raw = np.frombuffer(bytes.fromhex(blob[1]), np.uint8)
    count = math.prod(static_sizes(t))
    if t.dtype == "i1" and raw.size < count:
        raw = np.unpackbits(raw, bitorder="little")[:count]
    if raw.size != count * dtype.itemsize:
        raise ValueError(f"{attribute} holds {raw.size} bytes of elements, expected {count * dtype.itemsize}")
    return _own_copy_if_small(raw, dtype.itemsize).view(dtype).reshape(static_sizes(t))


def _raw_constant_bytes(attribute: Any, t: TensorType) -> np.ndarray:
    """Return the element bytes of a type whose buffer the bindings reject (bf16, f8, 4-bit).

    MLIR bytecode contains the element bytes unchanged. To find their offset, two attributes of this type that differ in
    every byte are serialized: the elements start where the two bytecodes first differ.
    """
    word = np.dtype(f"u{DTYPES[t.dtype].size}")
    count = math.prod(static_sizes(t))
    one, two = (int.from_bytes(bytes([b]) * word.itemsize, "little") for b in (1, 2))
    pattern = np.where(np.arange(count) % 2 == 0, one, two).astype(word)
    element = attribute.type.element_type
    codes = [
        np.frombuffer(
            _bytecode_of_attribute(ir.DenseElementsAttr.get(p.data, type=element, shape=list(static_sizes(t)))),
            np.uint8,
        )
        for p in (pattern, (one + two - pattern).astype(word))
    ]
    start = int(np.argmax(codes[0] != codes[1]))
    code = np.frombuffer(_bytecode_of_attribute(attribute), np.uint8)
    return np.array(code[start : start + count * word.itemsize])


def _module_holding_attribute(attribute: Any) -> Any:
    with ir.Location.unknown(attribute.context):
        module = ir.Module.create()
    module.operation.attributes["v"] = attribute
    return module


def _bytecode_of_attribute(attribute: Any) -> bytes:
    stream = io.BytesIO()
    _module_holding_attribute(attribute).operation.write_bytecode(stream)
    return stream.getvalue()
