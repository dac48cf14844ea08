"""Array files by suffix: ``.npz``, ``.json`` and ``.safetensors`` hold several arrays, ``.bin`` the bytes of one.

Arrays are stored under the names of results and arguments. ``.json`` has an object ``{"dtype", "shape", "data"}`` for
each, with complex numbers as pairs and the strings ``"NaN"``, ``"Infinity"``, ``"-Infinity"`` for non-finite numbers.
Formats import their modules when a file has them: ``aotc run`` without files needs none.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aotc.vmfb.dtypes import DTYPES, from_numpy, to_numpy
from aotc.vmfb.errors import CallError
from aotc.vmfb.host.files import write_atomically

Named = Mapping[str, np.ndarray]
_WIDEST = {"f": np.float64, "c": np.float64, "i": np.int64, "u": np.uint64, "b": np.bool_}  # of numbers; c: of parts


def suffix_of(path: str) -> str:
    """Return the suffix of a file name in lower case."""
    return Path(path).suffix.lower()


def check_output(path: str, append: bool, results: Sequence[Mapping[str, Any]]) -> None:
    """Refuse an output with an unknown suffix or folder, or one that cannot hold ``results``, before anything runs.

    Raises
    ------
    CallError
        If the output is refused.
    """
    suffix = suffix_of(path)
    if suffix not in ("", ".npy", *WRITERS):
        known = ", ".join([".npy", *WRITERS])
        what = f"--output={path}: {suffix} is not a format of results"
        raise CallError("", what, expected=known, hint="another name")
    if append and suffix in WRITERS:
        raise CallError("", f"--output=+{path}: only a .npy can be appended to", hint=f"--output=@{path}")
    if suffix == ".safetensors":
        _check_safetensors(path, results)
    require_folder_of(path, "--output")


def require_folder_of(path: str, option: str) -> None:
    """Raise CallError if the folder that is to contain ``path`` does not exist."""
    folder = os.path.dirname(path.rstrip(os.sep)) or "."
    if not os.path.isdir(folder):
        raise CallError("", f"{option}={path}: there is no folder {folder}", hint=f"make it, or another {option}")


def _check_safetensors(path: str, results: Sequence[Mapping[str, Any]]) -> None:
    from aotc.vmfb.weights.safetensors import NAMES

    for r in results:
        if r["dtype"] not in NAMES:
            hint = "a .npz file stores all types"
            raise CallError("", f"--output={path}: safetensors has no type for {r['name']}, {r['dtype']}", hint=hint)


def holds_several(path: str) -> bool:
    """Return True if the file format of ``path`` can hold more than one array."""
    return suffix_of(path) in WRITERS and suffix_of(path) != ".bin"


def write_arrays(path: str, arrays: Named) -> None:
    """Write ``arrays`` in the format of the suffix of ``path``.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    write_atomically(path, WRITERS[suffix_of(path)](arrays))


def _write_npz(arrays: Named) -> list[Any]:
    from aotc_cli.shared.inputs import to_storage

    buffer = io.BytesIO()
    np.savez(buffer, **{name: to_storage(a) for name, a in arrays.items()})  # type: ignore[arg-type]
    return [buffer.getbuffer()]


def _write_bin(arrays: Named) -> list[Any]:
    (array,) = arrays.values()
    return [np.ascontiguousarray(array).reshape(-1).view("u1")]


def _write_json(arrays: Named) -> list[Any]:
    import json

    held = {
        name: {"dtype": from_numpy(a.dtype), "shape": list(a.shape), "data": _numbers_of_list(_nested_list(a))}
        for name, a in arrays.items()
    }
    return [json.dumps(held, allow_nan=False).encode() + b"\n"]


def _nested_list(array: np.ndarray) -> Any:
    """Return an array as nested lists of Python numbers; floats keep their exact value."""
    row = DTYPES[from_numpy(array.dtype)]
    if row.kind == "c":
        return np.stack([array.real, array.imag], -1).tolist()
    return array.astype(_WIDEST[row.kind]).tolist()


def _numbers_of_list(data: Any) -> Any:
    if isinstance(data, list):
        return [_numbers_of_list(x) for x in data]
    if isinstance(data, float) and not math.isfinite(data):
        return "NaN" if data != data else "Infinity" if data > 0 else "-Infinity"
    return data


def _write_safetensors(arrays: Named) -> list[Any]:
    from aotc.vmfb.weights.safetensors import encode_header, make_tensor_row

    header, parts, at = {}, [], 0
    for name, array in arrays.items():
        header[name] = make_tensor_row(from_numpy(array.dtype), array.shape, at)
        parts.append(np.ascontiguousarray(array).reshape(-1).view("u1"))
        at += array.nbytes
    return [encode_header(header), *parts]


WRITERS: dict[str, Callable[[Named], list[Any]]] = {
    ".npz": _write_npz, ".json": _write_json, ".bin": _write_bin, ".safetensors": _write_safetensors,
}  # fmt: skip


# ---------------------------------------------------------------- reading


def read_arrays(path: str, room: Sequence[Mapping[str, Any]], what: str) -> list[np.ndarray] | None:
    """Read the arrays of a file for the arguments ``room``, matched by name or else in order.

    Return None if the suffix is not one of this module's.

    Raises
    ------
    CallError
        If the file cannot be read, or does not match the format of its suffix.
    """
    reader = _READERS.get(suffix_of(path))
    if reader is None:
        return None
    try:
        return arrays_by_name(reader(path, room), room)
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        hint = f"a {suffix_of(path)} file of arrays"
        raise CallError("", f"cannot read {what}=@{path}: {reason}", hint=hint) from None


def arrays_by_name(arrays: Named, room: Sequence[Mapping[str, Any]]) -> list[np.ndarray]:
    """Sort arrays by the names of the arguments ``room``; if names do not match, keep the order of the file."""
    names = [a["name"] for a in room]
    if arrays and set(arrays) <= set(names):
        first = [n for n in names if n in arrays]
        if first == names[: len(first)]:
            return [arrays[n] for n in first]
    return list(arrays.values())


def _read_bin(path: str, room: Sequence[Mapping[str, Any]]) -> Named:
    """Read the bytes of one array of known dtype and shape."""
    if not room:
        raise ValueError("it is one too many")
    dims, dtype = room[0]["dims"], to_numpy(room[0]["dtype"])
    if any(not isinstance(d, int) for d in dims):
        raise ValueError(f"the sizes of {room[0]['name']} are not fixed; say them as 2x3x{room[0]['dtype']}=@{path}")
    wanted = math.prod(dims) * dtype.itemsize
    data = np.fromfile(path, "u1")
    if data.nbytes != wanted:
        raise ValueError(f"it has {data.nbytes} bytes, expected {wanted}")
    return {room[0]["name"]: data.view(dtype).reshape(dims)}


def _read_json(path: str, room: Sequence[Mapping[str, Any]]) -> Named:
    import json

    held = json.loads(Path(path).read_bytes())
    if not isinstance(held, dict):  # the values of one argument
        held = {room[0]["name"] if room else "": {"dtype": room[0]["dtype"] if room else "f32", "data": held}}
    return {name: _array_of_entry(name, entry) for name, entry in held.items()}


def _array_of_entry(name: str, entry: object) -> np.ndarray:
    if not isinstance(entry, dict) or not {"dtype", "data"} <= entry.keys():
        form = f'{{"{name}": {{"dtype": "f32", "shape": [2, 3], "data": [...]}}}}'
        raise ValueError(f"{name!r} has no dtype and data; write {form}")
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"the dtype of {name!r} is {entry['dtype']!r}; expected one of {', '.join(DTYPES)}")
    row = DTYPES[entry["dtype"]]
    values: np.ndarray = np.array(_parsed_json(entry["data"]), _WIDEST[row.kind])
    if row.kind == "c":
        values = np.ascontiguousarray(values).view(np.complex128)[..., 0]
    array = values.astype(to_numpy(row.name))
    return array.reshape(entry["shape"]) if "shape" in entry else array


def _parsed_json(data: Any) -> Any:
    if isinstance(data, list):
        return [_parsed_json(x) for x in data]
    return float(data) if isinstance(data, str) else data


def _read_safetensors(path: str, room: Sequence[Mapping[str, Any]]) -> Named:
    """Read the arrays of a safetensors file by name."""
    from aotc.vmfb.weights.safetensors import OWN_DTYPES, decode_header

    data = np.fromfile(path, np.uint8)
    header, start = decode_header(data.data)
    found = {}
    for name, row in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = row["data_offsets"]
        dtype = to_numpy(OWN_DTYPES[row["dtype"]])
        found[name] = data[start + begin : start + end].view(dtype).reshape(row["shape"])
    return found


_READERS: dict[str, Callable[[str, Sequence[Mapping[str, Any]]], Named]] = {
    ".json": _read_json, ".bin": _read_bin, ".safetensors": _read_safetensors,
}  # fmt: skip
