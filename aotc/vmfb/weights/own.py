"""A bundle's own weights: named arrays for arguments of its functions, in a segment or in a separate file.

Weights are the arguments that the bundle was compiled to bind (``prepared`` in the manifest). They are named by path:
``params/layers_0/kernel`` for ``params['layers_0']['kernel']``. A digest of names, types and bytes identifies the file
that belongs to the bundle.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from aotc.vmfb.arguments import Argument, refuse_whole_array, type_text
from aotc.vmfb.bundle import OpenedBundle, write_bundle
from aotc.vmfb.dtypes import from_numpy
from aotc.vmfb.errors import ArgumentError, ArgumentValueError, BundleError, CallError
from aotc.vmfb.host.files import write_atomically
from aotc.vmfb.memory.mapped_file import MappedFile
from aotc.vmfb.ranks.layout import Layout, layout_of
from aotc.vmfb.result_names import slash_separated_path
from aotc.vmfb.weights.constants import find_weights_file
from aotc.vmfb.weights.tensors import Tensors, Types, require_tensor_types, safetensors_pieces

WEIGHTS = "weights"
_DIGEST = "aotc.weights"  # its key in the file's metadata
_BIND = "compile it with bind=[...]"
_SHARDS = "a folder that aotc shard-weights has written"


class WeightPlaces(NamedTuple):
    """Which arguments of a variant's functions are weights.

    Attributes
    ----------
    types : dict of str to (str, list of int)
        Dtype and shape of each weight, by path.
    functions : dict of str to dict of str to int
        For each function the paths of its weights, and their argument numbers.
    names : dict of str to str
        The path of each weight by argument name.
    cuts : dict of str to (tuple of int, Layout)
        The whole shape and the layout of each weight of which a rank has a part.
    """

    types: dict[str, tuple[str, list[int]]]
    functions: dict[str, dict[str, int]]
    names: dict[str, str]
    cuts: dict[str, tuple[tuple[int, ...], Layout]]


def weight_places_of(manifest: Mapping[str, Any], variant: Mapping[str, Any], where: str) -> WeightPlaces:
    """Find the arguments of a variant's functions that are weights.

    Raises
    ------
    BundleError
        If no argument is a weight, or functions disagree about the type of one.
    """
    found = WeightPlaces({}, {}, {}, {})
    for name in variant["functions"]:
        entry = manifest["functions"][name]
        numbers = entry.get("bound") or variant.get("prepared", {}).get(name, {}).get("weights", ())
        arguments = entry["arguments"]
        if not numbers:
            continue
        own = found.functions[name] = {slash_separated_path(arguments[n]["name"]): n for n in numbers}
        for path, n in own.items():
            type_ = arguments[n]["dtype"], list(arguments[n]["dims"])
            if found.types.setdefault(path, type_) != type_:
                known = type_text(*found.types[path])
                what = f"{path} is {type_text(*type_)} in function {name!r}, and {known} in another"
                raise BundleError(where, what, hint="call one of the parameters otherwise")
            found.names[arguments[n]["name"]] = path
            if "whole" in arguments[n]:
                found.cuts[path] = tuple(arguments[n]["whole"]), layout_of(arguments[n]["layout"])
        if len(own) < len(numbers):
            raise BundleError(where, f"two weights of function {name!r} have one path", ", ".join(own))
    if not found.functions:
        raise BundleError(where, "the bundle was compiled for no weights that are given to it", hint=_BIND)
    return found


def read_own_weights(
    bundle: OpenedBundle, types: Types, verify: bool = False
) -> tuple[dict[str, np.ndarray], MappedFile | None]:
    """Open the weights of a bundle.

    Returns
    -------
    arrays : dict of str to numpy.ndarray
        By path; memory-mapped if the file is large.
    file : MappedFile or None
        The mapped file that contains them.

    Raises
    ------
    BundleError
        If the weights are missing, have other types, or belong to another bundle.
    """
    entry = bundle.manifest[WEIGHTS]
    where = bundle.where
    owner: MappedFile | None
    if "segment" in entry:
        data, owner = bundle.segment(entry["segment"]), bundle.mapped_file_of_segment(entry["segment"])
    elif "file" not in entry:
        raise BundleError(where, "the bundle does not say where its weights are", sorted(entry), "a segment or a file")
    else:
        where = find_weights_file(bundle, entry["file"])
        owner = bundle.open_companion(where)
        data = owner.data
    found = Tensors(data, where, owner)
    if found.metadata.get(_DIGEST) != entry["digest"]:
        hint = f"aotc.load(..., weights={where!r}) takes them; aotc update-weights makes them the bundle's own"
        raise BundleError(where, f"these are not the weights of {bundle.where}", hint=hint)
    arrays = require_tensor_types(found, types, where)
    if verify and weights_digest(arrays) != entry["digest"]:
        raise BundleError(where, "the weights are damaged: their sha256 differs", hint="the file that was written")
    return arrays, owner


def weights_digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Return a digest of the names, types and bytes of weights, independent of their order."""
    digest = sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name], order="C")
        digest.update(f"{name} {type_text(from_numpy(array.dtype), array.shape)}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def validate_weights(values: Any, places: WeightPlaces, where: str, whole: bool = True) -> dict[str, np.ndarray]:
    """Check the weights that a user passes, and return them by path; one error lists all that do not fit.

    Parameters
    ----------
    values : mapping
        Arrays by path or argument name; pytrees of dicts by the names of trees.
    places : WeightPlaces
    where : str
    whole : bool
        True if no weight may be missing.

    Raises
    ------
    CallError or BundleError
        Its message lists all that are missing, unknown, or of another dtype or shape.
    """
    if not isinstance(values, Mapping):
        raise ArgumentError(where, "weights are not a mapping", type(values).__name__, "{'params/w': array}, or a path")
    if isinstance(values, Tensors):
        types = {path: row for path, row in places.types.items() if whole or path in values}
        return require_tensor_types(values, types, where)
    found, problems = {}, []
    for name, value in _weights_by_path(values):
        path = places.names.get(name, name)
        if path not in places.types:
            problems.append(f"there is no weight {name!r}")
            continue
        dtype, shape = places.types[path]
        row: dict[str, Any] = {"name": path, "dtype": dtype, "dims": shape, "donated": False}
        try:
            if path in places.cuts:
                partition = dict(zip(("whole", "layout"), places.cuts[path]))
                refuse_whole_array({**row, **partition}, path, value, where, _SHARDS)
            found[path] = Argument(0, row).prepare(value, where)
        except CallError as error:
            description = str(error).removeprefix(f"{where}: error: ").replace(f"argument 0 ({path})", path)
            problems.append(" ".join(description.split()))
    known = {places.names.get(name, name) for name, _ in _weights_by_path(values)}
    missing = [path for path in places.types if whole and path not in known]
    problems += [f"{path} is missing, {type_text(*places.types[path])}" for path in missing]
    if problems:
        raise ArgumentValueError(where, "weights do not fit:\n  " + "\n  ".join(problems))
    return found


def _weights_by_path(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Flatten nested mappings and lists of weights to pairs of path and array."""
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            rows += _weights_by_path(value, f"{name}/")
        elif isinstance(value, list | tuple):
            rows += _weights_by_path({str(n): x for n, x in enumerate(value)}, f"{name}/")
        else:
            rows.append((name, value))
    return rows


def bundle_with_weights(data: Any, values: Mapping[str, Any], file: str = "") -> bytes:
    """Return the bytes of an unsigned bundle with new weights, in a segment or in the new file ``file``.

    ``data`` is the bundle, ``values`` are the weights by path.

    Raises
    ------
    BundleError
        If the bundle was compiled without bound arguments.
    CallError
        If the weights do not fit.
    OSError
        If the file cannot be written.
    """
    opened = data if isinstance(data, OpenedBundle) else OpenedBundle("<bytes>", None, memoryview(data))
    refuse_unbound_bundle(opened)
    found = [weight_places_of(opened.manifest, variant, opened.where) for variant in opened.manifest["variants"]]
    arrays = validate_weights(values, found[0], opened.where)
    arrays = {path: arrays[path] for path in found[0].types}
    digest = weights_digest(arrays)
    parts = safetensors_pieces(arrays, {_DIGEST: digest})
    entry: dict[str, Any] = {"digest": digest}
    if file:
        write_atomically(os.fspath(file), parts)
        return bundle_with_weights_entry(opened, {**entry, "file": os.path.basename(file)}, None)
    return bundle_with_weights_entry(opened, entry, parts)


def refuse_unbound_bundle(opened: OpenedBundle) -> None:
    """Refuse a bundle that cannot store weights.

    Raises
    ------
    BundleError
        If it is for several ranks, or was compiled without bound arguments.
    """
    if "mesh" in opened.manifest:
        hint = "aotc shard-weights, and aotc.load(bundle, weights=FOLDER)"
        raise BundleError(opened.where, "a bundle for several ranks stores no weights", hint=hint)
    for variant in opened.manifest["variants"]:
        weight_places_of(opened.manifest, variant, opened.where)


def bundle_with_weights_entry(opened: OpenedBundle, entry: Mapping[str, Any], parts: Sequence[Any] | None) -> bytes:
    """Return the bytes of a bundle whose manifest entry for weights is ``entry``.

    With ``parts``, also replace the content of the weights' segment.
    """
    manifest = {key: value for key, value in opened.manifest.items() if key != "segments"}
    segments: list[tuple[str, Any]] = [
        (row["name"], opened.verified_segment(n)) for n, row in enumerate(opened.manifest["segments"])
    ]
    old = (manifest.get(WEIGHTS) or {}).get("segment")
    number = len(segments) if old is None else old
    if parts is not None:
        segments[number : number + 1] = [(WEIGHTS, list(parts))]
        entry = {**entry, "segment": number}
    elif old is not None:
        segments[old] = (WEIGHTS, b"")
    made = write_bundle(None, {**manifest, WEIGHTS: dict(entry)}, segments)
    assert made is not None
    return made


def copy_own_weights(opened: OpenedBundle, data: bytes) -> bytes:
    """Return the recompiled bundle ``data`` with the weights of the original bundle ``opened``."""
    entry = opened.manifest.get(WEIGHTS)
    if entry is None:
        return data
    kept = {key: value for key, value in entry.items() if key != "segment"}
    parts = [opened.verified_segment(entry["segment"])] if "segment" in entry else None
    return bundle_with_weights_entry(OpenedBundle("<bytes>", None, memoryview(data)), kept, parts)
