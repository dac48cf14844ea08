"""Difference coding of arrays that compress well: words, or differences of words, in a zlib stream.

All differences of neighbours in a progression are equal. Words that repeat at a fixed ``distance``, as the rows of a
matrix may, have differences of zero. :func:`expand_differences` undoes compression and differences in the memory of
the array.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np

WORDS = (1, 2, 4, 8)
"""Bytes of a word: an integer, or the bits of a float."""

MOST_GROWTH = 1032
"""Bytes that one byte of a deflate stream expands to, at most: a match of 258 bytes takes two bits."""

# Bytes of a stream that are decompressed at a time, and bytes that one step returns.
READ_BYTES = 1 << 16
EXPANDED_BYTES = 1 << 20


def word_differences(elements: memoryview | np.ndarray, word: int, distance: int = 1) -> memoryview:
    """Return each word minus the word ``distance`` words before, modulo the word's range.

    ``word`` is the size of a word in bytes. The first ``distance`` words are unchanged; with a ``distance`` of 0 all
    are.
    """
    words = np.frombuffer(elements, f"<u{word}")
    if 0 < distance < len(words):
        found = words.copy()
        found[distance:] -= words[:-distance]
        words = found
    return words.view(np.uint8).data


def expand_differences(packed: memoryview | bytes, word: int, distance: int, into: np.ndarray) -> None:
    """Decompress ``packed``, undo :func:`word_differences`, and write the bytes to ``into``, an array of u8.

    Raises
    ------
    ValueError
        If ``packed`` is damaged, or has another size than ``into``.
    """
    size = into.nbytes
    if word not in WORDS or size % word or distance < 0:
        raise ValueError(f"words of {word} bytes at a distance of {distance} in {size:,} bytes")
    at = 0
    for piece in _decompressed_pieces(packed):
        if at + len(piece) > size:
            raise ValueError(f"more than {size:,} bytes, expected {size:,}")
        into[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    if at != size:
        raise ValueError(f"{at:,} bytes, expected {size:,}")
    if distance:
        _undo_differences_in_place(into.view(f"<u{word}"), distance)


def decompress_differences(packed: bytes, word: int, size: int) -> memoryview:
    """Decompress ``packed`` and undo :func:`word_differences` at distance 1; the result has ``size`` bytes.

    Raises
    ------
    ValueError
        If ``packed`` has another size, or is damaged.
    """
    data = np.empty(size, np.uint8)
    expand_differences(packed, word, 1, data)
    return data.data


def _decompressed_pieces(packed: memoryview | bytes) -> Iterator[bytes]:
    """Decompress a zlib stream in pieces, so that little memory is needed."""
    stream = zlib.decompressobj()
    try:
        for begin in range(0, len(packed), READ_BYTES):
            data: memoryview | bytes = packed[begin : begin + READ_BYTES]
            while piece := stream.decompress(data, EXPANDED_BYTES):
                yield piece
                data = stream.unconsumed_tail
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not stream.eof or stream.unused_data:
        raise ValueError("the stream is cut or too long")


# Words of a row from which rows are added one after the other: NumPy's accumulation along columns uses no vectors. 16
# MB of rows of 4,096 bytes take 6 ms instead of 230.
ROW_WORDS = 128


def _undo_differences_in_place(items: np.ndarray, distance: int) -> None:
    """Undo :func:`word_differences` in place, block by block, so that a block fits a cache."""
    step = distance * max(EXPANDED_BYTES // (distance * items.itemsize), 1)
    for begin in range(0, len(items), step):
        block = items[begin : begin + step]
        if begin:
            block[:distance] += items[begin - distance : begin][: len(block)]
        full = len(block) // distance * distance
        if distance < ROW_WORDS:
            rows = block[:full] if distance == 1 else block[:full].reshape(-1, distance)
            np.add.accumulate(rows, axis=0, out=rows)
        else:
            for row in range(distance, full, distance):
                block[row : row + distance] += block[row - distance : row]
        if full:
            block[full:] += block[full - distance : len(block) - distance]
