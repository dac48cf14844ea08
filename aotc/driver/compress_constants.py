"""Compress constant arrays in a bundle.

Masks, index tables, one-hot rows and zero-padded weights compress to a small fraction. The bundle stores them
compressed, and the loader expands them once (:mod:`aotc.vmfb.weights.constants`). So calls are as fast as with
uncompressed constants.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from aotc.ir.program.ir import Constants
from aotc.vmfb.limits import EAGER_BYTES
from aotc.vmfb.weights.differences import word_differences

# Bytes of an array, at most, that is stored as it is without trials, which take a third of a millisecond.
SMALL_BYTES = 1 << 14

# Bytes of each of two samples that trials compress.
SAMPLE_BYTES = 1 << 12

# Bytes of a first sample, and the ratio above which it is the last one: of most weights it is 0.95.
FIRST_BYTES = 1 << 9
FIRST_RATIO = 0.7

# Ratio of compressed to original size of samples, at most, for which the whole array is compressed. Codes of the
# samples take 100 bytes.
TRIED_RATIO = 0.25

# Bytes of an array, at least, for each stored byte. Masks, steps, repeated rows and one-hot rows reach 14 to 1000;
# weights of which a tenth is not zero 5, of four values 3, others 1. The loader expands 300 to 900 MB/s.
WORTH_RATIO = 8

# Share of the constants that must be saved if the rest is mapped from the file: it is then copied into memory.
WORTH_SHARE = 0.1

# Compressed size relative to the best one so far, below which differences with words further away are taken: the
# loader adds them up.
BETTER = 0.6


@dataclass(frozen=True)
class CompressedConstants:
    """The constants of a variant as a bundle stores them: compressed arrays and uncompressed runs.

    Attributes
    ----------
    size : int
        Number of bytes after expansion.
    rows : list of list of int
        Offset, bytes, offset in the segment, stored bytes, word, distance: see ``docs/bundle.md``.
    parts : list of memoryview
        The contents of the segment.
    """

    size: int
    rows: list[list[int]] = field(default_factory=list)
    parts: list[memoryview] = field(default_factory=list)
    stored: int = 0

    def entry(self, segment: int) -> dict[str, Any]:
        """Return the manifest entry of these constants in segment number ``segment``."""
        return {"segment": segment, "size": self.size, "rows": self.rows}


@dataclass(frozen=True)
class _CompressedArray:
    """A compressed array.

    ``word`` is the number of bytes of an element for difference coding, ``distance`` the number of words between the
    two terms of a difference (0: not difference coded).
    """

    data: bytes
    word: int
    distance: int


def compress_constants(constants: Constants) -> CompressedConstants | None:
    """Compress the arrays of ``constants``; return None if compression saves too little."""
    streams = {n: s for n, (_, array, _) in enumerate(constants.arrays) if (s := _compressed_array(array)) is not None}
    saved = sum(constants.arrays[n][1].nbytes - len(s.data) for n, s in streams.items())
    rest = constants.size - saved
    if not saved or (rest > EAGER_BYTES and saved < WORTH_SHARE * rest):
        return None
    rows: list[list[int]] = []
    parts: list[memoryview] = []
    stored = 0
    for offset, size, stream, pieces in _compressed_runs(constants, streams):
        length = len(stream.data) if stream else size
        rows.append([offset, size, stored, length, *((stream.word, stream.distance) if stream else (0, 0))])
        parts += pieces
        stored += length
    return CompressedConstants(constants.size, rows, parts)


def _compressed_runs(
    constants: Constants, streams: dict[int, _CompressedArray]
) -> Iterator[tuple[int, int, _CompressedArray | None, list[memoryview]]]:
    """Yield the parts of the constants in order: a compressed array, or a run of uncompressed arrays.

    A part is its offset, its size in bytes, its compressed form (None if uncompressed), and its stored pieces.
    """
    pieces: list[memoryview] = []
    begin = end = 0
    for n, (_, array, offset) in enumerate(constants.arrays):
        if (stream := streams.get(n)) is not None:
            if pieces:
                yield begin, end - begin, None, pieces
                pieces = []
            yield offset, array.nbytes, stream, [memoryview(stream.data)]
            continue
        if not pieces:
            begin = end = offset
        pieces += [memoryview(bytes(offset - end))] if offset > end else []
        pieces.append(array.reshape(-1).view(np.uint8).data)
        end = offset + array.nbytes
    if pieces:
        yield begin, end - begin, None, pieces


def _compressed_array(array: np.ndarray) -> _CompressedArray | None:
    """Compress ``array``; return None if compression saves too little."""
    if array.nbytes <= SMALL_BYTES:
        return None
    word = min(array.itemsize, 8)
    elements = array.reshape(-1).view(np.uint8)
    words = elements.view(f"<u{word}")
    best, ratio = -1, TRIED_RATIO / BETTER
    for distance in _candidate_distances(array.shape, array.itemsize // word):
        if (trial := _trial_compression_ratio(words, distance)) < BETTER * ratio:
            best, ratio = distance, trial
    if best < 0:
        return None
    data = _difference_stream(elements, word, best)
    return None if data is None else _CompressedArray(data, word, best)


def _candidate_distances(shape: Sequence[int], words: int) -> list[int]:
    """Return the candidate distances for difference coding in words: 0 (no differences), strides of dims, diagonals."""
    strides = [words * prod(shape[d + 1 :]) for d in range(len(shape)) if shape[d] > 1][::-1]
    diagonals = [s + strides[0] for s in strides[1:]]
    return [*dict.fromkeys([0, *strides, *diagonals])]


def _trial_compression_ratio(words: np.ndarray, distance: int) -> float:
    """Return the compression ratio of samples of ``words``: of the words, or of their differences at ``distance``."""
    ratio, middle = 0.0, max(distance, len(words) // 2)
    for begin, size in ((distance, FIRST_BYTES), (distance, SAMPLE_BYTES), (middle, SAMPLE_BYTES)):
        sample = words[begin : begin + size // words.itemsize]
        if not len(sample):
            return 1.0
        sample = sample - words[begin - distance : begin - distance + len(sample)] if distance else sample
        sample_ratio = len(zlib.compress(sample.tobytes(), 1)) / sample.nbytes
        if sample_ratio > FIRST_RATIO:
            return sample_ratio
        ratio += sample_ratio / 2 if size == SAMPLE_BYTES else 0
    return ratio


# Bytes that are compressed between two looks at the ratio, so that an array whose samples deceived costs little.
STEP_BYTES = 1 << 18


def _difference_stream(elements: np.ndarray, word: int, distance: int) -> bytes | None:
    """Compress the differences of an array at ``distance``; return None if they are not small enough."""
    data = word_differences(elements, word, distance)
    packer, chunks, size = zlib.compressobj(6), list[bytes](), 0
    for begin in range(0, len(data), STEP_BYTES):
        chunks.append(packer.compress(data[begin : begin + STEP_BYTES]))
        size += len(chunks[-1])
        if WORTH_RATIO * size > min(len(data), begin + 4 * STEP_BYTES):
            return None
    chunks.append(packer.flush())
    whole = b"".join(chunks)
    return whole if WORTH_RATIO * len(whole) <= len(data) else None
