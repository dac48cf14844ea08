"""Layouts that tensor core instructions prescribe: fragments in a warp's registers, swizzled tiles in shared memory.

**Fragments** (PTX ISA, "Matrix Fragments for mma.m16n8k16" and "Register Fragments for wgmma.mma_async.m64n8"). Lane l
of a warp has elements of two of its 16 rows, l / 4 and l / 4 + 8; four consecutive lanes, a *quad*, share a row. The
accumulators of a group of 8 columns are four registers of each lane::

            columns 0, 1   2, 3     4, 5     6, 7
    row 0   lane 0         lane 1   lane 2   lane 3      registers 0 and 1 of each lane
    row 1   lane 4         lane 5   lane 6   lane 7
    row 8   lane 0         lane 1   lane 2   lane 3      registers 2 and 3 of each lane

**Tiles** (PTX ISA, "Swizzling Modes", 128 bytes; CUTLASS calls the layout ``Swizzle<3, 4, 3>``). A line of a tile has
128 bytes, eight pieces of 16. Piece c of line r is stored at position c ^ (r % 8), so that eight lanes which read the
same piece of eight lines (``ldmatrix``) access all 32 banks of shared memory.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from aotc.kernels.cuda.templates.threads import PIECE_BYTES
from aotc.kernels.llvm_types import i32

# Lanes of a quad, which share a row of a fragment, and the columns of a group that each lane has.
QUAD, LANE_COLUMNS = 4, 2
# Registers of a lane: accumulators of 16 rows and 8 columns (m16n8); 16 rows and 32 bytes of a left operand.
GROUP_SUMS = FRAGMENT_REGISTERS = 4
# Columns of such accumulators, and rows from a lane's first row to its second one.
GROUP = HALF_ROWS = 8
# Columns of a right operand that one ldmatrix.x4 loads: two groups. Their accumulators of 16 rows are eight registers.
PAIR_COLUMNS, PAIR_SUMS = 2 * GROUP, 2 * GROUP_SUMS
# Bytes of a row of both operands that one instruction multiplies. PTX ISA, shapes of mma and wgmma.
STEP_BYTES = 32
# Rows of a matrix of ldmatrix, whose rows are pieces of 16 bytes, and matrices that ldmatrix.x4 loads.
MATRIX_ROWS, MATRICES = 8, 4
# Bytes of a line of a tile; lines after which the swizzle repeats; pieces and 32-bit words of a line.
LINE_BYTES, SWIZZLE_LINES = 128, 8
LINE_PIECES = LINE_BYTES // PIECE_BYTES
# Bytes of a word, and of an f64; words of a piece and of a line.
WORD_BYTES, DOUBLE_BYTES = 4, 8
PIECE_WORDS, LINE_WORDS = PIECE_BYTES // WORD_BYTES, LINE_BYTES // WORD_BYTES


def log2_of_size(size: int) -> int:
    """Return the base-2 logarithm of a power of two, for shifts in place of multiplications and divisions."""
    return size.bit_length() - 1


def emit_times_power_of_two(b: ir.IRBuilder, number: ir.Value, size: int) -> ir.Value:
    """Emit ``number`` times ``size``, a power of two."""
    return b.shl(number, i32(log2_of_size(size)))


def emit_divide_by_power_of_two(b: ir.IRBuilder, number: ir.Value, size: int) -> ir.Value:
    """Emit ``number // size`` of a non-negative number; ``size`` is a power of two."""
    return b.lshr(number, i32(log2_of_size(size)))


def emit_modulo_power_of_two(b: ir.IRBuilder, number: ir.Value, size: int) -> ir.Value:
    """Emit ``number % size``; ``size`` is a power of two."""
    return b.and_(number, i32(size - 1))


def emit_quad_row(b: ir.IRBuilder, lane: ir.Value) -> ir.Value:
    """Emit the first row of a lane's elements of a fragment."""
    return emit_divide_by_power_of_two(b, lane, QUAD)


def emit_quad_lane(b: ir.IRBuilder, lane: ir.Value) -> ir.Value:
    """Emit a lane's position in its quad."""
    return emit_modulo_power_of_two(b, lane, QUAD)


def emit_lane_column(b: ir.IRBuilder, lane: ir.Value) -> ir.Value:
    """Emit the first of a lane's two columns in each group of accumulators."""
    return emit_times_power_of_two(b, emit_quad_lane(b, lane), LANE_COLUMNS)


def emit_line_offset(b: ir.IRBuilder, line: ir.Value) -> ir.Value:
    """Emit the byte offset of a 128-byte line in a tile."""
    return emit_times_power_of_two(b, line, LINE_BYTES)


def emit_piece_offset(b: ir.IRBuilder, piece: ir.Value) -> ir.Value:
    """Emit the byte offset of a 16-byte piece in a line."""
    return emit_times_power_of_two(b, piece, PIECE_BYTES)


def emit_word_offset(b: ir.IRBuilder, word: ir.Value) -> ir.Value:
    """Emit the byte offset of a 4-byte word."""
    return emit_times_power_of_two(b, word, WORD_BYTES)


def accumulator_rows_and_columns(lane: Any, number: Any) -> tuple[Any, Any]:
    """Return the rows (of a warp's 16) and the columns of a lane's accumulators with the indices ``number``.

    ``lane`` and ``number`` are NumPy arrays or ints.
    """
    half = number // LANE_COLUMNS % 2
    row = lane // QUAD + HALF_ROWS * half
    return row, GROUP * (number // GROUP_SUMS) + LANE_COLUMNS * (lane % QUAD) + number % LANE_COLUMNS


def lanes_of_quad(lane: int) -> slice:
    """Return the slice of lanes that form the quad of a lane, for the simulator."""
    first = lane // QUAD * QUAD
    return slice(first, first + QUAD)
