"""Tensor maps: what the tensor memory accelerator is told of an array; see :mod:`aotc.vmfb.devices.launch`.

A map holds the array's address, so it is made when a plan has its memory, and lies in the parameters of the launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from aotc.vmfb.abi import MAP_ALIGNMENT, MAP_BYTES
from aotc.vmfb.devices import driver
from aotc.vmfb.errors import VmError
from aotc.vmfb.safety.interface import evaluate

# CUtensorMapDataType, by what an element is copied as; TF32 is f32 that is rounded on its way.
_TYPES = {"u8": 0, "u16": 1, "i32": 3, "i64": 5, "f16": 6, "f32": 7, "f64": 8, "bf16": 9, "tf32": 11}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle, by the bytes of a row
_PROMOTION = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
_MOST_DIMENSIONS = 5


def map_fits(row: Mapping[str, Any], buffers: int) -> bool:
    """Can a kernel of so many ``buffers`` have this tensor map?"""
    rank = len(row["sizes"])
    return (
        0 <= row["buffer"] < buffers
        and row["type"] in _TYPES
        and row["swizzle"] in _SWIZZLES
        and 1 <= rank <= _MOST_DIMENSIONS
        and (len(row["strides"]), len(row["box"])) == (rank - 1, rank)
    )


def encode_map(where: str, row: Mapping[str, Any], address: int, dims: Sequence[int]) -> Any:
    """Return the tensor map that ``row`` of a launch describes, for an array at ``address``.

    Raises
    ------
    VmError
        If the driver refuses it: the array lies, or its rows lie, where none of 16 bytes begin.
    """
    memory = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    start = -ctypes.addressof(memory) % MAP_ALIGNMENT
    address += evaluate(row.get("offset", 0), dims)
    made = (ctypes.c_uint8 * MAP_BYTES).from_buffer(memory, start)
    rank = len(row["sizes"])
    sizes = (ctypes.c_uint64 * rank)(*[evaluate(s, dims) for s in row["sizes"]])
    strides = (ctypes.c_uint64 * rank)(*[evaluate(s, dims) for s in row["strides"]])
    box, ones = (ctypes.c_uint32 * rank)(*row["box"]), (ctypes.c_uint32 * rank)(*[1] * rank)
    kind, swizzle = _TYPES[row["type"]], _SWIZZLES[row["swizzle"]]
    try:
        driver.call(
            "cuTensorMapEncodeTiled", made, kind, rank, address, sizes, strides, box, ones, 0, swizzle, _PROMOTION, 0
        )
    except VmError as error:
        shown = f"{list(sizes)} of {row['type']} at {address:#x}, rows {list(strides)[:-1]} bytes apart"
        raise VmError(where, "an array cannot be copied in tiles", shown, "addresses of whole 16 bytes") from error
    return made
