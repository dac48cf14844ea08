"""Device functions of the matmul template mma: copies by all threads of a block, and products of single warps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba.cuda import types

from aotc.ir.loop.forms.tiling import FP8_PAIRS
from aotc.ir.loop.ir import WARP
from aotc.kernels.cuda.ampere import PIECE, copy_16_bytes_async
from aotc.kernels.cuda.block import simulated_thread
from aotc.kernels.cuda.ptx import F32 as FLOAT
from aotc.kernels.cuda.ptx import I32 as INT
from aotc.kernels.cuda.ptx import I64 as LONG
from aotc.kernels.cuda.ptx import NOTHING, emit_inline_assembly, llvm_instruction
from aotc.kernels.cuda.shell import emit_device_function_call
from aotc.kernels.cuda.templates.fragments import (
    DOUBLE_BYTES,
    FRAGMENT_REGISTERS,
    GROUP,
    GROUP_SUMS,
    HALF_ROWS,
    LINE_WORDS,
    MATRICES,
    MATRIX_ROWS,
    PAIR_COLUMNS,
    PIECE_WORDS,
    QUAD,
    STEP_BYTES,
    WORD_BYTES,
    emit_divide_by_power_of_two,
    emit_lane_column,
    emit_line_offset,
    emit_modulo_power_of_two,
    emit_piece_offset,
    emit_quad_lane,
    emit_quad_row,
    emit_times_power_of_two,
    emit_word_offset,
    log2_of_size,
)
from aotc.kernels.cuda.templates.gemm.epilogue import EpiloguePieces
from aotc.kernels.cuda.templates.gemm.tiles import CHUNK, OperandSource, WarpTiles
from aotc.kernels.cuda.templates.records import named_tuple_members
from aotc.kernels.cuda.templates.steps import (
    GATHERED,
    PITCH,
    REGISTERS,
    START,
    TO_TF32,
    emit_shared_f32_load,
    own_accumulator_elements,
    simulate_result_stores,
    simulated_dot_products,
)
from aotc.kernels.cuda.templates.threads import WARP_TILE
from aotc.kernels.formulas.llvm_values import ScalarValue
from aotc.kernels.llvm_types import F32, F64, I32, I64, i32, i64

PIECES = CHUNK // PIECE
_FOUR = ir.LiteralStructType([I32] * MATRICES)


def copied_piece_of_thread(tiles: WarpTiles, thread: Any, number: int, operand: int) -> tuple[Any, Any, Any]:
    """Return the destination, first row or column, and first term of the ``number``-th piece that a thread copies.

    ``thread`` is a Python int or an emitted value.
    """
    at = thread + number * tiles.threads
    source, by_rows, count, _ = operand_tiles(tiles)[operand]
    if source.transposed:
        piece, line = at >> (count.bit_length() - 1), at & (count - 1)
    else:
        piece, line = at & (PIECES - 1), at >> log2_of_size(PIECES)
    place = line * CHUNK + ((piece ^ tiles.swizzle(line, by_rows)) << log2_of_size(PIECE))
    first = piece * (PIECE // tiles.size)
    if not by_rows:
        return place, line, first
    part, within = line >> (tiles.depth.bit_length() - 1), line & (tiles.depth - 1)
    return place, part * (CHUNK // tiles.size) + first, within


def operand_tiles(tiles: WarpTiles) -> tuple[tuple[OperandSource, bool, int, int], ...]:
    """Return source, layout (True: contiguous along rows), lines of a tile, and stage offset of operands A and B."""
    return (tiles.a, tiles.a_by_rows, tiles.rows, 0), (tiles.b, tiles.b_by_rows, tiles.cols, tiles.rows * CHUNK)


def copy_operand_stage(tiles: WarpTiles) -> Any:
    """Return the device function by which a block starts to copy a stage, padded with zeros outside of the operands."""
    copied = [(n, *row) for n, row in enumerate(operand_tiles(tiles)) if not row[0].computed]

    def codegen(context, builder, signature, arguments):
        pointers, dims, to, thread, tile, depth, extents = arguments
        (z, row, column), (m, n, k) = named_tuple_members(builder, tile), named_tuple_members(builder, extents)
        b, own, tables = builder, ScalarValue(builder, thread), (pointers, dims)
        for operand, found, by_rows, count, begin in copied:
            source = b.ptrtoint(b.extract_value(pointers, found.pointer), I64)
            if not found.gathered:
                start = emit_device_function_call(b, START[operand], I64, tables, b.sext(z, I64))
                pitch = emit_device_function_call(b, PITCH[operand], I64, tables)
            first, size = ((row, m), (column, n))[operand]
            for number in range(count * PIECES // tiles.threads):
                place, outer, inner = (v.raw for v in copied_piece_of_thread(tiles, own, number, operand))
                outer, inner = b.add(first, outer), b.add(depth, inner)
                inside = b.and_(b.icmp_signed("<", outer, size), b.icmp_signed("<", inner, k))
                if found.gathered:
                    at = [b.sext(v, I64) for v in (z, outer, inner)]
                    flat = emit_device_function_call(b, GATHERED[operand], I64, tables, *at)
                    inside = b.and_(inside, b.icmp_signed(">=", flat, i64(0)))
                else:
                    high, low = (inner, outer) if by_rows else (outer, inner)
                    flat = b.add(b.add(start, b.mul(b.sext(high, I64), pitch)), b.sext(low, I64))
                offset = b.select(inside, b.mul(flat, i64(tiles.size)), i64(0))
                there = b.select(inside, i32(PIECE), i32(0))
                given = [b.add(b.add(to, i32(begin)), place), b.add(source, offset), there]
                emit_inline_assembly(b, copy_16_bytes_async.text, NOTHING, [INT, LONG, INT], given)
        return context.get_dummy_value()

    @llvm_instruction(lambda p, d, to, t, tile, depth, extents: NOTHING(p, d, INT, INT, tile, INT, extents), codegen)
    def start_stage_copy(pointers, dims, to, thread, tile, depth, extents):
        functions, (z, row, column), (m, n, k) = simulated_thread().block.functions, tile, extents
        for operand, found, by_rows, count, begin in copied:
            source, (first, size) = pointers[found.pointer], ((row, m), (column, n))[operand]
            for number in range(count * PIECES // tiles.threads):
                place, outer, inner = copied_piece_of_thread(tiles, int(thread), number, operand)
                outer, inner = outer + int(first), inner + int(depth)
                inside = outer < size and inner < k
                if not inside:
                    flat = 0
                elif found.gathered:
                    flat = functions[GATHERED[operand]](int(z), outer, inner)
                    inside = flat >= 0
                else:
                    high, low = (inner, outer) if by_rows else (outer, inner)
                    flat = functions[START[operand]](int(z)) + high * functions[PITCH[operand]]() + low
                copy_16_bytes_async(to + begin + place, source.ctypes.data + flat * tiles.size, PIECE if inside else 0)

    return start_stage_copy


def multiply_operand_stage(tiles: WarpTiles) -> Any:
    """Return the device function that adds the products of a stage to a warp's accumulators, 16 rows at a time."""
    count = tiles.warp_rows * tiles.warp_cols // WARP

    def codegen(context, builder, signature, arguments):
        sums, a, b, lane, warp_row, warp_col = arguments
        held = [builder.extract_value(sums, n) for n in range(count)]
        warp = (DoubleProducts if tiles.operands == "f64" else WarpProducts)(builder, tiles, lane)
        for step in range(warp.steps):
            left = [warp.load_row_fragment(a, warp_row, row, step) for row in range(0, tiles.warp_rows, WARP_TILE)]
            first = range(0, tiles.warp_cols, PAIR_COLUMNS)
            for columns in [first] if warp.at_once else [[j] for j in first]:
                pairs = [(j, warp.load_column_fragment(b, warp_col, j, step)) for j in columns]
                right = [(j // GROUP + half, pair[2 * half : 2 * half + 2]) for j, pair in pairs for half in range(2)]
                for i, four in enumerate(left):
                    for group, two in right:
                        at = GROUP_SUMS * (i * tiles.warp_cols // GROUP + group)
                        own = slice(at, at + GROUP_SUMS)
                        held[own] = warp.add_products(four, two, held[own])
        return context.make_tuple(builder, signature.return_type, held)

    kept = types.UniTuple(REGISTERS[tiles.sum][0], count)

    @llvm_instruction(lambda *given: kept(kept, INT, INT, INT, INT, INT), codegen)
    def add_stage_products(sums, a, b, lane, warp_row, warp_col):
        rows, cols = own_accumulator_elements(tiles.warp_cols)
        found = [
            simulated_dot_products(tiles, a, b, rows + int(warp_row) + first, cols + int(warp_col))
            for first in range(0, tiles.warp_rows, WARP_TILE)
        ]
        return sums + np.concatenate(found)

    return add_stage_products


# The terms of a step of operands of f32: eight.
F32_TERMS = STEP_BYTES // WORD_BYTES


@dataclass(frozen=True, slots=True)
class WarpOperands:
    """The operands of a warp's products: dtypes and layout in shared memory, as in :class:`.ProductTiles`."""

    operands: str
    size: int
    sum: str
    depth: int
    a_by_rows: bool
    b_by_rows: bool


class WarpProducts:
    """Emitter of the loads and products of a warp: ``steps`` per stage; all columns at once, or 16 at a time.

    A step multiplies 32 bytes of a row, the k of the instruction. ldmatrix.x4 loads a fragment: four matrices of 8 rows
    and 16 bytes. Lane l passes the address of row l % 8 of matrix l / 8, and gets a word of row l / 4 of each (PTX ISA,
    ldmatrix).
    """

    steps, at_once = CHUNK // STEP_BYTES, True

    def __init__(self, builder: ir.IRBuilder, tiles: WarpOperands | WarpTiles, lane: ir.Value) -> None:
        self.b, self.tiles, self.lane = builder, tiles, lane
        self.line = emit_modulo_power_of_two(builder, lane, MATRIX_ROWS)
        self.second = builder.and_(emit_divide_by_power_of_two(builder, lane, MATRIX_ROWS), i32(1))
        self.fourth = emit_divide_by_power_of_two(builder, lane, 2 * MATRIX_ROWS)

    def load_row_fragment(self, begin: ir.Value, first: ir.Value, more: int, step: int) -> list[ir.Value]:
        """Emit the load of a lane's fragment of 16 rows of A: four registers."""
        return self._load_matrix_fragment(begin, first, more, step, self.second, self.fourth, self.tiles.a_by_rows)

    def load_column_fragment(self, begin: ir.Value, first: ir.Value, more: int, step: int) -> list[ir.Value]:
        """Emit the load of a lane's fragment of 16 columns of B: four registers, two for each 8 columns."""
        return self._load_matrix_fragment(begin, first, more, step, self.fourth, self.second, self.tiles.b_by_rows)

    def _load_matrix_fragment(
        self, begin: ir.Value, first: ir.Value, more: int, step: int, outer: ir.Value, inner: ir.Value, by_rows: bool
    ) -> list[ir.Value]:
        """Emit the load of four matrices (ldmatrix); the lane addresses a row of matrix (``outer``, ``inner``).

        ``outer`` selects rows (columns) of the operand, ``inner`` terms. Operands of 16 bits that are contiguous along
        their rows are transposed by the load.
        """
        b = self.b
        start = b.add(first, i32(more))
        if by_rows and self.tiles.size == WORD_BYTES:
            return self._load_word_fragment(begin, start, step, outer is self.second)
        if by_rows:
            line = b.add(b.add(i32(2 * MATRIX_ROWS * step), emit_times_power_of_two(b, inner, MATRIX_ROWS)), self.line)
            element = b.add(start, emit_times_power_of_two(b, outer, MATRIX_ROWS))
            part = emit_divide_by_power_of_two(b, element, CHUNK // self.tiles.size)
            begin = b.add(begin, b.mul(part, i32(self.tiles.depth * CHUNK)))
            piece = emit_modulo_power_of_two(
                b, emit_divide_by_power_of_two(b, element, PIECE // self.tiles.size), PIECES
            )
        else:
            line = b.add(b.add(start, emit_times_power_of_two(b, outer, MATRIX_ROWS)), self.line)
            piece = b.or_(i32(STEP_BYTES // PIECE * step), inner)
        place = b.add(emit_line_offset(b, line), emit_piece_offset(b, b.xor(piece, self.line)))
        text = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if by_rows else ''}.shared.b16 {{$0,$1,$2,$3}}, [$4];"
        kind = ir.FunctionType(_FOUR, [I32])
        found = b.asm(kind, text, "=r,=r,=r,=r,r,~{memory}", [b.add(begin, place)], side_effect=True)
        values = [b.extract_value(found, n) for n in range(MATRICES)]
        if self.tiles.operands != "tf32":
            return values
        return [emit_inline_assembly(b, TO_TF32, INT, [FLOAT], [b.bitcast(v, F32)]) for v in values]

    def _load_word_fragment(self, begin: ir.Value, start: ir.Value, step: int, outer_first: bool) -> list[ir.Value]:
        """Emit the load of a fragment of f32 that is contiguous along rows: ldmatrix transposes only 16-bit elements.

        The swizzle of a line is twice its number modulo 4 (:meth:`.WarpTiles.swizzle`).
        """
        b, term = self.b, emit_quad_lane(self.b, self.lane)
        found = []
        for n in range(FRAGMENT_REGISTERS):
            outer, inner = (n & 1, n >> 1) if outer_first else (n >> 1, n & 1)
            element = b.add(b.add(start, i32(MATRIX_ROWS * outer)), emit_quad_row(b, self.lane))
            part, first = emit_divide_by_power_of_two(b, element, LINE_WORDS), i32(F32_TERMS * step + QUAD * inner)
            line = b.add(b.mul(part, i32(self.tiles.depth)), first)
            piece = b.xor(
                emit_modulo_power_of_two(b, emit_divide_by_power_of_two(b, element, PIECE_WORDS), PIECES),
                b.shl(term, i32(1)),
            )
            place = b.add(emit_line_offset(b, b.add(line, term)), emit_piece_offset(b, piece))
            place = b.add(b.add(begin, place), emit_word_offset(b, emit_modulo_power_of_two(b, element, PIECE_WORDS)))
            found.append(emit_shared_f32_load(b, place))
        return [emit_inline_assembly(b, TO_TF32, INT, [FLOAT], [v]) for v in found]

    def add_products(self, left: list[ir.Value], right: list[ir.Value], sums: list[ir.Value]) -> list[ir.Value]:
        """Emit the products of 16 rows and 8 columns; return the new accumulators."""
        b, kind = self.b, self.tiles.operands
        shape = f"m16n8k{STEP_BYTES // self.tiles.size}"
        both = kind if kind in FP8_PAIRS else f"{kind}.{kind}"
        kinds = "s32.s8.s8.s32" if kind == "i8" else f"f32.{both}.f32"
        text = (
            f"mma.sync.aligned.{shape}.row.col.{kinds} "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
        )
        _, sum_type = REGISTERS[self.tiles.sum]
        c = "r" if kind == "i8" else "f"
        given, count = len(left) + len(right), len(sums)
        result = ir.FunctionType(ir.LiteralStructType([sum_type] * count), [I32] * given + [sum_type] * count)
        letters = ",".join([f"={c}"] * count + ["r"] * given + [c] * count)
        found = b.asm(result, text, letters, [*left, *right, *sums], side_effect=False)
        return [b.extract_value(found, n) for n in range(count)]


# Terms of a line of f64, half a step's terms, and pieces from one step, and one group of rows, to the next.
DOUBLE_TERMS, DOUBLE_STEP_TERMS = CHUNK // DOUBLE_BYTES, 8
DOUBLE_PIECES = DOUBLE_STEP_TERMS * DOUBLE_BYTES // PIECE


class DoubleProducts(WarpProducts):
    """Emitter of the loads and products of a warp for f64 matmuls, with 8 terms of the sum in a step.

    Lane l of the instruction's layout has the terms l % 4 and l % 4 + 4; here it takes ``2 (l % 4)`` and the next term.
    The order of the terms is arbitrary, as long as both operands have the same order. With this order the terms of an
    operand that is contiguous along the contraction are neighbours, and one load has both.
    """

    steps, at_once = DOUBLE_TERMS // DOUBLE_STEP_TERMS, False

    def _load_matrix_fragment(
        self, begin: ir.Value, first: ir.Value, more: int, step: int, outer: ir.Value, inner: ir.Value, by_rows: bool
    ) -> list[ir.Value]:
        """Emit the load of a lane's f64 fragment: two terms of two rows that are 8 apart."""
        b = self.b
        start = b.add(first, i32(more))
        make = self._load_f64_by_rows if by_rows else self._load_f64_by_terms
        pairs = [make(begin, start, half, step) for half in range(2)]
        if outer is self.second:
            return [pair[n] for n in range(2) for pair in pairs]
        return [value for pair in pairs for value in pair]

    def _load_f64_by_terms(self, begin: ir.Value, start: ir.Value, half: int, step: int) -> list[ir.Value]:
        """Emit the load of the terms of a row, which are one piece.

        The swizzle of a line is four times the lowest bit of its number.
        """
        b, own = self.b, emit_quad_row(self.b, self.lane)
        piece = b.or_(i32(DOUBLE_PIECES * step), emit_quad_lane(b, self.lane))
        piece = b.xor(piece, emit_times_power_of_two(b, b.and_(own, i32(1)), DOUBLE_PIECES))
        place = b.add(
            b.add(begin, emit_line_offset(b, start)), b.add(emit_line_offset(b, own), emit_piece_offset(b, piece))
        )
        kind = ir.FunctionType(ir.LiteralStructType([F64] * 2), [I32])
        text = "ld.shared.v2.f64 {$0, $1}, [$2];"
        found = b.asm(kind, text, "=d,=d,r,~{memory}", [b.add(place, i32(HALF_ROWS * half * CHUNK))], side_effect=True)
        return [b.extract_value(found, n) for n in range(2)]

    def _load_f64_by_rows(self, begin: ir.Value, start: ir.Value, half: int, step: int) -> list[ir.Value]:
        """Emit the loads of a lane's f64 terms from two swizzled lines of an operand that is contiguous along rows."""
        b, row = self.b, emit_quad_row(self.b, self.lane)
        term = emit_lane_column(b, self.lane)
        piece = b.xor(b.or_(i32(HALF_ROWS * DOUBLE_BYTES // PIECE * half), b.lshr(row, i32(1))), term)
        own = emit_line_offset(b, term)
        byte = b.add(emit_piece_offset(b, piece), emit_times_power_of_two(b, b.and_(row, i32(1)), DOUBLE_BYTES))
        own = b.add(own, byte)
        place = b.add(b.add(begin, b.mul(start, i32(self.tiles.depth * CHUNK // DOUBLE_TERMS))), own)
        kind = ir.FunctionType(F64, [I32])
        places = [b.add(place, i32((DOUBLE_STEP_TERMS * step + n) * CHUNK)) for n in range(2)]
        return [b.asm(kind, "ld.shared.f64 $0, [$1];", "=d,r,~{memory}", [at], side_effect=True) for at in places]

    def add_products(self, left: list[ir.Value], right: list[ir.Value], sums: list[ir.Value]) -> list[ir.Value]:
        """Emit the products of 16 rows and 8 columns; return the new accumulators."""
        if self.tiles.terms == DOUBLE_STEP_TERMS:
            return self._f64_mma_instruction("m16n8k8", left, right, sums)
        for term in range(2):
            for half in range(2):
                own = slice(2 * half, 2 * half + 2)
                given = [left[2 * term + half]], [right[term]], sums[own]
                sums = [*sums[: own.start], *self._f64_mma_instruction("m8n8k4", *given), *sums[own.stop :]]
        return sums

    def _f64_mma_instruction(
        self, shape: str, left: list[ir.Value], right: list[ir.Value], sums: list[ir.Value]
    ) -> list[ir.Value]:
        names = iter(f"${n}" for n in range(len(left) + len(right) + 2 * len(sums)))
        given = [f"{{{', '.join(next(names) for _ in x)}}}" for x in (sums, left, right, sums)]
        text = f"mma.sync.aligned.{shape}.row.col.f64.f64.f64.f64 {', '.join(given)};"
        operands = [*left, *right, *sums]
        kind = ir.FunctionType(ir.LiteralStructType([F64] * len(sums)), [F64] * len(operands))
        letters = ",".join(["=d"] * len(sums) + ["d"] * len(operands))
        found = self.b.asm(kind, text, letters, operands, side_effect=False)
        return [self.b.extract_value(found, n) for n in range(len(sums))]


def store_warp_tile(tiles: WarpTiles) -> Any:
    """Return the device function by which a warp stores its part of a result tile."""
    count = tiles.warp_cols // 2  # accumulators of 16 rows

    def codegen(context, builder, signature, arguments):
        sums, staging, lane, place, sizes, *tables = arguments
        z, row, col = named_tuple_members(builder, place)
        others = [col, *named_tuple_members(builder, sizes), *tables]
        for i in range(tiles.warp_rows // WARP_TILE):
            own = [builder.extract_value(sums, i * count + n) for n in range(count)]
            first = builder.add(row, i32(WARP_TILE * i))
            pieces = EpiloguePieces(builder, tiles, [own], [staging, lane, z, first, *others])
            pieces.emit(pieces.load_first_operands(1))
        return context.get_dummy_value()

    @llvm_instruction(lambda sums, _, lane, *given: NOTHING(sums, INT, INT, *given), codegen)
    def store_warp_accumulators(sums, staging, lane, place, sizes, pointers, dims):
        z, row, col = place
        for i in range(tiles.warp_rows // WARP_TILE):
            own = sums[i * count : (i + 1) * count]
            simulate_result_stores(tiles, own, (z, row + WARP_TILE * i, col), tiles.warp_cols, sizes, pointers)

    return store_warp_accumulators
