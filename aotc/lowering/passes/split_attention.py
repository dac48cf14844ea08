"""Split attention of few queries by terms, so that many multiprocessors read the keys of one head.

Before::

    %o = attention %q, %k, %v {...} : bf16[8, 1, 32, 128]                       // keys of 32768 terms
After::

    %m, %l = attention %q, %k, %v {part = 2048, ...} : f32[16, 8, 1, 32, 128], f32[8, 1, 32, 16]
    %w = softmax over parts of %l
    %o = convert (sum over parts of %m * %w where %w is not 0)

A part in which no term has weight has no mean, and the logarithm of its weight is -inf. Sums are added in a fixed
order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from aotc.ir.tensor.ir import Module, Op, TensorType, Value
from aotc.lowering.passes.parallelize_gpu.elementwise_dsl import Maths
from aotc.lowering.passes.rewrite import Builder, rewrite_on
from aotc.lowering.plans.attention.gpu_decode import FEW_PARTS, terms_of_parts
from aotc.lowering.plans.attention.sizes import sizes_of
from aotc.options import Options
from aotc.targets import Target


def split_attention(module: Module, options: Options) -> Module:
    """Return ``module`` with attention of few queries in parts, on GPUs."""
    if not module.has("attention"):
        return module
    return rewrite_on("cuda", module, options, _rule)


def _rule(op: Op, b: Builder, target: Target) -> Sequence[Value] | None:
    if op.name != "attention" or "part" in op.attrs:
        return None
    sizes = sizes_of(tuple(v.type for v in op.operands), op.attrs)
    part = terms_of_parts(sizes, target) if sizes is not None else 0
    return (_in_parts(op, part, b),) if part else None


def _in_parts(op: Op, part: int, b: Builder) -> Value:
    """Append attention in parts and the ops that combine the parts; return the result."""
    out = op.result.type
    column = op.attrs["out_dims"][-1]
    attrs = {**op.attrs, "part": part}
    means, logs = b.append(b.op("attention", op.operands, attrs, ()))
    if FEW_PARTS.holds(means.type.shape[0]):
        return b.convert(_combine_parts(means, logs, column, Maths(b)), out.dtype)
    maths, low, zero = Maths(b), b.constant(-math.inf, TensorType("f32")), b.constant(0, TensorType("f32"))
    rank, last = len(out.shape), logs.type.rank - 1
    rows = tuple(range(last))
    tops = b.reduce(logs, low, (last,), b.combiner("max", "f32"))
    each = maths("exp", maths("sub", logs, b.broadcast(tops, rows, logs.type.shape)))
    total = b.reduce(each, zero, (last,), b.combiner("add", "f32"))
    weights = maths("div", each, b.broadcast(total, rows, logs.type.shape))
    wide = (0, *(d + 1 for d in range(rank) if d != column))
    spread = b.broadcast(b.transpose(weights, (last, *rows)), wide, means.type.shape)
    none = maths("eq", spread, 0.0)
    sums = b.reduce(maths.select(none, 0.0, maths("mul", means, spread)), zero, (0,), b.combiner("add", "f32"))
    return b.convert(sums, out.dtype)


def _combine_parts(means: Value, logs: Value, column: int, maths: Maths) -> Value:
    """Append the ops that combine a few parts without a reduction, so that they are one kernel; return the result."""
    b, count, last = maths.b, means.type.shape[0], logs.type.rank - 1
    assert isinstance(count, int)
    shape, rows = means.type.shape[1:], logs.type.shape[:-1]
    dims = [d for d in range(len(shape)) if d != column]
    slices = [b.reshape(b.slice_dim(logs, last, n, n + 1), rows) for n in range(count)]
    own = [b.broadcast(x, dims, shape) for x in slices]
    top = own[0]
    for x in own[1:]:
        top = maths("max", top, x)
    each = [maths("exp", maths("sub", x, top)) for x in own]
    whole = each[0]
    for x in each[1:]:
        whole = maths("add", whole, x)
    found = None
    for n, x in enumerate(each):
        weight = maths("div", x, whole)
        part = b.reshape(b.slice_dim(means, 0, n, n + 1), shape)
        term = maths.select(maths("eq", weight, 0.0), 0.0, maths("mul", part, weight))
        found = term if found is None else maths("add", found, term)
    assert found is not None
    return found
