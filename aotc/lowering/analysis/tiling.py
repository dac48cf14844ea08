"""Which register tile to use for a product of given size."""

from __future__ import annotations

from aotc.ir.dims import Dim, Expr
from aotc.ir.tile_forms import FORMS
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of

STREAM_ROWS = 4
STREAM_VECTORS = {1: 8, 2: 8, 3: 4, 4: 4}
SMALL_ROWS = 8


def best_tile(m: Dim, n: Dim, k: Dim, form: str, target: Target) -> tuple[int, int]:
    """Return the ``(rows, cols)`` of the tile for ``out[m, n] = a[m, k] @ b[k, n]``.

    ``rows`` is the most that a tile may have (give it to :func:`split_rows`);
    ``cols`` is a multiple of the vector. Up to four rows the product streams
    ``b``, so a tile is wide and has all rows; a symbolic ``m`` counts as large.
    """
    lanes = target.vector_bytes // size_of(FORMS[form].out)
    room = target.registers - 1
    needed = -(-n // lanes) if not isinstance(n, Expr) else room
    if not isinstance(m, Expr) and m <= STREAM_ROWS:
        wide = STREAM_VECTORS[max(m, 1)] * min(target.registers, 32) // 32
        return max(m, 1), lanes * max(min(wide, needed), 1)
    vectors = min(2, needed)
    if target.registers >= 32 and not isinstance(n, Expr) and -n % (3 * lanes) < -n % (2 * lanes):
        vectors = 3
    if target.registers >= 32 and needed >= 3 and not isinstance(m, Expr) and m <= SMALL_ROWS:
        vectors = 3
    rows = min((room - vectors) // vectors, 14 if vectors > 1 else 24)
    if form in ("bf16", "i8"):
        rows = min(rows, 12 if target.registers >= 32 else 4)
    return (rows if isinstance(m, Expr) else min(rows, m)), lanes * vectors


def split_rows(m: int, rows_max: int) -> tuple[tuple[int, int], ...]:
    """Return ``(rows, tiles)`` runs that cover ``m`` rows with heights that differ by at most 1.

    >>> split_rows(128, 13)
    ((13, 8), (12, 2))
    """
    tiles = -(-m // rows_max)
    if tiles == 0:
        return ()
    low, tall = divmod(m, tiles)
    return tuple(run for run in ((low + 1, tall), (low, tiles - tall)) if run[1])
