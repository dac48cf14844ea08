"""Plan fused attention on a GPU: choose the tiling for the code template that computes it on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.loop.forms.attention import read_attention
from aotc.ir.loop.forms.tiling import DecodeAttention, Tiling
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.attention.gpu_decode import one_warp_tiling
from aotc.lowering.plans.attention.gpu_loops import attention_loops
from aotc.lowering.plans.attention.gpu_tiles import are_operands_async_copyable, attention_tiling
from aotc.lowering.plans.attention.sizes import AttentionSizes, attention_sizes
from aotc.lowering.plans.region_plan import RegionPlan


@dataclass(frozen=True, slots=True)
class TensorCoreAttentionPlan(RegionPlan):
    """Attention on tensor cores, by a template.

    Attributes
    ----------
    tiling : Tiling
        The tiling of the kernel.
    """

    tiling: Tiling


def region_sizes(b: RegionBuilder) -> AttentionSizes | None:
    """Return the axes of the ``attention`` of a region, or None if no template supports them."""
    op = b.region_root_op("attention")
    return attention_sizes(tuple(v.type for v in op.operands), op.attrs)


def plan_gpu_attention(b: RegionBuilder) -> TensorCoreAttentionPlan:
    """Return the tiling for a region around ``attention``.

    Raises
    ------
    CompileError
        If no template supports the sizes, or rows of operands do not begin at multiples of 16 bytes.
    """
    op, sizes = b.region_root_op("attention"), region_sizes(b)
    tiling = None if sizes is None else attention_tiling(sizes, b.target)
    if sizes is None or tiling is None:
        raise b.unsupported_error(
            op, "attention of these sizes", "fuse_attention creates it only where it is supported"
        )
    loops = read_attention(attention_loops(b, b.trial_elements(), sizes))
    if isinstance(tiling.template, DecodeAttention) and not are_operands_async_copyable(loops, tiling):
        tiling = one_warp_tiling(sizes, b.target) or tiling
    if not are_operands_async_copyable(loops, tiling):
        hint = "align rows of queries, keys and values to 16 bytes"
        raise b.unsupported_error(op, "attention with rows that are not aligned to 16 bytes", hint)
    return TensorCoreAttentionPlan(tiling)
