"""Weights of a bundle: values of bound arguments, and constants outside the bundle.

Values of bound arguments are the example arguments that the model was compiled with. Constants outside the bundle are a
safetensors file in the layout of the program. The loader maps the file and uses the tensors in place. The format allows
no gaps between tensors, so padding for alignment is stored as tensors named ``__align_N``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aotc.diagnostics import UNKNOWN, CompileError
from aotc.guard import guard
from aotc.ir.program.ir import Constants
from aotc.options import UNPACKED, Options
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.dtypes import from_numpy
from aotc.vmfb.errors import BundleError, CallError
from aotc.vmfb.host.files import write_atomically
from aotc.vmfb.weights.own import bundle_with_weights, weight_places_of
from aotc.vmfb.weights.safetensors import encode_header, make_tensor_row

Values = Mapping[str, Sequence[Any]]


def compile_with_weights(raws: list[Any], options: Options, compile_raw: Callable[[Any, Options], bytes]) -> bytes:
    """Compile the only element of ``raws``, and store the examples of bound arguments as the bundle's weights.

    The examples are stored only if ``options.weights`` is a file or ``unpacked``, and arguments are bound. A model from
    a file has no examples; the weights file then receives its constants.

    Raises
    ------
    CompileError
        If there are no values to store, or the file cannot be written.
    """
    values: Values = raws[0].values
    place = options.weights
    if options.bind and place != "inline" and "ranks" in raws[0].metadata:
        what = f"weights={os.fspath(place)!r} keeps whole arrays in the bundle, and the model is for several ranks"
        raise CompileError.at(UNKNOWN, what, hint="bind=[...] alone, then aotc shard-weights")
    if place == UNPACKED and not (options.bind and values):
        what = f"weights={UNPACKED!r} keeps the examples of bound arguments, and there are none"
        raise CompileError.at(UNKNOWN, what, hint="bind=['params'], and arrays as examples of a function")
    if not options.bind or not values or place == "inline":
        return compile_raw(raws.pop(), options)
    data = compile_raw(raws.pop(), replace(options, weights="inline"))
    with guard("while writing the weights", options, passing=(CompileError,)):
        opened = open_bundle(data)
        try:
            places = weight_places_of(opened.manifest, opened.manifest["variants"][0], opened.where)
            arrays = {
                path: _weight_array(values[name][n], path)
                for name, own in places.functions.items()
                for path, n in own.items()
            }
            return bundle_with_weights(opened, arrays, "" if place == UNPACKED else os.fspath(place))
        except (BundleError, CallError) as error:
            raise CompileError.at(UNKNOWN, str(error)) from None


def _weight_array(value: Any, path: str) -> Any:
    """Return the example of a bound argument; raise CompileError if it has no values."""
    if not hasattr(value, "__array__"):
        what = f"weights: the example of {path} is a {type(value).__name__}, which has no values to keep"
        raise CompileError.at(UNKNOWN, what, hint="arrays as examples; or weights='inline', and aotc update-weights")
    return value


def write_weights(path: str, constants: Constants) -> dict[str, Any]:
    """Write ``constants`` to a safetensors file ``path`` and return their manifest entry.

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
        _fill_alignment(header, parts, at, offset)
        dtype = from_numpy(array.dtype)
        data = array.reshape(-1).view("u1").data
        key = f"{number}_{name}"
        shape, at = list(array.shape), offset + array.nbytes
        header[key] = make_tensor_row(dtype, shape, offset)
        parts.append(data)
        digest = hashlib.sha256(data).digest()
        tensors.append(
            {"name": key, "dtype": dtype, "shape": shape, "offset": offset, "size": array.nbytes, "sha256": digest}
        )
    _fill_alignment(header, parts, at, constants.size)
    write_atomically(path, [encode_header(header), *parts])
    return {"file": os.path.basename(path), "tensors": tensors, "size": constants.size}


def unreachable_weights_note(data: bytes, weights: str | os.PathLike[str], output: str | os.PathLike[str]) -> str:
    """Return a warning if the bundle ``data`` in the file ``output`` cannot find its file of weights, ``weights``.

    A bundle has the name of the file without its folder. The text is empty if the loader searches the file's folder.
    """
    if weights in ("inline", UNPACKED) or (os.path.exists(output) and not os.path.isfile(output)):
        return ""
    folder = os.path.dirname(os.path.abspath(weights))
    searched = [os.path.dirname(os.path.abspath(output)), *os.environ.get("AOTC_WEIGHTS_PATH", "").split(os.pathsep)]
    manifest = open_bundle(data).manifest
    constants = [(variant.get("constants") or {}).get("external") or {} for variant in manifest["variants"]]
    entries = [manifest.get("weights") or {}, *constants]
    if not any("file" in entry for entry in entries) or folder in map(os.path.abspath, filter(None, searched)):
        return ""
    name, shown = os.path.basename(weights), os.fspath(weights)
    return (
        f"the bundle expects {name} in its own folder: move {shown} next to {os.fspath(output)}, "
        f"or set AOTC_WEIGHTS_PATH={os.path.dirname(shown)}"
    )


def _fill_alignment(header: dict[str, Any], parts: list[Any], at: int, to: int) -> None:
    if to > at:
        header[f"__align_{at}"] = make_tensor_row("u8", (to - at,), at)
        parts.append(bytes(to - at))
