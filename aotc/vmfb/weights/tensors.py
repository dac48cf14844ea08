"""Named arrays in safetensors files: atomic writes, zero-copy reads, and checks against expected types."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from aotc.vmfb.arguments import type_text
from aotc.vmfb.dtypes import from_numpy, to_numpy
from aotc.vmfb.errors import BundleError
from aotc.vmfb.host.files import write_atomically
from aotc.vmfb.memory.mapped_file import MappedFile
from aotc.vmfb.weights.safetensors import (
    METADATA,
    OWN_DTYPES,
    decode_header_and_metadata,
    encode_header,
    make_tensor_row,
)

Types = Mapping[str, tuple[str, Sequence[int]]]


def safetensors_pieces(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> list[Any]:
    """Return the buffers of a safetensors file with these arrays, in order, for a writer."""
    rows: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    at, parts = 0, []
    for name, array in arrays.items():
        whole = np.asarray(array, order="C")
        rows[name] = make_tensor_row(from_numpy(whole.dtype), whole.shape, at)
        at += whole.nbytes
        parts.append(whole.reshape(-1).view(np.uint8).data)
    return [encode_header(rows), *parts]


def write_tensors(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a file atomically.

    Raises
    ------
    BundleError
        If it cannot be written; an existing file is unchanged.
    """
    where = os.fspath(path)
    try:
        write_atomically(where, safetensors_pieces(arrays))
    except OSError as error:
        need = sum(array.nbytes for array in arrays.values())
        raise BundleError(
            where,
            f"cannot write the file: {error.strerror}",
            expected=f"a writable directory with {need:,} free bytes",
            hint="another path; a file that was there before is unchanged",
        ) from error


class Tensors(Mapping[str, np.ndarray]):
    """Mapping of names to the memory-mapped arrays of a safetensors file.

    Attributes
    ----------
    metadata : dict of str to str
        The metadata of the file.
    file : MappedFile or None
        The file that owns the memory.
    """

    def __init__(self, data: memoryview, where: str, file: MappedFile | None = None) -> None:
        try:
            self.rows, self.metadata, self._start = decode_header_and_metadata(data)
        except ValueError as error:
            raise BundleError(where, f"this is not a safetensors file: {error}") from None
        self._data, self._where, self.file = data, where, file

    def __getitem__(self, name: str) -> np.ndarray:
        """Return an array whose dtype the safetensors format has; :meth:`array` returns arrays of other dtypes.

        Raises
        ------
        BundleError
            If the dtype is unknown to aotc.
        """
        row = self.rows[name]
        if row["dtype"] not in OWN_DTYPES:
            known = ", ".join(OWN_DTYPES)
            raise BundleError(self._where, f"tensor {name!r} has an unknown dtype", row["dtype"], f"one of {known}")
        return self.array(name, OWN_DTYPES[row["dtype"]], row["shape"])

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def array(self, name: str, dtype: str, shape: Sequence[int]) -> np.ndarray:
        """Return an array with its bytes interpreted as ``dtype`` and ``shape``."""
        begin, end = self.rows[name]["data_offsets"]
        found = np.frombuffer(self._data[self._start + begin : self._start + end], np.uint8)
        if found.ctypes.data % to_numpy(dtype).alignment:
            found = found.copy()
        return found.view(to_numpy(dtype)).reshape(shape)

    def problems(self, types: Types) -> list[str]:
        """Describe each difference from arrays of these types: missing, unexpected, or of another dtype or shape."""
        found = [f"{name} is missing" for name in types if name not in self.rows]
        found += [f"there is no {name}" for name in self.rows if name not in types]
        for name in types:
            row = self.rows.get(name)
            if row is None:
                continue
            expected = make_tensor_row(*types[name], row["data_offsets"][0])
            if row != expected:
                description = type_text(OWN_DTYPES.get(row["dtype"]) or row["dtype"], row["shape"])
                found.append(f"{name} is {description}, expected {type_text(*types[name])}")
        return found


def read_tensors(path: str | os.PathLike[str], copy: bool = False) -> Tensors:
    """Open a safetensors file.

    Raises
    ------
    BundleError
        If it cannot be read, or is not a safetensors file.
    """
    where = os.fspath(path)
    try:
        file = MappedFile(where, copy)
    except OSError as error:
        raise BundleError(where, f"the file cannot be read: {error.strerror}") from None
    return Tensors(file.data, where, file)


def require_tensor_types(found: Tensors, types: Types, where: str) -> dict[str, np.ndarray]:
    """Return the arrays of a file, after a check that names, dtypes and shapes are exactly ``types``.

    Raises
    ------
    BundleError
        Its message lists all differences.
    """
    if problems := found.problems(types):
        raise BundleError(where, "these are other arrays than expected:\n  " + "\n  ".join(problems))
    return {name: found.array(name, *types[name]) for name in types}
