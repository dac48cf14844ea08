"""The bundle format: one file with a compiled program, its weights and its kernels.

Layout (``docs/bundle.md`` has the promises that go with it)::

    header     64 bytes   magic, version, flags, manifest length, manifest sha256, file length
    manifest   msgpack, then zeros up to a multiple of 64
    segments   each at a multiple of 64 from here, zeros between
    signature  128 bytes, if the header's flags say so: of the header, which holds the digests of all the rest

A large file is memory-mapped: weights stay in the page cache, shared by all processes that run the same bundle. All
other data that calls read is copied when the file is opened.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack

from aotc.vmfb.errors import BundleError, BundleNotFoundError
from aotc.vmfb.host.digests import has_digest, sha256_of
from aotc.vmfb.limits import EAGER_BYTES
from aotc.vmfb.manifest import manifest_problem
from aotc.vmfb.memory.mapped_file import MappedFile, allocate_aligned
from aotc.vmfb.verify.unpack import unpack_msgpack

MAGIC = b"AOTCVMFB"
VERSION = 1
FORMAT = 1
ALIGNMENT = 64

_HEADER = struct.Struct("<8sIIQ32sQ")
SIGNED = 1  # the flag
_SIGNATURE = struct.Struct("<8s32s64s24x")  # magic, public key, Ed25519 signature
_SIGNATURE_MAGIC = b"AOTCSIGN"


def _align_offset(size: int) -> int:
    return -size % ALIGNMENT + size


# ---------------------------------------------------------------- writing


def write_bundle(
    path: str | os.PathLike[str] | None, manifest: dict[str, Any], segments: Sequence[tuple[str, Any]]
) -> bytes | None:
    """Write a bundle, or return its bytes.

    Parameters
    ----------
    path : str, path or None
        Path of the file, which is written atomically; None returns the bytes.
    manifest : dict
        In the form of :data:`aotc.vmfb.manifest.SCHEMA`, without ``segments``.
    segments : sequence of (str, buffer or list of buffers)
        Name and bytes of each segment, whole or in pieces, in the order of the numbers in the manifest. Equal contents
        are stored once.

    Returns
    -------
    bytes or None
        The bundle if ``path`` is None. Equal input gives equal bytes.

    Raises
    ------
    BundleError
        If the manifest does not match the schema or the file cannot be written.
    """
    where = "<bytes>" if path is None else os.fspath(path)
    table, stored = _place_segments(segments)
    whole = {**manifest, "segments": table}
    found = manifest_problem(whole)
    if found:
        raise BundleError(where, "the compiler made a manifest that breaks the schema", found)
    packed = msgpack.packb(whole, use_bin_type=True)
    payload = segment_table_bytes(table)
    total = _HEADER.size + _align_offset(len(packed)) + payload
    header = _HEADER.pack(MAGIC, VERSION, 0, len(packed), sha256_of(packed), total)
    parts: list[Any] = [header, packed, bytes(_align_offset(len(packed)) - len(packed))]
    for data, padding in stored:
        parts += [*data, bytes(padding)]
    if path is None:
        return b"".join(parts)
    write_bundle_file(where, parts)
    return None


def _place_segments(segments: Sequence[tuple[str, Any]]) -> tuple[list[dict[str, Any]], list[tuple[list[Any], int]]]:
    """Assign an offset to each segment; segments of equal contents share one.

    Returns
    -------
    table : list of dict
        Name, offset, size and sha256 of each segment, as in the manifest.
    stored : list of (list of buffers, int)
        The different contents in order, each with the number of padding bytes after it.
    """
    table: list[dict[str, Any]] = []
    stored: list[tuple[list[Any], int]] = []
    offsets: dict[tuple[bytes, int], int] = {}
    end = 0
    for name, buffer in segments:
        pieces = [memoryview(b) for b in (buffer if isinstance(buffer, list) else [buffer])]
        data = [p.cast("B") for p in pieces if p.nbytes]
        size = sum(p.nbytes for p in data)
        digest = sha256_of(*data)
        offset = offsets.get((digest, size))
        if offset is None:
            offset = offsets[digest, size] = end
            end += _align_offset(size)
            stored.append((data, _align_offset(size) - size))
        table.append({"name": name, "offset": offset, "size": size, "sha256": digest})
    return table, stored


def segment_table_bytes(table: Sequence[dict[str, Any]]) -> int:
    """Return the total size in bytes of the segments in ``table``, padding included."""
    return max((_align_offset(row["offset"] + row["size"]) for row in table), default=0)


def write_bundle_file(path: str, parts: list[Any]) -> None:
    """Write buffers one after the other to a bundle's file, atomically.

    Raises
    ------
    BundleError
        If the file cannot be written; an existing file is unchanged.
    """
    from aotc.vmfb.host.files import write_atomically  # not needed by a process that only loads

    try:
        write_atomically(path, parts)
    except ValueError as error:  # an invalid path
        raise BundleError(repr(path), f"cannot write the bundle: {error}") from error
    except OSError as error:
        need = sum(len(part) for part in parts)
        raise BundleError(
            path,
            f"cannot write the bundle: {error.strerror}",
            expected=f"a writable directory with {need:,} free bytes",
            hint="another place with -o; a bundle that was there before is unchanged",
        ) from error


# ---------------------------------------------------------------- reading


class OpenedBundle:
    """An opened bundle with verified header, manifest and segment table.

    Attributes
    ----------
    where : str
        The path, or ``<bytes>``, for messages.
    path : str or None
        None for a bundle in memory.
    manifest : dict
        In the form of :data:`aotc.vmfb.manifest.SCHEMA`.
    copied : bool
        True if files that belong to the bundle are copied too instead of mapped.
    signature : tuple of (bytes, bytes, bytes) or None
        Public key, signature and signed message; not yet verified.
    signer : bytes
        The public key of a verified signature, else empty.
    file : MappedFile or None
        The file that contains the bundle; None for a bundle in memory.
    """

    copied = False

    def __init__(self, where: str, path: str | None, data: memoryview, file: MappedFile | None = None) -> None:
        self.where = where
        self.path = path
        self.signer = b""
        self.signature, data = _read_signature(where, data)
        self._data, self.file = data, file
        self.manifest, self._start = _read_manifest(where, data)
        self._table = self.manifest["segments"]
        _check_segment_table(where, data, self._table, self._start)
        self._verified: set[int] = set()
        self._copies: dict[tuple[int, int], memoryview] = {}  # copies of segments of a mapped file, by offset and size
        source = self.manifest.get("source") or {}
        records = [(self.manifest.get(key) or {}).get("segment") for key in ("costs", "profile")]
        unread = source.get("segment"), source.get("weights"), *records  # not needed by calls
        for number, row in enumerate(self._table):
            if row["size"] <= EAGER_BYTES and number not in unread:
                self._copy_segment(row)
                self.verified_segment(number)

    def _copy_segment(self, row: Mapping[str, Any]) -> None:
        """Copy a segment out of the mapped file, so that calls no longer depend on the file."""
        place = row["offset"], row["size"]
        if self.file is not None and self.file.is_mapped and place not in self._copies:
            view = allocate_aligned(row["size"])
            start = self._start + row["offset"]
            view[:] = self._data[start : start + row["size"]]
            self._copies[place] = view.toreadonly()

    def segment(self, number: int) -> memoryview:
        """Return the bytes of a segment, as a read-only view of the file or of a copy.

        Raises
        ------
        BundleError
            If there is no such segment, or the file has been overwritten.
        """
        if number >= len(self._table):
            raise BundleError(
                self.where, "the manifest names a segment that does not exist", number, f"below {len(self._table)}"
            )
        row = self._table[number]
        start = self._start + row["offset"]
        copied = self._copies.get((row["offset"], row["size"]))
        if copied is not None:
            return copied
        if self.file is not None:
            self.file.check_unchanged_now()
        return self._data[start : start + row["size"]]

    def mapped_file_of_segment(self, number: int) -> MappedFile | None:
        """Return the mapped file that contains a segment; None if the segment was copied."""
        row = self._table[number]
        mapped = self.file is not None and self.file.is_mapped and (row["offset"], row["size"]) not in self._copies
        return self.file if mapped else None

    def verified_segment(self, number: int) -> memoryview:
        """Return the bytes of a segment; raise a BundleError if their sha256 differs from the manifest's."""
        data = self.segment(number)
        if number not in self._verified:
            row = self._table[number]
            if not has_digest(data, row["sha256"]):
                raise BundleError(
                    self.where,
                    f"segment {number} ({row['name']}) is damaged",
                    f"sha256 {sha256_of(data).hex()}",
                    f"sha256 {row['sha256'].hex()}",
                    "copy the file again from where it was made",
                )
            self._verified.add(number)
        return data

    def open_companion(self, path: str) -> MappedFile:
        """Open another file that belongs to the bundle; map or copy it like the bundle itself."""
        return MappedFile(path, self.copied)

    def segment_digest(self, number: int) -> bytes:
        """Return the sha256 of a segment as the manifest states it."""
        self.segment(number)
        return self._table[number]["sha256"]

    def verify_all(self) -> None:
        """Verify the sha256 of every segment.

        Raises
        ------
        BundleError
            Its message has the first damaged segment.
        """
        for number in range(len(self._table)):
            self.verified_segment(number)


def open_bundle(source: Any, copy: bool = False) -> OpenedBundle:
    """Open a bundle.

    Parameters
    ----------
    source : str, path, bytes, buffer or OpenedBundle
        A path is mapped; a buffer is used without a copy; an opened bundle is returned unchanged.
    copy : bool
        Copy the file or buffer.

    Raises
    ------
    BundleError
        If ``source`` is not a bundle, is truncated or damaged, or has a newer version.
    """
    if isinstance(source, OpenedBundle):
        return source
    if not isinstance(source, (str, os.PathLike)):
        try:
            data = memoryview(source).cast("B").toreadonly()
            data = memoryview(bytes(data)) if copy else data
        except (TypeError, ValueError, BufferError):
            raise BundleError("", "this is not a bundle", type(source).__name__, "a path, bytes or a buffer") from None
        return OpenedBundle("<bytes>", None, data)
    path = os.fspath(source)
    try:
        file = MappedFile(path, copy)
        bundle = OpenedBundle(path, path, file.data, file)
        bundle.copied = copy
        return bundle
    except OSError as error:
        kind = BundleNotFoundError if isinstance(error, FileNotFoundError) else BundleError
        raise kind(path, f"cannot open the bundle: {error.strerror}") from error
    except ValueError as error:  # an invalid path
        raise BundleError(repr(path), f"cannot open the bundle: {error}") from error


def _read_signature(where: str, data: memoryview) -> tuple[tuple[bytes, bytes, bytes] | None, memoryview]:
    """Split a file into signature and bundle.

    Returns
    -------
    signature : tuple of (bytes, bytes, bytes) or None
        Public key, signature and signed message; None for an unsigned bundle.
    data : memoryview
        The file without the signature at its end.
    """
    if data.nbytes < _HEADER.size or _HEADER.unpack_from(data)[:3] != (MAGIC, VERSION, SIGNED):
        return None, data
    end = data.nbytes - _SIGNATURE.size
    if end < _HEADER.size or data.nbytes != _HEADER.unpack_from(data)[5]:
        found, expected = f"{data.nbytes:,} bytes", f"{_HEADER.unpack_from(data)[5]:,} bytes"
        raise BundleError(where, "truncated, or longer than its header says", found, expected, "copy the file again")
    magic, key, signature = _SIGNATURE.unpack_from(data, end)
    if magic != _SIGNATURE_MAGIC or any(data[-24:]):
        raise BundleError(where, "the signature is damaged", hint="sign the bundle again")
    return (key, signature, _SIGNATURE_MAGIC + bytes(data[: _HEADER.size])), data[:end]


def signed_bundle_pieces(opened: OpenedBundle, sign: Callable[[bytes], tuple[bytes, bytes]]) -> list[Any]:
    """Return the buffers of a signed bundle's file, in order; a new signature replaces an existing one.

    Parameters
    ----------
    opened : OpenedBundle
        All its digests must have been verified.
    sign : callable
        Returns public key and signature of a message.
    """
    data = opened._data
    magic, version, _, length, digest, _ = _HEADER.unpack_from(data)
    header = _HEADER.pack(magic, version, SIGNED, length, digest, data.nbytes + _SIGNATURE.size)
    return [header, data[_HEADER.size :], _SIGNATURE.pack(_SIGNATURE_MAGIC, *sign(_SIGNATURE_MAGIC + header))]


def _read_manifest(where: str, data: memoryview) -> tuple[dict[str, Any], int]:
    """Verify the header, decode the manifest, and return it with the offset of the first segment."""
    if data.nbytes < _HEADER.size:
        if bytes(data[:8]) != MAGIC[: data.nbytes] or not data.nbytes:
            raise _not_a_bundle(where, data)
        raise BundleError(where, "truncated", f"{data.nbytes} bytes", f"a header of {_HEADER.size}", "copy it again")
    magic, version, flags, length, digest, total = _HEADER.unpack_from(data)
    total -= _SIGNATURE.size if flags == SIGNED else 0
    if magic != MAGIC:
        raise _not_a_bundle(where, data)
    if version != VERSION:
        raise BundleError(
            where,
            "this bundle has another version of the format",
            f"version {version}",
            f"version {VERSION}, which this aotc reads",
            "a newer aotc, or compile the model again",
        )
    if flags & ~SIGNED:
        raise BundleError(where, "unknown flags in the header", f"{flags:#x}", "0", "a newer aotc")
    if data.nbytes != total:
        what = "truncated" if data.nbytes < total else "longer than its header says"
        raise BundleError(where, what, f"{data.nbytes:,} bytes", f"{total:,} bytes", "copy the file again")
    start = _HEADER.size + _align_offset(length)
    if start > total:
        raise BundleError(where, "the manifest is longer than the file", f"{length:,} bytes", f"below {total:,}")
    packed = data[_HEADER.size : _HEADER.size + length]
    if sha256_of(packed) != digest:
        raise BundleError(where, "the manifest is damaged (sha256 differs)", hint="copy the file again")
    _check_zero_padding(where, data[_HEADER.size + length : start])
    return _decode_manifest(where, packed), start


_MODEL_ENDINGS = (".mlir", ".mlirbc", ".jaxexp", ".jax", ".stablehlo")
_BYTECODE = b"ML\xefR"  # how MLIR's bytecode begins


def _not_a_bundle(where: str, data: memoryview) -> BundleError:
    hint = "the path of a .vmfb that `aotc compile` wrote"
    if where.endswith(_MODEL_ENDINGS) or bytes(data[:4]) == _BYTECODE:
        hint = f"this is a model: `aotc compile {where} -o model.vmfb` makes a bundle of it"
    return BundleError(where, "not an aotc bundle", f"first bytes {bytes(data[:8])!r}", repr(MAGIC), hint)


def _decode_manifest(where: str, packed: memoryview) -> dict[str, Any]:
    """Decode the manifest from msgpack, and check its format version and its schema."""
    try:
        found = unpack_msgpack(packed)
    except Exception as error:  # msgpack raises many unrelated types on bad input
        raise BundleError(where, f"the manifest is not msgpack: {error}") from error
    if isinstance(found, dict) and found.get("format") != FORMAT:
        raise BundleError(
            where, "another manifest format", found.get("format"), f"{FORMAT}, which this aotc reads", "a newer aotc"
        )
    problem = manifest_problem(found)
    if problem:
        raise BundleError(where, "the manifest breaks the schema", problem)
    return found


def _check_zero_padding(where: str, padding: memoryview) -> None:
    if bytes(padding).strip(b"\0"):
        raise BundleError(where, "bytes between segments are not zero", hint="copy the file again")


def _check_segment_table(where: str, data: memoryview, table: list[dict[str, Any]], start: int) -> None:
    """Check that segments are inside the file and aligned, equal or disjoint, and that padding is zero."""
    extents = sorted({(row["offset"], row["size"]) for row in table if row["size"]})
    end = 0
    for offset, size in extents:
        if offset % ALIGNMENT:
            raise BundleError(where, "a segment is not aligned", f"offset {offset}", f"a multiple of {ALIGNMENT}")
        if offset < end:
            raise BundleError(where, "two segments overlap", f"offset {offset}", f"at least {end}")
        if start + offset + size > data.nbytes:
            raise BundleError(where, "a segment reaches past the end of the file", offset + size, data.nbytes - start)
        _check_zero_padding(where, data[start + end : start + offset])
        end = offset + size
    _check_zero_padding(where, data[start + end :])
    if start + _align_offset(end) != data.nbytes:
        raise BundleError(where, "the file does not end with its last segment", data.nbytes, start + _align_offset(end))
    for row in table:
        if not row["size"] and row["offset"] + start > data.nbytes:
            raise BundleError(where, "a segment reaches past the end of the file", row["offset"], data.nbytes - start)
