"""Device functions of the attention template wgmma (Hopper): TMA copies, and overlapping matmuls of warpgroups.

A wgmma is asynchronous: its registers are valid only after a wait, but the compiler considers them complete when it is
issued. The wait therefore takes these registers as operands and returns them, and no use of them moves before it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba.cuda import types

from aotc.kernels.cuda.block import simulated_thread
from aotc.kernels.cuda.hopper import tma_copy_box
from aotc.kernels.cuda.ptx import F32 as FLOAT
from aotc.kernels.cuda.ptx import I32 as INT
from aotc.kernels.cuda.ptx import I64 as LONG
from aotc.kernels.cuda.ptx import NOTHING, emit_inline_assembly, llvm_instruction
from aotc.kernels.cuda.shell import emit_device_function_call
from aotc.kernels.cuda.templates.attention.softmax_steps import (
    COORDINATE,
    gather_weights_of_quad,
    simulated_tile_lines,
    weight_register_count,
)
from aotc.kernels.cuda.templates.attention.tiles import AttentionTiles, WarpgroupAttention
from aotc.kernels.cuda.templates.fragments import FRAGMENT_REGISTERS, STEP_BYTES, emit_divide_by_power_of_two
from aotc.kernels.cuda.templates.gemm.tiles import CHUNK
from aotc.kernels.cuda.templates.records import named_tuple_members
from aotc.kernels.cuda.templates.steps import (
    emit_attention_result_stores,
    own_accumulator_elements,
    simulate_result_stores,
)
from aotc.kernels.cuda.templates.threads import WARPGROUP_TILE, first_row_of_warp
from aotc.kernels.cuda.templates.wgmma_instruction import (
    DESCRIPTOR_UNIT,
    NO_LEADING,
    WgmmaInstruction,
    emit_tied_assembly,
    wgmma_descriptor,
)
from aotc.kernels.llvm_types import I32, I64, i32


def load_attention_operand(tiles: AttentionTiles, number: int) -> Any:
    """Return the device function that starts the copy of rows of operand ``number``.

    Operands are queries (0), keys (1) and values (2). Queries that device functions compute have no tensor map.
    """
    source, own = (tiles.q, tiles.k, tiles.v)[number], number - (tiles.q is None)
    assert source is not None
    wide = CHUNK // tiles.size
    chunks = tiles.value_chunks if number == 2 else tiles.key_chunks
    lines = tiles.terms if number else tiles.rows

    def codegen(context, builder, signature, arguments):
        maps, pointers, dims, to, barrier, z, line = arguments
        chosen = builder.ptrtoint(builder.extract_value(maps, own), I64)
        names = [f"{COORDINATE[number]}{c}" for c in range(source.coordinates)]
        head = builder.sext(z, I64)
        others = [
            builder.trunc(emit_device_function_call(builder, name, I64, (pointers, dims), head), I32) for name in names
        ]
        for chunk in range(chunks):
            place = [i32(chunk * wide), line, *others]
            operands = [builder.add(to, i32(chunk * lines * CHUNK)), chosen, barrier, *place]
            emit_inline_assembly(
                builder, tma_copy_box(len(place)).text, NOTHING, [INT, LONG, INT, *[INT] * len(place)], operands
            )
        return context.get_dummy_value()

    @llvm_instruction(lambda maps, pointers, dims, *numbers: NOTHING(maps, pointers, dims, INT, INT, INT, INT), codegen)
    def start_operand_copy(maps, pointers, dims, to, barrier, z, line):
        functions = simulated_thread().block.functions
        others = [functions[f"{COORDINATE[number]}{c}"](int(z)) for c in range(source.coordinates)]
        for chunk in range(chunks):
            place = (chunk * wide, line, *others)
            tma_copy_box(len(place))(to + chunk * lines * CHUNK, maps[own], barrier, *place)

    return start_operand_copy


def issue_query_key_products(tiles: WarpgroupAttention) -> Any:
    """Return the device function that issues queries times keys; scores have the layout of accumulators."""
    count, steps, kept = tiles.terms // 2, tiles.steps, types.UniTuple(FLOAT, tiles.terms // 2)
    shape = f"m64n{tiles.terms}k{STEP_BYTES // tiles.size}.f32.{tiles.operands}.{tiles.operands}"

    def codegen(context, builder, signature, arguments):
        q, k = (emit_divide_by_power_of_two(builder, place, DESCRIPTOR_UNIT) for place in arguments)
        held: list[ir.Value] = []
        for step in range(steps):
            chunk, in_chunk = divmod(step, CHUNK // STEP_BYTES)
            places = [
                builder.add(issue_scores, i32((chunk * lines * CHUNK + in_chunk * STEP_BYTES) // DESCRIPTOR_UNIT))
                for issue_scores, lines in ((q, tiles.rows), (k, tiles.terms))
            ]
            operands = [wgmma_descriptor(builder, p, NO_LEADING) for p in places]
            held = WgmmaInstruction(shape, count, ", 1, 1, 0, 0", added=step > 0).emit(builder, held, operands)
        return context.make_tuple(builder, signature.return_type, held)

    @llvm_instruction(lambda q, k: kept(INT, INT), codegen)
    def issue_scores(q, k):
        def simulated_scores():
            left = simulated_tile_lines(q, np.arange(WARPGROUP_TILE), tiles.depth, tiles.rows, tiles.operands)
            right = simulated_tile_lines(k, np.arange(tiles.terms), tiles.depth, tiles.terms, tiles.operands)
            return left.astype(np.float32) @ right.astype(np.float32).T

        rows, cols = own_accumulator_elements(tiles.terms)
        with simulated_thread().block.synchronized_warpgroup() as once:
            return once((int(q), int(k)), simulated_scores)[rows + first_row_of_warp(simulated_thread().thread), cols]

    return issue_scores


def issue_value_products(tiles: WarpgroupAttention) -> Any:
    """Return the device function that issues packed weights times values, added to a warpgroup's accumulators."""
    count, packed, step_terms = tiles.width // 2, weight_register_count(tiles), STEP_BYTES // tiles.size
    shape = f"m64n{tiles.width}k{step_terms}.f32.{tiles.operands}.{tiles.operands}"
    instruction = WgmmaInstruction(shape, count, ", 1, 1, 1", from_registers=True, added=True)
    kept, weights_type = types.UniTuple(FLOAT, count), types.UniTuple(INT, packed)

    def codegen(context, builder, signature, arguments):
        held, weights = (
            [builder.extract_value(arguments[t], n) for n in range(size)] for t, size in enumerate((count, packed))
        )
        v = emit_divide_by_power_of_two(builder, arguments[2], DESCRIPTOR_UNIT)
        together = emit_tied_assembly(builder, "wgmma.fence.sync.aligned;", [*held, *weights])
        held, weights = together[:count], together[count:]
        for step in range(tiles.terms // step_terms):
            place = builder.add(v, i32(step * step_terms * CHUNK // DESCRIPTOR_UNIT))
            left = weights[FRAGMENT_REGISTERS * step : FRAGMENT_REGISTERS * (step + 1)]
            right = wgmma_descriptor(builder, place, tiles.terms * CHUNK)
            held = instruction.emit(builder, held, [*left, right])
        return context.make_tuple(builder, signature.return_type, held)

    @llvm_instruction(lambda *given: kept(kept, weights_type, INT), codegen)
    def issue_weighted_values(sums, weights, v):
        with simulated_thread().block.synchronized_warpgroup() as once:
            with_measured_work = gather_weights_of_quad(weights, tiles.terms)
            given = partial(simulated_tile_lines, v, np.arange(tiles.terms), tiles.width, tiles.terms, tiles.operands)
            values = once(int(v), lambda: given().astype(np.float32))
        return sums + (with_measured_work @ values)[own_accumulator_elements(tiles.width)]

    return issue_weighted_values


def wait_for_wgmma_groups(left: int, *counts: int) -> Any:
    """Return the device function that waits until at most ``left`` groups of wgmma instructions are in flight.

    The function takes and returns tuples of ``counts`` registers: results of the groups, and registers that must not be
    used before the wait.
    """
    kinds = [types.UniTuple(FLOAT, count) for count in counts]
    result = types.Tuple(kinds) if len(kinds) > 1 else kinds[0]
    text = f"wgmma.wait_group.sync.aligned {left};"

    def codegen(context, builder, signature, arguments):
        values = [builder.extract_value(a, n) for a, count in zip(arguments, counts) for n in range(count)]
        found, parts = emit_tied_assembly(builder, text, values), []
        for kind, count in zip(kinds, counts):
            parts.append(context.make_tuple(builder, kind, found[:count]))
            found = found[count:]
        return parts[0] if len(parts) == 1 else context.make_tuple(builder, signature.return_type, parts)

    if len(counts) == 1:

        @llvm_instruction(lambda given: result(given), codegen)
        def wait_for_registers(given):
            return given

        return wait_for_registers

    @llvm_instruction(lambda first, second: result(first, second), codegen)
    def wait_for_both_registers(first, second):
        return first, second

    return wait_for_both_registers


def store_warpgroup_rows(tiles: WarpgroupAttention) -> Any:
    """Return the device function by which a warp of a warpgroup stores its 16 rows."""
    count = tiles.width // 2

    def codegen(context, builder, signature, arguments):
        sums = [builder.extract_value(arguments[0], n) for n in range(count)]
        staging, warp, rows, *tables = arguments[1:]
        z, row, lane = named_tuple_members(builder, warp)
        emit_attention_result_stores(
            builder, tiles, sums, [staging, lane, z, row, i32(0), rows, i32(tiles.width), *tables]
        )
        return context.get_dummy_value()

    @llvm_instruction(lambda sums, _, warp, rows, p, d: NOTHING(sums, INT, warp, INT, p, d), codegen)
    def store_warp_rows(sums, staging, warp, rows, pointers, dims):
        z, row, _ = warp
        simulate_result_stores(tiles, sums, (z, row, 0), tiles.width, (rows, tiles.width), pointers)

    return store_warp_rows
