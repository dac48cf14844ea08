"""Tensor maps: array descriptors for the tensor memory accelerator (TMA); see :mod:`aotc.vmfb.devices.cuda.launch`.

A map is a parameter of a launch. It contains the array's address, so it is encoded when the memory of a plan is known.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from aotc.vmfb.abi import MAP_ALIGNMENT, MAP_BYTES
from aotc.vmfb.devices.cuda import driver
from aotc.vmfb.errors import CallError
from aotc.vmfb.verify.kernel_interface import evaluate_size

# CUtensorMapDataType, by the type as which an element is copied; TF32 rounds f32 during the copy.
_TYPES = {"u8": 0, "u16": 1, "i32": 3, "i64": 5, "f16": 6, "f32": 7, "f64": 8, "bf16": 9, "tf32": 11}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle, by bytes of a row
_PROMOTION = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
_MOST_DIMENSIONS = 5


def is_valid_tensor_map(row: Mapping[str, Any], buffers: int) -> bool:
    """Return True if ``row``, a tensor map of a kernel's manifest entry, is valid for ``buffers`` arrays."""
    rank, window = len(row["sizes"]), row.get("window")
    boxed = rank if window is None else 2
    spatial = window is None or all(len(dims_are_given) == rank - 2 for dims_are_given in window.values())
    return (
        0 <= row["buffer"] < buffers
        and spatial
        and row["type"] in _TYPES
        and row["swizzle"] in _SWIZZLES
        and (1 if window is None else 3) <= rank <= _MOST_DIMENSIONS
        and (len(row["strides"]), len(row["box"])) == (rank - 1, boxed)
    )


def im2col_corners(window: Mapping[str, Sequence[int]], sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the corners of an im2col map: offset of the first window, and of the last one from the array's end."""
    rows = zip(window["low"], window["pixels"], window["strides"], sizes[1:-1], strict=True)
    high = [(pixels - 1) * stride - low - extent + 1 for low, pixels, stride, extent in rows]
    return [-low for low in window["low"]], high


def encode_tensor_map(
    where: str, row: Mapping[str, Any], address: int, dims: Sequence[int]
) -> ctypes.Array[ctypes.c_uint8]:
    """Encode a tensor map by the driver, for an array at ``address``; ``row`` is its entry in the manifest.

    Raises
    ------
    CallError
        If the driver refuses it, because the array or its rows are not aligned to 16 bytes.
    """
    return _encode_by_driver(where, row, address + evaluate_size(row.get("offset", 0), dims), dims)


def retarget_tensor_map(
    where: str, row: Mapping[str, Any], encoded: ctypes.Array[ctypes.c_uint8], dims: Sequence[int], address: int
) -> None:
    """Change the array's address in the encoded tensor map ``encoded``.

    Raises
    ------
    CallError
        As in :func:`encode_tensor_map`.
    """
    address += evaluate_size(row.get("offset", 0), dims)
    try:
        driver.call("cuTensorMapReplaceAddress", encoded, address)
    except CallError:
        again = _encode_by_driver(where, row, address, dims)  # raises with the reason if that fails
        ctypes.memmove(encoded, again, MAP_BYTES)


def _encode_by_driver(
    where: str, row: Mapping[str, Any], address: int, dims: Sequence[int]
) -> ctypes.Array[ctypes.c_uint8]:
    """Call the driver to encode a tensor map, tiled or im2col."""
    memory = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    start = -ctypes.addressof(memory) % MAP_ALIGNMENT
    encoded = (ctypes.c_uint8 * MAP_BYTES).from_buffer(memory, start)
    rank = len(row["sizes"])
    sizes = (ctypes.c_uint64 * rank)(*[evaluate_size(s, dims) for s in row["sizes"]])
    strides = (ctypes.c_uint64 * rank)(*[evaluate_size(s, dims) for s in row["strides"]])
    window = row.get("window")
    steps = (ctypes.c_uint32 * rank)(1, *(window["strides"] if window else [1] * (rank - 2)), 1)
    array = (encoded, _TYPES[row["type"]], rank, address, sizes, strides)
    way = (0, _SWIZZLES[row["swizzle"]], _PROMOTION, 0)
    try:
        if window:
            low, high = ((ctypes.c_int * (rank - 2))(*corner) for corner in im2col_corners(window, list(sizes)))
            driver.call("cuTensorMapEncodeIm2col", *array, low, high, *row["box"], steps, *way)
        else:
            box = (ctypes.c_uint32 * rank)(*row["box"])
            driver.call("cuTensorMapEncodeTiled", *array, box, steps, *way)
    except CallError as error:
        shown = f"{list(sizes)} of {row['type']} at {address:#x}, rows {list(strides)[:-1]} bytes apart"
        raise CallError(where, "an array cannot be copied in tiles", shown, "addresses of whole 16 bytes") from error
    return encoded
