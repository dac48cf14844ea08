"""Choose the tiles of fused attention on the tensor cores of a GPU; reject operands that no template supports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aotc.ir.dims.algebra import product
from aotc.ir.loop.forms.attention import LoopAttention
from aotc.ir.loop.forms.matmul import is_multiple_dim
from aotc.ir.loop.forms.tiling import ELEMENT_BYTES, DecodeAttention, MmaAttention, Tiling, WgmmaAttention
from aotc.ir.opset.spec import Attrs, Types
from aotc.lowering.cost_model.work import UNKNOWN_TERMS, dim_or
from aotc.lowering.plans.attention.gpu_decode import FEW_QUERIES, plan_decode
from aotc.lowering.plans.attention.sizes import AttentionSizes, attention_sizes
from aotc.lowering.threshold import Estimate, Limit
from aotc.targets import Target

ATTENTION_SPREAD = Estimate(132, "tiles of attention that a GPU computes at a time", "the multiprocessors of an H200")
SHORT_CAUSAL = Limit(
    2047,
    "terms of causal attention, at most, for which tiles of 192 rows are not used",
    "on an H200 with keys of 64 elements: 1024 terms take 79 us with 192 rows, 68 us with 128; 4096 terms take 643 "
    "and 697 us",
)


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """Measured rate of one attention tiling.

    Attributes
    ----------
    tiling : Tiling
    depth : int
        The most elements of a key or of a value.
    rate : float
        The query rows per unit of time, relative to the second row of the table.
    plain : bool
        Is the tiling only for long rows of plain scores, i.e. scaled products? Other scores need more registers.
    size : int
        The bytes of an element; 4 is f32, which is rounded to TF32.
    """

    tiling: Tiling
    depth: int
    rate: float
    plain: bool = False
    size: int = 2


# Rates of the tilings, see AttentionRate; the one with the least time is used. Measured on an H200, in us:
# - 128 heads of 4096 x 4096 x 64 in bf16: 1118 with tiles of 192 rows, 1265 with 128.
# - 96 heads of 1024 x 1024 x 64 in bf16: 71 with 128 rows, 96 with 64, 83 with 64 terms at a time; with the templates
#   of single warps 113, 102 and 118. These have lower rates in the table than measured, since a tile that is alone on
#   a multiprocessor takes as long with fewer rows.
# - f32: 243, 278 and 387; with 128 elements per key 441 and 669.
ATTENTION_RATES = (
    AttentionRate(Tiling(WgmmaAttention(), 192, 128, 2), 64, 1.2, plain=True),
    AttentionRate(Tiling(WgmmaAttention(), 128, 128, 2), 128, 1.0),
    AttentionRate(Tiling(WgmmaAttention(), 64, 128, 2), 128, 0.74),
    AttentionRate(Tiling(WgmmaAttention(), 128, 64, 2), 256, 0.86),
    AttentionRate(Tiling(MmaAttention(), 128, 64, 2), 128, 0.36),
    AttentionRate(Tiling(MmaAttention(), 64, 64, 2), 128, 0.4),
    AttentionRate(Tiling(MmaAttention(), 32, 64, 2), 256, 0.34),
    AttentionRate(Tiling(MmaAttention(), 128, 64, 2), 64, 0.2, size=4),
    AttentionRate(Tiling(MmaAttention(), 64, 32, 2), 64, 0.174, size=4),
    AttentionRate(Tiling(MmaAttention(), 32, 64, 2), 64, 0.125, size=4),
    AttentionRate(Tiling(MmaAttention(), 128, 32, 2), 128, 0.2, size=4),
    AttentionRate(Tiling(MmaAttention(), 32, 32, 2), 128, 0.132, size=4),
    AttentionRate(Tiling(MmaAttention(), 128, 16, 2), 256, 0.18, size=4),
    AttentionRate(Tiling(MmaAttention(), 64, 16, 2), 256, 0.15, size=4),
    AttentionRate(Tiling(MmaAttention(), 32, 16, 2), 256, 0.12, size=4),
)


def attention_tiling(sizes: AttentionSizes, target: Target) -> Tiling | None:
    """Return the tiling with the least modelled time on ``target``, or None if none fits its shared memory.

    The time is the number of waves of tiles, times the time of one tile. A few queries per head use another model
    (:mod:`.gpu_decode`).
    """
    if not target.has_ampere:
        return None
    if FEW_QUERIES.holds(sizes.rows):
        plan = plan_decode(sizes, target)
        return plan.tiling if plan is not None else None
    fitting = list(_tilings_in_shared_memory(sizes, target))
    return min(fitting, key=lambda row: _attention_nanoseconds(sizes, row)).tiling if fitting else None


def _tilings_in_shared_memory(sizes: AttentionSizes, target: Target) -> Iterator[AttentionRate]:
    """Yield the tilings whose template the target supports and whose operands fit its shared memory."""
    for row in ATTENTION_RATES:
        takes = target.cpu == "sm_90a" or not isinstance(row.tiling.template, WgmmaAttention)
        small = max(sizes.depth, sizes.width) <= row.depth and sizes.size == row.size
        fits = sizes.shared_memory_bytes(row.tiling) <= target.shared_memory
        wide = sizes.plain and (sizes.offset is None or not SHORT_CAUSAL.holds(sizes.terms))
        if takes and small and fits and (wide or not row.plain):
            yield row


def _attention_nanoseconds(sizes: AttentionSizes, row: AttentionRate) -> float:
    rows, heads = (dim_or(n, UNKNOWN_TERMS.value) for n in (sizes.rows, product(sizes.batch)))
    tiles = heads * -(-rows // row.tiling.rows)
    return -(-tiles // ATTENTION_SPREAD.value) * row.tiling.rows / row.rate


def takes_attention_cuda(types: Types, attrs: Attrs, target: Target) -> bool:
    """Return True if ``target`` has a template for attention with operands of ``types``."""
    sizes = attention_sizes(types, attrs)
    return sizes is not None and attention_tiling(sizes, target) is not None


def are_operands_async_copyable(attention: LoopAttention, tiling: Tiling) -> bool:
    """Return True if the template can copy the operands asynchronously: contiguous lines, aligned to 16 bytes."""
    views = attention.views()
    if isinstance(tiling.template, MmaAttention):
        return all(view is not None and view.in_lines for view in views[1:])
    count = 16 // ELEMENT_BYTES[attention.operands]
    for view in views[isinstance(tiling.template, DecodeAttention) :]:
        if view is None or not view.in_lines or (lying := view.coordinates(*attention.batch)) is None:
            return False
        if not all(is_multiple_dim(x, count) for x in (lying[0], *(stride for _, stride, _ in lying[1]))):
            return False
    return True
