"""Tile shapes and launch parameters of a matmul on tensor cores, for the manifest; this module needs no Numba."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from math import prod
from typing import Any

from aotc.ir.dims.algebra import Dim, ceildiv, maximum
from aotc.ir.loop.forms.conv import WindowOperands, window_operands
from aotc.ir.loop.forms.matmul import LoopProduct, View, is_multiple_dim, read_product
from aotc.ir.loop.forms.tiling import ELEMENT_BYTES, FP8_PAIRS, Tiling, Window
from aotc.ir.loop.ir import Kernel
from aotc.kernels.cuda.templates.gemm.epilogue_layout import result_pieces
from aotc.kernels.cuda.templates.gemm.tiles import CHUNK, WARP_ROWS, OperandSource, WarpgroupTiles, WarpTiles
from aotc.kernels.cuda.templates.threads import PIECE_BYTES, WARPGROUP_TILE
from aotc.kernels.interface import manifest_size_entry

_COPIED_AS = dict.fromkeys(("i8", *FP8_PAIRS), "u8")  # element types of a tensor map


def gemm_tiles(kernel: Kernel) -> WarpgroupTiles | WarpTiles:
    """Return the template's parameters for a kernel with a tiling: tile shape and layouts of operands."""
    tiling, product = _gemm_tiling_of(kernel), read_product(kernel)
    buffers = [b.name for b in (*kernel.inputs, *kernel.outputs)]
    views = (product.view(), product.view(right=True))
    given: dict[str, Any] = {
        "operands": product.operands,
        "stages": tiling.stages,
        "cols": tiling.cols,
        "a": _gemm_operand_source(views[0], tiling, product, buffers, 0),
        "b": _gemm_operand_source(views[1], tiling, product, buffers, 1),
        "batched": product.batch[1] != 1,
        "pieces": result_pieces(product, buffers),
    }
    if tiling.window is not None:
        read = _convolution_operand_sources(product, tiling.window)
        given |= {"a_by_rows": False, "b_by_rows": not read.transposed, "window": tiling.window}
        return WarpgroupTiles(**given, **_consumer_warpgroups(tiling))
    for name, view in zip(("a", "b"), views):
        source = given[name]
        by_rows = view is not None and view.by_rows and not source.transposed
        given[f"{name}_by_rows"] = by_rows and not source.gathered
    if tiling.is_wgmma:
        return WarpgroupTiles(**given, **_consumer_warpgroups(tiling))
    if product.operands == "f64" and tiling.rows == tiling.cols == 2 * WARP_ROWS:  # two warps would spill registers
        given["warp_cols"] = WARP_ROWS
    if tiling.rows < WARP_ROWS:
        return WarpTiles(**given, warps_down=1, warp_rows=tiling.rows, warp_cols=WARP_ROWS)
    return WarpTiles(**given, warps_down=tiling.rows // WARP_ROWS)


def _consumer_warpgroups(tiling: Tiling) -> dict[str, Any]:
    """Return the template's parameters for the distribution of a tile's rows to consumer warpgroups."""
    if tiling.is_ping_pong:
        return {"consumers": 2, "parts": tiling.rows // WARPGROUP_TILE, "in_turn": True}
    if tiling.is_transposed:
        return {"consumers": tiling.cols // WARPGROUP_TILE, "transposed": True, "high": tiling.rows}
    return {"consumers": tiling.rows // WARPGROUP_TILE}


def _gemm_tiling_of(kernel: Kernel) -> Tiling:
    if kernel.tiling is None:
        raise ValueError(f"kernel {kernel.name} has no tiling")
    return kernel.tiling


def _convolution_operand_sources(product: LoopProduct, window: Window) -> WindowOperands:
    found = window_operands(product, window)
    if found is None:
        raise ValueError("the loops do not match the convolution of the tiling")
    return found


def _gemm_operand_source(
    view: View | None, tiling: Tiling, product: LoopProduct, buffers: list[str], number: int
) -> OperandSource:
    if tiling.window is not None:
        read = _convolution_operand_sources(product, tiling.window)
        return OperandSource(buffers.index((read.x, read.w)[number].name))
    if tiling.is_wgmma:
        if view is None or (found := view.coordinates(*product.batch)) is None:
            raise ValueError("an operand is not copied in tiles")
        return OperandSource(buffers.index(view.buffer.name), len(found[1]))
    outer = (product.row, product.col)[number][1]
    takes_rows = ELEMENT_BYTES[product.operands] > 1
    if view is not None and view.in_pieces(outer, product.k[1]) and (takes_rows or not view.by_rows):
        return OperandSource(buffers.index(view.buffer.name))
    if (gathered := product.gathered(right=bool(number))) is not None:
        return OperandSource(buffers.index(gathered.buffer.name), gathered=True)
    in_pieces = is_multiple_dim(product.k[1], PIECE_BYTES // ELEMENT_BYTES[product.operands])
    in_pieces = in_pieces and product.is_widened(right=bool(number))
    return OperandSource(number, computed=True, in_pieces=in_pieces, transposed=view is not None and view.by_rows)


def gemm_launch(kernel: Kernel) -> dict[str, Any]:
    """Return the launch entry of the manifest for a matmul, see :mod:`aotc.vmfb.devices.cuda.launch`."""
    tiles, product = gemm_tiles(kernel), read_product(kernel)
    numbers = {name: n for n, name in enumerate(kernel.dims)}
    blocks = product.batch[1] * ceildiv(product.row[1], tiles.rows) * ceildiv(product.col[1], tiles.cols)
    shape = {"blocks": [manifest_size_entry(blocks, numbers), 1, 1], "cluster": [1, 1, 1], "shared": tiles.shared}
    if isinstance(tiles, WarpTiles):
        return {**shape, "resident": 0, "maps": []}
    if tiles.window is not None:
        maps = _convolution_tensor_maps(tiles, product, tiles.window, numbers)
    else:
        maps = [_operand_tensor_map(tiles, product, number, numbers) for number in range(2)]
    return {**shape, "resident": tiles.resident, "maps": maps}


def _operand_tensor_map(
    tiles: WarpgroupTiles, product: LoopProduct, number: int, numbers: Mapping[str, int]
) -> dict[str, Any]:
    """Return the tensor map of an operand for the manifest; its boxes are 128 bytes wide, and as high as a stage."""
    view, source = product.view(right=bool(number)), (tiles.a, tiles.b)[number]
    assert view is not None
    outer, depth, lines = (product.row, product.col)[number][1], product.k[1], (tiles.rows, tiles.cols)[number]
    inner, other = (outer, depth) if view.by_rows else (depth, outer)
    box = [CHUNK // tiles.size, tiles.depth] if view.by_rows else [tiles.depth, lines]
    return tensor_map_of_lines(view, source.pointer, tiles.operands, product.batch, (inner, other), box, numbers)


def tensor_map_of_lines(
    view: View, pointer: int, operands: str, batch: tuple[str, Dim], sizes: tuple[Dim, Dim], box: list[int],
    numbers: Mapping[str, int],
) -> dict[str, Any]:  # fmt: skip
    """Return the tensor map of a strided operand, with a further dim for each index of ``view`` that the batch decides.

    The map is created even for an array without elements, of which nothing is copied; so extents of 0 become 1.
    """
    found, size = view.coordinates(*batch), ELEMENT_BYTES[operands]
    assert found is not None
    offset, others = found
    strides = [view.pitch, *(stride for _, stride, _ in others)]
    return {
        "buffer": pointer,
        "offset": manifest_size_entry(offset * size, numbers),
        "type": _COPIED_AS.get(operands, operands),
        "sizes": [manifest_size_entry(maximum(n, 1), numbers) for n in (*sizes, *(count for _, _, count in others))],
        "strides": [manifest_size_entry(stride * size, numbers) for stride in strides],
        "box": [*box, *[1] * len(others)],
        "swizzle": CHUNK,
    }


def _convolution_tensor_maps(
    tiles: WarpgroupTiles, product: LoopProduct, window: Window, numbers: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the tensor maps of a convolution: im2col of its input, and its kernel as a matrix for each tap."""
    read, size = _convolution_operand_sources(product, window), tiles.size
    taps, channels = window.copied
    step, columns = window.strides[-1] if window.merged else 1, product.col[1]
    images, *outer, width, pitch = read.x.shape
    # merged taps are channels of the pixel where they start: only pixels of the result have all of them in their line
    extents = [channels, window.pixels[-1] if window.merged else width, *outer[::-1], images]
    steps = [pitch * step, *accumulate([width * pitch, *outer[::-1]], lambda a, b: a * b)]
    strides = (*window.strides[:-1], 1) if window.merged else window.strides
    if tiles.b_by_rows:
        kernel, lines = [columns, channels, prod(taps)], [columns, columns * channels]
    else:
        kernel, line = [channels, columns, taps[-1], prod(taps[:-1])], channels * taps[-1]
        lines = [line, channels, line * columns]
    box = [CHUNK // tiles.size, tiles.depth, 1] if tiles.b_by_rows else [tiles.depth, tiles.cols, 1, 1]
    left = {
        "sizes": [manifest_size_entry(maximum(extent, 1), numbers) for extent in extents],
        "strides": [manifest_size_entry(n * size, numbers) for n in steps],
        "box": [tiles.depth, tiles.rows],
        "window": {"low": window.low[::-1], "pixels": window.pixels[::-1], "strides": strides[::-1]},
    }
    left["window"] = {name: list(given) for name, given in left["window"].items()}
    right = {
        "sizes": [manifest_size_entry(n, numbers) for n in kernel],
        "strides": [manifest_size_entry(n * size, numbers) for n in lines],
        "box": box,
    }
    kind = {"offset": 0, "type": _COPIED_AS.get(tiles.operands, tiles.operands), "swizzle": CHUNK}
    return [{"buffer": tiles.a.pointer, **left, **kind}, {"buffer": tiles.b.pointer, **right, **kind}]
