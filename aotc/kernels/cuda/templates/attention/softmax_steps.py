"""Device functions that the attention templates share: tile order, scores, online softmax.

A lane has elements of two of its warp's 16 rows, in the layout of accumulators: lane l has rows ``l / 4`` and
``l / 4 + 8``, and in each group of 8 columns two elements of each. The softmax statistics of its rows are six numbers
(``STATE``): the highest score so far of each row, the sum of weights of the lane's own elements, and the factor by
which earlier sums are rescaled.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.cuda import types

from aotc.ir.loop.ir import WARP
from aotc.kernels.cuda.block import simulated_thread, swizzled_tile_offset
from aotc.kernels.cuda.ptx import F32 as FLOAT
from aotc.kernels.cuda.ptx import I32 as INT
from aotc.kernels.cuda.ptx import divide_nonnegative, emit_inline_assembly, llvm_instruction
from aotc.kernels.cuda.shell import emit_device_function_call
from aotc.kernels.cuda.templates.attention.tiles import AttentionTiles
from aotc.kernels.cuda.templates.fragments import (
    FRAGMENT_REGISTERS,
    GROUP,
    GROUP_SUMS,
    HALF_ROWS,
    LANE_COLUMNS,
    WORD_BYTES,
    accumulator_rows_and_columns,
    emit_lane_column,
    emit_quad_row,
    lanes_of_quad,
)
from aotc.kernels.cuda.templates.gemm.tiles import CHUNK
from aotc.kernels.cuda.templates.records import named_tuple_members
from aotc.kernels.cuda.templates.steps import PACK, TO_TF32, own_accumulator_elements, simulated_dtype
from aotc.kernels.cuda.templates.threads import WARP_TILE
from aotc.kernels.llvm_types import F32, I32, I64, i32

SCORE = "aotc_score"
"""``f32 score(..., i64 z, i64 row, i64 term, f32 product)``."""
END = "aotc_end"
"""``i64 end(..., i64 z, i64 row)``: the number of keys of a row; it does not decrease from row to row."""
BEGIN = "aotc_begin"
"""``i64 begin(..., i64 z)``: the first key of a head, a multiple of the keys of a stage."""
COORDINATE = ("aotc_query_coordinate", "aotc_key_coordinate", "aotc_value_coordinate")
"""``i64 f(..., i64 z)``, numbered: a coordinate of head z in the tensor map of an operand."""
# The softmax statistics of a lane's two rows, and the indices of the first row's: its maximum is number 0.
STATE = types.UniTuple(FLOAT, 6)
SUM_OF_ROW, FACTOR_OF_ROW = 2, 4
# exp(x) is computed as 2 ** (x * log2(e)), by the instruction ex2.
LOG2_E = 1.4426950408889634
_SHUFFLE = "shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;"


def _key_count_codegen(context, builder, signature, arguments):
    pointers, dims, z, row = arguments
    place = (builder.sext(z, I64), builder.sext(row, I64))
    return builder.trunc(emit_device_function_call(builder, END, I64, (pointers, dims), *place), I32)


@llvm_instruction(lambda pointers, dims, z, row: INT(pointers, dims, INT, INT), _key_count_codegen)
def key_count_of_row(pointers, dims, z, row):
    """Call the kernel's device function that returns the number of keys of a row."""
    return simulated_thread().block.functions[END](int(z), int(row))


def _first_key_codegen(context, builder, signature, arguments):
    pointers, dims, z, _ = arguments
    return builder.trunc(emit_device_function_call(builder, BEGIN, I64, (pointers, dims), builder.sext(z, I64)), I32)


@llvm_instruction(lambda pointers, dims, z, row: INT(pointers, dims, INT, INT), _first_key_codegen)
def first_key_of_head(pointers, dims, z, row):
    """Call the kernel's device function that returns the first key of a head."""
    return simulated_thread().block.functions[BEGIN](int(z))


# Heads whose tiles are interleaved under a causal mask, where later rows have more keys: tiles with the most keys come
# first. Their keys and values must stay in the L2 cache. 8192 keys of 128 elements take 4 MB a head; an H200 has 50 MB.
HEADS_TOGETHER = 8


def attention_tile_order(cuda: Any, tiles: AttentionTiles) -> Any:
    """Return the device function that maps a tile's index to its head, its first row, and its number of keys.

    Tiles of a head follow each other. Under a causal mask, tiles of :data:`HEADS_TOGETHER` heads are interleaved, and
    those with the most keys come first.
    """
    rows, causal, i32 = tiles.rows, tiles.causal, types.int32

    @cuda.jit(device=True, inline="always")
    def locate_tile(pointers, dims, tile, grid, sizes):
        down, n = grid.down, sizes.cols
        if causal:
            group = divide_nonnegative(tile, i32(HEADS_TOGETHER * down))
            first = i32(group * HEADS_TOGETHER)
            wide = i32(min(i32(grid.heads - first), i32(HEADS_TOGETHER)))
            at = i32(tile - i32(group * i32(HEADS_TOGETHER * down)))
            line = divide_nonnegative(at, wide)
            z, row = i32(first + i32(at - i32(line * wide))), i32(i32(down - 1 - line) * rows)
            end = i32(min(key_count_of_row(pointers, dims, z, i32(min(i32(row + rows), sizes.rows) - 1)), n))
            end = i32(max(end, i32(0)))
        else:
            z = divide_nonnegative(tile, down)
            row, end = i32(i32(tile - i32(z * down)) * rows), n
        return z, row, end

    return locate_tile


def simulated_tile_lines(begin: int, lines: np.ndarray, count: int, height: int, dtype: str) -> np.ndarray:
    """Return the first ``count`` elements of ``lines`` of a tile in simulated shared memory."""
    kind = simulated_dtype(dtype)
    at = np.arange(count) * kind.itemsize
    places = int(begin) + at // CHUNK * height * CHUNK + swizzled_tile_offset(np.asarray(lines)[:, None], at % CHUNK)
    return simulated_thread().block.memory.view(kind)[places // kind.itemsize]


def gather_weights_of_quad(weights: np.ndarray, terms: int) -> np.ndarray:
    """Gather 16 complete rows of weights in the simulator; each lane of a quad has only a part of its rows."""
    every, whole = simulated_thread().block.exchange_values(weights), np.zeros((WARP_TILE, terms), np.float32)
    for own in range(WARP)[lanes_of_quad(simulated_thread().thread % WARP)]:
        whole[accumulator_rows_and_columns(own, np.arange(terms // 2))] = every[own].astype(np.float32)
    return whole


def reduce_weight_sums_of_quad(known: np.ndarray) -> np.ndarray:
    """Return the sum of weights of each of the calling thread's rows over the lanes of its quad, in the simulator."""
    sums = simulated_thread().block.exchange_values(known[SUM_OF_ROW:FACTOR_OF_ROW])
    return np.sum(sums[lanes_of_quad(simulated_thread().thread % WARP)], axis=0)


def _initial_statistics_codegen(context, builder, signature, arguments):
    values = [-math.inf if n < SUM_OF_ROW else 0.0 for n in range(STATE.count)]
    return context.make_tuple(builder, signature.return_type, [ir.Constant(F32, v) for v in values])


@llvm_instruction(lambda: STATE(), _initial_statistics_codegen)
def initial_softmax_statistics():
    """Return the softmax statistics of rows before their first score: maxima of -inf, and sums of 0."""
    return np.array([-np.inf if n < SUM_OF_ROW else 0 for n in range(STATE.count)], np.float32)


class SoftmaxRowMath:
    """Emitter of f32 arithmetic within a lane, and of reductions across the lanes of a row."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.b = builder

    def number(self, value: float) -> ir.Constant:
        """Return an f32 constant."""
        return ir.Constant(F32, float(np.float32(value)))

    def power(self, x: ir.Value) -> ir.Value:
        """Emit 2 to the power of ``x``; subnormal results are 0."""
        return emit_inline_assembly(self.b, "ex2.approx.ftz.f32 $0, $1;", FLOAT, [FLOAT], [x])

    def sum_of_product(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """Emit ``x * y + z``."""
        return emit_inline_assembly(self.b, "fma.rn.f32 $0, $1, $2, $3;", FLOAT, [FLOAT, FLOAT, FLOAT], [x, y, z])

    def highest(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """Emit the larger of two f32."""
        return emit_inline_assembly(self.b, "max.f32 $0, $1, $2;", FLOAT, [FLOAT] * 2, [x, y])

    def other(self, x: ir.Value, mask: int) -> ir.Value:
        """Emit the value of ``x`` in lane ``l ^ mask`` (warp shuffle)."""
        kind = ir.FunctionType(F32, [F32, I32])
        return self.b.asm(kind, _SHUFFLE, "=f,f,r", [x, i32(mask)], side_effect=True)

    def sum_of_lanes(self, x: ir.Value) -> ir.Value:
        """Emit the sum over the four lanes of a row."""
        for mask in (1, 2):
            x = self.b.fadd(x, self.other(x, mask))
        return x

    def finite(self, x: ir.Value) -> ir.Value:
        """Emit ``x``, or 0 if ``x`` is minus infinity."""
        none = self.b.fcmp_ordered("==", x, ir.Constant(F32, -math.inf))
        return self.b.select(none, self.number(0), x)


def _split_elements_by_row(scores: list[Any]) -> list[list[Any]]:
    """Split a lane's elements by row: a lane has elements of two rows."""
    return [[x for n, x in enumerate(scores) if n // 2 % 2 == row] for row in range(2)]


def online_softmax(tiles: AttentionTiles) -> Any:
    """Return the device function that converts scores to weights and updates the softmax statistics of their rows.

    The algorithm is the online softmax of M. Milakov and N. Gimelshein (2018). A lane's statistics (``STATE``) are, for
    each of its two rows: the maximum so far, its own part of the sum of weights, and the factor by which earlier sums
    shrink.
    """
    count = tiles.terms // 2
    kept = types.UniTuple(FLOAT, count)
    result = types.Tuple((kept, STATE))

    def codegen(context, builder, signature, arguments):
        lane = SoftmaxRowMath(builder)
        scores = [builder.extract_value(arguments[0], n) for n in range(count)]
        known = [builder.extract_value(arguments[1], n) for n in range(STATE.count)]
        found, weights = [None] * STATE.count, [None] * count
        for row, own in enumerate(_split_elements_by_row(list(range(count)))):
            top = _row_maximum_of_quad(lane, known[row], [scores[n] for n in own])
            found[row] = top
            base, old, power = _softmax_base_and_weights(lane, tiles, top, known[row])
            found[FACTOR_OF_ROW + row] = old
            partial = [None, None]
            for at, n in enumerate(own):
                weights[n] = power(scores[n], base)
                held = partial[at % 2]
                partial[at % 2] = weights[n] if held is None else builder.fadd(held, weights[n])
            found[SUM_OF_ROW + row] = lane.sum_of_product(known[SUM_OF_ROW + row], old, builder.fadd(*partial))
        parts = [
            context.make_tuple(builder, kept, weights), context.make_tuple(builder, STATE, found)
        ]  # fmt: skip
        return context.make_tuple(builder, signature.return_type, parts)

    @llvm_instruction(lambda *given: result(kept, STATE), codegen)
    def update_softmax(scores, known):
        factor = np.float32(LOG2_E * (tiles.scale or 1.0))
        found, weights = known.copy(), np.zeros(count, np.float32)
        own = [np.arange(count)[np.arange(count) // 2 % 2 == row] for row in range(2)]
        tops = np.array([max(known[row], scores[own[row]].max()) for row in range(2)])
        found[:SUM_OF_ROW] = np.max(
            simulated_thread().block.exchange_values(tops)[lanes_of_quad(simulated_thread().thread % WARP)], axis=0
        )
        for row in range(2):
            base = found[row] if found[row] != -np.inf else np.float32(0)
            found[FACTOR_OF_ROW + row] = shrinks = np.exp2((known[row] - base) * factor)
            weights[own[row]] = np.exp2((scores[own[row]] - base) * factor)
            found[SUM_OF_ROW + row] = known[SUM_OF_ROW + row] * shrinks + weights[own[row]].sum()
        return weights, found

    return update_softmax


# Independent chains of maximum instructions by which a thread finds the highest score of a row. Each instruction waits
# for the one before it in its chain; four chains overlap.
TOP_CHAINS = 4


def _row_maximum_of_quad(lane: SoftmaxRowMath, known: ir.Value, scores: list[ir.Value]) -> ir.Value:
    """Emit the maximum of earlier scores and of new scores of a row, reduced over the four lanes of its quad."""
    chains = scores[:TOP_CHAINS]
    for n, x in enumerate(scores[TOP_CHAINS:]):
        chains[n % TOP_CHAINS] = lane.highest(chains[n % TOP_CHAINS], x)
    while len(chains) > 1:
        chains = [lane.highest(*chains[n : n + 2]) for n in range(0, len(chains), 2)]
    top = lane.highest(known, chains[0])
    for mask in (1, 2):
        top = lane.highest(top, lane.other(top, mask))
    return top


def _softmax_base_and_weights(
    lane: SoftmaxRowMath, tiles: AttentionTiles, top: ir.Value, known: ir.Value
) -> tuple[ir.Value, ir.Value, Any]:
    """Return the base that is subtracted from a row's scores, the factor for earlier sums, and the emitter of weights.

    A score that is a scaled dot product is scaled by the fused multiply-add of the exponent. Other scores may be too
    large for the multiply-add, and the base is subtracted first.
    """
    b, factor = lane.b, lane.number(LOG2_E * (tiles.scale or 1.0))
    if tiles.scale:
        base = b.fsub(lane.number(-0.0), b.fmul(lane.finite(top), factor))
        return base, lane.power(lane.sum_of_product(known, factor, base)), lambda x, y: lane.power(
            lane.sum_of_product(x, factor, y)
        )
    base = lane.finite(top)
    return base, lane.power(b.fmul(b.fsub(known, base), factor)), lambda x, y: lane.power(b.fmul(b.fsub(x, y), factor))


# The order of a lane's four weights of 8 keys in the registers of an m16n8k8 fragment, which has both rows of a column
# before the next column; accumulators have both columns of a row first. PTX ISA, fragments of mma.m16n8k8 for .tf32.
TF32_ORDER = (0, 2, 1, 3)


def weight_register_count(tiles: AttentionTiles) -> int:
    """Return the number of registers of a lane's packed weights: 16 rows times the keys of a stage, over 32 lanes."""
    return WARP_TILE * tiles.terms * tiles.size // (WARP * WORD_BYTES)


def pack_softmax_weights(tiles: AttentionTiles) -> Any:
    """Return the device function that packs weights into tensor core fragments, four bytes in each register.

    For TF32, a lane has two neighbouring columns in each group of 8, but a fragment has two columns that are four
    apart. The neighbours are passed in their place, with the values in the same order, so that no lane needs another's
    weights.
    """
    count = weight_register_count(tiles)
    kept = types.UniTuple(INT, count)

    def codegen(context, builder, signature, arguments):
        weights = [builder.extract_value(arguments[0], n) for n in range(tiles.terms // 2)]
        if tiles.operands == "tf32":
            groups = range(0, count, FRAGMENT_REGISTERS)
            order = [first + n for first in groups for n in TF32_ORDER]
            packed = [emit_inline_assembly(builder, TO_TF32, INT, [FLOAT], [weights[n]]) for n in order]
        else:
            pairs = [weights[2 * n : 2 * n + 2] for n in range(count)]
            packed = [emit_inline_assembly(builder, PACK[tiles.operands], INT, [FLOAT, FLOAT], pair) for pair in pairs]
        return context.make_tuple(builder, signature.return_type, packed)

    @llvm_instruction(lambda weights: kept(weights), codegen)
    def pack_weights(weights):
        return weights.astype(simulated_dtype(tiles.operands))

    return pack_weights


def rescale_accumulators(tiles: AttentionTiles, last: bool = False) -> Any:
    """Return the device function that rescales accumulators, or divides them by the sums of weights if ``last``."""
    count = tiles.width // 2
    kept = types.UniTuple(FLOAT, count)

    def codegen(context, builder, signature, arguments):
        lane = SoftmaxRowMath(builder)
        factors = []
        for row in range(2):
            factor = builder.extract_value(arguments[1], (SUM_OF_ROW if last else FACTOR_OF_ROW) + row)
            if last:
                factor = emit_inline_assembly(
                    builder, "rcp.rn.f32 $0, $1;", FLOAT, [FLOAT], [lane.sum_of_lanes(factor)]
                )
            factors.append(factor)
        found = [builder.fmul(builder.extract_value(arguments[0], n), factors[n // 2 % 2]) for n in range(count)]
        return context.make_tuple(builder, signature.return_type, found)

    @llvm_instruction(lambda *given: kept(kept, STATE), codegen)
    def rescale(sums, known):
        factors = known[FACTOR_OF_ROW:]
        if last:
            with np.errstate(all="ignore"):
                factors = 1 / reduce_weight_sums_of_quad(known)
        with np.errstate(all="ignore"):
            return sums * factors[np.arange(count) // 2 % 2]

    return rescale


def attention_scores(tiles: AttentionTiles, there: bool = False) -> Any:
    """Return the device function that scales and masks dot products; scores beyond a row's end are -inf.

    A score of minus infinity has weight 0, whatever the other scores, so masks need no other treatment. ``there`` is
    True if all keys of the stage exist, as in all stages but the last: indices are then not clamped, which saves
    registers.
    """
    count, ragged = tiles.terms // 2, tiles.ragged and not there
    kept = types.UniTuple(FLOAT, count)

    def codegen(context, builder, signature, arguments):
        products, warp, first, sizes, *tables = arguments
        b, (z, row, lane), (m, n) = builder, named_tuple_members(builder, warp), named_tuple_members(builder, sizes)
        rows = [b.add(row, b.add(emit_quad_row(b, lane), i32(HALF_ROWS * half))) for half in range(2)]
        rows = [b.select(b.icmp_signed("<", r, m), r, b.sub(m, i32(1))) for r in rows]
        wide = [b.sext(x, I64) for x in (z, *rows)]
        ends = [n, n]
        if tiles.causal:
            ends = [b.trunc(emit_device_function_call(b, END, I64, tables, wide[0], r), I32) for r in wide[1:]]
        begin = b.add(first, emit_lane_column(b, lane))
        found = []
        for at in range(count):
            term = b.add(begin, i32(GROUP * (at // GROUP_SUMS) + at % LANE_COLUMNS))
            value, half = b.extract_value(products, at), at // LANE_COLUMNS % 2
            if not tiles.scale:
                inside = b.select(b.icmp_signed("<", term, n), term, b.sub(n, i32(1))) if ragged else term
                inside = b.sext(inside, I64)
                value = emit_device_function_call(b, SCORE, F32, tables, wide[0], wide[1 + half], inside, value)
            if tiles.causal or ragged:
                value = b.select(b.icmp_signed("<", term, ends[half]), value, ir.Constant(F32, -math.inf))
            found.append(value)
        return context.make_tuple(builder, signature.return_type, found)

    @llvm_instruction(lambda products, warp, first, *given: kept(kept, warp, INT, *given), codegen)
    def compute_scores(products, warp, first, sizes, pointers, dims):
        (z, row, _), (m, n) = warp, sizes
        functions, found = simulated_thread().block.functions, products.copy()
        for at, (i, j) in enumerate(zip(*own_accumulator_elements(tiles.terms))):
            place = int(z), min(int(row + i), int(m) - 1), int(first + j)
            if place[2] >= (functions[END](*place[:2]) if tiles.causal else n):
                found[at] = -np.inf
            elif not tiles.scale:
                found[at] = functions[SCORE](*place, products[at])
        return found

    return compute_scores
