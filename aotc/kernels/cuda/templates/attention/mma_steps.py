"""Device functions of the attention template mma: copies by all threads of a block, and products of single warps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba.cuda import types

from aotc.ir.loop.ir import WARP
from aotc.kernels.cuda.ampere import PIECE, copy_16_bytes_async
from aotc.kernels.cuda.block import simulated_thread
from aotc.kernels.cuda.ptx import F32 as FLOAT
from aotc.kernels.cuda.ptx import I32 as INT
from aotc.kernels.cuda.ptx import I64 as LONG
from aotc.kernels.cuda.ptx import NOTHING, emit_inline_assembly, llvm_instruction
from aotc.kernels.cuda.shell import emit_device_function_call
from aotc.kernels.cuda.templates.attention.softmax_steps import (
    STATE,
    SUM_OF_ROW,
    SoftmaxRowMath,
    gather_weights_of_quad,
    reduce_weight_sums_of_quad,
    simulated_tile_lines,
    weight_register_count,
)
from aotc.kernels.cuda.templates.attention.tiles import AttentionTiles, WarpAttention
from aotc.kernels.cuda.templates.fragments import (
    FRAGMENT_REGISTERS,
    GROUP,
    GROUP_SUMS,
    HALF_ROWS,
    LINE_WORDS,
    PAIR_COLUMNS,
    PIECE_WORDS,
    QUAD,
    STEP_BYTES,
    SWIZZLE_LINES,
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
from aotc.kernels.cuda.templates.gemm.mma_steps import PIECES, WarpOperands, WarpProducts
from aotc.kernels.cuda.templates.gemm.tiles import CHUNK
from aotc.kernels.cuda.templates.records import named_tuple_members
from aotc.kernels.cuda.templates.steps import (
    PACK,
    TO_TF32,
    emit_attention_result_stores,
    emit_shared_f32_load,
    own_accumulator_elements,
    simulate_result_stores,
    simulated_dtype,
)
from aotc.kernels.cuda.templates.threads import WARP_TILE
from aotc.kernels.formulas.llvm_values import ScalarValue
from aotc.kernels.llvm_types import F32, I32, I64, i32, i64

QUERY = "aotc_query"
"""``f32 query(..., i64 z, i64 row, i64 d)``."""
START = ("aotc_key_start", "aotc_value_start")
"""``i64 f(..., i64 z)``: the offset of the first element of the keys, or of the values, of head z."""
PITCH = ("aotc_key_pitch", "aotc_value_pitch")
"""``i64 f(...)``: the stride between two keys, or values, in elements."""
REST = "aotc_rest"
"""``i32 rest(..., i64 z, i64 row, f32 top, f32 whole)``: stores the softmax statistics of a row."""


def _key_or_value_pieces(tiles: WarpAttention, number: int) -> tuple[Any, int, int, int]:
    """Return source, number of chunks, number of 16-byte pieces, and stage offset of keys (0) or of values (1)."""
    if number:
        return tiles.v, tiles.value_chunks, tiles.width * tiles.size // PIECE, tiles.key_bytes
    return tiles.k, tiles.key_chunks, tiles.depth * tiles.size // PIECE, 0


def _copied_piece_of_thread(tiles: WarpAttention, thread: Any, number: int) -> tuple[Any, Any, Any]:
    """Return destination, line and index in the line of the piece that a thread copies in step ``number``."""
    at = thread + number * tiles.threads
    piece, line = at & (PIECES - 1), (at >> log2_of_size(PIECES)) & (tiles.terms - 1)
    chunk = at >> log2_of_size(PIECES * tiles.terms)
    place = (chunk * tiles.terms + line) * CHUNK + ((piece ^ (line & SWIZZLE_LINES - 1)) << log2_of_size(PIECE))
    return place, line, chunk * PIECES + piece


# Pieces of 16 bytes of keys or values whose copies a thread issues in one iteration. A thread of a block of eight warps
# has no more. A thread of a block of one warp has 64, whose addresses would spill if all were unrolled. The linker's
# log.
COPIED_AT_ONCE = 8


def _emit_thread_copies(
    b: ir.IRBuilder, tiles: WarpAttention, thread: ir.Value, count: int, emit: Callable[[ir.Value, int], None]
) -> None:
    """Emit the copies of a thread's 16-byte pieces by ``emit``: unrolled, or as a loop to save registers."""
    if count <= COPIED_AT_ONCE:
        for n in range(count):
            emit(thread, n)
        return
    iterations = emit_inline_assembly(
        b, f"mov.u32 $0, {count // COPIED_AT_ONCE};", INT, [], []
    )  # opaque, so never unrolled
    before, loop, after = b.block, b.append_basic_block("pieces"), b.append_basic_block("copied")
    b.branch(loop)
    b.position_at_end(loop)
    iteration = b.phi(I32)
    iteration.add_incoming(i32(0), before)
    own = b.add(thread, b.mul(iteration, i32(COPIED_AT_ONCE * tiles.threads)))
    for n in range(COPIED_AT_ONCE):
        emit(own, n)
    following = b.add(iteration, i32(1))
    iteration.add_incoming(following, b.block)
    b.cbranch(b.icmp_signed("<", following, iterations), loop, after)
    b.position_at_end(after)
    for n in range(count // COPIED_AT_ONCE * COPIED_AT_ONCE, count):
        emit(thread, n)


def _emit_async_piece_copy(
    b: ir.IRBuilder, tiles: WarpAttention, lying: Sequence[ir.Value], thread: ir.Value, count: int
) -> None:
    """Emit the asynchronous copy of 16-byte piece ``count`` of a thread."""
    source, start, pitch, to, first, n, there = lying
    place, line, piece = (v.raw for v in _copied_piece_of_thread(tiles, ScalarValue(b, thread), count))
    term = b.add(first, line)
    inside = b.and_(b.icmp_signed("<", term, n), b.icmp_signed("<", piece, there))
    low = b.shl(b.sext(piece, I64), i64(log2_of_size(PIECE // tiles.size)))
    flat = b.add(b.add(start, b.mul(b.sext(term, I64), pitch)), low)
    offset = b.select(inside, b.shl(flat, i64(log2_of_size(tiles.size))), i64(0))
    given = [b.add(to, place), b.add(source, offset), b.select(inside, i32(PIECE), i32(0))]
    emit_inline_assembly(b, copy_16_bytes_async.text, NOTHING, [INT, LONG, INT], given)


def copy_keys_and_values(tiles: WarpAttention) -> Any:
    """Return the device function by which a block starts to copy a stage of keys and values, padded with zeros."""

    def codegen(context, builder, signature, arguments):
        pointers, dims, to, thread, z, first, n = arguments
        b, tables = builder, (pointers, dims)
        for number in range(2):
            found, chunks, there, begin = _key_or_value_pieces(tiles, number)
            source = b.ptrtoint(b.extract_value(pointers, found.pointer), I64)
            start = emit_device_function_call(b, START[number], I64, tables, b.sext(z, I64))
            pitch = emit_device_function_call(b, PITCH[number], I64, tables)
            lying = (source, start, pitch, b.add(to, i32(begin)), first, n, i32(there))
            each = chunks * PIECES * tiles.terms // tiles.threads
            _emit_thread_copies(b, tiles, thread, each, partial(_emit_async_piece_copy, b, tiles, lying))
        return context.get_dummy_value()

    @llvm_instruction(lambda pointers, dims, *given: NOTHING(pointers, dims, INT, INT, INT, INT, INT), codegen)
    def start_key_value_copy(pointers, dims, to, thread, z, first, n):
        functions = simulated_thread().block.functions
        for number in range(2):
            found, chunks, there, begin = _key_or_value_pieces(tiles, number)
            source, per = pointers[found.pointer].ctypes.data, PIECE // tiles.size
            for count in range(chunks * PIECES * tiles.terms // tiles.threads):
                place, line, piece = _copied_piece_of_thread(tiles, int(thread), count)
                term = int(first) + line
                inside = term < n and piece < there
                flat = functions[START[number]](int(z)) + term * functions[PITCH[number]]() + piece * per
                copy_16_bytes_async(
                    to + begin + place, source + (flat * tiles.size if inside else 0), PIECE if inside else 0
                )

    return start_key_value_copy


def load_queries(tiles: AttentionTiles) -> Any:
    """Return the device function that loads a lane's fragments of its warp's 16 queries, four registers per step."""
    count, each = FRAGMENT_REGISTERS * tiles.steps, WORD_BYTES // tiles.size
    kept = types.UniTuple(INT, count)

    def codegen(context, builder, signature, arguments):
        pointers, dims, z, row, lane, m = arguments
        b, tables, found = builder, (pointers, dims), []
        text = TO_TF32 if tiles.operands == "tf32" else PACK[tiles.operands]
        rows = [b.add(row, b.add(emit_quad_row(b, lane), i32(HALF_ROWS * half))) for half in range(2)]
        rows = [b.sext(b.select(b.icmp_signed("<", r, m), r, b.sub(m, i32(1))), I64) for r in rows]
        head, own = b.sext(z, I64), emit_times_power_of_two(b, emit_quad_lane(b, lane), each)
        for step in range(tiles.steps):
            for register in range(FRAGMENT_REGISTERS):  # both rows of the first half of the terms, then of the second
                first = QUAD * each * (2 * step + register // 2)
                if first >= tiles.depth:
                    found.append(i32(0))
                    continue
                at = [b.sext(b.add(own, i32(first + e)), I64) for e in range(each)]
                values = [emit_device_function_call(b, QUERY, F32, tables, head, rows[register % 2], d) for d in at]
                found.append(emit_inline_assembly(b, text, INT, [FLOAT] * each, values))
        return context.make_tuple(builder, signature.return_type, found)

    @llvm_instruction(lambda *given: kept(*given[:2], INT, INT, INT, INT), codegen)
    def load_query_fragments(pointers, dims, z, row, lane, m):
        query = simulated_thread().block.functions[QUERY]
        rows = [min(int(row) + r, int(m) - 1) for r in range(WARP_TILE)]
        whole = [[float(query(int(z), r, d)) for d in range(tiles.depth)] for r in rows]
        return np.array(whole).astype(simulated_dtype(tiles.operands))

    return load_query_fragments


def store_query_to_shared_memory(tiles: AttentionTiles) -> Any:
    """Return the device function by which a warp stores a query in shared memory.

    Lane l has elements l, l + 32 and so on.
    """

    def query_element_address(row, d):
        line = (d >> log2_of_size(LINE_WORDS)) * (WARP_TILE * CHUNK) + row * CHUNK
        piece = ((d >> log2_of_size(PIECE_WORDS)) & PIECES - 1) ^ (row & SWIZZLE_LINES - 1)
        return line + (piece << log2_of_size(PIECE)) + ((d & PIECE_WORDS - 1) << log2_of_size(WORD_BYTES))

    def codegen(context, builder, signature, arguments):
        pointers, dims, to, z, row, line, lane = arguments
        b, own = builder, ScalarValue(builder, line)
        for first in range(0, tiles.key_chunks * LINE_WORDS, WARP):
            d = b.add(lane, i32(first))
            there = b.icmp_signed("<", d, i32(tiles.depth))
            inside = b.sext(b.select(there, d, i32(0)), I64)
            value = emit_device_function_call(b, QUERY, F32, (pointers, dims), b.sext(z, I64), b.sext(row, I64), inside)
            value = b.select(there, value, ir.Constant(F32, 0.0))
            place = query_element_address(own, ScalarValue(b, d)).raw
            emit_inline_assembly(b, "st.shared.f32 [$0], $1;", NOTHING, [INT, FLOAT], [b.add(to, place), value])
        return context.get_dummy_value()

    @llvm_instruction(lambda pointers, dims, *given: NOTHING(pointers, dims, INT, INT, INT, INT, INT), codegen)
    def store_query(pointers, dims, to, z, row, line, lane):
        query, memory = simulated_thread().block.functions[QUERY], simulated_thread().block.memory.view(np.float32)
        for d in range(int(lane), tiles.key_chunks * LINE_WORDS, WARP):
            place = int(to) + query_element_address(int(line), d)
            memory[place // WORD_BYTES] = query(int(z), int(row), d) if d < tiles.depth else 0

    return store_query


def _warp_product_emitter(tiles: AttentionTiles, builder: ir.IRBuilder, lane: ir.Value, by_rows: bool) -> WarpProducts:
    """Return the emitter of a warp's loads and products for keys, or for values (``by_rows``)."""
    operands = WarpOperands(tiles.operands, tiles.size, "f32", tiles.terms, a_by_rows=False, b_by_rows=by_rows)
    return WarpProducts(builder, operands, lane)


def multiply_queries_by_keys(tiles: AttentionTiles) -> Any:
    """Return the device function that multiplies a warp's queries by a stage of keys (Q K^T)."""
    count, stay = tiles.terms // 2, tiles.queries_stay
    kept, queries = types.UniTuple(FLOAT, count), INT if stay else types.UniTuple(INT, FRAGMENT_REGISTERS * tiles.steps)

    def codegen(context, builder, signature, arguments):
        given, at, lane = arguments
        warp, held = _warp_product_emitter(tiles, builder, lane, by_rows=False), [ir.Constant(F32, 0.0)] * count
        for step in range(tiles.steps):
            chunk, in_chunk = divmod(step, CHUNK // STEP_BYTES)
            if stay:
                own = builder.add(given, i32(chunk * WARP_TILE * CHUNK))
                left = warp.load_row_fragment(own, i32(0), 0, in_chunk)
            else:
                left = [builder.extract_value(given, FRAGMENT_REGISTERS * step + n) for n in range(FRAGMENT_REGISTERS)]
            begin = builder.add(at, i32(chunk * tiles.terms * CHUNK))
            for j in range(tiles.terms // PAIR_COLUMNS):
                right = warp.load_column_fragment(begin, i32(0), PAIR_COLUMNS * j, in_chunk)
                _add_two_column_groups(warp, left, right, held, 2 * j)
        return context.make_tuple(builder, signature.return_type, held)

    @llvm_instruction(lambda *given: kept(queries, INT, INT), codegen)
    def compute_scores(given, at, lane):
        rows, cols = own_accumulator_elements(tiles.terms)
        keys = simulated_tile_lines(at, np.arange(tiles.terms), tiles.depth, tiles.terms, tiles.operands)
        if stay:
            given = simulated_tile_lines(given, np.arange(WARP_TILE), tiles.depth, WARP_TILE, tiles.operands)
        return (given.astype(np.float32) @ keys.astype(np.float32).T)[rows, cols]

    return compute_scores


class _ValueFragmentLoader:
    """Emitter of loads of f32 values, in the order in which ``pack_softmax_weights`` passes the weights.

    A lane has the values of two neighbouring terms of 8, in columns that are 8 apart.
    """

    def __init__(self, b: ir.IRBuilder, tiles: AttentionTiles, at: ir.Value, lane: ir.Value) -> None:
        self.b, self.tiles, self.at = b, tiles, at
        self.pair, self.column = emit_lane_column(b, lane), emit_quad_row(b, lane)

    def columns(self, group: int, step: int) -> list[ir.Value]:
        """Return the values of 8 terms in two groups of columns, as fragments of two registers each."""
        return [self._value_register(group + half, step, term) for half in range(2) for term in range(2)]

    def _value_register(self, group: int, step: int, term: int) -> ir.Value:
        """Return the register with the value of ``term`` in this lane's column of a group of 8 columns."""
        b = self.b
        line = b.add(self.pair, i32(term))
        chunk, own = divmod(group, LINE_WORDS // GROUP)
        piece = b.xor(
            b.or_(i32(GROUP // PIECE_WORDS * own), emit_divide_by_power_of_two(b, self.column, PIECE_WORDS)), line
        )
        place = emit_line_offset(b, line)
        place = b.add(
            place,
            b.add(
                emit_piece_offset(b, piece), emit_word_offset(b, emit_modulo_power_of_two(b, self.column, PIECE_WORDS))
            ),
        )
        begin = (chunk * self.tiles.terms + STEP_BYTES // WORD_BYTES * step) * CHUNK
        value = emit_shared_f32_load(b, b.add(b.add(self.at, place), i32(begin)))
        return emit_inline_assembly(b, TO_TF32, INT, [FLOAT], [value])


def _add_two_column_groups(
    warp: WarpProducts, left: list[ir.Value], right: list[ir.Value], sums: list[ir.Value], group: int
) -> None:
    """Add products of a left fragment and two groups of columns to ``sums``, in place, from group ``group`` on.

    ``right`` has two registers of each group. The second group is left out if there are no accumulators for it.
    """
    for half in range(min(2, len(sums) // GROUP_SUMS - group)):
        own = slice(GROUP_SUMS * (group + half), GROUP_SUMS * (group + half + 1))
        sums[own] = warp.add_products(left, right[2 * half : 2 * half + 2], sums[own])


def multiply_weights_by_values(tiles: AttentionTiles) -> Any:
    """Return the device function that adds softmax weights times a stage of values to the accumulators."""
    count, packed = tiles.width // 2, weight_register_count(tiles)
    kept, weights_type = types.UniTuple(FLOAT, count), types.UniTuple(INT, packed)

    def codegen(context, builder, signature, arguments):
        sums, weights, at, lane = arguments
        warp, held = (
            _warp_product_emitter(tiles, builder, lane, by_rows=True),
            [builder.extract_value(sums, n) for n in range(count)],
        )
        words = _ValueFragmentLoader(builder, tiles, at, lane)
        groups, wide = tiles.width // GROUP, tiles.operands == "tf32"
        for step in range(packed // FRAGMENT_REGISTERS):
            left = [builder.extract_value(weights, FRAGMENT_REGISTERS * step + n) for n in range(FRAGMENT_REGISTERS)]
            for j in range(0, groups, 2):
                right = words.columns(j, step) if wide else warp.load_column_fragment(at, i32(0), GROUP * j, step)
                _add_two_column_groups(warp, left, right, held, j)
        return context.make_tuple(builder, signature.return_type, held)

    @llvm_instruction(lambda *given: kept(kept, weights_type, INT, INT), codegen)
    def add_weighted_values(sums, weights, at, lane):
        whole, lines = gather_weights_of_quad(weights, tiles.terms), np.arange(tiles.terms)
        values = simulated_tile_lines(at, lines, tiles.width, tiles.terms, tiles.operands).astype(np.float32)
        return sums + (whole @ values)[own_accumulator_elements(tiles.width)]

    return add_weighted_values


def store_attention_rows(tiles: WarpAttention) -> Any:
    """Return the device function by which a warp stores its 16 rows, and their softmax statistics if keys are split."""
    count = tiles.width // 2

    def codegen(context, builder, signature, arguments):
        sums = [builder.extract_value(arguments[0], n) for n in range(count)]
        known, staging, warp, rows, *tables = arguments[1:]
        z, row, lane = named_tuple_members(builder, warp)
        emit_attention_result_stores(
            builder, tiles, sums, [staging, lane, z, row, i32(0), rows, i32(tiles.width), *tables]
        )
        if tiles.split:
            _emit_softmax_statistics_stores(builder, tiles, known, (z, row, lane), rows, tables)
        return context.get_dummy_value()

    @llvm_instruction(lambda sums, known, _, warp, rows, p, d: NOTHING(sums, STATE, INT, warp, INT, p, d), codegen)
    def store_warp_rows(sums, known, staging, warp, rows, pointers, dims):
        z, row, lane = warp
        simulate_result_stores(tiles, sums, (z, row, 0), tiles.width, (rows, tiles.width), pointers)
        if tiles.split:
            wholes = reduce_weight_sums_of_quad(known)
            for half in range(2):
                own = int(row) + int(lane) // QUAD + HALF_ROWS * half
                if lane % QUAD == 0 and own < rows:
                    top = np.float32(known[half] * np.float32(tiles.scale or 1))
                    simulated_thread().block.functions[REST](int(z), own, top, wholes[half])

    return store_warp_rows


def _emit_softmax_statistics_stores(
    b: ir.IRBuilder, tiles: WarpAttention, known: ir.Value, warp: tuple[ir.Value, ir.Value, ir.Value],
    rows: ir.Value, tables: list[ir.Value],
) -> None:  # fmt: skip
    """Emit the stores of softmax statistics: one lane of each quad stores the rows of the quad."""
    z, row, lane = warp
    for half in range(2):
        top, whole = b.extract_value(known, half), b.extract_value(known, SUM_OF_ROW + half)
        top = b.fmul(top, ir.Constant(F32, float(np.float32(tiles.scale or 1.0))))
        whole = SoftmaxRowMath(b).sum_of_lanes(whole)
        own = b.add(row, b.add(emit_quad_row(b, lane), i32(HALF_ROWS * half)))
        first = b.icmp_signed("==", emit_quad_lane(b, lane), i32(0))
        inside, after = (b.append_basic_block(name) for name in ("row", "rest"))
        b.cbranch(b.and_(first, b.icmp_signed("<", own, rows)), inside, after)
        b.position_at_end(inside)
        emit_device_function_call(b, REST, I32, tables, b.sext(z, I64), b.sext(own, I64), top, whole)
        b.branch(after)
        b.position_at_end(after)
