"""Matmul operands that device functions of the kernel compute: a block's threads compute a stage in 16-byte pieces.

These are operands that cannot be copied: arrays whose rows are not aligned, f32 or i8 that is contiguous along the
wrong axis for tensor cores, and the patches of a convolution. Quantized weights are loaded and dequantized piece by
piece, so that no dequantized copy of them is in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.cuda import types

from aotc.ir.loop.forms.tiling import FP8_PAIRS
from aotc.kernels.cuda.ampere import PIECE
from aotc.kernels.cuda.block import simulated_thread
from aotc.kernels.cuda.ptx import F32 as FLOAT
from aotc.kernels.cuda.ptx import I32 as INT
from aotc.kernels.cuda.ptx import NOTHING, emit_inline_assembly, llvm_instruction
from aotc.kernels.cuda.shell import emit_device_function_call
from aotc.kernels.cuda.templates.fragments import PIECE_WORDS, WORD_BYTES
from aotc.kernels.cuda.templates.gemm.mma_steps import PIECES, copied_piece_of_thread, operand_tiles
from aotc.kernels.cuda.templates.gemm.tiles import WarpTiles
from aotc.kernels.cuda.templates.records import named_tuple_members
from aotc.kernels.cuda.templates.steps import ELEMENT, ELEMENTS, PACK, REGISTERS, simulated_dtype
from aotc.kernels.formulas.llvm_values import ScalarValue
from aotc.kernels.llvm_types import F32, I32, I64, i32

_WORDS = PIECE_WORDS
# Bits of a byte; positions of the later bytes of a word, and of its upper half.
BYTE_MASK, BYTE_POSITIONS, HALF_POSITION = 0xFF, (8, 16, 24), 16


def _computed_pieces(tiles: WarpTiles) -> list[tuple[int, int, bool, int]]:
    """Return the pieces of a stage that a thread computes.

    Each is a tuple of the operand (0 or 1), the index among the thread's pieces of that operand, True if the operand is
    contiguous along rows, and the operand's offset in the stage.
    """
    return [
        (operand, number, by_rows, begin)
        for operand, (source, by_rows, count, begin) in enumerate(operand_tiles(tiles))
        if source.computed
        for number in range(count * PIECES // tiles.threads)
    ]


def compute_operand_stage(tiles: WarpTiles) -> Any:
    """Return the device function that computes a thread's pieces of a stage, as 4-byte words padded with zeros."""
    pieces = _computed_pieces(tiles)
    words = max(len(pieces) * _WORDS, 1)
    each = PIECE // tiles.size

    def codegen(context, builder, signature, arguments):
        tables, (thread, tile, depth, extents) = arguments[:2], arguments[2:]
        (z, row, column), (m, n, k) = named_tuple_members(builder, tile), named_tuple_members(builder, extents)
        b, own = builder, ScalarValue(builder, thread)
        found: list[ir.Value] = []
        for operand, number, by_rows, _ in pieces:
            _, outer, inner = (v.raw for v in copied_piece_of_thread(tiles, own, number, operand))
            first, size = ((row, m), (column, n))[operand]
            place, ends = (z, b.add(first, outer), b.add(depth, inner)), (size, k)
            if (tiles.a, tiles.b)[operand].in_pieces:
                values = _compute_piece_elements_at_once(b, tables, operand, place, ends, each)
            else:
                values = _compute_piece_elements_one_by_one(b, tiles, tables, operand, place, ends, by_rows)
            found += _pack_piece(b, tiles, values, operand)
        return context.make_tuple(builder, signature.return_type, found or [i32(0)])

    kept = types.UniTuple(INT, words)

    @llvm_instruction(lambda p, d, thread, tile, depth, extents: kept(p, d, INT, tile, INT, extents), codegen)
    def compute_pieces(pointers, dims, thread, tile, depth, extents):
        (z, row, column), (m, n, k) = tile, extents
        functions, found = simulated_thread().block.functions, np.zeros((len(pieces), PIECE), np.uint8)
        for p, (operand, number, by_rows, _) in enumerate(pieces):
            _, outer, inner = copied_piece_of_thread(tiles, int(thread), number, operand)
            first, size = ((row, m), (column, n))[operand]
            elements = found[p].view(simulated_dtype(tiles.operands, operand))
            for e in range(each):
                i, j = int(first) + outer + (e if by_rows else 0), int(depth) + inner + (0 if by_rows else e)
                if i < size and j < k:
                    elements[e] = functions[ELEMENT[operand]](int(z), i, j)
        return found

    return compute_pieces


def _compute_piece_elements_one_by_one(
    b: ir.IRBuilder, tiles: WarpTiles, tables: Sequence[ir.Value], operand: int, place: Sequence[ir.Value],
    ends: Sequence[ir.Value], by_rows: bool,
) -> list[ir.Value]:  # fmt: skip
    """Emit the elements of a 16-byte piece, each by its own call of the operand's device function."""
    z, outer, inner = place
    kind, values = REGISTERS[tiles.sum][1], []
    for e in range(PIECE // tiles.size):
        i, j = (b.add(outer, i32(e)), inner) if by_rows else (outer, b.add(inner, i32(e)))
        inside = b.and_(*(b.icmp_signed("<", x, end) for x, end in zip((i, j), ends, strict=True)))
        own = (b.select(b.icmp_signed("<", x, end), x, b.sub(end, i32(1))) for x, end in zip((i, j), ends, strict=True))
        value = emit_device_function_call(b, ELEMENT[operand], kind, tables, *(b.sext(v, I64) for v in (z, *own)))
        values.append(b.select(inside, value, ir.Constant(kind, 0)))
    return values


def _compute_piece_elements_at_once(
    b: ir.IRBuilder, tables: Sequence[ir.Value], operand: int, place: Sequence[ir.Value], ends: Sequence[ir.Value],
    each: int,
) -> list[ir.Value]:  # fmt: skip
    """Emit all elements of a 16-byte piece by one call; its terms either all exist or all do not.

    The code has no branches, so that all loads are issued at once. Indices outside are clamped to the last piece, and
    the result is replaced by zeros.
    """
    z, outer, inner = place
    (size, k), number = ends, i32(each)
    inside = b.and_(b.icmp_signed("<", outer, size), b.icmp_signed("<", inner, k))
    outer = b.select(b.icmp_signed("<", outer, size), outer, b.sub(size, i32(1)))
    inner = b.select(b.icmp_signed("<", inner, k), inner, b.sub(k, number))
    at = (b.sext(v, I64) for v in (z, outer, b.sdiv(inner, number)))
    found = emit_device_function_call(b, ELEMENTS[operand], ir.LiteralStructType([F32] * each), tables, *at)
    return [b.select(inside, b.extract_value(found, n), ir.Constant(F32, 0)) for n in range(each)]


def _pack_piece(b: ir.IRBuilder, tiles: WarpTiles, values: list[ir.Value], operand: int) -> list[ir.Value]:
    """Emit the packing of the elements of a piece into words."""
    if tiles.operands == "tf32":
        return [b.bitcast(v, I32) for v in values]
    if tiles.operands == "f64":
        pairs = [b.bitcast(v, ir.VectorType(I32, 2)) for v in values]
        return [b.extract_element(pair, i32(n)) for pair in pairs for n in range(2)]
    if tiles.operands == "i8":
        low = [b.and_(v, i32(BYTE_MASK)) for v in values]
        fours = [low[n : n + WORD_BYTES] for n in range(0, len(low), WORD_BYTES)]
        second, third, fourth = BYTE_POSITIONS
        return [
            b.or_(b.or_(p, b.shl(q, i32(second))), b.or_(b.shl(r, i32(third)), b.shl(s, i32(fourth))))
            for p, q, r, s in fours
        ]
    pairs = [values[n : n + 2] for n in range(0, len(values), 2)]
    if tiles.operands in FP8_PAIRS:
        halves = [_narrow_to_8_bit_floats(b, pair, FP8_PAIRS[tiles.operands][operand]) for pair in pairs]
        return [b.or_(x, b.shl(y, i32(HALF_POSITION))) for x, y in zip(halves[::2], halves[1::2], strict=True)]
    return [emit_inline_assembly(b, PACK[tiles.operands], INT, [FLOAT, FLOAT], pair) for pair in pairs]


def _narrow_to_8_bit_floats(b: ir.IRBuilder, pair: list[ir.Value], dtype: str) -> ir.Value:
    """Emit the conversion of two f32, which are exactly representable, to 8-bit floats.

    f8E5M2 is the upper byte of f16, with its infinities; for f8E4M3 there is an instruction.
    """
    if dtype == "f8E5M2":
        wide = emit_inline_assembly(b, PACK["f16"], INT, [FLOAT, FLOAT], pair)
        return emit_inline_assembly(b, "prmt.b32 $0, $1, 0, 0x4431;", INT, [INT], [wide])
    text = "{\n.reg .b16 h;\ncvt.rn.satfinite.e4m3x2.f32 h, $2, $1;\ncvt.u32.u16 $0, h;\n}"
    return emit_inline_assembly(b, text, INT, [FLOAT, FLOAT], pair)


def store_computed_stage(tiles: WarpTiles) -> Any:
    """Return the device function that stores a thread's computed pieces in a stage in shared memory."""
    pieces = _computed_pieces(tiles)

    def codegen(context, builder, signature, arguments):
        held, to, thread = arguments
        b, own = builder, ScalarValue(builder, thread)
        for p, (operand, number, _, begin) in enumerate(pieces):
            place = copied_piece_of_thread(tiles, own, number, operand)[0].raw
            words = [b.extract_value(held, _WORDS * p + n) for n in range(_WORDS)]
            given = [b.add(b.add(to, i32(begin)), place), *words]
            emit_inline_assembly(b, "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", NOTHING, [INT] * len(given), given)
        return context.get_dummy_value()

    @llvm_instruction(lambda held, to, thread: NOTHING(held, INT, INT), codegen)
    def store_pieces(held, to, thread):
        for p, (operand, number, _, begin) in enumerate(pieces):
            at = int(to) + begin + copied_piece_of_thread(tiles, int(thread), number, operand)[0]
            simulated_thread().block.memory[at : at + PIECE] = held[p]

    return store_pieces
