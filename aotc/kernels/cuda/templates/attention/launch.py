"""Tile shapes and launch parameters of attention on tensor cores, for the manifest; this module needs no Numba."""

from __future__ import annotations

from typing import Any

from aotc.ir.dims.algebra import ceildiv, mod
from aotc.ir.loop.forms.attention import LoopAttention, read_attention
from aotc.ir.loop.forms.matmul import View
from aotc.ir.loop.forms.tiling import DecodeAttention, WgmmaAttention
from aotc.ir.loop.ir import Kernel, Store
from aotc.kernels.cuda.templates.attention.tiles import AttentionTiles, FewAttention, WarpAttention, WarpgroupAttention
from aotc.kernels.cuda.templates.gemm.launch import tensor_map_of_lines
from aotc.kernels.cuda.templates.gemm.tiles import CHUNK, OperandSource
from aotc.kernels.cuda.templates.threads import WARP_TILE
from aotc.kernels.interface import manifest_size_entry


def attention_tiles(kernel: Kernel) -> AttentionTiles:
    """Return the template's parameters for a kernel with a tiling: tile shape and layouts of operands."""
    tiling, found = kernel.tiling, read_attention(kernel)
    if tiling is None or not isinstance(found.depth[1], int) or not isinstance(found.col[1], int):
        raise ValueError(f"kernel {kernel.name} has no tiling for attention")
    buffers = [b.name for b in (*kernel.inputs, *kernel.outputs)]
    last, in_lines = found.epilogue[-1], found.place is not None
    stored = isinstance(last, Store) and in_lines
    given: dict[str, Any] = {
        "operands": found.operands,
        "result": last.buffer.dtype if stored else "f32",
        "rows": tiling.rows,
        "terms": tiling.cols,
        "stages": tiling.stages,
        "depth": found.depth[1],
        "width": found.col[1],
        "out": buffers.index(last.buffer.name) if stored else -1,
        "scale": found.scale,
        "ragged": mod(found.terms, tiling.cols) != 0,
        "causal": found.causal,
        "in_lines": in_lines,
    }
    views = found.views()
    if isinstance(tiling.template, WgmmaAttention):
        sources = [_attention_operand_source(view, found, buffers) for view in views]
        return WarpgroupAttention(**given | dict(zip("qkv", sources)))
    if isinstance(tiling.template, DecodeAttention):
        sources = [_attention_operand_source(view, found, buffers) for view in views[1:]]
        given |= dict(zip("kv", sources)) | {"rows": WARP_TILE, "warps": tiling.rows // WARP_TILE}
        given["cluster"] = tiling.cluster
        return FewAttention(**given | {"in_lines": False, "split": bool(found.rest)})
    if not all(view is not None and view.in_lines for view in views[1:]):
        raise ValueError("keys or values are not aligned to 16 bytes")
    places = [OperandSource(buffers.index(view.buffer.name)) for view in views[1:] if view is not None]
    return WarpAttention(**given | dict(zip("kv", places)), split=bool(found.rest))


def _attention_operand_source(view: View | None, found: LoopAttention, buffers: list[str]) -> OperandSource:
    """Return the source of an operand: a strided array, or a device function if ``view`` is None."""
    if view is None or not view.in_lines or (lying := view.coordinates(*found.batch)) is None:
        raise ValueError("an operand is not copied in tiles")
    return OperandSource(buffers.index(view.buffer.name), len(lying[1]))


# Keys of attention up to which blocks are persistent and compute one tile after the other: the loads of the next tile's
# keys overlap with the stores of the results. With more keys, one block for each tile balances better. Measured on an
# H200: persistent blocks take 0.97 of the time for 1024 x 1024 x 64, 1.04 for 4096 x 4096 x 128.
STAY_TERMS = 2048


def attention_launch(kernel: Kernel) -> dict[str, Any]:
    """Return the launch entry of the manifest for attention, see :mod:`aotc.vmfb.devices.cuda.launch`."""
    tiles, found = attention_tiles(kernel), read_attention(kernel)
    numbers = {name: n for n, name in enumerate(kernel.dims)}
    blocks = found.batch[1] * ceildiv(found.row[1], tiles.rows)
    shape = {"blocks": [manifest_size_entry(blocks, numbers), 1, 1], "cluster": [1, 1, 1], "shared": tiles.shared}
    if isinstance(tiles, WarpAttention):
        return {**shape, "resident": 0, "maps": []}
    if isinstance(tiles, FewAttention):
        shape |= {
            "blocks": [manifest_size_entry(blocks * tiles.cluster, numbers), 1, 1],
            "cluster": [tiles.cluster, 1, 1],
        }
    is_few = isinstance(tiles, FewAttention)
    stays = not is_few and not tiles.causal and isinstance(found.terms, int) and found.terms <= STAY_TERMS
    lines = ((found.row[1], found.depth[1], tiles.rows), *(
        (found.terms, inner, tiles.terms) for inner in (found.depth[1], found.col[1])
    ))  # fmt: skip
    wide = CHUNK // tiles.size
    views = zip(found.views(), (tiles.q, tiles.k, tiles.v), lines)
    maps = [
        tensor_map_of_lines(view, source.pointer, found.operands, found.batch, (inner, count), [wide, height], numbers)
        for view, source, (count, inner, height) in views
        if view and source
    ]
    return {**shape, "resident": int(stays), "maps": maps}
