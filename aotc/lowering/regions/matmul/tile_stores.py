"""The loops that store a tile, along the contiguous axis of memory.

If the result is stored transposed, a column of its tile is contiguous in memory. Row by row, each element would go to
another cache line. Lines that are 2 or 4 kB apart share few cache sets, so all of them would be evicted before the next
row. ::

    for c in range(0, 32):            # in place of for r: for c:
        for r in range(0, 14):
            o0[c + 32*q, r + 14*t] = tile0[r, c]
"""

from __future__ import annotations

from collections.abc import Sequence

from aotc.ir.dims.algebra import Dim
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.ir import For, Stmt, Store


def loops_of_tile(inner: Sequence[Stmt], rows: Dim, columns: Dim, most: int) -> For:
    """Return the loops over ``columns`` (``c``) and ``rows`` (``r``, at most ``most``) of a tile."""
    if most == 1:
        return For("c", 0, columns, tuple(inner))
    if _goes_by_columns(inner):
        return For("c", 0, columns, (For("r", 0, rows, tuple(inner)),))
    return For("r", 0, rows, (For("c", 0, columns, tuple(inner)),))


def _goes_by_columns(inner: Sequence[Stmt]) -> bool:
    """Return True if every store is contiguous along the rows, and not along the columns."""
    stores = [s for s in inner if isinstance(s, Store)]
    return bool(stores) and all(_is_along_rows(s) for s in stores)


def _is_along_rows(store: Store) -> bool:
    large = [i for i, size in zip(store.index, store.buffer.shape) if size != 1]
    used = {s.name for s in symbols(large[-1])} if large else set()
    return "r" in used and "c" not in used
