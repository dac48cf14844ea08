"""Constants (weights) of a variant in host memory.

Inline constants, and external ones whose file has the layout that the program needs, are used in place in the mapped
file. Other constants are copied once, when the bundle is loaded; compressed ones are expanded.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from aotc.vmfb.abi import ALIGNMENT
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.dtypes import DTYPES
from aotc.vmfb.errors import BundleError
from aotc.vmfb.memory.mapped_file import MappedFile
from aotc.vmfb.memory.pointers import aligned_bytes


class ConstantMemory:
    """Host memory with the constants of a variant.

    Attributes
    ----------
    address, size : int
        Start, and number of bytes.
    copied : bool
        True if the constants were copied out of the bundle or out of the file of weights.
    owner : object
        The object that keeps the memory alive.
    file : MappedFile or None
        The mapped file from which calls read the constants, if any.
    """

    __slots__ = ("address", "copied", "file", "owner", "size")

    def __init__(self, address: int, size: int, copied: bool, owner: object, file: MappedFile | None = None) -> None:
        self.file = file if file is not None and file.is_mapped else None
        self.address = address
        self.size = size
        self.copied = copied
        self.owner = owner


def load_constants(bundle: OpenedBundle, entry: dict[str, Any] | None) -> ConstantMemory:
    """Load the constants that a variant's manifest entry describes: map, copy or expand them.

    Raises
    ------
    BundleError
        If the file of external weights is missing or does not match, or compressed constants are damaged.
    """
    if entry and entry.get("external"):
        return _load_external(bundle, entry["external"])
    if entry and entry.get("compressed"):
        return _load_compressed(bundle, entry["compressed"])
    if not entry or entry.get("segment") is None:
        return ConstantMemory(0, 0, False, None)
    view = bundle.segment(entry["segment"])
    if not view.nbytes:
        return ConstantMemory(0, 0, False, None)
    array = np.frombuffer(view, np.uint8)
    if array.ctypes.data % ALIGNMENT == 0:
        file = bundle.mapped_file_of_segment(entry["segment"])
        return ConstantMemory(array.ctypes.data, array.nbytes, False, array, file)
    memory, address = aligned_bytes(array.nbytes, ALIGNMENT)
    start = address - memory.ctypes.data
    memory[start : start + array.nbytes] = array
    return ConstantMemory(address, array.nbytes, True, memory)


def _load_external(bundle: OpenedBundle, entry: dict[str, Any]) -> ConstantMemory:
    """Load constants from a safetensors file; use the mapped file in place if its layout is that of the program."""
    path = find_weights_file(bundle, entry["file"])
    file, header, start = _open_safetensors(bundle, path)
    data = file.data
    places = [_find_tensor(bundle, path, header, tensor) for tensor in entry["tensors"]]
    for tensor in entry["tensors"]:
        if tensor["offset"] + tensor["size"] > entry["size"]:
            raise BundleError(bundle.where, f"weight {tensor['name']!r} lies outside of the constants")
    shifts = {start + place - tensor["offset"] for tensor, place in zip(entry["tensors"], places)}
    base = np.frombuffer(data, np.uint8)
    if len(shifts) == 1 and min(shifts) >= 0 and min(shifts) % ALIGNMENT == 0:
        size = min(entry["size"], base.nbytes - min(shifts))  # the last weight may end the file without padding
        return ConstantMemory(base.ctypes.data + min(shifts), size, False, base, file)
    memory, address = _allocate_constants(bundle, entry["size"])
    origin = address - memory.ctypes.data
    for tensor, place in zip(entry["tensors"], places):
        to, source = origin + tensor["offset"], start + place
        memory[to : to + tensor["size"]] = base[source : source + tensor["size"]]
    return ConstantMemory(address, entry["size"], True, memory)


def _load_compressed(bundle: OpenedBundle, entry: dict[str, Any]) -> ConstantMemory:
    """Validate and expand compressed constants."""
    from aotc.vmfb.weights.compressed import check_compressed, expand_compressed_rows

    check_compressed(bundle, entry)
    memory, address = _allocate_constants(bundle, entry["size"])
    expand_compressed_rows(bundle, entry, memory[address - memory.ctypes.data :])
    return ConstantMemory(address, entry["size"], True, memory)


def _allocate_constants(bundle: OpenedBundle, size: int) -> tuple[np.ndarray, int]:
    try:
        return aligned_bytes(size, ALIGNMENT)
    except (MemoryError, ValueError):
        raise BundleError(bundle.where, f"the system has no memory for {size:,} bytes of constants") from None


def find_weights_file(bundle: OpenedBundle, name: str) -> str:
    """Return the path of an external file of weights: next to the bundle, or in a folder of ``AOTC_WEIGHTS_PATH``.

    Raises
    ------
    BundleError
        If the file is missing; the message lists the folders.
    """
    folders = [os.path.dirname(os.path.abspath(bundle.path))] if bundle.path else []
    folders += [folder for folder in os.environ.get("AOTC_WEIGHTS_PATH", "").split(os.pathsep) if folder]
    for folder in folders:
        for path in (os.path.join(folder, name), os.path.join(folder, os.path.basename(name))):
            if os.path.isfile(path):
                return path
    raise BundleError(
        bundle.where,
        f"the file of external weights {name!r} is missing",
        f"not in {', '.join(folders) or 'any folder (the bundle came from memory)'}",
        hint="put it next to the bundle, or set AOTC_WEIGHTS_PATH to its folder",
    )


def _open_safetensors(bundle: OpenedBundle, path: str) -> tuple[MappedFile, dict[str, Any], int]:
    """Open a safetensors file; return the file, its header by tensor name, and the offset of the tensors' bytes."""
    from aotc.vmfb.weights.safetensors import decode_header

    try:
        file = bundle.open_companion(path)
        return file, *decode_header(file.data)
    except (OSError, ValueError) as error:
        raise BundleError(path, f"this is not a safetensors file: {error}", hint="the file that was compiled") from None


def _find_tensor(bundle: OpenedBundle, path: str, header: dict[str, Any], tensor: dict[str, Any]) -> int:
    """Check that a tensor has the dtype and shape of compile time, and return the offset of its bytes.

    The offset counts from the end of the file's header.
    """
    from aotc.vmfb.weights.safetensors import make_tensor_row

    name = tensor["name"]
    row = header.get(name)
    if row is None:
        raise BundleError(path, f"no tensor {name!r}, which {bundle.where} needs", hint="the file that was compiled")
    if tensor["dtype"] not in DTYPES:
        raise BundleError(bundle.where, f"weight {name!r} is of a type that is not known, {tensor['dtype']}")
    begin, end = row["data_offsets"]
    expected = make_tensor_row(tensor["dtype"], tensor["shape"], begin)
    if end - begin != tensor["size"] or any(row[key] != value for key, value in expected.items()):
        raise BundleError(
            path,
            f"tensor {name!r} is not the one that was compiled",
            f"{row['dtype']}{row['shape']}, {end - begin} bytes",
            f"{expected['dtype']}{expected['shape']}, {tensor['size']} bytes",
        )
    return int(begin)


def verify_external(bundle: OpenedBundle, entry: dict[str, Any] | None) -> None:
    """Check the sha256 of each external weight against the sha256 from compile time.

    Raises
    ------
    BundleError
        Its message has the first weight that differs.
    """
    if not entry or not entry.get("external"):
        return
    from hashlib import sha256

    path = find_weights_file(bundle, entry["external"]["file"])
    file, header, start = _open_safetensors(bundle, path)
    for tensor in entry["external"]["tensors"]:
        place = start + _find_tensor(bundle, path, header, tensor)
        digest = sha256(file.data[place : place + tensor["size"]])
        if tensor["sha256"] not in (digest.digest(), digest.hexdigest()):
            raise BundleError(path, f"tensor {tensor['name']!r} is not the one that was compiled (sha256 differs)")
