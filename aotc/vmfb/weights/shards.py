"""Weights of a model of several ranks: a checkpoint of whole arrays is split into one file for each group of ranks.

A rank's columns of a matrix are in every page of the checkpoint, so a rank that mapped it would read all of it. Files
of parts are contiguous: a rank maps its own, and reads nothing else. Ranks whose parts are the same share a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from aotc.vmfb.arguments import type_text
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.dtypes import size_of, to_numpy
from aotc.vmfb.errors import BundleError
from aotc.vmfb.host.files import write_atomically
from aotc.vmfb.memory.mapped_file import MappedFile
from aotc.vmfb.memory.pointers import address_of
from aotc.vmfb.ranks.layout import Mesh, layout_text, mesh_of, slices_of_rank
from aotc.vmfb.weights.own import WeightPlaces, weight_places_of
from aotc.vmfb.weights.safetensors import METADATA, OWN_DTYPES, encode_header, make_tensor_row
from aotc.vmfb.weights.tensors import Tensors, read_tensors, require_tensor_types

TABLE = "shards.json"
"""The file of a folder of shards that has the mesh, the weights, and each file with its ranks and its sha256."""

INDEX = ".index.json"
"""The end of the name of a list of safetensors files: ``{"weight_map": {tensor: file}}``."""

# Bytes that are read and written at a time: the memory that cutting a checkpoint takes.
PIECE_BYTES = 16 << 20

Held = tuple[dict[str, np.ndarray], dict[str, MappedFile | None]]
"""Arrays by path, and the mapped file that each is in, None for a copy."""


class ShardFile(NamedTuple):
    """A file with the parts of all weights that a group of ranks has.

    Attributes
    ----------
    file : str
        Its name in the folder.
    ranks : list of int
        The ranks that map it.
    bytes : int
    sha256 : str
        In hexadecimal digits.
    """

    file: str
    ranks: list[int]
    bytes: int
    sha256: str


class Checkpoint:
    """Memory-mapped whole arrays, in one safetensors file or in the files of an index.

    Tensors are named by the paths of weights: ``params/w``. Where all paths begin alike, names may leave that out, and
    dots may be in place of slashes: ``layers.0.w`` for ``params/layers/0/w``.
    """

    def __init__(self, path: str | os.PathLike[str], paths: Sequence[str]) -> None:
        self.where = os.fspath(path)
        self._files = self._open_files()
        owners = {name: tensors for tensors in self._files for name in tensors.rows}
        aliases = _other_weight_names(paths)
        named = [(aliases.get(name, name), name) for name in owners]
        self._names = dict(named)
        self.rows = {path: owners[name].rows[name] for path, name in named}
        self._owners = {path: owners[name] for path, name in named}
        if len(self._names) < len(named):
            twice = sorted({path for path in self._names if sum(p == path for p, _ in named) > 1})
            raise BundleError(self.where, "two tensors are the same weight", ", ".join(twice))

    def _open_files(self) -> list[Tensors]:
        """Open the checkpoint's safetensors file, or all files that its index lists."""
        if not self.where.endswith(INDEX):
            return [read_tensors(self.where)]
        try:
            with open(self.where, "rb") as file:
                rows = json.load(file)["weight_map"]
            names = sorted({str(name) for name in rows.values()})
        except OSError as error:
            raise BundleError(self.where, f"the file cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            expected = '{"weight_map": {tensor: file}}'
            raise BundleError(self.where, "this is not an index of safetensors files", expected=expected) from None
        if bad := [name for name in names if os.path.basename(name) != name]:
            raise BundleError(self.where, "a file of the index is in another folder", bad[0], "a name without folders")
        return [read_tensors(os.path.join(os.path.dirname(self.where), name)) for name in names]

    def is_whole(self, places: WeightPlaces) -> bool:
        """Return True if some tensor has the whole shape of a weight that is partitioned over ranks."""
        found = ((path, self.rows[path]) for path in places.cuts if path in self.rows)
        return any(
            row == make_tensor_row(places.types[p][0], places.cuts[p][0], row["data_offsets"][0]) for p, row in found
        )

    def check(self, places: WeightPlaces) -> None:
        """Check that the checkpoint has each weight as a whole array, and nothing else.

        Raises
        ------
        BundleError
            Its message lists all differences.
        """
        whole = {path: (dtype, _whole_weight(places, path)) for path, (dtype, _) in places.types.items()}
        problems = [f"{path} is missing, {type_text(*type_)}" for path, type_ in whole.items() if path not in self.rows]
        problems += [f"there is no weight {self._names[path]!r}" for path in self.rows if path not in whole]
        for path, (dtype, shape) in whole.items():
            row = self.rows.get(path)
            if row is not None and row != make_tensor_row(dtype, shape, row["data_offsets"][0]):
                found = type_text(OWN_DTYPES.get(row["dtype"]) or row["dtype"], row["shape"])
                problems.append(f"{path} is {found}, expected {type_text(dtype, shape)}")
        if problems:
            raise BundleError(self.where, "the checkpoint does not fit:\n  " + "\n  ".join(problems))

    def read_part_in_pieces(
        self, path: str, dtype: str, whole: Sequence[int], slices: tuple[slice, ...]
    ) -> Iterator[np.ndarray]:
        """Yield the bytes of the part ``slices`` of a weight in order, in pieces; pages that were read are released.

        ``whole`` is the shape of the whole array.
        """
        for view in _view_blocks(self._read_as_bytes(path, dtype, whole)[slices]):
            yield np.ascontiguousarray(view).reshape(-1)
            self._release_pages(path, view)

    def read_part(
        self, path: str, dtype: str, whole: Sequence[int], slices: tuple[slice, ...]
    ) -> tuple[np.ndarray, MappedFile | None]:
        """Read the part ``slices`` of a weight, and return it with the mapped file that contains it.

        Contiguous parts are views of the file; others are copied, and the file is None.
        """
        view = self._read_as_bytes(path, dtype, whole)[slices]
        type_ = to_numpy(dtype)
        if view.flags.c_contiguous and address_of(view) % type_.alignment == 0:
            return view.reshape(-1).view(type_).reshape(view.shape[:-1]), self._owners[path].file
        made = np.empty(view.shape, np.uint8)
        made[...] = view
        self._release_pages(path, view)
        return made.reshape(-1).view(type_).reshape(view.shape[:-1]), None

    def _read_as_bytes(self, path: str, dtype: str, whole: Sequence[int]) -> np.ndarray:
        """Return a whole array as u8, whose last dim is the bytes of an element: the file may not align elements."""
        size = size_of(dtype)
        flat = self._owners[path].array(self._names[path], "u8", (-1,))
        return flat.reshape(*whole, size)

    def _release_pages(self, path: str, view: np.ndarray) -> None:
        file = self._owners[path].file
        if file is not None and view.size:
            file.release_pages(address_of(view), 1 + sum((n - 1) * step for n, step in zip(view.shape, view.strides)))


def _other_weight_names(paths: Sequence[str]) -> dict[str, str]:
    """Return the path of each weight by each of its alternative names; ambiguous names are left out."""
    roots = {path.partition("/")[0] for path in paths}
    found: dict[str, set[str]] = {}
    for path in paths:
        short = path.partition("/")[2] if len(roots) == 1 else ""
        for name in {path.replace("/", "."), short, short.replace("/", ".")} - {"", path}:
            found.setdefault(name, set()).add(path)
    return {name: path for name, (path, *more) in found.items() if not more and name not in paths}


def _view_blocks(view: np.ndarray) -> Iterator[np.ndarray]:
    """Yield a view in blocks of its slowest dims, each of at most :data:`PIECE_BYTES` bytes."""
    if view.nbytes <= PIECE_BYTES or view.ndim == 1:
        yield view
        return
    rows = PIECE_BYTES // max(view[:1].nbytes, 1)
    if not rows:
        for inner in view:
            yield from _view_blocks(inner)
        return
    for start in range(0, len(view), rows):
        yield view[start : start + rows]


def _whole_weight(places: WeightPlaces, path: str) -> Sequence[int]:
    return places.cuts[path][0] if path in places.cuts else places.types[path][1]


def _slices_of_rank_part(places: WeightPlaces, mesh: Mesh, path: str, rank: int) -> tuple[slice, ...]:
    shape = places.types[path][1]
    if path not in places.cuts:
        return tuple(slice(n) for n in shape)
    return slices_of_rank(mesh, places.cuts[path][1], rank, shape)


def shard_weights(
    bundle: str | os.PathLike[str], checkpoint: str | os.PathLike[str], folder: str | os.PathLike[str]
) -> list[ShardFile]:
    """Cut a checkpoint into the parts that the ranks of a sharded model read; nothing is compiled.

    Memory is bounded: arrays are read through memory maps, and written in pieces.

    Parameters
    ----------
    bundle : path
        A bundle that was compiled with a mesh and with ``bind=[...]``.
    checkpoint : path
        A safetensors file of whole arrays, or a ``*.safetensors.index.json`` that lists several.
    folder : path
        The folder to write to; made if it is missing. ``aotc.load(bundle, weights=folder)`` maps a rank's file.

    Returns
    -------
    list of ShardFile

    Raises
    ------
    BundleError
        If the bundle is for one device or has no bound arguments, or the checkpoint does not fit or cannot be read.
    OSError
        If a file cannot be written.
    """
    opened = open_bundle(os.fspath(bundle))
    entry = opened.manifest.get("mesh")
    if entry is None:
        hint = "aotc update-weights, or aotc.load(bundle, weights=...)"
        raise BundleError(opened.where, "the bundle is for one device, which has whole arrays", hint=hint)
    mesh = mesh_of(entry)
    places = weight_places_of(opened.manifest, opened.manifest["variants"][0], opened.where)
    source = Checkpoint(checkpoint, list(places.types))
    source.check(places)
    os.makedirs(folder, exist_ok=True)
    stem = os.path.basename(os.fspath(bundle)).removesuffix(".vmfb")
    written = [
        _write_rank_parts(os.path.join(folder, stem + name + ".safetensors"), source, places, mesh, ranks)
        for name, ranks in _ranks_with_same_parts(mesh, places).items()
    ]
    table = {"mesh": mesh.entry(), "weights": _shard_table_rows(places), "files": [file._asdict() for file in written]}
    write_atomically(os.path.join(folder, TABLE), [json.dumps(table, indent=1).encode()])
    return written


def _ranks_with_same_parts(mesh: Mesh, places: WeightPlaces) -> dict[str, list[int]]:
    """Group the ranks that have equal parts of all weights, by a name from their coordinates such as ``-model0``."""
    cut = {axis for _, layout in places.cuts.values() for axes in layout for axis in axes}
    found: dict[str, list[int]] = {}
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        name = "".join(f"-{axis}{at[axis]}" for axis, size in mesh.axes if axis in cut and size > 1)
        found.setdefault(name, []).append(rank)
    return found


def _shard_table_rows(places: WeightPlaces) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for path, (dtype, shape) in places.types.items():
        whole, layout = places.cuts.get(path, (tuple(shape), ()))
        rows[path] = {"dtype": dtype, "dims": list(shape), "whole": list(whole), "cut": layout_text(layout)}
    return rows


def _write_rank_parts(path: str, source: Checkpoint, places: WeightPlaces, mesh: Mesh, ranks: list[int]) -> ShardFile:
    """Write one file with the parts of all weights that the group ``ranks`` has."""
    header: dict[str, Any] = {METADATA: {"aotc.mesh": str(mesh), "aotc.ranks": ", ".join(map(str, ranks))}}
    order = sorted(places.types, key=lambda p: -to_numpy(places.types[p][0]).alignment)  # so that each is aligned
    at = 0
    for name in order:
        header[name] = make_tensor_row(*places.types[name], at)
        at = header[name]["data_offsets"][1]
    digest, size = sha256(), 0

    def parts() -> Iterator[Any]:
        """Yield the header and the pieces of all parts; count bytes and update the digest."""
        nonlocal size
        start = encode_header(header)
        digest.update(start)
        size += len(start)
        yield start
        for name in order:
            slices = _slices_of_rank_part(places, mesh, name, ranks[0])
            for piece in source.read_part_in_pieces(name, places.types[name][0], _whole_weight(places, name), slices):
                digest.update(piece.data)
                size += piece.nbytes
                yield piece.data

    write_atomically(path, parts())
    return ShardFile(os.path.basename(path), ranks, size, digest.hexdigest())


def weights_of_rank(
    path: str | os.PathLike[str], places: WeightPlaces, mesh: Mesh, rank: int, verify: bool = False
) -> Held:
    """Return a rank's weights from a folder of shards, a checkpoint of whole arrays, or a file of the rank's parts.

    Returns
    -------
    arrays : dict of str to numpy.ndarray
        The rank's part of each weight, by path.
    files : dict of str to MappedFile or None
        The mapped file that contains each part.

    Raises
    ------
    BundleError
        If they do not fit, cannot be read, or, with ``verify``, are damaged.
    """
    where = os.fspath(path)
    if is_shard_folder(where):
        return _weights_of_folder(where, places, mesh, rank, verify)
    source = Checkpoint(where, list(places.types))
    if not source.is_whole(places):
        tensors = read_tensors(where)
        return require_tensor_types(tensors, places.types, where), dict.fromkeys(places.types, tensors.file)
    source.check(places)
    parts = {
        p: source.read_part(p, dtype, _whole_weight(places, p), _slices_of_rank_part(places, mesh, p, rank))
        for p, (dtype, _) in places.types.items()
    }
    return {p: array for p, (array, _) in parts.items()}, {p: file for p, (_, file) in parts.items()}


def is_shard_folder(path: str | os.PathLike[str]) -> bool:
    """Return True if a path is a folder of shards, or the table in it."""
    return os.path.isdir(path) or os.path.basename(path) == TABLE


def _weights_of_folder(where: str, places: WeightPlaces, mesh: Mesh, rank: int, verify: bool) -> Held:
    """Open the file of a rank in a folder of shards, after a check that the folder belongs to this bundle and mesh."""
    folder = where if os.path.isdir(where) else os.path.dirname(where)
    table = os.path.join(folder, TABLE)
    try:
        with open(table, "rb") as file:
            entry = json.load(file)
        own = mesh_of(entry["mesh"])
        rows = [ShardFile(**row) for row in entry["files"]]
        found = next(row for row in rows if rank in row.ranks)
        path = os.path.join(folder, os.path.basename(found.file))
        weights = entry["weights"]
    except OSError as error:
        hint = f"aotc shard-weights model.vmfb checkpoint.safetensors -o {folder}"
        raise BundleError(table, f"the file cannot be read: {error.strerror}", hint=hint) from None
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, RecursionError):
        raise BundleError(table, "this is not a table of shards", expected="what aotc shard-weights writes") from None
    if own != mesh or weights != _shard_table_rows(places):
        expected = ", ".join(f"{p} cut by {row['cut']}" for p, row in _shard_table_rows(places).items() if row["cut"])
        hint = "aotc shard-weights for this bundle"
        raise BundleError(table, "these are shards for another bundle", f"mesh {own}", f"mesh {mesh}, {expected}", hint)
    tensors = read_tensors(path)
    if verify and tensors.file is not None and sha256(tensors.file.data).hexdigest() != found.sha256:
        raise BundleError(path, "the weights are damaged: their sha256 differs", hint="aotc shard-weights, again")
    return require_tensor_types(tensors, places.types, path), dict.fromkeys(places.types, tensors.file)
