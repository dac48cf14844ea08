"""Row-major offsets of array elements, and the indices of an offset."""

from __future__ import annotations

from collections.abc import Sequence

from aotc.ir.dims.algebra import Dim, floordiv, mod


def linearize(index: Sequence[Dim], shape: Sequence[Dim]) -> Dim:
    """Return the row-major flat offset of ``index`` in ``shape``, in elements."""
    flat: Dim = 0
    for i, d in zip(index, shape, strict=True):
        flat = flat * d + i
    return flat


def delinearize(flat: Dim, shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return the index in ``shape`` of the row-major offset ``flat``."""
    index: list[Dim] = []
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] == 1 or shape[axis] == 0:  # an empty array has no element
            index.append(0)
        elif all(d == 1 for d in shape[:axis]):
            index.append(flat)
            flat = 0
        else:
            index.append(mod(flat, shape[axis]))
            flat = floordiv(flat, shape[axis])
    return tuple(reversed(index))
