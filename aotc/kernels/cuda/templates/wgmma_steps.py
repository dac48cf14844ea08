"""The steps of a product on Hopper: each is many instructions, and one statement to Numba, which types every one.

Tiles lie in shared memory in rows of 128 bytes, whose pieces of 16 bytes are swizzled: piece c of row r is at
c ^ r % 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba.cuda import types

from aotc.kernels.cuda.block import here, swizzled
from aotc.kernels.cuda.hopper import copy_tile
from aotc.kernels.cuda.ptx import F32 as FLOAT
from aotc.kernels.cuda.ptx import I32 as INT
from aotc.kernels.cuda.ptx import I64 as LONG
from aotc.kernels.cuda.ptx import NOTHING, assembly, emitted
from aotc.kernels.cuda.shell import call_function
from aotc.kernels.llvm_types import F32, I32, I64, i32
from aotc.vmfb.dtypes import to_numpy

if TYPE_CHECKING:
    from aotc.kernels.cuda.templates.gemm_wgmma import Tiles

EPILOGUE = "aotc_epilogue"
"""``f32 epilogue(..., i64 row, i64 col, f32 sum)``: what is stored for a sum, before it is rounded."""
SIZES = {"rows": "aotc_rows", "cols": "aotc_cols", "depth": "aotc_depth"}
"""``i64 f(...)``: the sizes of the product."""
CHUNK = 128
"""unit: bytes
why: of a row of a tile in shared memory: what the accelerator swizzles at most
from: PTX ISA, tensor swizzling modes
"""
STAGING = 16 * CHUNK
"""unit: bytes
why: a warp holds 16 rows of a tile's sums, which it writes in pieces of 128 bytes
from: PTX ISA, layout of wgmma's accumulators
"""
_BARRIER = "bar.warp.sync 0xffffffff;"
_PACK = {"bf16": "cvt.rn.bf16x2.f32 $0, $2, $1;", "f16": "cvt.rn.f16x2.f32 $0, $2, $1;"}
_STORE_IF = (
    "{\n.reg .pred p;\n.reg .b32 a,b,c,d;\nsetp.ne.b32 p, $2, 0;\nld.shared.v4.b32 {a,b,c,d}, [$0];\n"
    "@p st.global.v4.b32 [$1], {a,b,c,d};\n}"
)


def extent(name: str) -> Any:
    """Return the function of a kernel's pointers and dims that is a size of the product."""

    def generate(context, builder, signature, arguments):
        return builder.trunc(call_function(builder, SIZES[name], I64, arguments), I32)

    @emitted(lambda pointers, dims: INT(pointers, dims), generate)
    def size(pointers, dims):
        return here().block.functions[SIZES[name]]()

    return size


def zeros(count: int) -> Any:
    """Return the function that makes ``count`` sums of nothing."""

    def generate(context, builder, signature, arguments):
        return context.make_tuple(builder, signature.return_type, [ir.Constant(F32, 0.0)] * count)

    @emitted(types.UniTuple(FLOAT, count), generate)
    def clear():
        return np.zeros(count, np.float32)

    return clear


def _boxes(tiles: Tiles) -> Iterator[tuple[int, int, bool, int]]:
    """Yield what is copied for a stage: of which map, where to, is it stored by rows, and from which row or column on."""
    for number, by_rows, count, begin in (
        (0, tiles.a_by_rows, tiles.rows, 0),
        (1, tiles.b_by_rows, tiles.cols, tiles.rows * CHUNK),
    ):
        for part in range(0, count if by_rows else 1, 64):
            yield number, begin + part // 64 * tiles.depth * CHUNK, by_rows, part


def load_tile(tiles: Tiles) -> Any:
    """Return the function that begins to copy a stage: the tile's rows of A, then its columns of B."""

    def generate(context, builder, signature, arguments):
        table, to, barrier, row, column, depth = arguments
        maps = [builder.ptrtoint(builder.extract_value(table, n), I64) for n in range(2)]
        for number, offset, by_rows, part in _boxes(tiles):
            first = builder.add((row, column)[number], i32(part))
            place = (first, depth) if by_rows else (depth, first)
            operands = [builder.add(to, i32(offset)), maps[number], barrier, *place]
            assembly(builder, copy_tile.text, NOTHING, [INT, LONG, INT, INT, INT], operands)
        return context.get_dummy_value()

    @emitted(lambda maps, *numbers: NOTHING(maps, *[INT] * 5), generate)
    def copy(maps, to, barrier, row, column, depth):
        for number, offset, by_rows, part in _boxes(tiles):
            first = (row, column)[number] + part
            copy_tile(to + offset, maps[number], barrier, *((first, depth) if by_rows else (depth, first)))

    return copy


def _descriptor(builder: ir.IRBuilder, place: ir.Value, leading: int) -> ir.Value:
    """Return what tells a product of a tile at ``place``, in units of 16 bytes: 8 rows are 1024 bytes, swizzled."""
    low = builder.or_(place, i32(leading >> 4 << 16))
    return builder.or_(builder.zext(low, I64), ir.Constant(I64, (1 << 62) | (1024 >> 4 << 32)))


def multiply(tiles: Tiles) -> Any:
    """Return the function that begins to add the products of a stage to a warpgroup's sums.

    Of them it has those of rows ``16 w + l / 4`` and 8 more, for warp w and lane l, and of columns ``8 j + 2 (l % 4)``
    and the next; if it is the first stage of a tile, the sums begin anew.
    """
    count, step = tiles.cols // 2, 32 // tiles.size
    kind = "tf32" if tiles.operands == "tf32" else tiles.operands
    sums = ", ".join(f"${n}" for n in range(count))
    ways = "" if kind == "tf32" else f", {int(tiles.a_by_rows)}, {int(tiles.b_by_rows)}"
    text = (
        f"{{\n.reg .pred p;\nsetp.ne.b32 p, ${2 * count + 2}, 0;\n"
        f"wgmma.mma_async.sync.aligned.m64n{tiles.cols}k{step}.f32.{kind}.{kind} {{{sums}}}, "
        f"${2 * count}, ${2 * count + 1}, p, 1, 1{ways};\n}}"
    )
    constraints = ",".join(["=f"] * count + [str(n) for n in range(count)] + ["l", "l", "r"])
    result = ir.FunctionType(ir.LiteralStructType([F32] * count), [F32] * count + [I64, I64, I32])
    across = step * CHUNK >> 4  # from one step to the next, where elements of a row or column lie side by side
    a_step, a_leading = (across, 16) if tiles.a_by_rows else (2, 16)
    b_step, b_leading = (across, tiles.depth * CHUNK) if tiles.b_by_rows else (2, 16)

    def generate(context, builder, signature, arguments):
        held = [builder.extract_value(arguments[0], n) for n in range(count)]
        a, b = (builder.lshr(place, i32(4)) for place in arguments[1:3])
        for n in range(4):
            operands = [
                _descriptor(builder, builder.add(a, i32(a_step * n)), a_leading),
                _descriptor(builder, builder.add(b, i32(b_step * n)), b_leading),
                i32(1) if n else arguments[3],
            ]
            found = builder.asm(result, text, constraints, [*held, *operands], side_effect=True)
            held = [builder.extract_value(found, n) for n in range(count)]
        return context.make_tuple(builder, signature.return_type, held)

    kept = types.UniTuple(FLOAT, count)

    @emitted(lambda *given: kept(kept, INT, INT, INT), generate)
    def steps(given, a, b, turn):
        rows, cols = own_elements(tiles)
        with here().block.warpgroup():
            left = _operand(tiles, a, tiles.a_by_rows, 64)[rows].astype(np.float32)
            right = _operand(tiles, b, tiles.b_by_rows, tiles.cols)[cols].astype(np.float32)
        found = np.einsum("ek,ek->e", left, right)
        return given + found if turn else found

    return steps


def own_elements(tiles: Tiles) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows, of the warpgroup's 64, and the columns that the calling thread has the sums of."""
    warp, lane = here().thread >> 5 & 3, here().thread & 31
    n = np.arange(tiles.cols // 2)
    return 16 * warp + lane // 4 + 8 * (n // 2 % 2), 8 * (n // 4) + 2 * (lane % 4) + n % 2


def _operand(tiles: Tiles, begin: int, by_rows: bool, count: int) -> np.ndarray:
    """Return ``count`` rows of A, or columns of B, that lie in shared memory, with all products of the stage."""
    i, k = np.indices((count, tiles.depth))
    part, line, at = (i // 64, k, i % 64) if by_rows else (0 * i, i, k)
    places = (int(begin) + part * tiles.depth * CHUNK)[..., None] + swizzled(
        line[..., None], (at * tiles.size)[..., None] + np.arange(tiles.size)
    )
    return here().block.memory[places].view(to_numpy("f32" if tiles.operands == "tf32" else tiles.operands))[..., 0]


def store_tile(tiles: Tiles) -> Any:
    """Return the function by which a warp stores its 16 rows of a tile.

    The lanes have single elements of all rows: pieces of 128 bytes go through ``staging``, so that each lane writes 16
    bytes of a row to memory. Elements outside of the result are computed of ones inside, and not stored.
    """

    def generate(context, builder, signature, arguments):
        _Store(builder, tiles, arguments).emit()
        return context.get_dummy_value()

    @emitted(lambda sums, *given: NOTHING(sums, *[INT] * 6, *given[-2:]), generate)
    def store(sums, staging, lane, row, col, rows, cols, pointers, dims):
        own_rows, own_cols = own_elements(tiles)
        for value, i, j in zip(sums, own_rows % 16 + int(row), own_cols + int(col)):
            if i < rows and j < cols:
                pointers[-1][i, j] = here().block.functions[EPILOGUE](i, j, value)

    return store


class _Store:
    """Emits the stores of a warp."""

    def __init__(self, builder: ir.IRBuilder, tiles: Tiles, arguments: Sequence[ir.Value]) -> None:
        self.b, self.tiles = builder, tiles
        sums, self.staging, lane, self.row, self.col, self.rows, self.cols, self.pointers, self.dims = arguments
        self.sums = [builder.extract_value(sums, n) for n in range(tiles.cols // 2)]
        self.quad, self.own_row = builder.and_(lane, i32(3)), builder.lshr(lane, i32(2))
        self.piece, self.read_row = builder.and_(lane, i32(7)), builder.lshr(lane, i32(3))

    def emit(self) -> None:
        """Emit all of them, 128 bytes of each row at a time."""
        per = CHUNK // (8 * self.tiles.result_size)  # groups of 8 columns
        for first in range(0, self.tiles.cols // 8, per):
            for n in range(per):
                self._stage(n, first + n)
            assembly(self.b, _BARRIER, NOTHING, [], [])
            for n in range(4):
                self._copy(n, first * 8)
            assembly(self.b, _BARRIER, NOTHING, [], [])

    def _epilogue(self, value: ir.Value, row: ir.Value, col: ir.Value) -> ir.Value:
        b = self.b
        inside = [
            b.sext(b.select(b.icmp_signed("<", at, end), at, b.sub(end, i32(1))), I64)
            for at, end in ((row, self.rows), (col, self.cols))
        ]
        return call_function(b, EPILOGUE, F32, (self.pointers, self.dims), *inside, value)

    def _stage(self, piece: int, group: int) -> None:
        """Compute and put down the lane's two columns of a group of 8, in both of its rows."""
        b = self.b
        col = b.add(b.add(self.col, i32(8 * group)), b.shl(self.quad, i32(1)))
        for below in (0, 8):
            at = 4 * group + below // 4
            row = b.add(self.row, b.add(self.own_row, i32(below)))
            values = [self._epilogue(self.sums[at + n], row, b.add(col, i32(n))) for n in range(2)]
            line = b.add(self.staging, b.shl(b.add(self.own_row, i32(below)), i32(7)))
            if self.tiles.result_size == 2:
                place = b.add(self._swizzled(line, i32(piece), self.own_row), b.shl(self.quad, i32(2)))
                packed = assembly(b, _PACK[self.tiles.result], INT, [FLOAT, FLOAT], values)
                assembly(b, "st.shared.b32 [$0], $1;", NOTHING, [INT, INT], [place, packed])
            else:
                half = b.add(i32(2 * piece), b.lshr(self.quad, i32(1)))
                place = b.add(self._swizzled(line, half, self.own_row), b.shl(b.and_(self.quad, i32(1)), i32(3)))
                assembly(b, "st.shared.v2.f32 [$0], {$1, $2};", NOTHING, [INT, FLOAT, FLOAT], [place, *values])

    def _swizzled(self, line: ir.Value, piece: ir.Value, row: ir.Value) -> ir.Value:
        return self.b.add(line, self.b.shl(self.b.xor(piece, self.b.and_(row, i32(7))), i32(4)))

    def _copy(self, part: int, begin: int) -> None:
        """Write 16 bytes of a row, of 4 rows together, from the group of columns at ``begin``."""
        b, size = self.b, self.tiles.result_size
        own = b.add(self.read_row, i32(4 * part))
        source = self._swizzled(b.add(self.staging, b.shl(own, i32(7))), self.piece, own)
        row = b.add(self.row, own)
        col = b.add(b.add(self.col, i32(begin)), b.mul(self.piece, i32(16 // size)))
        inside = b.and_(b.icmp_signed("<", row, self.rows), b.icmp_signed("<", col, self.cols))
        result = b.ptrtoint(b.extract_value(self.pointers, self.pointers.type.count - 1), I64)
        flat = b.add(b.mul(b.sext(row, I64), b.sext(self.cols, I64)), b.sext(col, I64))
        place = b.add(result, b.mul(flat, ir.Constant(I64, size)))
        assembly(b, _STORE_IF, NOTHING, [INT, LONG, INT], [source, place, b.zext(inside, I32)])
