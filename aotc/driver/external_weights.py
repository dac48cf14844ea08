"""Constants outside the bundle: a safetensors file in the layout of the program.

The loader maps the file and uses the tensors in place. The format allows no gaps between tensors, so padding for
alignment is stored as tensors named ``__align_N``.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

from aotc.ir.program.ir import Constants
from aotc.vmfb.dtypes import from_numpy
from aotc.vmfb.host.files import write_whole
from aotc.vmfb.weights.safetensors import encode_header, make_row


def write_weights(path: str, constants: Constants) -> dict[str, Any]:
    """Write ``constants`` to ``path`` and return their manifest entry.

    Raises
    ------
    OSError
        If the file cannot be written; an existing file is then unchanged.
    """
    header: dict[str, Any] = {}
    parts: list[Any] = []
    tensors = []
    at = 0
    for number, (name, array, offset) in enumerate(constants.arrays):
        _fill(header, parts, at, offset)
        dtype = from_numpy(array.dtype)
        data = array.reshape(-1).view("u1").data
        key = f"{number}_{name}"
        shape, at = list(array.shape), offset + array.nbytes
        header[key] = make_row(dtype, shape, offset)
        parts.append(data)
        digest = hashlib.sha256(data).digest()
        tensors.append(
            {"name": key, "dtype": dtype, "shape": shape, "offset": offset, "size": array.nbytes, "sha256": digest}
        )
    _fill(header, parts, at, constants.size)
    write_whole(path, [encode_header(header), *parts])
    return {"file": os.path.basename(path), "tensors": tensors, "size": constants.size}


def _fill(header: dict[str, Any], parts: list[Any], at: int, to: int) -> None:
    if to > at:
        header[f"__align_{at}"] = make_row("u8", (to - at,), at)
        parts.append(bytes(to - at))
