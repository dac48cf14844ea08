"""Assemble an attention kernel: the template for its tiles, and the device functions that the template calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from aotc.ir.dims.algebra import Dim
from aotc.ir.loop.forms.attention import LoopAttention, read_attention
from aotc.ir.loop.ir import Alloc, Apply, Index, Kernel, Scalar, Store, Var
from aotc.kernels.cuda.device_function import DeviceFunction
from aotc.kernels.cuda.front_end import ENTRY
from aotc.kernels.cuda.templates.attention.decode import decode_attention_texts
from aotc.kernels.cuda.templates.attention.launch import attention_tiles
from aotc.kernels.cuda.templates.attention.mma import mma_attention_texts
from aotc.kernels.cuda.templates.attention.mma_steps import PITCH, QUERY, REST, START
from aotc.kernels.cuda.templates.attention.softmax_steps import BEGIN, COORDINATE, END, SCORE
from aotc.kernels.cuda.templates.attention.tiles import AttentionTiles, FewAttention, WarpgroupAttention
from aotc.kernels.cuda.templates.attention.wgmma import wgmma_attention_texts
from aotc.kernels.cuda.templates.steps import EPILOGUE, PLACE, SIZES, STORE

_TEMPLATES: dict[type, Callable[[Any, int, int], tuple[str, ...]]] = {
    WarpgroupAttention: wgmma_attention_texts,
    FewAttention: decode_attention_texts,
}


def attention_template_texts(kernel: Kernel) -> tuple[list[str], list[DeviceFunction]]:
    """Return the LLVM IR of an attention kernel by its tiling's template, and the device functions that it calls."""
    tiles = attention_tiles(kernel)
    template = _TEMPLATES.get(type(tiles), mma_attention_texts)
    texts = template(tiles, len(kernel.inputs) + len(kernel.outputs), len(kernel.dims))
    return [text.replace(ENTRY, kernel.name) for text in texts], list(
        _attention_device_functions(read_attention(kernel), tiles)
    )


def _attention_device_functions(found: LoopAttention, tiles: AttentionTiles) -> Iterator[DeviceFunction]:
    """Yield the device functions of an attention kernel: scores, masks, operand offsets, epilogue."""
    z = (found.batch[0], "i64")
    row = (found.row[0], "i64")
    for name, extent in (("batch", found.batch[1]), ("rows", found.row[1]), ("terms", found.terms)):
        yield DeviceFunction(SIZES[name], (), _as_i64_index(extent))
    yield DeviceFunction(END, (z, row), _as_i64_index(found.term[1]))
    given = Var("aotc_sum", "f32")
    own = (z, row, (found.term[0], "i64"), ("aotc_sum", "f32"))
    begin = (Alloc(found.total), Store(found.total, (), given))
    yield DeviceFunction(SCORE, own, found.score, (*begin, *found.lets))
    if isinstance(tiles, WarpgroupAttention | FewAttention):
        yield from _tensor_map_coordinates(found)
    if not isinstance(tiles, WarpgroupAttention):
        yield from _operand_offset_functions(found)
    yield from _attention_epilogue_functions(found, tiles)


def _tensor_map_coordinates(found: LoopAttention) -> Iterator[DeviceFunction]:
    """Yield the device functions that compute the coordinates of operands in tensor maps."""
    for number, view in enumerate(found.views()):
        lying = view.coordinates(*found.batch) if view is not None else None
        for n, (value, _, _) in enumerate(lying[1] if lying else ()):
            yield DeviceFunction(f"{COORDINATE[number]}{n}", ((found.batch[0], "i64"),), _as_i64_index(value))


def _operand_offset_functions(found: LoopAttention) -> Iterator[DeviceFunction]:
    """Yield the device functions that compute offsets of operands and, for split keys, of the softmax statistics."""
    z, row = (found.batch[0], "i64"), (found.row[0], "i64")
    yield DeviceFunction(BEGIN, (z,), _as_i64_index(found.begin))
    query = found.queries if found.operands == "tf32" else Apply("convert", (found.queries,), "f32")
    yield DeviceFunction(QUERY, (z, row, (found.depth[0], "i64")), query)
    for number, view in enumerate(found.views()[1:]):
        assert view is not None
        yield DeviceFunction(START[number], (z,), _as_i64_index(view.start))
        yield DeviceFunction(PITCH[number], (), _as_i64_index(view.pitch))
    if found.rest:
        given = [(buffer, Var(f"aotc_{n}", "f32")) for n, buffer in enumerate((found.top, found.whole))]
        begin = [s for buffer, var in given for s in (Alloc(buffer), Store(buffer, (), var))]
        own = (z, row, *((var.name, "f32") for _, var in given))
        yield DeviceFunction(REST, own, Index(0, "i32"), (*begin, *found.rest))


def _attention_epilogue_functions(found: LoopAttention, tiles: AttentionTiles) -> Iterator[DeviceFunction]:
    """Yield the device functions of the epilogue, which store an element or a row of the result."""
    axes = tuple((name, "i64") for name, _ in (found.batch, found.row, found.col))
    own = (*axes, (found.mean.var.name, "f32"))
    if not tiles.in_lines:
        yield DeviceFunction(STORE, own, Index(0, "i32"), found.epilogue)
        return
    *lets, last = found.epilogue
    assert isinstance(last, Store)
    assert found.place is not None
    yield DeviceFunction(EPILOGUE, own, _before_rounding(last.value), tuple(lets))
    yield DeviceFunction(PLACE, axes, _as_i64_index(found.place))


def _before_rounding(value: Scalar) -> Scalar:
    """Return ``value`` without its final conversion, as f32; the template itself rounds to the result's dtype."""
    match value:
        case Apply(fn="convert", args=(inner,)) if inner.dtype == "f32":
            return inner
    return value if value.dtype == "f32" else Apply("convert", (value,), "f32")


def _as_i64_index(e: Dim) -> Scalar:
    return Index(e, "i64")
