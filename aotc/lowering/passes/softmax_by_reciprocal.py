"""On CPUs, multiply the exponentials of a row by the inverse of their sum: one division per row.

Before::

    %e = exp (sub %x, (broadcast (reduce %x (max))))
    %s = reduce %e (add)
    %p = div %e, (broadcast %s)
After::

    %p = mul %e, (broadcast (div 1, %s))

The exponentials are at most 1, and one of them is 1, so the inverse of the sum is finite and no product overflows. The
result has one more rounding than the quotient. Other divisions of rows are not changed: ``x / max(x)`` must contain a
1. On a GPU divisions are hidden behind memory accesses.
"""

from __future__ import annotations

from collections.abc import Sequence

from aotc.ir.tensor.ir import Module, Op, Value
from aotc.lowering.analysis.long_rows import shared_sum
from aotc.lowering.passes.rewrite import Builder, rewrite_for_target_kind
from aotc.options import Options
from aotc.targets import Target


def softmax_by_reciprocal(module: Module, options: Options) -> Module:
    """Rewrite softmax to multiply by the reciprocal of the row sum instead of dividing each element."""
    if options.opt_level < 2:
        return module
    return rewrite_for_target_kind("cpu", module, options, _divide_by_reciprocal_rule, ("div",))


def _divide_by_reciprocal_rule(op: Op, b: Builder, _: Target) -> Sequence[Value] | None:
    """Rewrite ``x / sum`` of a row as ``x * (1 / sum)``, or return None for another op."""
    if op.name != "div" or op.result.type.dtype not in ("f32", "f64"):
        return None
    total = shared_sum(op, b.definitions)
    if total is None:
        return None
    inverse = b.make("div", (b.constant(1.0, total.type), total))
    dims = b.definitions[op.operands[1]].attrs["dims"]
    return (b.make("mul", (op.operands[0], b.broadcast(inverse, dims, op.result.type.shape))),)
