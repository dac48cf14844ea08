"""Replace ops that would occupy few GPU threads (scatters, sorts, ``top_k``) by several parallel kernels.

Each small singular value decomposition is computed by one block of threads. See :mod:`.scatter`, :mod:`.merge_sort`
and :mod:`.svd`.

Before: ``%y = scatter %x, %index, %u (add) : f32[1000]``, applied in order because two updates may write one element.
After: scatters of integers, which may be applied in any order, with elementwise ops between them.
"""

from __future__ import annotations

from collections.abc import Sequence

from aotc.ir.tensor.ir import Module, Op, Value
from aotc.lowering.passes.parallelize_gpu.merge_sort import parallelize_sort
from aotc.lowering.passes.parallelize_gpu.scatter import parallelize_scatter
from aotc.lowering.passes.parallelize_gpu.svd import parallelize_svd
from aotc.lowering.passes.rewrite import Builder, rewrite_for_target_kind
from aotc.options import Options
from aotc.targets import Target


def parallelize_gpu(module: Module, options: Options) -> Module:
    """Rewrite the scatters, sorts and SVDs of GPU functions into parallel forms."""
    return rewrite_for_target_kind("cuda", module, options, _parallelize_rule)


def _parallelize_rule(op: Op, b: Builder, target: Target) -> Sequence[Value] | None:
    if op.name == "lapack":
        return parallelize_svd(op, b)
    return parallelize_scatter(op, target, b) if op.name == "scatter" else parallelize_sort(op, target, b)
