"""Choose the register tile of a matmul on a CPU by its size."""

from __future__ import annotations

from aotc.ir.dims.algebra import Dim, Expr
from aotc.ir.loop.forms.tile_forms import BF16_PAIRS, I8_QUADS, TileForm
from aotc.lowering.plans.matmul import reads_operand_once
from aotc.lowering.threshold import BlockSize, Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of

SQUARES = {"bf16": "bf16", "i8": "i8mm"}
"""AArch64 features whose instructions multiply two rows by two columns, by the unit of the form of a tile."""


WIDE_STREAM_ROWS = Limit(
    2,
    "rows of a streaming product, at most, that has the widest tile",
    "2 rows of 8 vectors fill as many of 32 registers as 4 rows of 4 vectors",
)
STREAM_VECTORS = BlockSize(
    8,
    "vectors per row in the tile of a streaming product of at most WIDE_STREAM_ROWS rows",
    "see WIDE_STREAM_ROWS; fewer in proportion if the CPU has fewer than 32 registers",
)
NARROW_STREAM_VECTORS = BlockSize(
    4,
    "vectors per row in the tile of a streaming product of more rows",
    "see WIDE_STREAM_ROWS",
)
SMALL_ROWS = Limit(
    8,
    "rows of a product, at most, that are one tile with three vectors per row",
    "24 sums and 3 loads fit into 32 registers",
)
TILE_ROWS = BlockSize(
    14,
    "rows, at most, of a tile with two or more vectors per row",
    "28 sums, 2 loads and a broadcast fill 31 of 32 registers; spilling halves the rate (decision 14)",
)
FEW_TILE_ROWS = Limit(
    12,
    "rows of a product, at most, that stay one tile although they share cache sets",
    "12 ways (Ice Lake, Zen 5); several tiles read the right operand several times; with more rows that pays: 14 x "
    "4096 x 4096 in two tiles takes 0.62 of the time",
)
SET_PERIOD = BlockSize(
    4096,
    "bytes between addresses that share a set of the first-level cache",
    "64 sets of 64 bytes; of 14 rows that are half as many bytes apart 7 share a set, which SET_ROWS allows",
)
SET_ROWS = BlockSize(
    7,
    "rows, at most, of a tile with two or more vectors per row whose rows share cache sets",
    "8 ways, one of them for the right operand; f32 on a Zen 5 (12 ways), percent of the rate of FMAs alone: 1024^3 "
    "with 14 rows 89, with 12 93, with 7 95; 2048^3 with 12 rows 92, with 7 95",
)
AARCH64_TILE_ROWS = BlockSize(
    11,
    "rows, at most, of a tile with two or more vectors per row on AArch64",
    "code of LLVM: no sum is spilled in the inner loop; with 14 rows a quarter of the sums is",
)
SQUARE_SUMS = BlockSize(
    24,
    "registers for sums, at most, in an AArch64 tile whose instructions multiply two rows by two columns",
    "code of LLVM: no sum is spilled in the inner loop",
)
SVE_SUMS = BlockSize(
    24,
    "registers for sums, at most, in an SVE tile with two or more vectors per row",
    "code of LLVM: no sum is spilled in the inner loop; with 27 one is",
)
SVE_SQUARE_SUMS = BlockSize(
    20,
    "registers for sums, at most, in an SVE tile whose instructions multiply two rows by two columns",
    "code of LLVM: no sum is spilled in the inner loop; with 24 one is",
)
COLUMN_TILE_ROWS = BlockSize(
    24,
    "rows, at most, of a tile with one vector per row",
    "more sums do not hide more latency, and the code grows",
)
GROUPED_TILE_ROWS = BlockSize(
    12,
    "rows, at most, of a tile that adds several terms per step, on CPUs with 32 registers",
    "converted operands need registers in addition to the sums",
)
GROUPED_TILE_ROWS_16 = BlockSize(
    4,
    "rows, at most, of a tile that adds several terms per step, on CPUs with 16 registers",
    "converted operands need registers in addition to the sums",
)


def best_tile(m: Dim, n: Dim, k: Dim, form: TileForm, target: Target, pitch: Dim = 0) -> tuple[int, int]:
    """Return the ``(rows, cols)`` of the register tile for ``out[m, n] = a[m, k] @ b[k, n]``.

    The sums of a tile, the loads of one row of ``b`` and a broadcast of ``a`` fit into the vector registers together. A
    product of up to four rows streams ``b``: its tile is wide and has all rows.

    Parameters
    ----------
    m, n, k : Dim
        A symbolic ``m`` counts as large.
    form : TileForm
    target : Target
    pitch : Dim
        The distance in bytes between rows of ``a``, 0 if irrelevant. Tiles have fewer rows if rows share cache sets.

    Returns
    -------
    tuple of int
        The maximal number of rows, by which :func:`split_rows` divides ``m``; the columns, a multiple of the vector.
    """
    lanes = target.vector_bytes // size_of(form.out)
    room = target.registers - 1
    needed = -(-n // lanes) if not isinstance(n, Expr) else room
    if form.dot_product_dtype in target.matrices:
        return _matrix_tile(m, needed, lanes)
    if not isinstance(m, Expr) and reads_operand_once(m):
        across = STREAM_VECTORS if WIDE_STREAM_ROWS.holds(m) else NARROW_STREAM_VECTORS
        vectors = across.value * min(target.registers, 32) // 32
        return max(m, 1), lanes * max(min(vectors, needed), 1)
    vectors = min(2, needed)
    # Three vectors per row where they pad the columns less than two.
    if target.registers >= 32 and not isinstance(n, Expr) and -n % (3 * lanes) < -n % (2 * lanes):
        vectors = 3
    if target.registers >= 32 and needed >= 3 and SMALL_ROWS.holds(m):
        vectors = 3
    wide = AARCH64_TILE_ROWS if target.triple.startswith("aarch64") else TILE_ROWS
    most = wide if vectors > 1 else COLUMN_TILE_ROWS
    share = most is TILE_ROWS and isinstance(pitch, int) and pitch != 0 and pitch % SET_PERIOD.value == 0
    if share and form != I8_QUADS and not FEW_TILE_ROWS.holds(m):
        most = SET_ROWS
    scales = vectors if form.scaled else 0
    rows = min((room - vectors - scales) // vectors, most.value)
    if form == I8_QUADS or (form == BF16_PAIRS and form.dot_product_dtype not in target.units):
        rows = min(rows, (GROUPED_TILE_ROWS if target.registers >= 32 else GROUPED_TILE_ROWS_16).value)
    if SQUARES.get(form.dot_product_dtype) in target.features:
        sums = SVE_SQUARE_SUMS if target.sve_length else SQUARE_SUMS
        rows = min((room - vectors - scales) // vectors, sums.value // vectors // 2 * 2)
    elif target.sve_length and vectors > 1:
        rows = min(rows, SVE_SUMS.value // vectors)
    return (rows if isinstance(m, Expr) else min(rows, m)), lanes * vectors


def _matrix_tile(m: Dim, needed: int, lanes: int) -> tuple[int, int]:
    """Return the tile of a matrix unit: 2 x 2 registers of ``lanes`` x ``lanes`` sums, or 1 x 4 for few rows."""
    few = not isinstance(m, Expr) and m <= lanes
    rows = lanes if few else 2 * lanes
    return (rows if isinstance(m, Expr) else min(rows, max(m, 1))), lanes * max(min(4 if few else 2, needed), 1)


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


def in_place_cols(m: Dim, n: int, k: Dim, form: TileForm, target: Target) -> int:
    """Return the columns of a tile that reads its right operand in place: a divisor of ``n``, in whole vectors."""
    lanes = target.vector_bytes // size_of(form.out)
    _, cols = best_tile(m, n, k, form, target)
    return next(c for c in range(min(cols, n), 0, -lanes) if n % c == 0)
