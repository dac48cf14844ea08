"""Device functions of a TF32 matmul on Hopper whose first operand is contiguous along its rows.

wgmma reads f32 from shared memory only if it is contiguous along the contraction. So warps load their part of a stage
to registers and round it, while the products of the previous stage run. A wgmma is asynchronous and still reads its
registers until the program waits for it; the wait therefore has them as operands, so that the compiler does not reuse
them before.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba.cuda import types

from aotc.ir.loop.ir import WARP
from aotc.kernels.cuda.block import simulated_thread
from aotc.kernels.cuda.ptx import F32 as FLOAT
from aotc.kernels.cuda.ptx import I32 as INT
from aotc.kernels.cuda.ptx import emit_inline_assembly, llvm_instruction
from aotc.kernels.cuda.templates.fragments import (
    FRAGMENT_REGISTERS,
    HALF_ROWS,
    LINE_WORDS,
    PIECE_WORDS,
    QUAD,
    STEP_BYTES,
    WORD_BYTES,
    emit_divide_by_power_of_two,
    emit_modulo_power_of_two,
    emit_piece_offset,
    emit_quad_lane,
    emit_quad_row,
    emit_times_power_of_two,
    emit_word_offset,
)
from aotc.kernels.cuda.templates.gemm.tiles import CHUNK, WarpgroupTiles
from aotc.kernels.cuda.templates.steps import (
    TO_TF32,
    own_accumulator_elements,
    simulated_operand_elements,
    swapped_operand_pair,
)
from aotc.kernels.cuda.templates.threads import PIECE_BYTES, WARP_TILE, WARPGROUP_WARPS, first_row_of_warp
from aotc.kernels.cuda.templates.wgmma_instruction import (
    DESCRIPTOR_UNIT,
    NO_LEADING,
    WgmmaInstruction,
    emit_tied_assembly,
    wgmma_descriptor,
)
from aotc.kernels.llvm_types import F32, I32, i32

# Terms of a step, of f32; steps of a stage; registers of a thread for its rows of a stage.
_TERMS = STEP_BYTES // WORD_BYTES
_STEPS = LINE_WORDS // _TERMS
_HELD = types.UniTuple(INT, FRAGMENT_REGISTERS * _STEPS)


def _lane_bits(b: ir.IRBuilder, thread: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the thread's warp and lane, and the lowest bit of the lane, which is 1 if its term is odd."""
    lane = emit_modulo_power_of_two(b, thread, WARP)
    return (
        emit_modulo_power_of_two(b, emit_divide_by_power_of_two(b, thread, WARP), WARPGROUP_WARPS),
        lane,
        b.and_(lane, i32(1)),
    )


def load_register_operand(tiles: WarpgroupTiles) -> Any:
    """Return the device function that loads a warp's 16 rows of a stage, given the address of its warpgroup's 64 rows.

    For each 8 terms, lane l has terms l % 4 and l % 4 + 4 of row l / 4 and of the row 8 below. Lanes with odd terms
    load the later term first, which avoids bank conflicts within the warp.
    """
    # Bits of an address that differ in the term four lines on, whose swizzle differs too, and in the row 8 below.
    later, lower = QUAD * CHUNK + QUAD * PIECE_BYTES, HALF_ROWS * WORD_BYTES

    def codegen(context, builder, signature, arguments):
        b, (at, thread) = builder, arguments
        warp, lane, odd = _lane_bits(b, thread)
        term = b.or_(emit_quad_lane(b, lane), emit_times_power_of_two(b, odd, QUAD))
        # A line has 32 rows, those of two warps: a warp has four pieces, and a piece the rows of four quads.
        piece = b.or_(
            emit_times_power_of_two(b, b.and_(warp, i32(1)), WARP_TILE // PIECE_WORDS),
            emit_divide_by_power_of_two(b, lane, QUAD * PIECE_WORDS),
        )
        word = emit_modulo_power_of_two(b, emit_quad_row(b, lane), PIECE_WORDS)
        place = b.add(b.mul(b.lshr(warp, i32(1)), i32(tiles.depth * CHUNK)), b.mul(term, i32(CHUNK)))
        place = b.add(b.add(place, emit_piece_offset(b, b.xor(piece, term))), emit_word_offset(b, word))
        swaps = b.icmp_unsigned("!=", odd, i32(0))
        places = [[b.add(at, b.xor(place, i32(later * n + lower * half))) for half in range(2)] for n in range(2)]
        found = []
        for step in range(_STEPS):
            loaded = [[_load_word_at(b, p, step * _TERMS * CHUNK) for p in row] for row in places]
            for n in range(2):
                found += [b.select(swaps, loaded[1 - n][half], loaded[n][half]) for half in range(2)]
        rounded = [emit_inline_assembly(b, TO_TF32, INT, [FLOAT], [v]) for v in found]
        return context.make_tuple(builder, signature.return_type, rounded)

    @llvm_instruction(lambda at, thread: _HELD(INT, INT), codegen)
    def load_warp_rows(at, thread):
        rows, terms = _row_and_term_of_own_registers()
        whole = simulated_operand_elements(tiles, int(at), True, rows + first_row_of_warp(int(thread)))
        return whole[np.arange(len(rows)), terms]

    return load_warp_rows


def _load_word_at(b: ir.IRBuilder, place: ir.Value, offset: int) -> ir.Value:
    kind = ir.FunctionType(F32, [I32])
    return b.asm(kind, f"ld.shared.f32 $0, [$1+{offset}];", "=f,r,~{memory}", [place], side_effect=True)


def _row_and_term_of_own_registers() -> tuple[np.ndarray, np.ndarray]:
    """Return the row (of its warp's 16) and the term of each of the calling thread's registers."""
    return _row_and_term_of_registers(simulated_thread().thread % WARP)


def _row_and_term_of_registers(lane: Any) -> tuple[np.ndarray, np.ndarray]:
    n = np.arange(len(_HELD))
    return lane // QUAD + HALF_ROWS * (n % 2), _TERMS * (n // FRAGMENT_REGISTERS) + lane % QUAD + QUAD * (n // 2 % 2)


def empty_register_operand() -> Any:
    """Return the device function that creates uninitialized registers for the first operand."""

    def codegen(context, builder, signature, arguments):
        return context.make_tuple(builder, signature.return_type, [i32(0)] * len(_HELD))

    @llvm_instruction(_HELD, codegen)
    def create_empty_registers():
        return np.zeros(len(_HELD), np.float32)

    return create_empty_registers


def issue_register_products(tiles: WarpgroupTiles) -> Any:
    """Return the device function that issues the products of a stage with the first operand in registers.

    The registers are those of :func:`load_register_operand`; otherwise as :func:`.wgmma_steps.issue_stage_products`.
    """
    count = tiles.width // 2
    instruction = WgmmaInstruction(f"m64n{tiles.width}k{_TERMS}.f32.tf32.tf32", count, ", 1, 1", from_registers=True)
    kept = types.UniTuple(FLOAT, count)

    def codegen(context, builder, signature, arguments):
        b = builder
        values = [b.extract_value(arguments[t], n) for t, size in enumerate((count, len(_HELD))) for n in range(size)]
        together = emit_tied_assembly(b, "wgmma.fence.sync.aligned;", values)
        held, rows = together[:count], together[count:]
        _, _, other, iteration = arguments
        place = emit_divide_by_power_of_two(b, other, DESCRIPTOR_UNIT)
        for n in range(_STEPS):
            own = rows[FRAGMENT_REGISTERS * n : FRAGMENT_REGISTERS * (n + 1)]
            right = wgmma_descriptor(b, b.add(place, i32(STEP_BYTES // DESCRIPTOR_UNIT * n)), NO_LEADING)
            held = instruction.emit(b, held, [*own, right, i32(1) if n else iteration])
        return context.make_tuple(builder, signature.return_type, held)

    @llvm_instruction(lambda *given: kept(kept, _HELD, INT, INT), codegen)
    def issue_stage_products(sums, rows, other, iteration):
        by_rows = swapped_operand_pair(tiles, tiles.a_by_rows, tiles.b_by_rows)[1]

        def simulated_products(every):
            held = np.zeros((WARP_TILE, tiles.depth), np.float32)
            held[_row_and_term_of_registers(np.arange(WARP)[:, None])] = every
            return held @ simulated_operand_elements(tiles, int(other), by_rows, np.arange(tiles.width)).T

        with simulated_thread().block.synchronized_warpgroup() as once:
            every = simulated_thread().block.exchange_values(rows)
            found = once((simulated_thread().thread // WARP, int(other)), partial(simulated_products, every))[
                own_accumulator_elements(tiles.width)
            ]
        return sums + found if iteration else found

    return issue_stage_products


def wait_for_register_products(tiles: WarpgroupTiles) -> Any:
    """Return the device function that waits for all products and returns the accumulators.

    Its arguments are the accumulators and the registers of the first operand.
    """
    count = tiles.width // 2
    kept = types.UniTuple(FLOAT, count)

    def codegen(context, builder, signature, arguments):
        b = builder
        values = [b.extract_value(arguments[t], n) for t, size in enumerate((count, len(_HELD))) for n in range(size)]
        found = emit_tied_assembly(b, "wgmma.wait_group.sync.aligned 0;", values)
        return context.make_tuple(builder, signature.return_type, found[:count])

    @llvm_instruction(lambda sums, rows: kept(kept, _HELD), codegen)
    def wait_for_accumulators(sums, rows):
        return sums

    return wait_for_accumulators
