"""Recognize arrays that a few numbers describe: repeated rows, progressions of integers, diagonals and triangles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

# Elements along each dim: this corner of a constant is compared with a description before the whole array is. Most
# arrays that do not fit the description differ in the corner already.
CORNER = 8


@dataclass(frozen=True)
class Repeated:
    """``part`` repeated along all dims of the array except ``dims``, which are those of ``part``."""

    part: np.ndarray
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Progression:
    """The integers ``start + step * i``, where ``i`` is the index along ``dim``."""

    start: int
    step: int
    dim: int


@dataclass(frozen=True)
class Banded:
    """Diagonal or triangle of a matrix with the indices ``i`` and ``j`` along ``dims``.

    Elements are ``inside`` where ``i + offset == j``, for a ``triangle`` where ``i + offset >= j``, else ``outside``.
    """

    triangle: bool
    offset: int
    inside: np.ndarray
    outside: np.ndarray
    dims: tuple[int, int]


Description: TypeAlias = Repeated | Progression | Banded


def describe(array: np.ndarray) -> Description | None:
    """Return a description that needs much less memory than ``array``, or None.

    The description reproduces the bits exactly, also those of NaN and -0.0. A small corner of the array is compared
    first; most arrays without a description differ there, so large weights take no time.
    """
    if not array.size:
        return None
    dims = [d for d in range(array.ndim) if array.shape[d] > 1 and not _repeats(array, d)]
    part = array[tuple(slice(None) if d in dims else 0 for d in range(array.ndim))]
    if len(dims) == 1 and (found := _progression(part)) is not None:
        return Progression(*found, dims[0])
    if len(dims) == 2 and (band := _band(part, (dims[0], dims[1]))) is not None:
        return band
    return Repeated(part, tuple(dims)) if 4 * part.size <= array.size else None


def _repeats(array: np.ndarray, dim: int) -> bool:
    corner = array[(slice(0, CORNER),) * array.ndim]
    return all(_same(a, a.take([0], dim)) for a in (corner, array))


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    """Return True if the elements of ``a`` have the same bits as those of ``b``, which is broadcast."""
    return bool((_bits(a) == _bits(b)).all())


def _bits(a: np.ndarray) -> np.ndarray:
    """Return the bytes of ``a``; the last dim has those of one element."""
    return np.ascontiguousarray(a).reshape((*a.shape, 1)).view(np.uint8)


def _progression(line: np.ndarray) -> tuple[int, int] | None:
    """Return the first element and the step of a progression of integers below 2**24 in magnitude, or None.

    All supported dtypes represent such integers exactly.
    """
    if line.dtype.kind not in "iu" and line.dtype not in (np.float32, np.float64):
        return None
    start, step = float(line[0]), float(line[1]) - float(line[0])
    last = start + step * (len(line) - 1)
    if not (np.isfinite(last) and start == int(start) and step == int(step) and max(abs(start), abs(last)) < 1 << 24):
        return None
    made = (int(start) + int(step) * np.arange(len(line))).astype(line.dtype)
    return (int(start), int(step)) if _same(line, made) else None


def _band(a: np.ndarray, dims: tuple[int, int]) -> Banded | None:
    """Return the matrix ``a`` as a diagonal or a triangle, or None.

    The first row and column leave a few candidates, which are compared with the whole matrix.
    """
    row, column = _run(a[0]), _run(a[:, 0])
    edges: list[tuple[bool, int, np.ndarray, np.ndarray]] = []
    if row < a.shape[1]:
        edges = [(True, row - 1, a[0, 0], a[0, -1]), (False, 0, a[0, 0], a[0, -1]), (False, row, a[0, row], a[0, 0])]
    elif column < a.shape[0]:
        edges = [(triangle, -column, a[column, 0], a[0, 0]) for triangle in (True, False)]
    for triangle, offset, inside, outside in edges:
        band = Banded(triangle, offset, np.asarray(inside), np.asarray(outside), dims)
        if all(_same(part, _banded(band, part.shape)) for part in (a[:CORNER, :CORNER], a)):
            return band
    return None


def _run(line: np.ndarray) -> int:
    """Return the number of leading elements that equal the first one."""
    other = np.flatnonzero((_bits(line) != _bits(line[:1])).any(-1))
    return int(other[0]) if len(other) else len(line)


def _banded(band: Banded, shape: Sequence[int]) -> np.ndarray:
    i, j = np.arange(shape[0])[:, None] + band.offset, np.arange(shape[1])
    return np.where(i >= j if band.triangle else i == j, band.inside, band.outside)
