"""Make several kernels of what would be a few threads' work on a GPU: scatters (:mod:`.gpu.scatters`), sorts and
``top_k`` (:mod:`.gpu.sorts`).

Before, in order because two updates may go to one element: ``%y = scatter %x, %index, %u (add) : f32[1000]``. After, in
any order: scatters of integers, and elementwise ops between them.
"""

from __future__ import annotations

from collections.abc import Sequence

from aotc.ir.tensor_ir import Module, Op, Value
from aotc.lowering.analysis.homes import homes_of
from aotc.lowering.passes.gpu.scatters import spread_scatter
from aotc.lowering.passes.gpu.sorts import spread_sort
from aotc.lowering.passes.rewrite import Builder, rewrite_module
from aotc.options import Options


def spread_work(module: Module, options: Options) -> Module:
    """Rewrite the scatters and sorts of GPUs; see the module docstring."""
    home, kinds = homes_of(module, options)
    if "cuda" not in kinds:
        return module

    def rule(op: Op, b: Builder) -> Sequence[Value] | None:
        target = home(op)
        if target.kind != "cuda":
            return None
        return spread_scatter(op, target, b) if op.name == "scatter" else spread_sort(op, target, b)

    return rewrite_module(module, rule)
