"""Describe matmuls and convolutions for the register tiles of a CPU: sizes, strides and addresses of operands.

A *panel* is a group of ``cols`` neighbouring columns of the right operand, as wide as a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, minimum, product, static
from aotc.ir.loop.forms.tile_forms import TileForm, form_of_operands
from aotc.ir.opset import TILED_BY_COLUMNS
from aotc.ir.opset.contract import panel_cols
from aotc.ir.opset.dim_attributes import dims_of
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.analysis.index_maps import Index

Levels = tuple[tuple[Dim, Dim, Dim], ...]


@dataclass(frozen=True, slots=True)
class TiledProduct:
    """A matmul or convolution as a matmul of rows and panels, with the addresses of its operands.

    ``outer`` are the extents of the grid dims before rows and columns (batch, or image and output row). ``a_at(outer,
    row)`` and ``b_at(outer, panel)`` return flat offsets; ``place(outer, row, column)`` returns the index in the op's
    result. If ``pixels``, the columns are the pixels of a row: a last tile that would exceed it begins earlier, and its
    first columns are dropped.
    """

    form: TileForm
    a: Value
    b: Value
    outer: tuple[Dim, ...]
    m: Dim
    n: Dim
    cols: int
    k: Dim
    a_row: Dim
    a_inner: Dim
    levels: Levels
    a_at: Callable[[Index, Dim], Dim]
    b_at: Callable[[Index, Dim], Dim]
    place: Callable[[Index, Dim, Dim], Index]
    pixels: bool = False

    @property
    def panels(self) -> Dim:
        """Return the number of panels of ``cols`` columns; the last one may exceed the result."""
        return (self.n + (self.cols - 1)) // self.cols

    @property
    def is_whole(self) -> bool:
        """Return True if no panel exceeds the result."""
        return isinstance(self.n, int) and self.n % self.cols == 0


def _tiled_packed_matmul(op: Op) -> TiledProduct:
    """Describe a matmul with a packed, possibly quantized right operand."""
    lhs, panels = op.operands
    group, bits = op.attrs["group"], op.attrs.get("bits", 0)
    *batch, m, n = op.result.type.shape
    steps, wide = panels.type.shape[-2:]
    k = steps * group
    transposed = op.attrs["lhs_transposed"]
    a_row, a_step = (1, m) if transposed else (k, 1)
    count, cols = panels.type.shape[-3], panel_cols(panels.type, op.attrs)
    levels: Levels = ((steps, a_step * group, wide),)
    form = form_of_operands(lhs.type.dtype, panels.type.dtype, bits)
    if bits:
        terms = form.group
        levels = (*levels, (group // terms, a_step * terms, cols * bits * terms // 8))
    return TiledProduct(
        form, lhs, panels, tuple(batch), m, n, cols, k, a_row, a_step, levels,
        lambda outer, row: (outer[0] * m * k if outer else 0) + row * a_row,
        lambda outer, panel: ((outer[0] * count if outer else 0) + panel) * steps * wide,
        lambda outer, row, column: (*outer, row, column),
    )  # fmt: skip


def _tiled_matmul_in_place(op: Op) -> TiledProduct:
    """Describe a matmul that reads its right operand in its own layout: rows of ``n`` contiguous elements.

    In a form with groups the last group may exceed the terms.
    """
    lhs, rhs = op.operands
    *batch, m, n = op.result.type.shape
    k, cols = rhs.type.shape[-2], op.attrs["cols"]
    a_row, a_step = (1, m) if op.attrs["lhs_transposed"] else (k, 1)
    form = form_of_operands(lhs.type.dtype, rhs.type.dtype)
    group = form.group
    return TiledProduct(
        form, lhs, rhs, tuple(batch), m, n, cols, k, a_row, a_step,
        (((k + (group - 1)) // group, a_step * group, n * group),),
        lambda outer, row: (outer[0] * m * k if outer else 0) + row * a_row,
        lambda outer, panel: (outer[0] * k * n if outer else 0) + panel * cols,
        lambda outer, row, column: (*outer, row, column),
    )  # fmt: skip


def _tiled_packed_conv(op: Op) -> TiledProduct:
    """Describe a packed convolution: the rows of a tile are neighbouring pixels of one output row.

    Patches are not copied. Groups are the first dim of the grid, so that the panels of one group stay in a cache while
    its channels of all pixels are read.
    """
    lhs, panels = op.operands
    shape, strides = lhs.type.shape, op.attrs["strides"]
    kernel, dilation = dims_of(op.attrs, "kernel"), op.attrs["rhs_dilation"]
    channels, group, groups = shape[-1], op.attrs.get("group", 1), op.attrs.get("feature_groups", 1)
    c, count = channels // groups, panels.type.shape[0] // groups
    cols = static(panels.type.shape[-1]) // group
    steps: list[Dim] = [channels]
    for extent in reversed(shape[2:-1]):
        steps.insert(0, steps[0] * extent)
    levels: list[tuple[Dim, Dim, Dim]] = [(c, 1, cols)]  # in single terms
    size: Dim = c
    for extent, step, gap in reversed(list(zip(kernel, steps, dilation, strict=True))):
        if len(levels) == 1 and step * gap == c and size == levels[0][0] and extent * c:
            levels[0] = (extent * c, 1, cols)
        elif extent != 1:
            levels.insert(0, (extent, step * gap, size * cols))
        size = size * extent
    terms, a_step, b_step = levels[-1]
    levels[-1] = (terms // group, a_step * group, b_step * group)
    n_images, *spatial, outputs = op.result.type.shape
    n = outputs // groups
    image = product(shape[1:])
    k = product(kernel) * c
    form = form_of_operands(lhs.type.dtype, panels.type.dtype)
    return TiledProduct(
        form, lhs, panels, (groups, n_images, *spatial[:-1]), spatial[-1], n, cols, k, strides[-1] * channels, 1,
        tuple(levels),
        lambda at, row: at[0] * c + at[1] * image
        + sum((i * s * step for i, s, step in zip(at[2:], strides[:-1], steps[:-1], strict=True)), 0)
        + row * strides[-1] * channels,
        lambda at, panel: (at[0] * count + panel) * k * cols,
        lambda at, row, column: (*at[1:], row, at[0] * n + column),
    )  # fmt: skip


def _tiled_pixel_conv(op: Op) -> TiledProduct:
    """Describe a convolution of one input channel with pixels as columns.

    The columns of a tile are neighbouring pixels of one output row, its rows are output channels.
    """
    lhs, rhs = op.operands
    shape, strides, cols = lhs.type.shape, op.attrs["strides"], op.attrs["cols"]
    *kernel, _, n = rhs.type.shape
    steps = [product(shape[d + 1 : -1]) for d in range(1, len(shape) - 1)]
    levels: list[tuple[Dim, Dim, Dim]] = []
    size: Dim = n
    for extent, step, gap in reversed(list(zip(kernel, steps, op.attrs["rhs_dilation"], strict=True))):
        if extent != 1:
            levels.insert(0, (extent, size, step * gap))
        size = size * extent
    images, *spatial, _ = op.result.type.shape
    image, pixels = product(shape[1:]), spatial[-1]
    return TiledProduct(
        form_of_operands(rhs.type.dtype, lhs.type.dtype), rhs, lhs, (images, *spatial[:-1]),
        n, pixels, cols, product(kernel), 1, 1, tuple(levels) or ((1, n, 1),),
        lambda at, row: row,
        lambda at, panel: at[0] * image
        + sum((i * s * step for i, s, step in zip(at[1:], strides[:-1], steps[:-1], strict=True)), 0)
        + minimum(panel * cols, pixels - cols),
        lambda at, row, column: (*at, column, row), pixels=True,
    )  # fmt: skip


_DESCRIBE: dict[str, Callable[[Op], TiledProduct]] = {
    "packed_matmul": _tiled_packed_matmul,
    "packed_conv": _tiled_packed_conv,
    "conv": _tiled_pixel_conv,
    "matmul": _tiled_matmul_in_place,
}


def tiled_product(op: Op) -> TiledProduct | None:
    """Return the description of an op that ``pack_contractions`` prepared for tiles, else None."""
    describe = _DESCRIBE.get(op.name)
    if describe is None or (op.name in TILED_BY_COLUMNS and "cols" not in op.attrs):
        return None
    return describe(op)
