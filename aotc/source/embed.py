"""Embed the model's source in a bundle: compressed bytecode, without weights that the bundle stores anyway.

The bundle stores weights packed for their kernels. Each large constant of the model is searched for among the
arrays of the bundle and among their unpacked forms (:class:`aotc.source.moves.UnpackingRules`). The checksum, the
array and the unpacking steps replace a constant that is found. Of the others, progressions and tables (``arange``,
``linspace``) are stored as differences of neighbours, because these repeat. Other constants stay in the bytecode, or
are stored next to it if they cannot be compressed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgpack
import numpy as np

from aotc.ir.program.ir import Constants
from aotc.ir.tensor.ir import TensorType
from aotc.source.bytecode import large_elements
from aotc.source.limits import DIFFERENCES_BYTES, LARGE_BYTES
from aotc.source.moves import UnpackingRules, UnpackingSteps
from aotc.source.record import VERSION, EmbeddedSource, recorded_targets
from aotc.vmfb.dtypes import from_numpy
from aotc.vmfb.weights.differences import word_differences

# First bytes of a constant that serve as its key; constants with equal keys are compared in full.
KEY_BYTES = 64


@dataclass(frozen=True, slots=True)
class SourceSegments:
    """A source as stored in a bundle: compressed record, its uncompressed size, and uncompressed weights."""

    record: bytes
    size: int
    weights: list[memoryview]


def embed_source(
    source: EmbeddedSource, constants: Sequence[Constants], ways: Sequence[UnpackingRules]
) -> SourceSegments:
    """Encode the model's source as bundle segments, without copies of constants that the bundle stores.

    ``constants`` are those of each variant, ``ways`` the rules to unpack them.
    """
    code = memoryview(source.code)
    cuts = large_elements(source.code, LARGE_BYTES)
    places = _stored_constants_in_source(source.code, cuts, constants, ways)
    holes: list[dict[str, Any]] = []
    rest: list[memoryview] = []
    weights: list[memoryview] = []
    end = stored = expanded = 0
    for cut in cuts:
        elements = code[slice(*cut)]
        ratio = 1.0 if cut in places else _compression_ratio(elements[:SAMPLE_BYTES])
        if cut in places:
            where: dict[str, Any] = {"array": places[cut]}
        elif expanded + elements.nbytes <= DIFFERENCES_BYTES and (word := _difference_word_size(elements, ratio)):
            where = {"differences": zlib.compress(word_differences(elements, word)), "word": word}
            expanded += elements.nbytes
        elif ratio < SQUEEZED:
            continue
        else:
            where = {"kept": stored}
            weights.append(elements)
            stored += elements.nbytes
        rest.append(code[end : cut[0]])
        end = cut[1]
        holes.append({"at": cut[0], "size": elements.nbytes, "sha256": sha256(elements).digest(), **where})
    rest.append(code[end:])
    record = {
        "version": VERSION,
        "path": source.path,
        "metadata": dict(source.metadata),
        "options": dict(source.options),
        "targets": recorded_targets(source.targets),
        "variants": source.variants,
        "code": b"".join(rest),
        "holes": holes,
    }
    packed = msgpack.packb(record, use_bin_type=True, unicode_errors="surrogateescape")
    return SourceSegments(zlib.compress(packed), len(packed), weights)


# Bytes of a constant that a trial compression reads, to decide whether the rest is worth compressing. It takes 2 ms.
# Only elements that the bundle does not have elsewhere are tried.
SAMPLE_BYTES = 1 << 16
# Ratio of compressed to original size of the sample, below which elements are compressed. Random weights reach 0.93,
# which is not worth 30 ms a megabyte; masks and tables reach 0.01. zlib on random f32, i8 and on masks.
SQUEEZED = 0.75


def _compression_ratio(sample: memoryview | bytes) -> float:
    """Return the ratio of compressed to original size of ``sample``."""
    return len(zlib.compress(sample, 1)) / max(len(sample), 1)


# The compressed size of differences relative to that of the elements, below which differences are stored: their sums
# take 1 ms a megabyte when they are read. Of an f32 arange it is 0.02, of random weights 1.
WORTH_DIFFERENCES = 0.5

# Bytes of the words whose differences are tried: of most constants the first ones compress best.
TRIED_WORDS = (4, 8, 2)


def _difference_word_size(elements: memoryview, ratio: float) -> int:
    """Return the word size in bytes for storing ``elements`` as differences of neighbours; 0 if that saves little.

    ``ratio`` is the compressed size of the elements themselves.
    """
    sample = elements[:SAMPLE_BYTES]
    words = [w for w in TRIED_WORDS if elements.nbytes % w == 0 and sample.nbytes % w == 0]
    sizes = {w: _compression_ratio(word_differences(sample, w)) for w in words}
    best = min(sizes, key=sizes.__getitem__, default=0)
    return best if best and sizes[best] < WORTH_DIFFERENCES * min(ratio, SQUEEZED) else 0


def _stored_constants_in_source(
    code: bytes, cuts: Sequence[tuple[int, int]], constants: Sequence[Constants], ways: Sequence[UnpackingRules]
) -> dict[tuple[int, int], dict[str, Any]]:
    """Map ranges of the source to stored constants with the same bytes, and the steps that unpack them."""
    wanted: dict[tuple[int, bytes], list[tuple[int, int]]] = {}
    for begin, end in cuts:
        wanted.setdefault((end - begin, code[begin : begin + KEY_BYTES]), []).append((begin, end))
    places: dict[tuple[int, int], dict[str, Any]] = {}
    for variant, (stored, known) in enumerate(zip(constants, ways, strict=True)):
        for _, array, offset in stored.arrays:
            if array.nbytes < LARGE_BYTES:
                continue
            type_ = TensorType(from_numpy(array.dtype), array.shape)
            for way, unpacked in known.unpacked_candidates(array, type_):
                for cut in wanted.get((unpacked.nbytes, _array_head_bytes(unpacked)), ()):
                    if cut not in places and _has_equal_bytes(unpacked, code, cut):
                        places[cut] = _stored_constant_place(variant, array, offset, type_.dtype, way)
    return places


def _stored_constant_place(
    variant: int, array: np.ndarray, offset: int, dtype: str, way: UnpackingSteps
) -> dict[str, Any]:
    shape = list(array.shape)
    return {"variant": variant, "offset": offset, "size": array.nbytes, "dtype": dtype, "shape": shape, "way": way}


def _array_head_bytes(array: np.ndarray) -> bytes:
    count = -(-KEY_BYTES // array.itemsize)
    return np.array(array.flat[:count]).tobytes()[:KEY_BYTES]


# Bytes of an array that are rearranged and compared at a time; they fit the second-level cache.
BLOCK_BYTES = 1 << 20


def _has_equal_bytes(array: np.ndarray, code: bytes, cut: tuple[int, int]) -> bool:
    """Return True if ``array`` equals the range ``cut`` (begin, end) of ``code``.

    The comparison is block by block: copying all of a large array would take longer.
    """
    if not array.size:
        return False
    other = np.frombuffer(code, np.uint8, cut[1] - cut[0], cut[0])
    rows = array.reshape(1) if array.ndim == 0 else array
    row = rows.nbytes // len(rows)
    count = max(BLOCK_BYTES // row, 1)
    for at in range(0, len(rows), count):
        one = np.ascontiguousarray(rows[at : at + count]).reshape(-1).view(np.uint8)
        if not np.array_equal(one, other[at * row : at * row + one.size]):
            return False
    return True
