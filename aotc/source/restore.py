"""Restore the source of a bundle: removed weights are inserted again and verified by checksum."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from hashlib import sha256
from typing import Any

import numpy as np

from aotc.source.limits import DIFFERENCES_BYTES, MOST_SOURCE_BYTES
from aotc.source.moves import undo_packing
from aotc.source.record import SCHEMA, VERSION, EmbeddedSource, measured_target, refused_option
from aotc.targets import OTHER_NAMES, TARGETS, Target
from aotc.vmfb import trees
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.errors import BundleError
from aotc.vmfb.manifest import problems
from aotc.vmfb.verify.unpack import unpack_msgpack
from aotc.vmfb.weights.constants import load_constants
from aotc.vmfb.weights.differences import decompress_differences

_AGAIN = "compile the model itself again"


def restore_source(opened: OpenedBundle) -> EmbeddedSource:
    """Return the source of a bundle, without running any of its code.

    Raises
    ------
    BundleError
        If the bundle has no source, is damaged, or a weight differs from the compiled model's.
    """
    entry = opened.manifest.get("source")
    if entry is None:
        raise BundleError(opened.where, "the bundle has no source: it was compiled with --no-source", hint=_AGAIN)
    record = _source_record(opened, entry)
    targets = tuple(_recorded_target(opened.where, row) for row in record["targets"])
    facts = (record["path"], record["metadata"], record["options"], targets, record["variants"])
    return EmbeddedSource(_bytecode_with_constants(opened, entry, record), *facts)


def _damaged_source_error(where: str, what: str, found: Any = "") -> BundleError:
    return BundleError(where, f"the source of the bundle is damaged: {what}", found, hint=_AGAIN)


# Bytes that a decompressed source may have whatever its size in the bundle. Models of a few thousand ops without their
# weights are smaller.
FREE_SOURCE_BYTES = 1 << 26
# Decompressed bytes of a source for each byte in the bundle, at most. Bytecode compresses to a fifth, equal layers to a
# thirtieth; a ratio of a thousand is a decompression bomb.
SOURCE_RATIO = 100


def _source_record(opened: OpenedBundle, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Decompress and validate the record of a bundle's source."""
    packed, size = opened.verified_segment(entry["segment"]), entry["bytes"]
    if size > min(MOST_SOURCE_BYTES, FREE_SOURCE_BYTES + SOURCE_RATIO * packed.nbytes):
        raise _damaged_source_error(opened.where, "it is too large", f"{size:,} bytes")
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(packed, size + 1)
        if len(data) != size or not stream.eof:
            raise ValueError(f"{len(data):,} bytes, expected {size:,}")
        record = unpack_msgpack(data, unicode_errors="surrogateescape")
    except Exception as error:  # zlib and msgpack raise many types on bad input
        raise _damaged_source_error(opened.where, str(error)) from None
    version = record.get("version") if isinstance(record, dict) else None
    if version != VERSION:
        hint = f"a newer aotc, or {_AGAIN}"
        raise BundleError(opened.where, "the source has another version", version, f"{VERSION}", hint)
    if problem := next(problems(record, SCHEMA, "source"), None):
        raise _damaged_source_error(opened.where, problem)
    record.setdefault("variants", len(record["targets"]))
    if problem := next(_record_inconsistencies(record), None):
        raise _damaged_source_error(opened.where, problem)
    return record


def _record_inconsistencies(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the inconsistencies of a record that matches its schema."""
    if name := refused_option(record["options"]):
        yield f"it sets the option {name!r}, which only a caller may set or this aotc does not know"
    if not 0 < record["variants"] <= len(record["targets"]):
        yield f"{len(record['targets'])} targets of {record['variants']} variants"
    if (expanded := sum(hole["size"] for hole in record["holes"] if "differences" in hole)) > DIFFERENCES_BYTES:
        yield f"{expanded:,} bytes of constants as differences, expected at most {DIFFERENCES_BYTES:,}"
    for known in (record["metadata"], *record["metadata"].get("entries", {}).values()):
        if max(known.get("kept", ()), default=-1) >= len(known.get("arg_names", ())):
            yield "more arguments than names"
        for name in ("in_tree", "out_tree"):
            try:
                trees.count_leaves(known.get(name) or {"kind": "leaf"})
            except ValueError as error:
                yield f"{name}: {error}"


def _recorded_target(where: str, row: Mapping[str, Any]) -> Target:
    """Return the target of a recorded row, with the measurements of the compiling machine."""
    name = OTHER_NAMES.get(row["name"], row["name"])
    if name not in TARGETS:
        raise BundleError(where, "this aotc has no such target", name, ", ".join(TARGETS), "--target")
    try:
        return measured_target(row)
    except ValueError as error:
        raise _damaged_source_error(where, str(error)) from None


def _bytecode_with_constants(opened: OpenedBundle, entry: Mapping[str, Any], record: Mapping[str, Any]) -> bytes:
    """Return the bytecode of a source with all removed constants inserted again."""
    arrays = _constants_reader(opened)
    code, parts = memoryview(record["code"]), []
    used = end = 0
    for hole in record["holes"]:
        count = hole["at"] - end
        if not 0 <= count <= code.nbytes - used:
            raise _damaged_source_error(opened.where, f"a weight at {hole['at']}")
        end = hole["at"] + hole["size"]
        parts += [code[used : used + count], _elements_of_removed_constant(opened, entry, hole, arrays)]
        used += count
    return b"".join([*parts, code[used:]])


def _constants_reader(opened: OpenedBundle) -> Callable[[int], np.ndarray]:
    """Return a cached function that loads all constants of a variant, by its number, as bytes."""

    @cache
    def constants(number: int) -> np.ndarray:
        memory = load_constants(opened, opened.manifest["variants"][number].get("constants"))
        if not memory.size:
            return np.zeros(0, np.uint8)
        array = np.ctypeslib.as_array((ctypes.c_uint8 * memory.size).from_address(memory.address))
        owners.append(memory.owner)
        return array

    owners: list[Any] = []
    return constants


def _elements_of_removed_constant(
    opened: OpenedBundle, entry: Mapping[str, Any], hole: Mapping[str, Any], arrays: Callable[[int], np.ndarray]
) -> memoryview:
    """Return the bytes of a removed constant (a ``hole`` of the record), verified by checksum."""
    try:
        if "array" in hole:
            elements = _bytes_from_array(hole["array"], arrays)
        elif "differences" in hole:
            elements = decompress_differences(hole["differences"], hole["word"], hole["size"])
        else:
            at = hole["kept"]
            elements = opened.segment(entry["weights"])[at : at + hole["size"]]
    except (ValueError, IndexError, TypeError, KeyError, OverflowError, MemoryError) as error:
        raise _damaged_source_error(opened.where, f"the weight at {hole['at']}: {error}") from None
    digest = sha256(elements).digest()
    if digest != hole["sha256"] or elements.nbytes != hole["size"]:
        raise BundleError(
            opened.where, f"the weight at {hole['at']} of the source is not the one that was compiled",
            f"sha256 {digest.hex()}", f"sha256 {hole['sha256'].hex()}", "the weights that belong to the bundle",
        )  # fmt: skip
    return elements


def _bytes_from_array(place: Mapping[str, Any], arrays: Callable[[int], np.ndarray]) -> memoryview:
    whole = arrays(place["variant"])[place["offset"] : place["offset"] + place["size"]]
    array = undo_packing(whole.view(to_numpy(place["dtype"])).reshape(place["shape"]), place["way"])
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
