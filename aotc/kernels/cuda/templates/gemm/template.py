"""Assemble a matmul kernel: the template for its tiles, and the device functions that the template calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from aotc.ir.dims.algebra import Dim, sym
from aotc.ir.loop.access import definitions_of
from aotc.ir.loop.forms.matmul import LoopProduct, read_product, row_major_offset
from aotc.ir.loop.forms.tiling import ELEMENT_BYTES
from aotc.ir.loop.ir import Alloc, Apply, Const, Index, Kernel, Scalar, Stmt, Store, Var
from aotc.kernels.cuda.device_function import DeviceFunction, LoadFunction
from aotc.kernels.cuda.front_end import ENTRY
from aotc.kernels.cuda.templates.gemm.epilogue_layout import (
    HELD,
    LANE,
    PIECE,
    SUMS,
    EpilogueSubstitution,
    piece_statements,
)
from aotc.kernels.cuda.templates.gemm.launch import gemm_tiles
from aotc.kernels.cuda.templates.gemm.mma import mma_gemm_texts
from aotc.kernels.cuda.templates.gemm.tiles import OperandSource, WarpgroupTiles, WarpTiles
from aotc.kernels.cuda.templates.gemm.wgmma import wgmma_gemm_texts
from aotc.kernels.cuda.templates.steps import (
    COORDINATE,
    ELEMENT,
    ELEMENTS,
    FAR,
    GATHERED,
    LOAD_AHEAD,
    PITCH,
    SIZES,
    START,
    STORE,
)
from aotc.kernels.cuda.templates.threads import PIECE_BYTES
from aotc.targets import Target

# Terms of an f64 instruction from Hopper on; Ampere has 4. PTX ISA, mma.m16n8k8 with .f64.
WIDE_F64_TERMS = 8


def gemm_template_texts(kernel: Kernel, target: Target) -> tuple[list[str], list[DeviceFunction | LoadFunction]]:
    """Return the LLVM IR of a matmul kernel by the template of its tiling, and the device functions that it calls."""
    tiles = gemm_tiles(kernel)
    if isinstance(tiles, WarpTiles) and tiles.operands == "f64" and target.has_wide_f64:
        tiles = replace(tiles, terms=WIDE_F64_TERMS)
    pointers, dims = len(kernel.inputs) + len(kernel.outputs), len(kernel.dims)
    if isinstance(tiles, WarpgroupTiles):
        texts = wgmma_gemm_texts(tiles, pointers, dims)
    else:
        texts = mma_gemm_texts(tiles, pointers, dims)
    return [text.replace(ENTRY, kernel.name) for text in texts], gemm_device_functions(kernel, tiles)


def gemm_device_functions(kernel: Kernel, tiles: WarpgroupTiles | WarpTiles) -> list[DeviceFunction | LoadFunction]:
    """Return the device functions that the template of ``tiles`` calls for ``kernel``."""
    product = read_product(kernel)
    depth = product.k[1]
    if isinstance(tiles, WarpgroupTiles) and tiles.window is not None:
        depth = tiles.window.slices(tiles.depth) * tiles.depth
    extents = {"batch": product.batch[1], "rows": product.row[1], "cols": product.col[1], "depth": depth}
    found: list[DeviceFunction | LoadFunction] = []
    found += [DeviceFunction(SIZES[name], (), _as_i64_index(extent)) for name, extent in extents.items()]
    for number, source in enumerate((tiles.a, tiles.b)):
        found += _gemm_operand_functions(product, tiles, source, number)
    return [*found, *_gemm_epilogue_functions(product)]


def _gemm_operand_functions(
    product: LoopProduct, tiles: WarpgroupTiles | WarpTiles, source: OperandSource, number: int
) -> Iterator[DeviceFunction | LoadFunction]:
    """Yield the device functions that load an operand, or compute the offsets of its elements."""
    z = ((product.batch[0] or "z", "i64"),)
    if source.computed:
        value, (outer, _) = (product.right, product.col) if number else (product.left, product.row)
        dtype = tiles.sum
        value = value if value.dtype == dtype else Apply("convert", (value,), dtype)
        if source.in_pieces:
            yield _piece_load_function(product, value, (*z, (outer, "i64")), number)
        own = (*z, (outer, "i64"), (product.k[0], "i64"))
        yield DeviceFunction(ELEMENT[number], own, value, definitions_of(value, product.lets))
        return
    if source.gathered:
        found, (outer, _) = product.gathered(right=bool(number)), product.col if number else product.row
        assert found is not None
        place = _as_i64_index(found.place)
        if found.inside is not None:
            place = Apply("select", (found.inside, place, Const(-1, "i64")), "i64")
        yield DeviceFunction(GATHERED[number], (*z, (outer, "i64"), (product.k[0], "i64")), place)
        return
    if isinstance(tiles, WarpgroupTiles) and tiles.window is not None:
        return
    view = product.view(right=bool(number))
    assert view is not None
    if isinstance(tiles, WarpTiles):
        yield DeviceFunction(START[number], z, _as_i64_index(view.start))
        yield DeviceFunction(PITCH[number], (), _as_i64_index(view.pitch))
        return
    moving = view.coordinates(*product.batch)
    assert moving is not None
    for n, (value_, _, _) in enumerate(moving[1]):
        yield DeviceFunction(f"{COORDINATE[number]}{n}", z, _as_i64_index(value_))


def _piece_load_function(
    product: LoopProduct, value: Scalar, axes: tuple[tuple[str, str], ...], number: int
) -> LoadFunction:
    """Return the device function that loads all elements of a 16-byte piece; packing rounds them."""
    match value:
        case Apply(fn="convert", args=(Apply(fn="convert", args=(inner,)) as rounded,)):
            value = inner if rounded.dtype == product.operands and inner.dtype == value.dtype else value
    count, (name, extent) = PIECE_BYTES // ELEMENT_BYTES[product.operands], product.k
    place = sym(PIECE, 0, extent // count) * count + sym(LANE, 0, count)
    each = EpilogueSubstitution({name: place}).substitute_in_scalar(value)
    return LoadFunction(ELEMENTS[number], (*axes, (PIECE, "i64")), ((each, count),), LANE)


def _gemm_epilogue_functions(product: LoopProduct) -> Iterator[DeviceFunction | LoadFunction]:
    """Yield the device functions of the epilogue, for single accumulators or for pieces."""
    found, total = piece_statements(product), product.total
    pieces, loops = found.pieces, (product.batch, product.row, product.col)
    axes = tuple((name or "z", "i64") for name, _ in loops)
    for number, load in enumerate(found.far):
        yield DeviceFunction(f"{FAR}{number}", axes, _as_i64_index(row_major_offset(load)))
    if pieces.width == 1:
        begin: tuple[Stmt, ...] = (Alloc(total), Store(total, (), Var("aotc_sum", total.dtype)))
        yield DeviceFunction(STORE, (*axes, ("aotc_sum", total.dtype)), Const(0, "i32"), (*begin, *found.body))
        return
    axis = 1 if pieces.down else 2
    own = tuple((PIECE, "i64") if n == axis else given for n, given in enumerate(axes))
    held = tuple((f"{HELD}{n}", dtype, count) for n, (dtype, count) in enumerate(pieces.held))
    vectors = ((SUMS, total.dtype, pieces.width), *held)
    yield DeviceFunction(STORE, own, Const(0, "i32"), found.body, vectors)
    if held:
        loads = tuple((load, count) for load, (_, count) in zip(found.loads, pieces.held, strict=True))
        yield LoadFunction(LOAD_AHEAD, own, loads, LANE)


def _as_i64_index(e: Dim) -> Scalar:
    return Index(e, "i64")
