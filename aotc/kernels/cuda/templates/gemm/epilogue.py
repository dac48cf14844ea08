"""Epilogue of a matmul: each lane gets contiguous pieces of the result, computes the epilogue, and stores the pieces.

A warp has the accumulators of 16 rows, which are columns of the result if the operands are swapped. They pass through
shared memory in chunks of 32 columns (16 of f64). There a lane gets whole pieces of a row, or of a column if the
elements of a column are contiguous in memory. Its loads and stores have 16 bytes and are coalesced with those of the
other lanes. Operands of later chunks are loaded while a chunk is stored. Operands of the first chunks, and prefetches
of large operands, start before the tile's matmul.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from aotc.ir.loop.ir import WARP
from aotc.kernels.cuda.device_function import register_struct_type
from aotc.kernels.cuda.ptx import I32 as INT
from aotc.kernels.cuda.ptx import I64 as LONG
from aotc.kernels.cuda.ptx import NOTHING, emit_inline_assembly
from aotc.kernels.cuda.shell import emit_device_function_call
from aotc.kernels.cuda.templates.fragments import (
    DOUBLE_BYTES,
    GROUP,
    GROUP_SUMS,
    HALF_ROWS,
    LANE_COLUMNS,
    LINE_PIECES,
    PIECE_WORDS,
    emit_divide_by_power_of_two,
    emit_line_offset,
    emit_modulo_power_of_two,
    emit_piece_offset,
    emit_quad_lane,
    emit_quad_row,
    emit_times_power_of_two,
    emit_word_offset,
)
from aotc.kernels.cuda.templates.gemm.tiles import ROWS, ProductTiles
from aotc.kernels.cuda.templates.steps import BARRIER, FAR, LOAD_AHEAD, REGISTERS, STORE, swapped_operand_pair
from aotc.kernels.cuda.templates.threads import WARPGROUP_TILE
from aotc.kernels.llvm_types import I32, I64, i32, i64

_READ = {"f32": ("f", "f32", 4), "i32": ("r", "b32", 4), "f64": ("d", "f64", 2)}
"""How accumulators are loaded back: the letter of the register, the PTX type, and the elements of one load."""


class EpiloguePieces:
    """Emitter of the epilogue of a warp's 16 rows, or of 16 rows in each of several parts of a tile, 64 rows apart.

    It is a loop over chunks: a thread runs through a tile's code only once, and fetching unrolled instructions would
    take longer than executing them.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
    tiles : ProductTiles
    parts : sequence of sequences of values
        The lane's accumulators of each part: in each group of 8 columns two of one row, and two of the row 8 below.
    arguments : sequence of values
        Address of the warp's staging area, lane, matmul, first row and column, extents of the result, and the tables of
        pointers and dims.
    """

    def __init__(
        self, builder: ir.IRBuilder, tiles: ProductTiles, parts: Sequence[Sequence[ir.Value]],
        arguments: Sequence[ir.Value],
    ) -> None:  # fmt: skip
        self.b, self.tiles, self.pieces = builder, tiles, tiles.pieces
        self.staging, self.lane, self.z, self.row, self.col, self.rows, self.cols, *self.tables = arguments
        self.columns = tiles.staged
        self.steps = tiles.steps
        self.down = self.pieces.down is not tiles.transposed
        own = self.columns // 2
        self.across = len(parts[0]) // own
        self.chunks = [sums[n : n + own] for sums in parts for n in range(0, len(sums), own)]

    def load_first_operands(self, ahead: int) -> list[ir.Value]:
        """Emit the loads of epilogue operands for the first ``ahead`` chunks of columns; return their registers."""
        if not self.pieces.held:
            return []
        return [value for chunk in range(ahead) for value in self._load_operands_of_chunk(i32(chunk))]

    def emit(self, first: Sequence[ir.Value]) -> None:
        """Emit the epilogue and the stores of all chunks of columns; ``first`` has operands loaded earlier.

        The registers of operands form a queue of ``ahead`` chunks, in phi nodes. Each iteration consumes the front of
        the queue and appends the operands of the chunk ``ahead`` iterations later (clamped to the last chunk).
        """
        b, count = self.b, len(self.chunks)
        each = len(register_struct_type(self.pieces.held).elements) * self.steps
        ahead = len(first) // each if each else 0
        before, loop, done = b.block, b.append_basic_block("chunk"), b.append_basic_block("stored")
        b.branch(loop)
        b.position_at_end(loop)
        chunk = b.phi(I32)
        chunk.add_incoming(i32(0), before)
        held = [b.phi(value.type) for value in first]
        for phi, value in zip(held, first):
            phi.add_incoming(value, before)
        self._stage_chunk(chunk)
        emit_inline_assembly(b, BARRIER, NOTHING, [], [])
        following = b.add(chunk, i32(1))
        more = b.icmp_signed("<", following, i32(count))
        later = held[len(held) - each :]
        if 0 < ahead < count:
            last = i32(count - 1)
            wanted = b.add(chunk, i32(ahead))
            later = self._load_operands_of_chunk(b.select(b.icmp_signed("<", wanted, last), wanted, last))
        self._emit_chunk_stores(chunk, held[:each])
        emit_inline_assembly(b, BARRIER, NOTHING, [], [])
        for phi, value in zip([chunk, *held], [following, *held[each:], *later]):
            phi.add_incoming(value, b.block)
        b.cbranch(more, loop, done)
        b.position_at_end(done)

    def _chunk_corner(self, chunk: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the first row and column of a chunk in the result."""
        b, part = self.b, i32(0)
        if len(self.chunks) > self.across:
            part = b.udiv(chunk, i32(self.across))
            chunk = b.sub(chunk, b.mul(part, i32(self.across)))
        return b.add(self.row, emit_times_power_of_two(b, part, WARPGROUP_TILE)), b.add(
            self.col, b.mul(chunk, i32(self.columns))
        )

    def _stage_chunk(self, chunk: ir.Value) -> None:
        """Emit the stores of a chunk of accumulators to the staging area in shared memory.

        A switch selects registers, which cannot be indexed.
        """
        b = self.b
        if len(self.chunks) == 1:
            self._stage_lane_accumulators(self.chunks[0])
            return
        together = b.append_basic_block("down")
        ways = [b.append_basic_block(f"down{n}") for n in range(len(self.chunks))]
        switch = b.switch(chunk, ways[-1])
        for n, way in enumerate(ways):
            if n < len(ways) - 1:
                switch.add_case(i32(n), way)
            b.position_at_end(way)
            self._stage_lane_accumulators(self.chunks[n])
            b.branch(together)
        b.position_at_end(together)

    def _stage_lane_accumulators(self, sums: Sequence[ir.Value]) -> None:
        """Emit the stores of the lane's accumulators of a chunk to the staging area, swizzled."""
        b, kind = self.b, REGISTERS[self.tiles.sum][0]
        quad, own = emit_quad_lane(b, self.lane), emit_quad_row(b, self.lane)
        letter = {"i32": "b32"}.get(self.tiles.sum, self.tiles.sum)
        for half in range(2):
            row = b.add(own, i32(HALF_ROWS * half))
            for n in range(self.columns // GROUP):
                col = b.add(i32(GROUP * n), emit_times_power_of_two(b, quad, LANE_COLUMNS))
                at = GROUP_SUMS * n + LANE_COLUMNS * half
                text = f"st.shared.v2.{letter} [$0], {{$1, $2}};"
                emit_inline_assembly(
                    b,
                    text,
                    NOTHING,
                    [INT, kind, kind],
                    [self._staged_accumulator_address(row, col), *sums[at : at + 2]],
                )

    def _staged_accumulator_address(self, row: ir.Value, col: ir.Value) -> ir.Value:
        """Emit the address of a staged accumulator, without bank conflicts along rows and along columns.

        The swizzle is a number of 3 bits, one for each piece of a line. Rows that lanes read or write at the same time
        have different swizzles: consecutive rows and every fourth row; of f64, every other row.
        """
        b = self.b
        if self.tiles.sum == "f64":
            swizzle = emit_modulo_power_of_two(b, b.lshr(row, i32(1)), LINE_PIECES)
            swizzle = b.xor(swizzle, emit_times_power_of_two(b, b.and_(row, i32(1)), LINE_PIECES // 2))
            piece = b.xor(b.lshr(col, i32(1)), swizzle)
            byte = emit_times_power_of_two(b, b.and_(col, i32(1)), DOUBLE_BYTES)
        else:
            swizzle = b.shl(
                emit_modulo_power_of_two(
                    b, b.xor(row, emit_divide_by_power_of_two(b, row, LINE_PIECES // 2)), LINE_PIECES // 2
                ),
                i32(1),
            )
            swizzle = b.or_(swizzle, b.and_(row, i32(1)))
            piece = b.xor(emit_divide_by_power_of_two(b, col, PIECE_WORDS), swizzle)
            byte = emit_word_offset(b, emit_modulo_power_of_two(b, col, PIECE_WORDS))
        return b.add(self.staging, b.add(emit_line_offset(b, row), b.add(emit_piece_offset(b, piece), byte)))

    def _lane_piece_position(self, step: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the row and column, within the chunk, of the piece that the lane stores in a step."""
        b, width = self.b, self.pieces.width
        if self.down:
            down = ROWS // width
            row = b.mul(b.and_(self.lane, i32(down - 1)), i32(width))
            return row, b.add(b.mul(step, i32(WARP // down)), b.lshr(self.lane, i32(down.bit_length() - 1)))
        across = self.columns // width
        row = b.add(b.mul(step, i32(WARP // across)), b.lshr(self.lane, i32(across.bit_length() - 1)))
        return row, b.mul(b.and_(self.lane, i32(across - 1)), i32(width))

    def _device_function_coordinates(self, row: ir.Value, col: ir.Value) -> list[ir.Value]:
        """Return matmul, row and column as arguments of device functions.

        The coordinate along a piece counts pieces instead of elements.
        """
        b, width = self.b, self.pieces.width
        if width > 1:
            shift = i32(width.bit_length() - 1)
            row, col = (b.ashr(row, shift), col) if self.down else (row, b.ashr(col, shift))
        return [b.sext(v, I64) for v in (self.z, *swapped_operand_pair(self.tiles, row, col))]

    def _load_operands_of_chunk(self, chunk: ir.Value) -> list[ir.Value]:
        """Emit the loads of a chunk's epilogue operands; indices outside of the result are clamped."""
        b = self.b
        kind = register_struct_type(self.pieces.held)
        found: list[ir.Value] = []
        last = [1, 1]
        last[0 if self.down else 1] = self.pieces.width
        for step in range(self.steps):
            place = (b.add(x, y) for x, y in zip(self._chunk_corner(chunk), self._lane_piece_position(i32(step))))
            row, col = (
                b.select(b.icmp_signed("<", at, end), at, b.sub(end, i32(less)))
                for at, end, less in zip(place, (self.rows, self.cols), last)
            )
            held = emit_device_function_call(
                b, LOAD_AHEAD, kind, self.tables, *self._device_function_coordinates(row, col)
            )
            found += [b.extract_value(held, n) for n in range(len(kind.elements))]
        return found

    def _emit_chunk_stores(self, chunk: ir.Value, held: Sequence[ir.Value]) -> None:
        """Emit the stores of a chunk: unrolled for pieces, as a loop for single elements."""
        b = self.b
        if self.pieces.width > 1:
            self._emit_whole_piece_stores(chunk, held)
            return
        before, loop, done = b.block, b.append_basic_block("step"), b.append_basic_block("all")
        b.branch(loop)
        b.position_at_end(loop)
        step = b.phi(I32)
        step.add_incoming(i32(0), before)
        own = self._lane_piece_position(step)
        place, there = self._piece_and_bounds_test(chunk, own)
        with b.if_then(there):
            self._call_epilogue(place, self._load_staged_piece(*own), [])
        following = b.add(step, i32(1))
        step.add_incoming(following, b.block)
        b.cbranch(b.icmp_signed("<", following, i32(self.steps)), loop, done)
        b.position_at_end(done)

    def _emit_whole_piece_stores(self, chunk: ir.Value, held: Sequence[ir.Value]) -> None:
        """Emit the stores of whole pieces, as a single basic block if all of them are inside the result.

        One warp runs on each quarter of a multiprocessor. Only independent steps of the same warp can hide its latency,
        and they overlap only within a basic block.
        """
        b, each = self.b, len(held) // self.steps
        owns = [self._lane_piece_position(i32(step)) for step in range(self.steps)]
        places = [self._piece_and_bounds_test(chunk, own) for own in owns]
        own_held = [held[n * each : (n + 1) * each] for n in range(self.steps)]

        def store_with_bounds_tests() -> None:
            for own, (place, there), given in zip(owns, places, own_held):
                with b.if_then(there):
                    self._call_epilogue(place, self._load_staged_piece(*own), given)

        if self.steps == 1:
            store_with_bounds_tests()
            return
        whole = places[0][1]
        for _, there in places[1:]:
            whole = b.and_(whole, there)
        with b.if_else(whole) as (inside, beyond):
            with inside:
                read = [self._load_staged_piece(*own) for own in owns]
                for (place, _), sums, given in zip(places, read, own_held):
                    self._call_epilogue(place, sums, given)
            with beyond:
                store_with_bounds_tests()

    def _piece_and_bounds_test(
        self, chunk: ir.Value, own: tuple[ir.Value, ir.Value]
    ) -> tuple[tuple[ir.Value, ir.Value], ir.Value]:
        """Return row and column of the lane's piece, and the condition that the piece is inside the result."""
        b = self.b
        row, col = (b.add(x, y) for x, y in zip(self._chunk_corner(chunk), own))
        return (row, col), b.and_(b.icmp_signed("<", row, self.rows), b.icmp_signed("<", col, self.cols))

    def _call_epilogue(
        self, place: tuple[ir.Value, ir.Value], sums: Sequence[ir.Value], held: Sequence[ir.Value]
    ) -> None:
        """Emit the call of the epilogue for the lane's piece at ``place``."""
        emit_device_function_call(
            self.b, STORE, I32, self.tables, *self._device_function_coordinates(*place), *sums, *held
        )

    def _load_staged_piece(self, row: ir.Value, col: ir.Value) -> list[ir.Value]:
        """Emit the loads of the accumulators of a 16-byte piece from the staging area."""
        b, width = self.b, self.pieces.width
        kind = REGISTERS[self.tiles.sum][1]
        letter, name, most = _READ[self.tiles.sum]
        if width == 1 or self.down:
            text, form = f"ld.shared.{name} $0, [$1];", ir.FunctionType(kind, [I32])
            places = [self._staged_accumulator_address(b.add(row, i32(n)), col) for n in range(width)]
            return [b.asm(form, text, f"={letter},r,~{{memory}}", [place], side_effect=True) for place in places]
        found = []
        form = ir.FunctionType(ir.LiteralStructType([kind] * most), [I32])
        text = f"ld.shared.v{most}.{name} {{{', '.join(f'${n}' for n in range(most))}}}, [${most}];"
        for n in range(0, width, most):
            place = self._staged_accumulator_address(row, b.add(col, i32(n)))
            few = b.asm(form, text, ",".join([f"={letter}"] * most + ["r", "~{memory}"]), [place], side_effect=True)
            found += [b.extract_value(few, k) for k in range(most)]
        return found


# Bytes of one L2 prefetch: a cache line of NVIDIA GPUs.
LINE = 128


def prefetch_epilogue_operands(
    builder: ir.IRBuilder, tiles: ProductTiles, columns: int, arguments: Sequence[ir.Value]
) -> None:
    """Emit prefetches to L2 of the operands that the epilogue of a warp's 16 rows and ``columns`` reads.

    Each lane prefetches one cache line at a time. ``arguments`` are those of :class:`EpiloguePieces`, without the
    staging area.
    """
    b, down = builder, tiles.pieces.down is not tiles.transposed
    lane, z, first_row, first_col, rows, cols, *tables = arguments
    for number, (pointer, size) in enumerate(tiles.pieces.far):
        line = min(LINE // size, ROWS if down else columns)
        lines = (ROWS // line * columns) if down else columns // line * ROWS
        for begin in range(0, lines, WARP):
            at = b.add(lane, i32(begin))
            if down:
                per = ROWS // line
                row, col = b.mul(b.urem(at, i32(per)), i32(line)), b.udiv(at, i32(per))
            else:
                per = columns // line
                row, col = b.udiv(at, i32(per)), b.mul(b.urem(at, i32(per)), i32(line))
            row, col = b.add(first_row, row), b.add(first_col, col)
            inside = b.and_(b.icmp_signed("<", row, rows), b.icmp_signed("<", col, cols))
            inside = b.and_(inside, b.icmp_signed("<", at, i32(lines)))
            with b.if_then(inside):
                own = (b.sext(v, I64) for v in (z, *swapped_operand_pair(tiles, row, col)))
                place = emit_device_function_call(b, f"{FAR}{number}", I64, tables, *own)
                base = b.ptrtoint(b.extract_value(tables[0], pointer), I64)
                address = b.add(base, b.mul(place, i64(size)))
                emit_inline_assembly(b, "prefetch.global.L2 [$0];", NOTHING, [LONG], [address])
