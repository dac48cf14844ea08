"""Device functions of the matmul template wgmma (Hopper): TMA copies, and products of warpgroups."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba.cuda import types

from aotc.ir.loop.forms.tiling import FP8_PAIRS
from aotc.kernels.cuda.block import simulated_thread
from aotc.kernels.cuda.device_function import register_struct_type
from aotc.kernels.cuda.hopper import tma_copy_box
from aotc.kernels.cuda.ptx import I32 as INT
from aotc.kernels.cuda.ptx import I64 as LONG
from aotc.kernels.cuda.ptx import NOTHING, emit_inline_assembly, llvm_instruction
from aotc.kernels.cuda.shell import emit_device_function_call
from aotc.kernels.cuda.templates.fragments import STEP_BYTES, emit_divide_by_power_of_two
from aotc.kernels.cuda.templates.gemm.epilogue import EpiloguePieces, prefetch_epilogue_operands
from aotc.kernels.cuda.templates.gemm.im2col_loads import im2col_boxes, load_convolution_stage
from aotc.kernels.cuda.templates.gemm.tiles import CHUNK, WarpgroupTiles
from aotc.kernels.cuda.templates.records import named_tuple_members
from aotc.kernels.cuda.templates.steps import (
    COORDINATE,
    REGISTERS,
    own_accumulator_elements,
    simulate_result_stores,
    simulated_stage_matmul,
    swapped_operand_pair,
)
from aotc.kernels.cuda.templates.threads import WARPGROUP_TILE, first_row_of_warp
from aotc.kernels.cuda.templates.wgmma_instruction import (
    DESCRIPTOR_UNIT,
    NO_LEADING,
    WgmmaInstruction,
    wgmma_descriptor,
)
from aotc.kernels.llvm_types import F32, F64, I1, I8, I16, I32, I64, i32

_NUMBA = {
    F32: types.float32, F64: types.float64,
    I1: types.boolean, I8: types.int8, I16: types.int16, I32: types.int32, I64: types.int64,
}  # fmt: skip


def load_operand_stage(tiles: WarpgroupTiles) -> Any:
    """Return the device function that starts the copy of a stage: the tile's rows of A, then its columns of B."""
    return _load_stage_of_lines(tiles) if tiles.window is None else load_convolution_stage(tiles, tiles.window)


def _load_stage_of_lines(tiles: WarpgroupTiles) -> Any:
    """Return the device function of :func:`load_operand_stage` for operands that are strided arrays."""
    sources = (tiles.a, tiles.b)

    def codegen(context, builder, signature, arguments):
        maps_, pointers, dims, to, barrier, tile, depth = arguments
        z, row, column = named_tuple_members(builder, tile)
        maps = [builder.ptrtoint(builder.extract_value(maps_, n), I64) for n in range(2)]
        product = builder.sext(z, I64)
        others = [
            [
                builder.trunc(
                    emit_device_function_call(builder, f"{COORDINATE[n]}{c}", I64, (pointers, dims), product), I32
                )
                for c in range(source.coordinates)
            ]
            for n, source in enumerate(sources)
        ]
        for number, offset, by_rows, part in im2col_boxes(tiles):
            first = builder.add((row, column)[number], i32(part))
            place = [*((first, depth) if by_rows else (depth, first)), *others[number]]
            operands = [builder.add(to, i32(offset)), maps[number], barrier, *place]
            emit_inline_assembly(
                builder, tma_copy_box(len(place)).text, NOTHING, [INT, LONG, INT, *[INT] * len(place)], operands
            )
        return context.get_dummy_value()

    @llvm_instruction(lambda maps, p, d, to, barrier, tile, depth: NOTHING(maps, p, d, INT, INT, tile, INT), codegen)
    def start_stage_copy(maps, pointers, dims, to, barrier, tile, depth):
        functions, (z, row, column) = simulated_thread().block.functions, tile
        for number, offset, by_rows, part in im2col_boxes(tiles):
            first = (row, column)[number] + part
            others = [functions[f"{COORDINATE[number]}{c}"](int(z)) for c in range(sources[number].coordinates)]
            place = (*((first, depth) if by_rows else (depth, first)), *others)
            tma_copy_box(len(place))(to + offset, maps[number], barrier, *place)

    return start_stage_copy


def issue_stage_products(tiles: WarpgroupTiles) -> Any:
    """Return the device function that issues the products of a stage, added to a warpgroup's accumulators.

    Lane l of warp w has the accumulators of row ``16 w + l / 4`` and of the row 8 below, in columns ``8 j + 2 (l % 4)``
    and the next column; those of the next 64 rows follow, if the warpgroup has more parts. In the first stage of a tile
    (``iteration`` is 0) the accumulators are overwritten. The function takes the addresses of the operands in
    instruction order: B comes first if the operands are swapped.
    """
    count, step = tiles.width // 2, STEP_BYTES // tiles.size
    a_by_rows, b_by_rows = swapped_operand_pair(tiles, tiles.a_by_rows, tiles.b_by_rows)
    numba_type, llvm_type = REGISTERS[tiles.sum]
    name, added = ("s8", "s32") if tiles.operands == "i8" else (tiles.operands, "f32")
    kinds = swapped_operand_pair(tiles, *(name.split(".") if name in FP8_PAIRS else (name, name)))
    signs = ", 1, 1" if tiles.sum == "f32" else ""
    ways = f", {int(a_by_rows)}, {int(b_by_rows)}" if tiles.size == 2 else ""
    shape = f"m64n{tiles.width}k{step}.{added}.{kinds[0]}.{kinds[1]}"
    instruction = WgmmaInstruction(shape, count, signs + ways, llvm_type)
    # From one step to the next, in units of descriptors: terms of a line, or, of an operand by rows, lines.
    along, across = STEP_BYTES // DESCRIPTOR_UNIT, step * CHUNK // DESCRIPTOR_UNIT
    a_step, a_leading = (across if a_by_rows else along), NO_LEADING
    b_step, b_leading = (across, tiles.depth * CHUNK) if b_by_rows else (along, NO_LEADING)
    part_units = WARPGROUP_TILE * CHUNK // DESCRIPTOR_UNIT

    def codegen(context, builder, signature, arguments):
        held = [
            [builder.extract_value(arguments[0], part * count + n) for n in range(count)] for part in range(tiles.parts)
        ]
        a, b = (emit_divide_by_power_of_two(builder, place, DESCRIPTOR_UNIT) for place in arguments[1:-1])
        for n in range(CHUNK // STEP_BYTES):
            for part in range(tiles.parts):
                operands = [
                    wgmma_descriptor(builder, builder.add(a, i32(a_step * n + part * part_units)), a_leading),
                    wgmma_descriptor(builder, builder.add(b, i32(b_step * n)), b_leading),
                    i32(1) if n else arguments[-1],
                ]
                held[part] = instruction.emit(builder, held[part], operands)
        return context.make_tuple(builder, signature.return_type, [x for own in held for x in own])

    kept = types.UniTuple(numba_type, count * tiles.parts)

    @llvm_instruction(lambda *given: kept(kept, INT, INT, INT), codegen)
    def issue_products(given, a, b, iteration):
        rows, cols = own_accumulator_elements(tiles.width)
        rows, extents = (
            rows + first_row_of_warp(simulated_thread().thread),
            swapped_operand_pair(tiles, WARPGROUP_TILE, tiles.width),
        )
        with simulated_thread().block.synchronized_warpgroup() as once:
            places = [swapped_operand_pair(tiles, a + p * WARPGROUP_TILE * CHUNK, b) for p in range(tiles.parts)]
            whole = [once(place, partial(simulated_stage_matmul, tiles, *place, *extents)) for place in places]
        found = np.concatenate([part[swapped_operand_pair(tiles, rows, cols)] for part in whole])
        return given + found if iteration else found

    return issue_products


def store_result_tile(tiles: WarpgroupTiles) -> Any:
    """Return the device function by which a warp stores its 16 rows of a result tile.

    The function takes the values that :func:`prefetch_epilogue_of_warp` loaded.
    """
    count = tiles.width // 2

    def codegen(context, builder, signature, arguments):
        sums, first, staging, lane, tile, sizes, *tables = arguments
        place = [staging, lane, *named_tuple_members(builder, tile), *named_tuple_members(builder, sizes), *tables]
        own = [[builder.extract_value(sums, p * count + n) for n in range(count)] for p in range(tiles.parts)]
        held = [builder.extract_value(first, n) for n in range(len(_preloaded_operand_types(tiles)))]
        EpiloguePieces(builder, tiles, own, place).emit(held)
        return context.get_dummy_value()

    @llvm_instruction(lambda sums, first, _, lane, *given: NOTHING(sums, first, INT, INT, *given), codegen)
    def store_warp_rows(sums, first, staging, lane, place, sizes, pointers, dims):
        z, row, col = place
        for part in range(tiles.parts):
            own = sums[part * count : (part + 1) * count]
            simulate_result_stores(tiles, own, (z, row + WARPGROUP_TILE * part, col), tiles.width, sizes, pointers)

    return store_warp_rows


def prefetch_epilogue_of_warp(tiles: WarpgroupTiles) -> Any:
    """Return the device function by which a warp starts to load the epilogue operands of its 16 rows.

    The function loads the operands of the first chunks, and prefetches large operands to L2.
    """

    def codegen(context, builder, signature, arguments):
        lane, tile, sizes, *tables = arguments
        z, row, col = named_tuple_members(builder, tile)
        others = [col, *named_tuple_members(builder, sizes), *tables]
        nothing = [[i32(0)] * (tiles.width // 2)] * tiles.parts
        found = EpiloguePieces(builder, tiles, nothing, [i32(0), lane, z, row, *others]).load_first_operands(
            tiles.ahead
        )
        for part in range(tiles.parts):
            place = [lane, z, builder.add(row, i32(WARPGROUP_TILE * part)), *others]
            prefetch_epilogue_operands(builder, tiles, tiles.width, place)
        return context.make_tuple(builder, signature.return_type, found)

    kept = types.Tuple(_preloaded_operand_types(tiles))

    @llvm_instruction(lambda lane, *given: kept(INT, *given), codegen)
    def start_epilogue_loads(lane, place, sizes, pointers, dims):
        return ()

    return start_epilogue_loads


def _preloaded_operand_types(tiles: WarpgroupTiles) -> list[types.Type]:
    """Return the Numba types of the epilogue operands that are loaded before a tile's products."""
    return [_NUMBA[kind] for kind in register_struct_type(tiles.pieces.held).elements] * (tiles.steps * tiles.ahead)
