"""Encodings of tensors: the protocol's datatypes, JSON numbers, and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aotc.serve.errors import BAD, RequestFault, shown_value
from aotc.serve.limits import INLINE_BYTES, MOST_DIMS
from aotc.vmfb.dtypes import DTYPES, limits, to_numpy

Buffer = bytes | memoryview
_NAMES = {
    "i1": "BOOL", "u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "u64": "UINT64", "i8": "INT8", "i16": "INT16",
    "i32": "INT32", "i64": "INT64", "f16": "FP16", "f32": "FP32", "f64": "FP64", "bf16": "BF16",
}  # fmt: skip
STRINGS = "BYTES"  # the protocol's type of strings of any length
_OURS = {name: ours for ours, name in _NAMES.items()} | {ours: ours for ours in DTYPES if ours not in _NAMES}
_KINDS = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}  # JSON kinds that each NumPy kind accepts
_NUMBERS = {bool, int, float}
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def datatype_of(dtype: str) -> str:
    """Return the protocol's datatype for a dtype, or the dtype's own name if the protocol has none."""
    return _NAMES.get(dtype, dtype)


def dtype_of(datatype: Any, where: str) -> str:
    """Return the dtype for a datatype of the protocol.

    Raises
    ------
    RequestFault
        If no model can have such an argument, for example BYTES.
    """
    found = _OURS.get(datatype) if isinstance(datatype, str) else None
    if datatype == STRINGS:
        what, hint = "models do not accept strings", "numbers: encode text with a tokenizer"
        raise RequestFault(BAD, where, what, STRINGS, ", ".join(_NAMES.values()), hint)
    if found is None:
        expected = ", ".join(_NAMES.values())
        raise RequestFault(BAD, where, "unknown datatype", shown_value(datatype), expected)
    return found


# Upper bound of a shape's element count, sizes of 0 excluded. NumPy counts bytes in 64 bits, also for empty arrays:
# 2**63 bytes divided by 16 bytes an element, with a margin.
MOST_ELEMENTS = 1 << 56


def checked_shape(shape: Any, where: str) -> tuple[int, ...]:
    """Validate the shape in a request.

    Raises
    ------
    RequestFault
        If it is invalid.
    """
    good = isinstance(shape, list | tuple) and len(shape) <= MOST_DIMS
    if not good or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
        raise RequestFault(BAD, where, "the shape is not a list of sizes", shown_value(shape), "[2, 3]")
    if math.prod(n for n in shape if n) >= MOST_ELEMENTS:
        raise RequestFault(
            BAD, where, "the shape is too large", shown_value(shape), f"fewer than {MOST_ELEMENTS} elements"
        )
    return tuple(shape)


def tensor_from_bytes(data: Any, dtype: str, shape: tuple[int, ...], where: str) -> np.ndarray:
    """Return an array over ``data``, without a copy.

    Raises
    ------
    RequestFault
        If the number of bytes does not match the shape, or a byte is not a value of the type.
    """
    kind = to_numpy(dtype)
    expected = math.prod(shape) * kind.itemsize
    if len(data) != expected:
        text = f"{expected} for {datatype_of(dtype)} {list(shape)}"
        raise RequestFault(BAD, where, "the tensor has the wrong number of bytes", len(data), text)
    array = np.frombuffer(data, kind).reshape(shape)
    row = DTYPES[dtype]
    if row.bits < 8 and array.size:
        raw = array.view(np.int8 if row.kind == "i" else np.uint8)
        low, high = limits(dtype) if row.kind in "iu" else (0, (1 << row.bits) - 1)
        if raw.min() < low or raw.max() > high:
            what = f"a byte is not a value of {datatype_of(dtype)}"
            raise RequestFault(BAD, where, what, f"{raw.min()} to {raw.max()}", f"{low} to {high}")
    return array


def tensor_from_json(data: Any, dtype: str, shape: tuple[int, ...], where: str) -> np.ndarray:
    """Convert flat or nested JSON numbers to an array.

    Raises
    ------
    RequestFault
        If they are not numbers, have the wrong count, or are out of the type's range.
    """
    row = DTYPES[dtype]
    if row.kind not in _KINDS:
        hint = "send it as binary data"
        raise RequestFault(BAD, where, f"JSON has no numbers for {dtype}", hint=hint)
    try:
        values = data if isinstance(data, list) else [data]
        if _element_types(values) <= _NUMBERS:
            found = np.array(values)
        else:
            found = np.array(_json_numbers(values), np.float64)  # NumPy would convert all elements to strings
        if found.dtype.kind == "O" and row.kind == "f":  # integers of more than 64 bits
            found = found.astype(np.float64)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise RequestFault(BAD, where, "data is not a list of numbers", str(error)[:200]) from None
    if found.size and found.dtype.kind not in _KINDS[row.kind]:
        what = f"data contains an element that is not of type {datatype_of(dtype)}"
        raise RequestFault(BAD, where, what, f"{found.dtype} as {shown_value(found.reshape(-1)[:1].tolist()[0])}")
    if found.size != math.prod(shape):
        expected = f"{math.prod(shape)}, as the shape is {list(shape)}"
        raise RequestFault(BAD, where, "data has the wrong number of elements", found.size, expected)
    if row.kind in "iu" and found.size:
        low, high = limits(dtype)
        if int(found.min()) < low or int(found.max()) > high:
            what = f"data is out of the range of {datatype_of(dtype)}"
            raise RequestFault(BAD, where, what, f"{found.min()} to {found.max()}", f"{low} to {high}")
    with np.errstate(over="ignore"):
        made = found.astype(to_numpy(dtype)).reshape(shape)
    if row.kind == "f" and not np.isfinite(made).all() and np.isfinite(found).all():
        what = f"data is out of the range of {datatype_of(dtype)}"
        raise RequestFault(BAD, where, what, f"up to {np.abs(found).max()}")
    return made


# Maximum nesting of lists in a tensor's JSON data: NumPy arrays have at most 64 dimensions.
MOST_NESTING = 64


def _element_types(values: list[Any], depth: int = 0) -> set[type]:
    """Return the Python types of the elements of nested lists.

    Raises
    ------
    ValueError
        If the lists nest too deeply.
    """
    if depth > MOST_NESTING:
        raise ValueError(f"lists nest more than {MOST_NESTING} deep")
    found = set(map(type, values))
    if list in found:
        found.discard(list)
        found = found.union(*[_element_types(value, depth + 1) for value in values if type(value) is list])
    return found


def _json_numbers(data: Any) -> Any:
    """Replace ``"NaN"`` and infinities in nested lists by floats; refuse anything but numbers."""
    if isinstance(data, list):
        return [_json_numbers(x) for x in data]
    if isinstance(data, str):
        if data not in _SPECIAL:
            raise ValueError(f"{data[:40]!r} is not a number")
        return _SPECIAL[data]
    if data is None or isinstance(data, dict):
        raise ValueError(f"{'null' if data is None else 'an object'} is not a number")
    return data


def tensor_to_bytes(array: np.ndarray) -> Buffer:
    """Return the bytes of an array; without a copy if the array is large."""
    base = array.base
    whole = not isinstance(base, np.ndarray) or base.nbytes == array.nbytes
    if array.nbytes <= INLINE_BYTES or not (whole and array.flags.c_contiguous):  # a view keeps its batch alive
        return array.tobytes()
    return array.reshape(-1).view(np.uint8).data


def tensor_to_json(array: np.ndarray, where: str) -> list[Any]:
    """Return the elements as a flat list; NaN and infinities as ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.

    Raises
    ------
    RequestFault
        If JSON has no numbers for its type.
    """
    if array.dtype.kind == "c":
        raise RequestFault(BAD, where, "JSON has no complex numbers", hint="ask for binary data")
    if array.dtype.kind in "biu" and array.dtype.isbuiltin == 1:
        return array.reshape(-1).tolist()
    wide = array.astype(np.float64).reshape(-1)
    values: list[Any] = wide.tolist()
    if not np.isfinite(wide).all():
        return [x if math.isfinite(x) else "NaN" if x != x else "Infinity" if x > 0 else "-Infinity" for x in values]
    return values


def unique_tensor_names(rows: Sequence[dict[str, Any]], other: str) -> list[str]:
    """Return unique names of arguments or results; an unnamed one is called ``other`` plus its number."""
    names: list[str] = []
    for number, row in enumerate(rows):
        name = row["name"] or f"{other}{number}"
        names.append(name if name not in names else f"{name}#{number}")
    return names
