"""Split attention of few queries by its keys: decoding with a long cache.

This is split-KV, as in T. Dao et al., "Flash-Decoding for long-context inference" (2023). Each part is attention over a
range of the keys, and also returns the softmax statistics of its rows; the parts are then combined. So many threads or
multiprocessors share the keys of one head. CPUs and GPUs store different statistics.

:func:`split_attention` is the pass for GPUs. Before::

    %o = attention %q, %k, %v {...} : bf16[8, 1, 32, 128]                       // keys of 32768 terms
After::

    %m, %l = attention %q, %k, %v {part = 2048, ...} : f32[16, 8, 1, 32, 128], f32[8, 1, 32, 16]
    %w = softmax over parts of %l
    %o = convert (sum over parts of %m * %w where %w is not 0)

A part in which no key has weight has an undefined mean, and the logarithm of its weight is -inf. Sums are added in a
fixed order.

:func:`split_on_cpu` is called by ``fuse_attention`` for CPUs. Before::

    %o = attention %q, %k, %v {...} : f32[1, 1, 64]                     // %k: f32[8192, 64]
After::

    %op, %top, %total = attention %q, %k, %v {split = 8, ...} : f32[8, 1, 64], f32[8, 1], f32[8, 1]
    %w = mul (exp (sub %top, (max of %top))), %total
    %o = (sum of %op * %w) / (sum of %w)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aotc.ir.dims.algebra import Dim
from aotc.ir.opset.attention import attention_axis_sizes
from aotc.ir.tensor.ir import Module, Op, TensorType, Value
from aotc.lowering.passes.parallelize_gpu.elementwise_dsl import ElementwiseBuilder
from aotc.lowering.passes.rewrite import Builder, rewrite_for_target_kind
from aotc.lowering.plans.attention.gpu_decode import FEW_PARTS, split_kv_part_terms
from aotc.lowering.plans.attention.sizes import attention_sizes
from aotc.options import Options
from aotc.targets import Target


def split_attention(module: Module, options: Options) -> Module:
    """Split attention with few queries on GPUs into parts along the keys (split-KV) that are combined."""
    if not module.has("attention"):
        return module
    return rewrite_for_target_kind("cuda", module, options, _split_attention_rule)


def _split_attention_rule(op: Op, b: Builder, target: Target) -> Sequence[Value] | None:
    """Split an attention by its keys if the GPU computes the parts in less time; else return None."""
    if op.name != "attention" or "part" in op.attrs:
        return None
    sizes = attention_sizes(tuple(v.type for v in op.operands), op.attrs)
    part = split_kv_part_terms(sizes, target) if sizes is not None else 0
    return (_attention_in_parts(op, part, b),) if part else None


def _attention_in_parts(op: Op, part: int, b: Builder) -> Value:
    """Append split-KV attention: attention for each range of keys, then the combination of the parts."""
    out = op.result.type
    column = op.attrs["out_dims"][-1]
    attrs = {**op.attrs, "part": part}
    means, logs = b.append(b.op("attention", op.operands, attrs, ()))
    if FEW_PARTS.holds(means.type.shape[0]):
        return b.convert(_combine_parts(means, logs, column, ElementwiseBuilder(b)), out.dtype)
    maths, low, zero = ElementwiseBuilder(b), b.constant(-math.inf, TensorType("f32")), b.constant(0, TensorType("f32"))
    rank, last = len(out.shape), logs.type.rank - 1
    rows = tuple(range(last))
    tops = b.reduce(logs, low, (last,), b.combiner("max", "f32"))
    each = maths("exp", maths("sub", logs, b.broadcast(tops, rows, logs.type.shape)))
    total = b.reduce(each, zero, (last,), b.combiner("add", "f32"))
    weights = maths("div", each, b.broadcast(total, rows, logs.type.shape))
    wide = (0, *(d + 1 for d in range(rank) if d != column))
    weight_of_part = b.broadcast(b.transpose(weights, (last, *rows)), wide, means.type.shape)
    none = maths("eq", weight_of_part, 0.0)
    sums = b.reduce(maths.select(none, 0.0, maths("mul", means, weight_of_part)), zero, (0,), b.combiner("add", "f32"))
    return b.convert(sums, out.dtype)


def _combine_parts(means: Value, logs: Value, column: int, maths: ElementwiseBuilder) -> Value:
    """Append elementwise ops (one kernel) that combine the few partial results of split-KV attention."""
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
    combined = None
    for n, x in enumerate(each):
        weight = maths("div", x, whole)
        part = b.reshape(b.slice_dim(means, 0, n, n + 1), shape)
        term = maths.select(maths("eq", weight, 0.0), 0.0, maths("mul", part, weight))
        combined = term if combined is None else maths("add", combined, term)
    assert combined is not None
    return combined


def split_on_cpu(op: Op, parts: int, results: Sequence[Value], b: Builder) -> list[Op]:
    """Return the ops of split-KV attention on a CPU: ``parts`` ranges of keys, then their combination."""
    types = tuple(v.type for v in op.operands)
    batch, row, _, _, column = attention_axis_sizes(types, op.attrs)
    count, attrs = len(batch), {**op.attrs, "split": parts, "out_dims": tuple(range(len(batch) + 2))}
    if op.result.type.dtype != types[0].dtype:
        attrs["precision"] = "HIGHEST"  # parts give f32, which no longer says how exact it is
    wide = "f64" if types[0].dtype == "f64" else "f32"
    shape = (*batch, parts, row)
    part_types = (TensorType(wide, (*shape, column)), *[TensorType(wide, shape)] * 2)
    own, top, total = b.append(b.op("attention", op.operands, attrs, part_types))
    result = _weighted_average_of_parts(own, top, total, count, b)
    result = b.transpose(result, [list(op.attrs["out_dims"]).index(d) for d in range(count + 2)])
    result = b.reshape(b.convert(result, op.result.type.dtype), results[0].type.shape)
    return [replace(o, results=tuple(results)) if result in o.results else o for o in b.ops]


def _weighted_average_of_parts(own: Value, top: Value, total: Value, axis: int, b: Builder) -> Value:
    """Return the softmax-weighted average of split-KV results along ``axis``.

    ``top`` and ``total`` are the softmax statistics of each part: its maximum, and its sum of exponentials. A part
    without keys has weight 0.
    """
    wide, shape = top.type.dtype, top.type.shape
    others = [d for d in range(len(shape)) if d != axis]

    def reduce_parts(x: Value, name: str, start: float) -> Value:
        return b.reduce(x, b.constant(start, TensorType(wide)), (axis,), b.combiner(name, wide))

    def broadcast_to(x: Value, dims: Sequence[int], shape: Sequence[Dim]) -> Value:
        return b.broadcast(x, dims, shape)

    def zero_where(test: Value, x: Value) -> Value:
        return b.make("select", (test, b.constant(0, x.type), x))

    difference = b.make("sub", (top, broadcast_to(reduce_parts(top, "max", -float("inf")), others, shape)))
    nothing = b.make("eq", (total, b.constant(0, total.type)))  # a part of -inf alone: its own result is NaN
    weight = zero_where(nothing, b.make("mul", (b.make("exp", (difference,)), total)))
    dims = range(len(shape))
    each = b.make("mul", (own, broadcast_to(weight, dims, own.type.shape)))
    each = zero_where(broadcast_to(nothing, dims, own.type.shape), each)
    sums: Any = reduce_parts(each, "add", 0.0)
    return b.make("div", (sums, broadcast_to(reduce_parts(weight, "add", 0.0), range(len(others)), sums.type.shape)))
