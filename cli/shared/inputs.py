"""Convert command-line values, in IREE's syntax, to arrays, and arrays to ``.npy``.

``2x3xf32=1,2,3,4,5,6``  ``2x2xi32=[1 2][3 4]``  ``4xi32=7`` (splat)  ``4xf32`` (zeros)
``f32=3`` or ``3`` (scalar)  ``2xf32=@raw.bin``  ``@x.npy``  ``@x.npz`` (all its arrays; also ``.json``,
``.safetensors``)  ``@x.bin`` (the bytes of one array of fixed sizes)

A ``.npy`` cannot represent bf16, f8 or i4. It stores the bits of floats as unsigned integers of the same width, and the
values of 4-bit and 2-bit integers as int8.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from io import BytesIO
from typing import Any
from zipfile import BadZipFile

import numpy as np

from aotc.tools.sample_arguments import array_shape
from aotc.tools.sample_arguments import make_values as make_values
from aotc.vmfb.arguments import Signature
from aotc.vmfb.assumed_sizes import assumed_sizes, assumed_text, dim_names
from aotc.vmfb.dtypes import DTYPES, limits, to_numpy
from aotc.vmfb.errors import CallError
from aotc.vmfb.host.files import append_all_or_none, write_atomically
from aotc_cli.shared.array_files import arrays_by_name, read_arrays

_TYPED = re.compile(r"&?((?:\d+x)*)([a-zA-Z][\w<>]*)(?:=(.*))?", re.DOTALL)
_TOKEN = re.compile(r"\([^)]*\)|[^\s,\[\]]+")
_ALIASES = {"complex<f32>": "c64", "complex<f64>": "c128", "bool": "i1"}
_WORDS = {"true": 1, "false": 0}


def parse_values(texts: Sequence[str], arguments: Sequence[Mapping[str, Any]], what: str = "--input") -> list[Any]:
    """Return one array for each value in ``texts``.

    Parameters
    ----------
    texts : sequence of str
        Values in the syntax of this module; ``@x.npz`` stands for several.
    arguments : sequence of mapping
        ``name``, ``dtype``, ``dims`` of the expected values, in order.
    what : str
        The option's name for messages.

    Returns
    -------
    list of numpy.ndarray

    Raises
    ------
    CallError
        If a text cannot be parsed, or its type differs from the expected one.
    """
    found: list[Any] = []
    for text in texts:
        room = arguments[len(found) :]
        if text.startswith("@"):
            found += _read_arrays(text[1:], room, what)
        elif room:
            found.append(_parse_text(text, room[0], what))
        else:
            raise CallError("", f"{what}={_shortened_value(text)} is one too many", expected=f"{len(arguments)} values")
    return found


def _shortened_value(text: str) -> str:
    return text if len(text) < 60 else text[:57] + "..."


def _parse_text(text: str, argument: Mapping[str, Any], what: str) -> np.ndarray:
    """Parse one value such as ``2xf32=1,2`` to an array of the argument's dtype."""
    typed = _TYPED.fullmatch(text.strip())
    name = _ALIASES.get(typed[2], typed[2]) if typed else ""
    if typed is None or _signless_dtype_name(name) not in DTYPES:
        if re.fullmatch(r"[-+]?(\d[\w.+-]*|inf|nan)|true|false", text.strip()):
            return _array_of_numbers(text, (), argument["dtype"], what)
        hint = f"{what}=2x3xf32=1,2,3,4,5,6 or {what}=@file.npy"
        raise CallError("", f"cannot read {what}={_shortened_value(text)}", expected="SHAPExTYPE=VALUES", hint=hint)
    dtype = argument["dtype"]
    if _signless_dtype_name(name) != dtype and name.removeprefix("i") != dtype.removeprefix("u"):
        raise CallError("", f"{what}={_shortened_value(text)} has the wrong dtype for {argument['name']}", name, dtype)
    shape = array_shape([d for d in typed[1].split("x") if d], dtype, f"{what}={_shortened_value(text)}")
    if typed[3] is None:
        return np.zeros(shape, to_numpy(dtype))
    if typed[3].startswith("@"):
        return _read_raw(typed[3][1:], shape, dtype, what)
    return _array_of_numbers(typed[3], shape, dtype, what, text)


def _signless_dtype_name(name: str) -> str:
    """Return aotc's name of a dtype that IREE writes with its sign: ``i32`` for ``si32``, ``u32`` for ``ui32``."""
    return name[1:] if re.fullmatch(r"si\d+", name) else "u" + name[2:] if re.fullmatch(r"ui\d+", name) else name


def _array_of_numbers(text: str, shape: tuple[int, ...], dtype: str, what: str, whole: str = "") -> np.ndarray:
    """Parse the numbers in ``text``, the end of the option's value ``whole``, to an array."""
    given = f"{what}={_shortened_value(whole or text)}"
    try:
        numbers = [_parse_element(token, DTYPES[dtype].kind) for token in _TOKEN.findall(text)]
        flat = _to_dtype(numbers, dtype)
    except (ValueError, OverflowError) as error:
        raise CallError("", f"cannot read {given} as {dtype}: {error}") from None
    count = int(np.prod(shape, dtype=np.int64))
    if len(flat) == 1:
        return np.full(shape, flat[0], flat.dtype)
    if len(flat) != count:
        raise CallError("", f"{given}: wrong number of values", len(flat), f"{count}, or 1 for all")
    return flat.reshape(shape)


def _parse_element(token: str, kind: str) -> Any:
    """Parse a number of an element kind: boolean, integer, complex or float (also in hexadecimal)."""
    if token in _WORDS:
        return _WORDS[token]
    match kind:
        case "b" | "i" | "u":
            return int(token, 0)
        case "c":
            if token.startswith("("):
                real, imaginary = token[1:-1].split(",")
                return complex(float(real), float(imaginary))
            return complex(token.replace("i", "j").replace("jnf", "inf"))
    return float(int(token, 16)) if token.lower().startswith("0x") else float(token)


def _to_dtype(numbers: list[Any], dtype: str) -> np.ndarray:
    target = to_numpy(dtype)
    row = DTYPES[dtype]
    if row.kind not in "iu":
        return np.array(numbers, np.complex128 if row.kind == "c" else np.float64).astype(target)
    low, high = limits(dtype)
    if numbers and not (low <= min(numbers) and max(numbers) <= high):
        raise ValueError(f"outside {low}..{high}")
    return np.array(numbers, np.uint64 if row.kind == "u" else np.int64).astype(target)


# ---------------------------------------------------------------- files


def _read_raw(path: str, shape: tuple[int, ...], dtype: str, what: str) -> np.ndarray:
    try:
        data = np.fromfile(path, "u1")
    except OSError as error:
        raise CallError("", f"cannot read {what}=@{path}: {error.strerror or error}") from None
    wanted = int(np.prod(shape, dtype=np.int64)) * to_numpy(dtype).itemsize
    if data.nbytes != wanted:
        raise CallError("", f"{what}: {path} has the wrong size", f"{data.nbytes} bytes", f"{wanted} bytes")
    return data.view(to_numpy(dtype)).reshape(shape)


def _read_arrays(path: str, room: Sequence[Mapping[str, Any]], what: str) -> list[np.ndarray]:
    """Read all arrays of a file for the arguments ``room``; the bits of floats without a NumPy dtype are restored."""
    found = read_arrays(path, room, what)
    if found is not None:
        return found
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            arrays = [loaded]
        else:
            arrays = arrays_by_name({k: loaded[k] for k in loaded.files}, room)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if "pickle" in reason:  # NumPy takes unknown files for pickles, and suggests loading one
            reason = "not an array file"
        raise CallError("", f"cannot read {what}=@{path}: {reason}", hint="a .npy or .npz that NumPy wrote") from None
    return [from_storage(a, room[i]["dtype"]) if i < len(room) else a for i, a in enumerate(arrays)]


def from_storage(array: np.ndarray, dtype: str) -> np.ndarray:
    """Restore ``array`` to ``dtype`` if a ``.npy`` stores its bits as integers; otherwise return it unchanged."""
    row, target = DTYPES[dtype], to_numpy(dtype)
    if target.kind not in "V" and target.isbuiltin == 1:
        return array
    if row.kind in "iu" and array.dtype.kind in "iu" and array.dtype.itemsize == 1:
        return array.astype(target)
    if array.dtype.kind in "uV" and array.dtype.itemsize == target.itemsize:
        return np.ascontiguousarray(array).view(target)
    return array


def to_storage(array: np.ndarray) -> np.ndarray:
    """Convert ``array`` to a dtype that a ``.npy`` can represent."""
    if array.dtype.isbuiltin == 1:
        return array
    if array.dtype.name in ("int2", "int4", "uint2", "uint4"):
        return array.astype(np.int8)
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def parse_sizes(texts: Sequence[str], arguments: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Parse ``["b=8"]`` to ``{"b": 8}``.

    Raises
    ------
    CallError
        If a text cannot be parsed, or names a dim that ``arguments`` do not have.
    """
    known = dim_names(arguments)
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not (value.isascii() and value.isdigit() and len(value) < 20):
            raise CallError("", f"cannot read --dim={_shortened_value(text)}", expected="NAME=SIZE, such as --dim=b=8")
        if name.strip() not in known:
            dims = ", ".join(sorted(known)) or "none: all sizes are fixed"
            raise CallError("", f"--dim={text}: no dim is called {name.strip()}", expected=dims)
        found[name.strip()] = int(value)
    return found


def sizes_with_notice(texts: Sequence[str], signature: Signature, values: Sequence[Any] = ()) -> dict[str, int]:
    """Return the sizes of all symbolic dims of a function, and print the assumed ones on standard error.

    ``texts`` are the values of ``--dim``. The first arguments ``values`` determine the sizes of their own dims.

    Raises
    ------
    CallError
        As :func:`parse_sizes`.
    """
    sizes = parse_sizes(texts, signature.arguments)
    for argument, value in zip(signature.arguments, values):
        for dim, size in zip(argument["dims"], np.shape(value)):
            if isinstance(dim, str) and dim.isidentifier():
                sizes.setdefault(dim, size)
    assumed = assumed_sizes(signature.arguments[len(values) :], signature.typical, sizes)
    print_assumed(assumed, signature.typical)
    return {**sizes, **assumed}


def print_assumed(sizes: Mapping[str, int], typical: Collection[str]) -> None:
    """Print assumed sizes, if any, on standard error; ``typical`` has the names of the typical ones."""
    if sizes:
        print(f"{assumed_text(sizes, typical)}; --dim {next(iter(sizes))}=... is another size", file=sys.stderr)


def save_array(path: str, array: np.ndarray, append: bool) -> None:
    """Write ``array`` as ``.npy``; ``append`` adds it to the end of the file, like IREE's ``+``.

    Raises
    ------
    OSError
        If the file cannot be written; the error names it, and an existing file is unchanged.
    """
    stored = np.ascontiguousarray(to_storage(array)).reshape(array.shape)
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(stored))
    write = append_all_or_none if append else write_atomically
    write(path, [header.getvalue(), stored])
