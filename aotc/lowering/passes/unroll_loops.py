"""Unroll short elementwise loops on GPUs, so that they are fused into one kernel.

Before, five kernels or more, each of which reads all carried values::

    %y = while %0, %x { (%i, %a): yield lt %i, 5 } { (%i, %a): yield add %i, 1, mul %a, %a }
After, one::

    %1 = mul %x, %x ... %y = mul %4, %4

JAX's rounds of Threefry have this form. Loops over small arrays are left alone: each is one kernel (``small_loops``).
"""

from __future__ import annotations

from collections.abc import Sequence

from aotc.ir.dims.algebra import product
from aotc.ir.opset import FREE, INLINE
from aotc.ir.tensor.ir import Module, Op, Value
from aotc.lowering.analysis.trip_counts import trip_count
from aotc.lowering.passes.rewrite import Builder, append_region, rewrite_for_target_kind
from aotc.lowering.threshold import Limit
from aotc.options import Options
from aotc.targets import Target


def unroll_loops(module: Module, options: Options) -> Module:
    """Unroll short elementwise loops on GPUs, so that they fuse into one kernel."""
    return rewrite_for_target_kind("cuda", module, options, _unroll_loop_rule)


UNROLLED_TURNS = Limit(8, "iterations of a loop that is unrolled on a GPU", "Threefry has five")
UNROLLED_OPS = Limit(
    160,
    "ops of all iterations of such a loop, movement ops not counted",
    "GPU_REGION_OPS, less the other ops of the region",
)
SHORT_CARRIED = Limit(
    1 << 12,
    "elements of each value carried by a GPU loop that is not unrolled",
    "the loop as a whole may become one kernel",
)


def _unroll_loop_rule(op: Op, b: Builder, _target: Target) -> Sequence[Value] | None:
    """Return the results of a short elementwise loop as the ops of all its iterations, or None to leave it."""
    if op.name != "while":
        return None
    _, body = op.regions
    if all(SHORT_CARRIED.holds(product(v.type.shape)) for v in op.results):
        return None
    if not all(inner.name in INLINE and not inner.regions for inner in body.ops):
        return None
    constants = {v: maker for v, maker in b.definitions.items() if maker.name == "constant"}
    iterations = trip_count(op, constants, {})
    computed = sum(inner.name not in FREE for inner in body.ops)
    if iterations is None or not UNROLLED_TURNS.holds(iterations) or not UNROLLED_OPS.holds(iterations * computed):
        return None
    values = list(op.operands)
    for _ in range(iterations):
        values = append_region(body, values, b)
    return values
