"""Device functions of decoding attention: storing and merging the accumulators of warps in shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from aotc.ir.limits import ROWS_APART
from aotc.kernels.cuda.block import simulated_thread
from aotc.kernels.cuda.ptx import F32 as FLOAT
from aotc.kernels.cuda.ptx import I32 as INT
from aotc.kernels.cuda.ptx import NOTHING, emit_inline_assembly, llvm_instruction, ptx_instruction
from aotc.kernels.cuda.shell import emit_device_function_call
from aotc.kernels.cuda.templates.attention.mma_steps import REST
from aotc.kernels.cuda.templates.attention.softmax_steps import (
    STATE,
    SUM_OF_ROW,
    SoftmaxRowMath,
    reduce_weight_sums_of_quad,
)
from aotc.kernels.cuda.templates.attention.tiles import FewAttention
from aotc.kernels.cuda.templates.fragments import (
    GROUP,
    GROUP_SUMS,
    HALF_ROWS,
    LANE_COLUMNS,
    QUAD,
    emit_quad_lane,
    emit_quad_row,
    emit_times_power_of_two,
    emit_word_offset,
)
from aotc.kernels.cuda.templates.gemm.tiles import ROWS
from aotc.kernels.cuda.templates.steps import STORE, emit_shared_f32_load, own_accumulator_elements
from aotc.kernels.cuda.templates.threads import SUM_BYTES
from aotc.kernels.llvm_types import I32, I64, i32


def accumulator_pitch(tiles: FewAttention) -> int:
    """Return the distance of two rows of accumulators in shared memory, in bytes."""
    return SUM_BYTES * (tiles.width + ROWS_APART)


def row_maxima_offset(tiles: FewAttention) -> int:
    """Return the offset of the rows' maximum scores in a warp's shared memory, in bytes; the sums of weights follow."""
    return ROWS * accumulator_pitch(tiles)


@ptx_instruction("ex2.approx.ftz.f32 $0, $1;", FLOAT, FLOAT)
def exp2_f32(x):
    """Return 2 to the power of the f32 ``x``, by the approximate instruction."""
    return np.exp2(np.float32(x))


@ptx_instruction("max.f32 $0, $1, $2;", FLOAT, FLOAT, FLOAT)
def max_f32(x, y):
    """Return the larger of two f32."""
    return np.fmax(x, y)


@ptx_instruction("{\n.reg .pred p;\nsetp.eq.f32 p, $1, 0fFF800000;\nselp.f32 $0, 0f00000000, $1, p;\n}", FLOAT, FLOAT)
def finite_or_zero(x):
    """Return ``x``, or 0 if ``x`` is minus infinity."""
    return np.float32(0) if x == -np.inf else np.float32(x)


@ptx_instruction("{\n.reg .f32 r;\nrcp.rn.f32 r, $2;\nmul.rn.f32 $0, $1, r;\n}", FLOAT, FLOAT, FLOAT)
def divide_f32(x, y):
    """Return ``x / y``, as ``x`` times the rounded reciprocal of ``y``."""
    with np.errstate(all="ignore"):
        return np.float32(x) * (np.float32(1) / np.float32(y))


@ptx_instruction("st.shared.f32 [$0], $1;", NOTHING, INT, FLOAT)
def store_shared_f32(place, value):
    """Store an f32 in shared memory."""
    simulated_thread().block.memory.view(np.float32)[int(place) // SUM_BYTES] = value


@llvm_instruction(
    lambda place: FLOAT(INT), lambda context, builder, signature, arguments: emit_shared_f32_load(builder, arguments[0])
)
def load_shared_f32(place):
    """Load an f32 from shared memory."""
    return simulated_thread().block.memory.view(np.float32)[int(place) // SUM_BYTES]


def store_partial_softmax(tiles: FewAttention) -> Any:
    """Return the device function by which a warp stores its accumulators and softmax statistics in shared memory."""
    count, pitch, tops = tiles.width // 2, accumulator_pitch(tiles), row_maxima_offset(tiles)

    def codegen(context, builder, signature, arguments):
        b, (sums, known, place, lane) = builder, arguments
        line = b.add(place, b.mul(emit_quad_row(b, lane), i32(pitch)))
        begin = b.add(line, emit_times_power_of_two(b, emit_quad_lane(b, lane), LANE_COLUMNS * SUM_BYTES))
        for n in range(0, count, LANE_COLUMNS):
            below, group = n // LANE_COLUMNS % 2, n // GROUP_SUMS
            at = b.add(begin, i32(GROUP * SUM_BYTES * group + HALF_ROWS * pitch * below))
            pair = [b.extract_value(sums, n + e) for e in range(LANE_COLUMNS)]
            emit_inline_assembly(b, "st.shared.v2.f32 [$0], {$1, $2};", NOTHING, [INT, FLOAT, FLOAT], [at, *pair])
        own = b.add(place, emit_word_offset(b, emit_quad_row(b, lane)))
        for half in range(2):
            whole = SoftmaxRowMath(b).sum_of_lanes(b.extract_value(known, SUM_OF_ROW + half))
            for offset, value in ((0, b.extract_value(known, half)), (SUM_BYTES * ROWS, whole)):
                at = b.add(own, i32(tops + HALF_ROWS * SUM_BYTES * half + offset))
                emit_inline_assembly(b, "st.shared.f32 [$0], $1;", NOTHING, [INT, FLOAT], [at, value])
        return context.get_dummy_value()

    @llvm_instruction(lambda sums, known, *given: NOTHING(sums, STATE, INT, INT), codegen)
    def store_partial(sums, known, place, lane):
        rows, cols = own_accumulator_elements(tiles.width)
        memory = simulated_thread().block.memory.view(np.float32)
        memory[(int(place) + rows * pitch) // SUM_BYTES + cols] = sums
        wholes = reduce_weight_sums_of_quad(known)
        for half in range(2):
            at = (int(place) + tops) // SUM_BYTES + int(lane) // QUAD + HALF_ROWS * half
            memory[at], memory[at + ROWS] = known[half], wholes[half]

    return store_partial


def _store_element_codegen(context, builder, signature, arguments):
    pointers, dims, z, row, col, value = arguments
    places = [builder.sext(i, I64) for i in (z, row, col)]
    emit_device_function_call(builder, STORE, I32, (pointers, dims), *places, value)
    return context.get_dummy_value()


@llvm_instruction(lambda pointers, dims, *given: NOTHING(pointers, dims, INT, INT, INT, FLOAT), _store_element_codegen)
def store_attention_element(pointers, dims, z, row, col, value):
    """Call the kernel's epilogue for one element of the attention result."""
    simulated_thread().block.functions[STORE](int(z), int(row), int(col), value)


def _store_statistics_codegen(context, builder, signature, arguments):
    pointers, dims, z, row, top, whole = arguments
    places = [builder.sext(i, I64) for i in (z, row)]
    emit_device_function_call(builder, REST, I32, (pointers, dims), *places, top, whole)
    return context.get_dummy_value()


@llvm_instruction(
    lambda pointers, dims, *given: NOTHING(pointers, dims, INT, INT, FLOAT, FLOAT), _store_statistics_codegen
)
def store_softmax_statistics(pointers, dims, z, row, top, whole):
    """Call the kernel's device function that stores the softmax statistics of a row."""
    simulated_thread().block.functions[REST](int(z), int(row), top, whole)
