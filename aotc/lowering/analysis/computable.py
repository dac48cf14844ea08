"""Recognize constant arrays that a few numbers describe: repeated rows, integers in steps, diagonals and triangles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

# Elements along each dim: this corner of a constant is compared with a description before the whole array is. Most
# arrays that do not fit the description differ in the corner already.
CORNER = 8


@dataclass(frozen=True)
class Repeated:
    """Description of an array: ``part`` repeated along all dims except ``dims``, which are the dims of ``part``."""

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


@dataclass(frozen=True)
class Steps:
    """The integers ``step * (i // every % period)``, where ``i`` is the index along ``dim``; period 0: no remainder."""

    step: int
    every: int
    period: int
    dim: int

    def largest_multiplier(self, size: int) -> int:
        """Return the largest multiplier of ``step`` that occurs along a dim of ``size`` elements."""
        last = (size - 1) // self.every
        return min(last, self.period - 1) if self.period else last


@dataclass(frozen=True)
class Stepped:
    """The integers ``start`` plus those of ``axes``: ``arange(n).reshape(a, b)``, ``arange(n) // 9 % 7``."""

    start: int
    axes: tuple[Steps, ...]


Description: TypeAlias = Repeated | Progression | Banded | Stepped


def describe_array(array: np.ndarray) -> Description | None:
    """Return a compact description of a constant (splat, progression, band), or None.

    The description reproduces the bits exactly, also those of NaN and -0.0. A small corner of the array is compared
    first; most arrays without a description differ there, so large weights take no time.
    """
    if not array.size:
        return None
    dims = [d for d in range(array.ndim) if array.shape[d] > 1 and not _repeats_along_dim(array, d)]
    part = array[tuple(slice(None) if d in dims else 0 for d in range(array.ndim))]
    if len(dims) == 1 and (progression := _integer_progression(part)) is not None:
        return Progression(*progression, dims[0])
    if len(dims) == 2 and (band := _constant_band(part, (dims[0], dims[1]))) is not None:
        return band
    if 4 * part.size <= array.size:
        return Repeated(part, tuple(dims))
    return _progression_along_dims(part, dims)


def _repeats_along_dim(array: np.ndarray, dim: int) -> bool:
    corner = array[(slice(0, CORNER),) * array.ndim]
    return all(_has_same_bits(a, a.take([0], dim)) for a in (corner, array))


def _has_same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Return True if the elements of ``a`` have the same bits as those of ``b``, which is broadcast."""
    return bool((_bytes_of_elements(a) == _bytes_of_elements(b)).all())


def _bytes_of_elements(a: np.ndarray) -> np.ndarray:
    """Return the bytes of ``a``; the last dim has those of one element."""
    return np.ascontiguousarray(a).reshape((*a.shape, 1)).view(np.uint8)


def _integer_progression(line: np.ndarray) -> tuple[int, int] | None:
    """Return the first element and the step of a progression of integers below 2**24 in magnitude, or None.

    All supported dtypes represent such integers exactly.
    """
    if line.dtype.kind not in "iu" and line.dtype not in (np.float32, np.float64):
        return None
    start, step = float(line[0]), float(line[1]) - float(line[0])
    last = start + step * (len(line) - 1)
    if not (np.isfinite(last) and start == int(start) and step == int(step) and max(abs(start), abs(last)) < 1 << 24):
        return None
    expected = (int(start) + int(step) * np.arange(len(line))).astype(line.dtype)
    return (int(start), int(step)) if _has_same_bits(line, expected) else None


def _progression_along_dims(a: np.ndarray, dims: Sequence[int]) -> Stepped | None:
    """Return a constant as an arithmetic progression along ``dims``, or None.

    The first line along each dim gives its steps. Their sum is compared with the whole array.
    """
    limit = _exact_integers(a.dtype)
    start = float(a.flat[0]) if limit else np.nan
    if not (abs(start) < limit and start == int(start)):
        return None
    axes: list[Steps] = []
    for n, dim in enumerate(dims):
        steps = _segmented_progression(a[tuple(slice(None) if d == n else 0 for d in range(a.ndim))], dim, limit)
        if steps is None:
            return None
        axes.append(steps)
    ends = [s.step * s.largest_multiplier(n) for s, n in zip(axes, a.shape)]
    if max(start + sum(n for n in ends if n > 0), -start - sum(n for n in ends if n < 0)) >= limit:
        return None
    stepped = Stepped(int(start), tuple(axes))
    corner = a[(slice(0, CORNER),) * a.ndim]
    return (
        stepped
        if all(_has_same_bits(part, _integers_of_progression(stepped, part.shape, a.dtype)) for part in (corner, a))
        else None
    )


def _exact_integers(dtype: np.dtype) -> int:
    """Return the bound below which ``dtype`` and f64 represent integers exactly; 0 for other dtypes."""
    if dtype == np.float32:
        return 1 << 24
    if dtype.kind in "iu":
        return min(int(np.iinfo(dtype).max) + 1, 1 << 53)
    return 1 << 53 if dtype == np.float64 else 0


def _segmented_progression(line: np.ndarray, dim: int, limit: int) -> Steps | None:
    """Return the steps of a line of integers (an arithmetic progression in segments), or None."""
    every = _leading_run_length(line)
    if every == len(line):
        return None
    heads = line[::every]
    start, step = float(line[0]), float(line[every]) - float(line[0])
    if not abs(step) < limit or step != int(step):
        return None
    period = _first_index_where(
        len(heads), lambda n: heads[:n].astype(np.float64) != start + step * np.arange(min(n, len(heads)))
    )
    return Steps(int(step), every, period % len(heads), dim)


def _integers_of_progression(stepped: Stepped, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return the array that ``stepped`` describes."""
    array = np.full(shape, stepped.start, np.int64)
    for n, steps in enumerate(stepped.axes):
        line = np.arange(shape[n]) // steps.every
        line = (line % steps.period if steps.period else line) * steps.step
        array += line.reshape([-1 if d == n else 1 for d in range(len(shape))])
    return array.astype(dtype)


def _constant_band(a: np.ndarray, dims: tuple[int, int]) -> Banded | None:
    """Return a matrix as a diagonal or triangular matrix of one value, or None.

    The first row and column leave a few candidates, which are compared with the whole matrix.
    """
    row, column = _leading_run_length(a[0]), _leading_run_length(a[:, 0])
    edges: list[tuple[bool, int, np.ndarray, np.ndarray]] = []
    if row < a.shape[1]:
        edges = [(True, row - 1, a[0, 0], a[0, -1]), (False, 0, a[0, 0], a[0, -1]), (False, row, a[0, row], a[0, 0])]
    elif column < a.shape[0]:
        edges = [(triangle, -column, a[column, 0], a[0, 0]) for triangle in (True, False)]
    for triangle, offset, inside, outside in edges:
        band = Banded(triangle, offset, np.asarray(inside), np.asarray(outside), dims)
        if all(_has_same_bits(part, _array_of_band(band, part.shape)) for part in (a[:CORNER, :CORNER], a)):
            return band
    return None


def _leading_run_length(line: np.ndarray) -> int:
    """Return the number of leading elements of ``line`` that equal its first element."""
    return _first_index_where(
        len(line), lambda n: (_bytes_of_elements(line[:n]) != _bytes_of_elements(line[:1])).any(-1)
    )


def _first_index_where(size: int, holds: Callable[[int], np.ndarray]) -> int:
    """Return the first of ``size`` indices where ``holds(n)``, of the first n indices, is true; ``size`` if none is.

    Small parts are tried first, so that arrays without a description take no time.
    """
    n = CORNER
    while not len(places := np.flatnonzero(holds(n))) and n < size:
        n *= CORNER
    return int(places[0]) if len(places) else size


def _array_of_band(band: Banded, shape: Sequence[int]) -> np.ndarray:
    i, j = np.arange(shape[0])[:, None] + band.offset, np.arange(shape[1])
    return np.where(i >= j if band.triangle else i == j, band.inside, band.outside)
