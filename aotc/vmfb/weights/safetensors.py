"""Reader and writer of the safetensors format: length of the header, header (JSON, a row a tensor), tensors' bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from aotc.vmfb.abi import ALIGNMENT
from aotc.vmfb.dtypes import size_of

NAMES = {
    "i1": "BOOL", "i8": "I8", "i16": "I16", "i32": "I32", "i64": "I64", "u8": "U8", "u16": "U16", "u32": "U32",
    "u64": "U64", "f8E4M3FN": "F8_E4M3", "f8E4M3FNUZ": "F8_E4M3FNUZ", "f8E5M2": "F8_E5M2",
    "f8E5M2FNUZ": "F8_E5M2FNUZ", "f8E8M0FNU": "F8_E8M0", "f16": "F16", "bf16": "BF16", "f32": "F32", "f64": "F64",
    "c64": "C64",
}  # fmt: skip
"""The safetensors name of each dtype. Sub-byte dtypes are missing: safetensors packs them, aotc does not."""

OWN_DTYPES = {theirs: ours for ours, theirs in NAMES.items()}

METADATA = "__metadata__"
"""The row of a header that is not a tensor: strings by name."""

_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000
# Characters of a damaged row of a header that a message quotes: it may be as long as the header.
_SHOWN_ROW = 160

Row = dict[str, Any]


def make_tensor_row(dtype: str, shape: Sequence[int], begin: int) -> Row:
    """Create the header row of a tensor whose bytes begin at ``begin``, counted from the end of the header.

    Elements of a dtype that safetensors lacks are stored as rows of bytes.
    """
    size = size_of(dtype)
    end = begin + math.prod(shape) * size
    shape = [*shape] if dtype in NAMES or size == 1 else [*shape, size]
    return {"dtype": NAMES.get(dtype, "U8"), "shape": shape, "data_offsets": [begin, end]}


def encode_header(rows: Mapping[str, Row]) -> bytes:
    """Encode the start of a safetensors file: length and header, padded so that the tensors are aligned."""
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def decode_header(data: memoryview) -> tuple[dict[str, Row], int]:
    """Decode a header; return the rows by tensor name, and the offset of the tensors' bytes in the file.

    Raises
    ------
    ValueError
        As in :func:`decode_header_and_metadata`.
    """
    rows, _, start = decode_header_and_metadata(data)
    return rows, start


def decode_header_and_metadata(data: memoryview) -> tuple[dict[str, Row], dict[str, str], int]:
    """Decode a header; return the rows by tensor name, the metadata, and the offset of the tensors' bytes.

    Raises
    ------
    ValueError
        If the file is not a safetensors file, is truncated, has extra bytes at its end, or tensors that overlap.
    """
    start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    if start > min(data.nbytes, _MOST_HEADER_BYTES):
        raise ValueError("its first 8 bytes are not the length of a header")
    try:
        text = str(data[_LENGTH_BYTES:start], "utf-8")
        rows = json.loads(text)
        if "\\u" in text:
            _check_characters(rows)
    except RecursionError:
        raise ValueError("its header is nested without end") from None
    if not isinstance(rows, dict):
        raise ValueError("its header is not an object")
    metadata = rows.pop(METADATA, None) or {}
    if not isinstance(metadata, dict):
        raise ValueError("its metadata is not an object")
    end = _end_of_disjoint_tensors({name: _tensor_span(name, row) for name, row in rows.items()})
    if start + end != data.nbytes:
        what = "truncated" if start + end > data.nbytes else "longer than its header says"
        raise ValueError(f"{what}: {data.nbytes:,} bytes, expected {start + end:,}")
    return rows, {str(key): str(value) for key, value in metadata.items()}, start


def _check_characters(rows: Any) -> None:
    """Refuse strings of a header with half of a surrogate pair, which cannot be printed or written."""
    try:
        json.dumps(rows, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        near = error.object[max(0, error.start - 40) : error.start + 40]
        half = ord(error.object[error.start])
        raise ValueError(f"its header has U+{half:04X}, half of a surrogate pair, in {near!a}") from None


def _end_of_disjoint_tensors(spans: Mapping[str, tuple[int, int]]) -> int:
    """Return the end of the last tensor's bytes, after a check that no two tensors overlap.

    Raises
    ------
    ValueError
        If tensors overlap.
    """
    last, end = "", 0
    for name, (start, stop) in sorted(spans.items(), key=lambda item: item[1]):
        if start < min(stop, end):  # a tensor without elements overlaps with none
            places = f"one ends at {end:,}, the other begins at {start:,}"
            raise ValueError(f"tensors {last!r} and {name!r} overlap: {places}")
        if stop >= end:
            last, end = name, stop
    return end


def _tensor_span(name: str, row: Any) -> tuple[int, int]:
    """Validate a tensor's header row; return start and end of its bytes, counted from the end of the header.

    Raises
    ------
    ValueError
        If the row contradicts itself. The size of a dtype unknown to aotc is not checked here; reading such a tensor
        fails.
    """
    match row:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if 0 <= begin <= end:
            if not all(isinstance(d, int) and d >= 0 for d in shape):
                raise ValueError(f"tensor {name!r} has the shape {str(shape)[:_SHOWN_ROW]}")
            own = OWN_DTYPES.get(dtype)
            if own is not None and end - begin != math.prod(shape) * size_of(own):
                raise ValueError(f"tensor {name!r} is {dtype}{shape}, and has {end - begin:,} bytes")
            return begin, end
    raise ValueError(f"tensor {name!r} is described by {str(row)[:_SHOWN_ROW]}")
