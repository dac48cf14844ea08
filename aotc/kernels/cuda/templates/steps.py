"""Device functions that several templates share: tile order, extents, accumulators, result stores.

A tile in shared memory has rows of 128 bytes with the 128-byte swizzle: the 16-byte piece c of row r is stored at
position c ^ (r % 8). An operand that is contiguous along the contraction has one such row for each row of A (or column
of B). An operand that is contiguous along its rows (or columns) has one row for each index of the contraction. It is
then split into parts as wide as a row. Warp tiles swizzle some operands differently: see
:meth:`aotc.kernels.cuda.templates.gemm.tiles.WarpTiles.swizzle`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba.cuda import types

from aotc.ir.loop.forms.tiling import stored_dtypes
from aotc.ir.loop.ir import WARP
from aotc.kernels.cuda.block import simulated_thread
from aotc.kernels.cuda.ptx import F32 as FLOAT
from aotc.kernels.cuda.ptx import F64 as DOUBLE
from aotc.kernels.cuda.ptx import I32 as INT
from aotc.kernels.cuda.ptx import I64 as LONG
from aotc.kernels.cuda.ptx import NOTHING, divide_nonnegative, emit_inline_assembly, llvm_instruction, ptx_instruction
from aotc.kernels.cuda.shell import emit_device_function_call
from aotc.kernels.cuda.templates.attention.tiles import AttentionTiles
from aotc.kernels.cuda.templates.fragments import (
    GROUP,
    GROUP_SUMS,
    HALF_ROWS,
    LANE_COLUMNS,
    LINE_PIECES,
    LINE_WORDS,
    PIECE_WORDS,
    SWIZZLE_LINES,
    WORD_BYTES,
    accumulator_rows_and_columns,
    emit_divide_by_power_of_two,
    emit_line_offset,
    emit_modulo_power_of_two,
    emit_piece_offset,
    emit_quad_lane,
    emit_quad_row,
    emit_times_power_of_two,
    emit_word_offset,
)
from aotc.kernels.cuda.templates.gemm.tiles import CHUNK, ProductTiles
from aotc.kernels.cuda.templates.records import TilePlace
from aotc.kernels.cuda.templates.threads import LANE_MASK, PIECE_BYTES, WARP_TILE
from aotc.kernels.llvm_types import F32, F64, I32, I64, i32, i64
from aotc.vmfb.dtypes import to_numpy

EPILOGUE = "aotc_epilogue"
"""``f32 epilogue(..., i64 z, i64 row, i64 col, f32 sum)``: the value that attention stores for an accumulator, before
it is rounded."""
PLACE = "aotc_place"
"""``i64 locate_tile(..., i64 z, i64 row, i64 col)``: the offset of a result, in elements."""
STORE = "aotc_store"
"""``i32 store(..., i64 z, i64 row, i64 col, f32 sum)``: the whole epilogue of an accumulator, with its stores. For a
piece of a row (column), ``col`` (``row``) is the number of the piece; all of its accumulators and the operands
loaded ahead follow."""
LOAD_AHEAD = "aotc_load_ahead"
"""``{...} load_ahead(..., i64 z, i64 row, i64 col)``: the operands of a piece's epilogue, loaded before its
accumulators are complete."""
FAR = "aotc_far"
"""``i64 far(..., i64 z, i64 row, i64 col)``, numbered: the offset of an element of a large epilogue operand, for
prefetching."""
SIZES = {name: f"aotc_{name}" for name in ("batch", "rows", "cols", "depth", "terms")}
"""``i64 f(...)``: batch and extents of the matmuls; for attention the numbers of heads, queries and keys."""
START = ("aotc_left_start", "aotc_right_start")
"""``i64 f(..., i64 z)``: the offset of the first element of an operand of matmul z, if the operand is strided."""
PITCH = ("aotc_left_pitch", "aotc_right_pitch")
"""``i64 f(...)``: the stride between the lines of such an operand, in elements."""
COORDINATE = ("aotc_left_coordinate", "aotc_right_coordinate")
"""``i64 f(..., i64 z)``, numbered: a coordinate of matmul z in the tensor map of an operand."""
GATHERED = ("aotc_left_gathered", "aotc_right_gathered")
"""``i64 f(..., i64 z, i64 i, i64 k)``: the offset of an element of an operand with contiguous pieces of 16 bytes; -1
for a zero."""
ELEMENT = ("aotc_left", "aotc_right")
"""``f32 f(..., i64 z, i64 i, i64 k)``: an element of a computed operand; i32 for i8, f64 for f64."""
ELEMENTS = ("aotc_left_piece", "aotc_right_piece")
"""``{...} f(..., i64 z, i64 i, i64 piece)``: all elements of a 16-byte piece of a computed operand, contiguous along
the contraction."""
REGISTERS = {"f32": (FLOAT, F32), "f64": (DOUBLE, F64), "i32": (INT, I32)}
"""Accumulator types: of Numba and of LLVM."""
BARRIER = "bar.warp.sync 0xffffffff;"
TO_TF32 = "cvt.rna.tf32.f32 $0, $1;"
PACK = {"bf16": "cvt.rn.bf16x2.f32 $0, $2, $1;", "f16": "cvt.rn.f16x2.f32 $0, $2, $1;"}
# Groups of 8 columns of f32 in a line of 128 bytes, and bytes of the two neighbours that a lane has of each.
LINE_GROUPS, PAIR_BYTES = LINE_WORDS // GROUP, LANE_COLUMNS * WORD_BYTES
# Lines that a warp copies at once: a piece of 16 bytes for each lane.
LINES_AT_ONCE = WARP // LINE_PIECES
# Sizes of tiles whose layouts are remembered, where kernels run as Python: more than a test uses.
SIZES_REMEMBERED = 32
_STORE_TWO = "st.shared.v2.f32 [$0], {$1, $2};"
_STORE_IF = (
    "{\n.reg .pred p;\n.reg .b32 a,b,c,d;\nsetp.ne.b32 p, $2, 0;\nld.shared.v4.b32 {a,b,c,d}, [$0];\n"
    "@p st.global.v4.b32 [$1], {a,b,c,d};\n}"
)


def matmul_extent(name: str) -> Any:
    """Return the device function that computes an extent of the matmul (see :data:`SIZES`) as i32.

    Its arguments are the kernel's pointers and dims.
    """

    def codegen(context, builder, signature, arguments):
        return builder.trunc(emit_device_function_call(builder, SIZES[name], I64, arguments), I32)

    @llvm_instruction(lambda pointers, dims: INT(pointers, dims), codegen)
    def read_extent(pointers, dims):
        return simulated_thread().block.functions[SIZES[name]]()

    return read_extent


# Rows of the result in a group of tiles. Blocks compute the tiles of a group column by column: B is read from memory
# once for each group, and A stays in the L2 cache. ncu, 4096^3 in bf16 on an H200: 145 MB read with tiles of 128 x 256,
# 186 MB with groups of 1024 rows (tiles of 128 x 128: 137 and 180).
GROUP_ROWS = 2048


def matmul_tile_order(cuda: Any, rows: int, cols: int, batched: bool) -> Any:
    """Return the device function that maps a tile's index to its matmul, first row and first column.

    The function takes the index of a tile, and the numbers of tiles down and across. Tiles are numbered column by
    column within a group of :data:`GROUP_ROWS` rows, and groups follow each other: blocks that run at the same time
    share operands in the L2 cache. CUTLASS calls this threadblock swizzling, Triton's tutorial grouped ordering.
    """
    i32, together = types.int32, GROUP_ROWS // rows

    @cuda.jit(device=True, inline="always")
    def locate_tile(tile, down, across):
        z = i32(0)
        if batched:
            z = divide_nonnegative(tile, i32(down * across))
            tile = i32(tile - i32(z * i32(down * across)))
        group = divide_nonnegative(tile, i32(together * across))
        first = i32(group * together)
        high = i32(min(i32(down - first), i32(together)))
        at = i32(tile - i32(group * i32(together * across)))
        column = divide_nonnegative(at, high)
        return TilePlace(z, i32(i32(first + i32(at - i32(column * high))) * rows), i32(column * cols))

    return locate_tile


def zero_accumulators(count: int, dtype: str = "f32") -> Any:
    """Return the device function that creates ``count`` accumulators of zero."""
    numba_type, llvm_type = REGISTERS[dtype]

    def codegen(context, builder, signature, arguments):
        return context.make_tuple(builder, signature.return_type, [ir.Constant(llvm_type, 0)] * count)

    @llvm_instruction(types.UniTuple(numba_type, count), codegen)
    def create_zeros():
        return np.zeros(count, to_numpy(dtype))

    return create_zeros


def swapped_operand_pair(tiles: ProductTiles, a: Any, b: Any) -> tuple[Any, Any]:
    """Return ``(a, b)``, or ``(b, a)`` if the kernel computes the transposed product.

    ``a`` belongs to operand A or to rows, ``b`` to operand B or to columns. The function is its own inverse.
    """
    return (b, a) if tiles.transposed else (a, b)


@ptx_instruction(BARRIER, NOTHING)
def warp_barrier():
    """Wait for the threads of the warp."""
    simulated_thread().block.exchange_values(None)


def emit_shared_f32_load(b: ir.IRBuilder, place: ir.Value) -> ir.Value:
    """Emit the load of an f32 in shared memory."""
    kind = ir.FunctionType(F32, [I32])
    return b.asm(kind, "ld.shared.f32 $0, [$1];", "=f,r,~{memory}", [place], side_effect=True)


def own_accumulator_elements(cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows (of its warp's 16) and columns of the calling thread's accumulators, in the simulator."""
    return _elements_of_lane(simulated_thread().thread & LANE_MASK, cols)


@lru_cache(maxsize=WARP * SIZES_REMEMBERED)
def _elements_of_lane(lane: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    return accumulator_rows_and_columns(lane, np.arange(cols // 2))


def simulated_stage_matmul(tiles: ProductTiles, a: int, b: int, rows: int, cols: int) -> np.ndarray:
    """Return the matmul of the operands of one stage in simulated shared memory."""
    kind = to_numpy(tiles.sum)
    left = simulated_operand_elements(tiles, a, tiles.a_by_rows, np.arange(rows))
    right = simulated_operand_elements(tiles, b, tiles.b_by_rows, np.arange(cols), 1)
    return left.astype(kind) @ right.astype(kind).T


def simulated_dot_products(tiles: ProductTiles, a: int, b: int, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """Return the dot products of rows of A and columns of B over the terms of one stage, in the simulator."""
    kind = to_numpy(tiles.sum)
    left = simulated_operand_elements(tiles, a, tiles.a_by_rows, rows)
    right = simulated_operand_elements(tiles, b, tiles.b_by_rows, cols, 1)
    return np.einsum("ek,ek->e", left.astype(kind), right.astype(kind))


def simulated_dtype(operands: str, number: int = 0) -> np.dtype:
    """Return the dtype of operand A (0) or B (1) in the simulator, which does not round to TF32."""
    return to_numpy(stored_dtypes(operands)[number])


def simulated_operand_elements(
    tiles: ProductTiles, begin: int, by_rows: bool, which: np.ndarray, number: int = 0
) -> np.ndarray:  # fmt: skip
    """Return rows of A, or columns of B, with the indices ``which``, from the stage at ``begin`` in the simulator."""
    places = _element_places(tiles, by_rows, which.tobytes(), which.dtype)
    memory = simulated_thread().block.memory.view(simulated_dtype(tiles.operands, number))
    return memory[int(begin) // tiles.size + places]


@lru_cache(maxsize=2 * SIZES_REMEMBERED)
def _element_places(tiles: ProductTiles, by_rows: bool, which: bytes, kind: np.dtype) -> np.ndarray:
    """Return the offsets, in elements from the start of a stage, of rows of A or columns of B.

    ``which`` has the indices of these rows or columns, as bytes of the dtype ``kind``.
    """
    i, k = np.frombuffer(which, kind)[:, None], np.arange(tiles.depth)
    wide = CHUNK // tiles.size
    part, line, at = (i // wide, k, i % wide) if by_rows else (0, i, k)
    piece, byte = np.divmod(at * tiles.size, PIECE_BYTES)
    places = (part * tiles.depth + line) * CHUNK + (piece ^ tiles.swizzle(line, by_rows)) * PIECE_BYTES + byte
    return np.asarray(places // tiles.size)


def simulate_result_stores(
    tiles: ProductTiles | AttentionTiles, sums: np.ndarray, place: Sequence[int], width: int, sizes: Sequence[int],
    pointers: Any,
) -> None:  # fmt: skip
    """Store the calling thread's accumulators of 16 rows and ``width`` columns, in the simulator."""
    z, row, col = place
    functions = simulated_thread().block.functions
    for value, i, j in zip(sums, *own_accumulator_elements(width)):
        if i + row < sizes[0] and j + col < sizes[1]:
            own = (int(i + row), int(j + col))
            at = (int(z), *(own[::-1] if isinstance(tiles, ProductTiles) and tiles.transposed else own))
            if isinstance(tiles, AttentionTiles) and tiles.in_lines:
                pointers[tiles.out].reshape(-1)[functions[PLACE](*at)] = functions[EPILOGUE](*at, value)
            else:
                functions[STORE](*at, value)


def emit_attention_result_stores(
    builder: ir.IRBuilder, tiles: AttentionTiles, sums: Sequence[ir.Value],
    arguments: Sequence[ir.Value],
) -> None:  # fmt: skip
    """Emit the stores of a warp's 16 rows of attention: by :class:`RowStoreEmitter` if rows are contiguous."""
    (RowStoreEmitter if tiles.in_lines else ElementStoreEmitter)(builder, tiles, sums, arguments).emit()


class ElementStoreEmitter:
    """Emitter of the epilogue of a warp's 16 rows, element by element; the lanes store neighbouring elements of a row.

    The accumulators pass through ``staging`` in chunks of 32 columns. Parameters are those of :class:`RowStoreEmitter`.
    """

    def __init__(
        self, builder: ir.IRBuilder, tiles: AttentionTiles, sums: Sequence[ir.Value],
        arguments: Sequence[ir.Value],
    ) -> None:  # fmt: skip
        self.b, self.tiles, self.sums = builder, tiles, sums
        self.staging, self.lane, self.z, self.row, self.col, self.rows, self.cols, *self.tables = arguments

    def emit(self) -> None:
        """Emit the stores of all chunks of 32 columns, element by element through shared memory."""
        for first in range(0, len(self.sums) // GROUP_SUMS, LINE_GROUPS):
            self._stage_columns(first)
            emit_inline_assembly(self.b, BARRIER, NOTHING, [], [])
            self._store_rows_of_chunk(first * GROUP)
            emit_inline_assembly(self.b, BARRIER, NOTHING, [], [])

    def _stage_columns(self, first: int) -> None:
        """Emit the stores of a chunk of 32 columns to the staging area, swizzled in pieces of 16 bytes."""
        b = self.b
        quad, own = emit_quad_lane(b, self.lane), emit_quad_row(b, self.lane)
        for n in range(min(LINE_GROUPS, len(self.sums) // GROUP_SUMS - first)):
            piece = b.xor(b.add(i32(GROUP // PIECE_WORDS * n), b.lshr(quad, i32(1))), own)
            for half in range(2):
                line = b.add(self.staging, emit_line_offset(b, b.add(own, i32(HALF_ROWS * half))))
                place = b.add(
                    b.add(line, emit_piece_offset(b, piece)),
                    emit_times_power_of_two(b, b.and_(quad, i32(1)), PAIR_BYTES),
                )
                at = GROUP_SUMS * (first + n) + LANE_COLUMNS * half
                emit_inline_assembly(b, _STORE_TWO, NOTHING, [INT, FLOAT, FLOAT], [place, *self.sums[at : at + 2]])

    def _store_rows_of_chunk(self, begin: int) -> None:
        """Emit the loop over the rows of a chunk: each lane stores one column."""
        b = self.b
        before = b.block
        loop, inside, after = (b.append_basic_block(name) for name in ("rows", "element", "next"))
        done = b.append_basic_block("stored")
        col = b.add(b.add(self.col, i32(begin)), self.lane)
        b.branch(loop)
        b.position_at_end(loop)
        own = b.phi(I32)
        own.add_incoming(i32(0), before)
        row = b.add(self.row, own)
        there = b.and_(b.icmp_signed("<", row, self.rows), b.icmp_signed("<", col, self.cols))
        b.cbranch(there, inside, after)
        b.position_at_end(inside)
        piece = b.xor(
            emit_divide_by_power_of_two(b, self.lane, PIECE_WORDS), emit_modulo_power_of_two(b, own, SWIZZLE_LINES)
        )
        line = b.add(self.staging, emit_line_offset(b, own))
        place = b.add(
            b.add(line, emit_piece_offset(b, piece)),
            emit_word_offset(b, emit_modulo_power_of_two(b, self.lane, PIECE_WORDS)),
        )
        value = emit_shared_f32_load(b, place)
        emit_device_function_call(b, STORE, I32, self.tables, *(b.sext(v, I64) for v in (self.z, row, col)), value)
        b.branch(after)
        b.position_at_end(after)
        following = b.add(own, i32(1))
        own.add_incoming(following, after)
        b.cbranch(b.icmp_signed("<", following, i32(WARP_TILE)), loop, done)
        b.position_at_end(done)


class RowStoreEmitter:
    """Emitter of the epilogue and the stores of a warp's 16 rows, in pieces of 16 bytes.

    A lane has single elements of all rows. They pass through ``staging`` in chunks of 128 bytes a row, so that each
    lane then writes 16 contiguous bytes of one row to memory. Elements outside of the result are computed from clamped
    indices and not stored.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
    tiles : AttentionTiles
    sums : sequence of values
        The lane's accumulators: in each group of 8 columns two of one row, and two of the row 8 below.
    arguments : sequence of values
        Address of the warp's staging area, lane, head, first row and column, extents of the result, and the tables of
        pointers and dims.
    """

    def __init__(
        self, builder: ir.IRBuilder, tiles: AttentionTiles, sums: Sequence[ir.Value],
        arguments: Sequence[ir.Value],
    ) -> None:  # fmt: skip
        self.b, self.tiles, self.sums = builder, tiles, sums
        self.staging, lane, self.z, self.row, self.col, self.rows, self.cols, self.pointers, self.dims = arguments
        self.quad, self.own_row = emit_quad_lane(builder, lane), emit_quad_row(builder, lane)
        self.piece, self.read_row = (
            emit_modulo_power_of_two(builder, lane, LINE_PIECES),
            emit_divide_by_power_of_two(builder, lane, LINE_PIECES),
        )

    def emit(self) -> None:
        """Emit the stores of all chunks (128 bytes of each row), in 16-byte pieces through shared memory."""
        groups, together = len(self.sums) // GROUP_SUMS, CHUNK // (GROUP * self.tiles.result_size)
        for first in range(0, groups, together):
            for n in range(min(together, groups - first)):
                self._stage_column_pair(n, first + n)
            emit_inline_assembly(self.b, BARRIER, NOTHING, [], [])
            for n in range(WARP_TILE // LINES_AT_ONCE):
                self._copy_row_piece(n, first * GROUP)
            emit_inline_assembly(self.b, BARRIER, NOTHING, [], [])

    def _apply_epilogue(self, value: ir.Value, row: ir.Value, col: ir.Value) -> ir.Value:
        b = self.b
        inside = [
            b.sext(b.select(b.icmp_signed("<", at, end), at, b.sub(end, i32(1))), I64)
            for at, end in ((row, self.rows), (col, self.cols))
        ]
        return emit_device_function_call(
            b, EPILOGUE, F32, (self.pointers, self.dims), b.sext(self.z, I64), *inside, value
        )

    def _stage_column_pair(self, piece: int, group: int) -> None:
        """Emit the stores of a lane's two columns of a group of 8 to the staging area, for both of its rows."""
        b = self.b
        col = b.add(b.add(self.col, i32(GROUP * group)), emit_times_power_of_two(b, self.quad, LANE_COLUMNS))
        for half in range(2):
            at, below = GROUP_SUMS * group + LANE_COLUMNS * half, i32(HALF_ROWS * half)
            row = b.add(self.row, b.add(self.own_row, below))
            values = [self._apply_epilogue(self.sums[at + n], row, b.add(col, i32(n))) for n in range(LANE_COLUMNS)]
            line = b.add(self.staging, emit_line_offset(b, b.add(self.own_row, below)))
            if self.tiles.result_size == 2:
                place = b.add(self._staging_address(line, i32(piece), self.own_row), emit_word_offset(b, self.quad))
                packed = emit_inline_assembly(b, PACK[self.tiles.result], INT, [FLOAT, FLOAT], values)
                emit_inline_assembly(b, "st.shared.b32 [$0], $1;", NOTHING, [INT, INT], [place, packed])
            else:
                own = b.add(i32(GROUP // PIECE_WORDS * piece), b.lshr(self.quad, i32(1)))
                place = self._staging_address(line, own, self.own_row)
                place = b.add(place, emit_times_power_of_two(b, b.and_(self.quad, i32(1)), PAIR_BYTES))
                emit_inline_assembly(b, _STORE_TWO, NOTHING, [INT, FLOAT, FLOAT], [place, *values])

    def _staging_address(self, line: ir.Value, piece: ir.Value, row: ir.Value) -> ir.Value:
        """Emit the address of a piece in the staging area.

        The swizzle of a line depends on its number, as the area starts at the beginning of a swizzle pattern.
        """
        return self.b.add(
            line, emit_piece_offset(self.b, self.b.xor(piece, emit_modulo_power_of_two(self.b, row, SWIZZLE_LINES)))
        )

    def _copy_row_piece(self, part: int, begin: int) -> None:
        """Emit the copy of 16 bytes of a row from the chunk at ``begin`` to memory; a warp copies 4 rows at a time."""
        b, size = self.b, self.tiles.result_size
        own = b.add(self.read_row, i32(LINES_AT_ONCE * part))
        source = self._staging_address(b.add(self.staging, emit_line_offset(b, own)), self.piece, own)
        row = b.add(self.row, own)
        col = b.add(b.add(self.col, i32(begin)), b.mul(self.piece, i32(PIECE_BYTES // size)))
        inside = b.and_(b.icmp_signed("<", row, self.rows), b.icmp_signed("<", col, self.cols))
        result = b.ptrtoint(b.extract_value(self.pointers, self.tiles.out), I64)
        at = [b.sext(v, I64) for v in (self.z, row, col)]
        flat = emit_device_function_call(b, PLACE, I64, (self.pointers, self.dims), *at)
        place = b.add(result, b.mul(flat, i64(size)))
        emit_inline_assembly(b, _STORE_IF, NOTHING, [INT, LONG, INT], [source, place, b.zext(inside, I32)])
