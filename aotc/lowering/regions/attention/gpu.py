"""Attention on a GPU: a kernel with the loops that define it, and the tiling for the tensor-core template."""

from __future__ import annotations

from dataclasses import replace

from aotc.ir.loop.ir import Kernel
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.attention.gpu import TensorCoreAttentionPlan, region_sizes
from aotc.lowering.plans.attention.gpu_loops import attention_loops


def lower_attention_cuda(b: RegionBuilder, plan: TensorCoreAttentionPlan) -> Kernel:
    """Lower a region around ``attention`` to a kernel for tensor cores."""
    sizes = region_sizes(b)
    assert sizes is not None
    return replace(attention_loops(b, b.elements(), sizes), tiling=plan.tiling)
