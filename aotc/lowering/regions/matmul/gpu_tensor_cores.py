"""Matmuls on tensor cores: a kernel with the loops that define them, and the tiling for the tensor-core template."""

from __future__ import annotations

from dataclasses import replace

from aotc.ir.dims.algebra import product
from aotc.ir.loop.ir import Kernel
from aotc.lowering.analysis.contractions import contraction_of
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.tensor_core_loops import tensor_core_loops
from aotc.lowering.plans.gpu_contract import TensorCorePlan


def lower_tensor_cores(b: RegionBuilder, plan: TensorCorePlan) -> Kernel:
    """Lower a matmul or convolution for tensor cores."""
    c = contraction_of(b.root)
    body = tensor_core_loops(b, b.elements(), plan.dtype)
    return replace(b.kernel(1, body, product((*c.batch, c.m, c.n, c.k)) * 2), tiling=plan.tiling)
