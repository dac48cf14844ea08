"""Choose the strategy of a matmul or a convolution on a CPU; passes and planners call the same functions.

See :func:`matmul_strategy` for the strategies. Tiles and panels are those of K. Goto and R. van de Geijn, "Anatomy of
high-performance matrix multiplication" (2008).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from aotc.ir.dims.algebra import Dim, is_static, product
from aotc.ir.loop.forms.tile_forms import BF16_PAIRS, I8_QUADS, I32, I64, TileForm
from aotc.ir.tensor.ir import Op
from aotc.lowering.threshold import Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import kind_of, size_of

STREAM_ROWS = Limit(
    4,
    "rows of a product, at most, that streams its right operand: reads it once, with all rows in one tile",
    "all sums of a wide tile fit into registers; memory bandwidth bounds the product",
)
THIN_ROWS = Limit(
    8,
    "rows of a product, at most, that reads a right operand by rows, once and without packing, if it is large and not "
    "a constant",
    "8 rows x 4096 x 4096 on one core of a Zen 5: packed first 22.8 ms, tiles in place 6.0 ms, by rows 3.9 ms",
)
MANY_THIN_ROWS = Limit(
    31,
    "rows of a product with at most THIN_ROWS columns up to which its operands are not swapped",
    "swapping pays with at least four times as many rows as columns",
)
HALF_PANEL_COLUMNS = Limit(
    7,
    "columns of a product of many rows, or with a constant, up to which it is computed with swapped operands",
    "a busy Zen 5, f32, 16384 terms, us with a constant: 8 x 4 packed 75, swapped 18; 24 x 6 504 and 107; 7 x 8 40 "
    "and 52",
)
PADDED_PANEL_BYTES = Limit(
    1 << 16,
    "bytes of the panels of a constant, at most, that is packed although half of the panels or more is padding",
    "as HALF_PANEL_COLUMNS, 8 x 8: panels of 64 KiB packed 6.8, as sums of rows 7.1; of 1 MiB 45 and 34; larger ones "
    "are not folded either",
)
SHORT_THIN_TERMS = Limit(
    127,
    "terms, at most, for which a product of few rows or columns does not use dot products of contiguous rows",
    "the partial sums in the lanes of a vector are added lane by lane in the end",
)
TINY_FLOPS = Limit(
    1 << 13,
    "floating-point operations of a product, at most, that is computed in plain loops",
    "packing, a tile and the buffer of its epilogue do not pay off for so few",
)
PACKED_PERCENT = Limit(
    25,
    "percent of a memory limit, at most, that the packed copy of one operand may occupy",
    "reading in place costs time; missing the limit costs the whole model",
)
IN_PLACE_ELEMENTS = Limit(
    1 << 16,
    "elements of a right operand, at most, that is read in place if it is not a constant",
    "256 KiB of f32 stay in a second-level cache, where rows are as fast as panels",
)
UNROLLED_TERMS = Limit(49, "terms of a sum, at most, that is unrolled", "the taps of a 7 x 7 window")

Strategy = Literal["loops", "dots", "sums", "in_place", "copied", "packed"]


def reads_operand_once(m: Dim) -> bool:
    """Return True if a matmul of ``m`` rows reads its right operand once, with all rows in one tile.

    Symbolic sizes count as large.
    """
    return STREAM_ROWS.holds(m)


def is_tiny_matmul(shape: Sequence[Dim], k: Dim) -> bool:
    """Return True if a product with a result of ``shape`` and ``k`` terms per element is too small for tiles."""
    return TINY_FLOPS.holds(product((*shape, k)) * 2)


def _converts_integers(op: Op, form: TileForm) -> bool:
    """Return True if tiles of ``form`` would need separate conversions of short integers; plain loops do not."""
    narrow = [op.result] if form == I8_QUADS else [op.result, *op.operands]
    return form in (I8_QUADS, I32, I64) and any(size_of(v.type.dtype) < size_of("i32") for v in narrow)


def is_matmul_transposed(op: Op, form: TileForm | None, target: Target, constant: bool = False) -> bool:
    """Return True if a ``matmul`` with few columns is computed transposed, with swapped operands.

    With many columns per tile, most of a tile would be padding. ``constant`` is True if only the right operand is known
    before a call, so that it can be transposed in advance.
    """
    m, n = op.result.type.shape[-2:]
    k = op.operands[0].type.shape[-2 if op.attrs["lhs_transposed"] else -1]
    if form is None or form == I8_QUADS or m == 1 or _converts_integers(op, form):
        return False
    if is_tiny_matmul(op.result.type.shape, k):
        return n == 1 and not UNROLLED_TERMS.holds(k) and kind_of(form.out) == "f"
    long = op.attrs["lhs_transposed"] or not SHORT_THIN_TERMS.holds(k)
    few = THIN_ROWS.holds(n) and not MANY_THIN_ROWS.holds(m)
    half = isinstance(n, int) and THIN_ROWS.holds(n) and 2 * n <= _sums_per_vector(form, target)
    if half and not op.attrs["lhs_transposed"]:
        few |= sum((HALF_PANEL_COLUMNS.holds(n), not THIN_ROWS.holds(m), constant)) >= 2
    return n == 1 or (few and long and form.dot_product_dtype not in target.matrices)


def _sums_per_vector(form: TileForm, target: Target) -> int:
    """Return the number of sums in one vector."""
    return target.vector_bytes // size_of(form.out)


def matmul_strategy(op: Op, form: TileForm | None, constant: bool, target: Target, memory_limit: int = 0) -> Strategy:
    """Choose how a CPU computes a ``matmul``: packed panels, operands in place, or loops.

    Parameters
    ----------
    op : Op
    form : TileForm or None
        The form of the tile for its dtypes, None if there is none.
    constant : bool
        Is the right operand a constant, which is packed before the first call?
    target : Target
        The CPU.
    memory_limit : int
        The bytes that a call may use, 0 for no limit. With a limit, large operands are not packed.

    Returns
    -------
    str
        ``packed``: tiles over packed panels of the right operand; ``in_place``: tiles over the right operand in its own
        layout; ``copied``: the same, and each grid item may copy the panels that it reads; ``dots``: one dot product
        per element of the result; ``sums``: a weighted sum of rows of the right operand for each row of the result;
        ``loops``: plain loops without tiles.
    """
    lhs, rhs = (v.type for v in op.operands)
    result = op.result.type
    m, n = result.shape[-2:]
    k = lhs.shape[-2 if op.attrs["lhs_transposed"] else -1]
    if form is None or k == 0 or (_converts_integers(op, form) and (n == 1 or is_tiny_matmul((m, n), k))):
        return "loops"
    once = reads_operand_once(m)
    few = THIN_ROWS.holds(m) and (once or form.dot_product_dtype not in target.matrices)
    thin = few and form != I8_QUADS and product(result.shape) != 0
    if op.attrs["rhs_transposed"] and form != I8_QUADS and once and not (form == BF16_PAIRS and constant):
        return "dots"
    sums = not op.attrs["rhs_transposed"] and thin
    if is_tiny_matmul(result.shape, k):
        rows = not op.attrs["rhs_transposed"] and n != 1 and product(result.shape) != 0
        return "sums" if rows and kind_of(form.out) == "f" and not UNROLLED_TERMS.holds(k) else "loops"
    if op.attrs["rhs_transposed"] and thin and not constant and not SHORT_THIN_TERMS.holds(k):
        return "dots"
    lanes = _sums_per_vector(form, target)
    by_rows = not op.attrs["rhs_transposed"] and form != I8_QUADS and isinstance(n, int) and n % lanes == 0
    quick = k % form.group == 0 or form.dot_product_dtype in target.matrices
    pairs = form == BF16_PAIRS and quick  # instructions on pairs of bf16 gain more than packing costs
    near = IN_PLACE_ELEMENTS.holds(k * n)
    if by_rows and not constant and near and (once or not pairs):
        return "in_place"
    if sums and (not constant or is_packing_mostly_padding(op, form, target)):
        return "sums"
    in_form = by_rows and {lhs.dtype, rhs.dtype, result.dtype} == {form.left} and form != BF16_PAIRS
    if in_form and memory_limit and not constant:
        copied = product(rhs.shape) * size_of(form.left)
        if not PACKED_PERCENT.holds(copied * 100 // memory_limit):
            return "in_place"
    if not (constant or op.attrs["rhs_transposed"]) and copies_panels(m, n, k) and _reads_rows(form, n, target):
        return "copied"
    return "packed"


def _reads_rows(form: TileForm, n: Dim, target: Target) -> bool:
    """Return True if tiles of ``form`` read the terms of a group from rows of the right operand."""
    if form.group == 1:
        return True
    x86 = target.triple.startswith("x86_64") and form.dot_product_dtype in target.units - target.matrices
    return form == BF16_PAIRS and x86 and (not isinstance(n, int) or n > _sums_per_vector(form, target))


def copies_panels(m: Dim, n: Dim, k: Dim) -> bool:
    """Return True if a matmul that reads its right operand in its own layout may copy panels of it.

    Matmuls of static sizes pack the whole operand or read it in place. So do those of few rows or small matrices.
    """
    return not (is_static((m, n, k)) or THIN_ROWS.holds(m) or IN_PLACE_ELEMENTS.holds(k * n))


def is_packing_mostly_padding(op: Op, form: TileForm, target: Target) -> bool:
    """Return True if packing a constant with few columns costs more than it saves.

    A panel has whole vectors of columns, so each row reads ``lanes`` columns where the constant has ``n``. A tile
    shares these reads among its rows, so a product with more rows can afford more padding. Large panels with mostly
    padding are not folded, so each call would pack them; at least half of what it reads would be padding.
    """
    rhs, (m, n) = op.operands[1].type, op.result.type.shape[-2:]
    if not isinstance(n, int) or not isinstance(m, int):
        return False
    lanes, k = _sums_per_vector(form, target), rhs.shape[-1 if op.attrs["rhs_transposed"] else -2]
    is_large = not PADDED_PANEL_BYTES.holds(k * lanes * size_of(rhs.dtype))
    most = lanes // 2 if form.group == 1 else lanes // 2 - 1
    return 2 * m * n <= lanes or (n <= most and is_large)


def conv_strategy(op: Op, form: TileForm | None) -> Strategy:
    """Return how a CPU computes a ``conv``: ``packed``, with tiles over packed panels of the weights, or ``loops``."""
    *window, n = op.operands[1].type.shape
    groups, terms = op.attrs["feature_groups"], product(window)
    unknown = not isinstance(terms * n, int)
    if form is None or terms == 0 or n == 0:
        return "loops"
    if unknown and groups > 1:
        return "loops"
    if form == I8_QUADS and window[-1] == 1 and UNROLLED_TERMS.holds(terms):
        return "loops"  # tiles of i8 add four terms at a time: three of them would be padding
    if groups > 1 and is_tiny_matmul(op.result.type.shape, terms):
        return "loops"
    if not unknown and n == groups and UNROLLED_TERMS.holds(terms):
        return "loops"  # a tile would have one useful column; loops have the pixels of a row in the lanes of a vector
    return "packed"
