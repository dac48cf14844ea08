"""Constants that a bundle stores compressed: validation, and expansion into memory when the bundle is loaded."""

from __future__ import annotations

from typing import Any

import numpy as np

from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.errors import BundleError
from aotc.vmfb.limits import MAX_BYTES
from aotc.vmfb.weights.differences import MOST_GROWTH, WORDS, expand_differences


def check_compressed(bundle: OpenedBundle, entry: dict[str, Any]) -> None:
    """Validate the offsets and sizes of compressed constants, as the manifest's ``entry`` lists them.

    Raises
    ------
    BundleError
        The message has the first invalid row.
    """
    stored, end, at = bundle.segment(entry["segment"]).nbytes, 0, 0
    if entry["size"] > MAX_BYTES:
        raise BundleError(bundle.where, f"{entry['size']:,} bytes of constants", expected=f"at most {MAX_BYTES:,}")
    for row in entry["rows"]:
        if problem := _compressed_row_problem(row, end, entry["size"], at, stored):
            raise BundleError(bundle.where, f"the compressed constants {row} {problem}")
        end, at = row[0] + row[1], at + row[3]
    if at != stored:
        what = "compressed constants do not fill their segment"
        raise BundleError(bundle.where, what, f"{at:,} bytes", f"{stored:,}")


def _compressed_row_problem(row: list[int], begin: int, end: int, first: int, stored: int) -> str:
    """Describe the problem of one row of compressed constants; an empty string if the row is valid.

    Parameters
    ----------
    row : list of int
        Offset and size in memory; offset and size of the stored stream; word size (0: not compressed), distance.
    begin, end : int
        Range of memory offsets that the row may use.
    first : int
        Required offset of the stored stream, the end of the previous one: no bytes are expanded twice.
    stored : int
        Size of the segment in bytes.
    """
    if len(row) != 6:
        return f"are {len(row)} numbers, expected 6"
    offset, size, at, length, word, distance = row
    if not begin <= offset <= offset + size <= end:
        return f"lie outside of {begin} to {end}"
    if at != first or length < 0 or at + length > stored:
        return f"are bytes {at} to {at + length} of the {stored} bytes that are stored, expected to begin at {first}"
    if not word:
        return "" if length == size and not distance else f"are {length} bytes as they are, expected {size}"
    if word not in WORDS or size % word:
        return f"have words of {word} bytes"
    return "" if size <= MOST_GROWTH * length else f"expand {length} bytes to {size}, which no stream does"


def expand_compressed_rows(bundle: OpenedBundle, entry: dict[str, Any], whole: np.ndarray) -> None:
    """Copy or decompress the constants of each row of a validated ``entry`` into the memory ``whole``.

    Raises
    ------
    BundleError
        If a stream is damaged.
    """
    stored = bundle.segment(entry["segment"])
    for offset, size, at, length, word, distance in entry["rows"]:
        piece, place = stored[at : at + length], whole[offset : offset + size]
        if not word:
            place[:] = np.frombuffer(piece, np.uint8)
            continue
        try:
            expand_differences(piece, word, distance, place)
        except ValueError as error:
            raise BundleError(bundle.where, f"the constants at {offset} are damaged: {error}") from None
