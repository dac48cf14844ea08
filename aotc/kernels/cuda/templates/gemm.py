"""A product of matrices as a kernel: the template of its tiles, what it calls, and how it is launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aotc.ir.dims import Dim, ceildiv
from aotc.ir.loop_ir import Index, Kernel, Scalar
from aotc.kernels.cuda.compile import image_of
from aotc.kernels.cuda.device_function import DeviceFunction, functions_text
from aotc.kernels.cuda.front_end import ENTRY
from aotc.kernels.cuda.image import Image
from aotc.kernels.cuda.templates import gemm_mma, gemm_wgmma
from aotc.kernels.cuda.templates.steps import EPILOGUE, SIZES
from aotc.kernels.cuda.templates.tiles import CHUNK, WarpgroupTiles, WarpTiles
from aotc.kernels.interface import size_entry
from aotc.targets import Target


@dataclass(frozen=True, slots=True)
class Product:
    """A product of matrices with what is computed of each of its elements.

    Attributes
    ----------
    kernel : Kernel
        Its buffers, A and B first and one output, and dims.
    rows, cols, depth : Dim
        Its sizes.
    epilogue : Scalar
        What is stored, in f32: of the variables ``row``, ``col`` and ``sum``, and of the kernel's buffers.
    """

    kernel: Kernel
    rows: Dim
    cols: Dim
    depth: Dim
    epilogue: Scalar

    def functions(self) -> list[DeviceFunction]:
        """Return what the template calls."""
        given = (("row", "i64"), ("col", "i64"), ("sum", "f32"))
        sizes = {name: Index(getattr(self, name), "i64") for name in SIZES}
        called = [DeviceFunction(SIZES[name], (), size) for name, size in sizes.items()]
        return [DeviceFunction(EPILOGUE, given, self.epilogue), *called]


def compile_gemm(product: Product, tiles: WarpgroupTiles | WarpTiles, target: Target) -> Image:
    """Return the machine code of a product, by the template that ``tiles`` are of."""
    kernel = product.kernel
    template: Any = gemm_wgmma if isinstance(tiles, WarpgroupTiles) else gemm_mma
    texts = template.gemm_texts(tiles, len(kernel.inputs) + len(kernel.outputs), len(kernel.dims))
    named = [text.replace(ENTRY, kernel.name) for text in texts]
    own = functions_text(product.functions(), kernel, target)
    return image_of([*named, own], kernel.name, target)


def launch_entry(product: Product, tiles: WarpgroupTiles | WarpTiles) -> dict[str, Any]:
    """Return what the manifest says of a product's launch: see :mod:`aotc.vmfb.devices.launch`."""
    numbers = {name: n for n, name in enumerate(product.kernel.dims)}
    m, n, k = product.rows, product.cols, product.depth
    blocks = ceildiv(m, tiles.rows) * ceildiv(n, tiles.cols)
    shape = {"blocks": [size_entry(blocks, numbers), 1, 1], "cluster": [1, 1, 1], "shared": tiles.shared}
    if isinstance(tiles, WarpTiles):
        return {**shape, "resident": 0, "maps": []}
    rows = ((0, m, tiles.a_by_rows, tiles.rows), (1, n, tiles.b_by_rows, tiles.cols))
    maps = [_map(tiles, buffer, k, outer, by_rows, count, numbers) for buffer, outer, by_rows, count in rows]
    return {**shape, "resident": 1, "maps": maps}


def _map(
    tiles: WarpgroupTiles, buffer: int, depth: Dim, outer: Dim, by_rows: bool, count: int, numbers: Mapping[str, int]
) -> dict[str, Any]:
    """Return the tensor map of an operand: its boxes are 128 bytes wide, and as high as they may be."""
    inner, other = (outer, depth) if by_rows else (depth, outer)
    box = [64, tiles.depth] if by_rows else [tiles.depth, count]
    return {
        "buffer": buffer,
        "type": tiles.operands,
        "sizes": [size_entry(inner, numbers), size_entry(other, numbers)],
        "strides": [size_entry(inner * tiles.size, numbers)],
        "box": box,
        "swizzle": CHUNK,
    }
