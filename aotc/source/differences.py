"""Constants as the differences of neighbouring words: of a progression all are equal, and compress to nothing."""

from __future__ import annotations

import zlib

import numpy as np

WORDS = (4, 8, 2)
"""Bytes of a word: an integer, or the bits of a float."""


def differences(elements: memoryview, word: int) -> bytes:
    """Return the differences of neighbouring words, modulo their range; the first one is the first word."""
    words = np.frombuffer(elements, f"<u{word}")
    return np.diff(words, prepend=words.dtype.type(0)).tobytes()


def from_differences(packed: bytes, word: int, size: int) -> memoryview:
    """Return the ``size`` bytes whose :func:`differences`, compressed by zlib, are ``packed``.

    Raises
    ------
    ValueError
        If ``packed`` has another size, or is damaged.
    """
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(packed, size + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if word not in WORDS or len(data) != size or not stream.eof:
        raise ValueError(f"{len(data):,} bytes of differences, expected {size:,}")
    words = np.frombuffer(data, f"<u{word}")
    return np.cumsum(words, dtype=words.dtype).view(np.uint8).data
