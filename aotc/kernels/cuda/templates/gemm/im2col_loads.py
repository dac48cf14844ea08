"""Copies of a convolution's operands on Hopper: im2col patches of its input, and its kernel, by tensor maps.

No array in memory contains the patches. A stage has up to 128 bytes of channels of one tap: of the input pixels that
belong to the tile's output pixels, and of the kernel's columns. Pixels outside of the input, and channels beyond the
last one, are 0. This is an implicit GEMM, as in S. Chetlur et al., "cuDNN: efficient primitives for deep learning"
(2014). PTX ISA, tensor im2col modes.

A stage has up to 128 bytes of channels of one tap: of the input pixels that belong to the tile's output pixels, and of
the kernel's columns. Pixels outside of the input, and channels beyond the last one, are 0. This is an implicit GEMM, as
in S. Chetlur et al., "cuDNN: efficient primitives for deep learning" (2014). PTX ISA, tensor im2col modes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir

from aotc.ir.loop.forms.tiling import Window
from aotc.kernels.cuda.hopper import tma_copy_box, tma_copy_im2col
from aotc.kernels.cuda.ptx import I16 as SHORT
from aotc.kernels.cuda.ptx import I32 as INT
from aotc.kernels.cuda.ptx import I64 as LONG
from aotc.kernels.cuda.ptx import NOTHING, emit_inline_assembly, llvm_instruction
from aotc.kernels.cuda.templates.gemm.tiles import CHUNK, WarpgroupTiles
from aotc.kernels.cuda.templates.records import named_tuple_members
from aotc.kernels.formulas.llvm_values import ScalarValue
from aotc.kernels.llvm_types import I16, I64


def im2col_boxes(tiles: WarpgroupTiles) -> Iterator[tuple[int, int, bool, int]]:
    """Yield the boxes that are copied for a stage.

    Each is a tuple of the tensor map's index, the destination, True if the operand is contiguous along rows, and the
    first element.
    """
    wide = CHUNK // tiles.size
    for number, by_rows, count, begin in (
        (0, tiles.a_by_rows, tiles.rows, 0),
        (1, tiles.b_by_rows, tiles.cols, tiles.rows * CHUNK),
    ):
        for part in range(0, count if by_rows else 1, wide):
            yield number, begin + part // wide * tiles.depth * CHUNK, by_rows, part


def _quotient_and_remainder(value: Any, by: int) -> tuple[Any, Any]:
    """Return the quotient and the remainder of a non-negative number, a Python int or an emitted value."""
    if isinstance(value, int):
        return divmod(value, by)
    quotient = ScalarValue(value.builder, value.builder.udiv(value.raw, ir.Constant(value.raw.type, by)))
    return quotient, value - quotient * by


def _indices_of_flat_index(flat: Any, extents: tuple[int, ...]) -> list[Any]:
    """Return the multi-dimensional index of a flat index, last dim first; the first dim is unbounded."""
    found = []
    for extent in extents[:0:-1]:
        flat, digit = _quotient_and_remainder(flat, extent)
        found.append(digit)
    return [*found, flat]


def _im2col_coordinates(
    tiles: WarpgroupTiles, window: Window, z: Any, row: Any, depth: Any
) -> tuple[list[Any], list[Any], Any]:
    """Return the coordinates of a stage in the im2col tensor map: position, offset of the tap, and index of the tap.

    A position has the channel, the pixel and the image. Numbers are Python ints or emitted values.
    """
    iteration, _ = _quotient_and_remainder(depth, tiles.depth)
    if window.parts > 1:
        iteration = z * window.slices(tiles.depth) + iteration
    taps, channels = window.copied
    chunks = -(-channels // tiles.depth)
    tap, chunk = _quotient_and_remainder(iteration, chunks)
    *pixel, image = _indices_of_flat_index(row, (1, *window.pixels))
    strides = (*window.strides[:-1], 1) if window.merged else window.strides
    steps = zip(pixel, strides[::-1], window.low[::-1], strict=True)
    at = [chunk * tiles.depth, *(i * stride - low for i, stride, low in steps), image]
    offsets = [t * gap for t, gap in zip(_indices_of_flat_index(tap, taps), window.gaps[::-1], strict=True)]
    return at, offsets, tap


def _convolution_kernel_coordinates(by_rows: bool, channel: Any, column: Any, tap: Any, last_taps: int) -> list[Any]:
    """Return the coordinates of a tap in the convolution's kernel: a matrix per tap, or columns of the last taps."""
    if by_rows:
        return [column, channel, tap]
    outer, last = _quotient_and_remainder(tap, last_taps)
    return [channel, column, last, outer]


def load_convolution_stage(tiles: WarpgroupTiles, window: Window) -> Any:
    """Return the device function that starts the copy of a stage of a convolution."""
    rank, last_taps = len(window.taps), window.copied[0][-1]
    kernel = [row for row in im2col_boxes(tiles) if row[0] == 1]

    def codegen(context, builder, signature, arguments):
        maps_, _, _, to, barrier, tile, depth = arguments
        b, (z, row, column) = builder, named_tuple_members(builder, tile)
        maps = [b.ptrtoint(b.extract_value(maps_, n), I64) for n in range(2)]
        at, offsets, tap = _im2col_coordinates(tiles, window, *(ScalarValue(b, v) for v in (z, row, depth)))
        taps = [b.trunc(v.raw, I16) for v in offsets]
        operands = [to, maps[0], barrier, *(v.raw for v in at), *taps]
        types_ = [INT, LONG, INT, *[INT] * (rank + 2), *[SHORT] * rank]
        emit_inline_assembly(b, tma_copy_im2col(rank).text, NOTHING, types_, operands)
        for _, offset, by_rows, part in kernel:
            first, place = (ScalarValue(b, column) + part).raw, (ScalarValue(b, to) + offset).raw
            where = [
                v.raw for v in _convolution_kernel_coordinates(by_rows, at[0], ScalarValue(b, first), tap, last_taps)
            ]
            kind = [INT, LONG, INT, *[INT] * len(where)]
            emit_inline_assembly(b, tma_copy_box(len(where)).text, NOTHING, kind, [place, maps[1], barrier, *where])
        return context.get_dummy_value()

    @llvm_instruction(lambda maps, p, d, to, barrier, tile, depth: NOTHING(maps, p, d, INT, INT, tile, INT), codegen)
    def start_convolution_copy(maps, pointers, dims, to, barrier, tile, depth):
        z, row, column = tile
        at, offsets, tap = _im2col_coordinates(tiles, window, int(z), int(row), int(depth))
        tma_copy_im2col(rank)(to, maps[0], barrier, *at, *offsets)
        for _, offset, by_rows, part in kernel:
            first = int(column) + part
            where = _convolution_kernel_coordinates(by_rows, at[0], first, tap, last_taps)
            tma_copy_box(len(where))(to + offset, maps[1], barrier, *where)

    return start_convolution_copy
