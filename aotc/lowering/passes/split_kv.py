"""Split attention of few rows by terms, so that all workers have work: decoding with a long cache.

Before::

    %o = attention %q, %k, %v {...} : f32[1, 1, 64]                     // %k: f32[8192, 64]
After::

    %op, %top, %total = attention %q, %k, %v {split = 8, ...} : f32[8, 1, 64], f32[8, 1], f32[8, 1]
    %w = mul (exp (sub %top, (max of %top))), %total
    %o = (sum of %op * %w) / (sum of %w)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aotc.ir.dims.algebra import Dim
from aotc.ir.opset.attention import axes
from aotc.ir.tensor.ir import Op, TensorType, Value
from aotc.lowering.passes.rewrite import Builder


def in_parts(op: Op, parts: int, results: Sequence[Value], b: Builder) -> list[Op]:
    """Return the ops that compute ``op`` with its terms in ``parts``; the last one makes ``results``."""
    types = tuple(v.type for v in op.operands)
    batch, row, _, _, column = axes(types, op.attrs)
    count, attrs = len(batch), {**op.attrs, "split": parts, "out_dims": tuple(range(len(batch) + 2))}
    if op.result.type.dtype != types[0].dtype:
        attrs["precision"] = "HIGHEST"  # parts give f32, which no longer says how exact it is
    wide = "f64" if types[0].dtype == "f64" else "f32"
    shape = (*batch, parts, row)
    given = (TensorType(wide, (*shape, column)), *[TensorType(wide, shape)] * 2)
    own, top, total = b.append(b.op("attention", op.operands, attrs, given))
    result = _together(own, top, total, count, b)
    result = b.transpose(result, [list(op.attrs["out_dims"]).index(d) for d in range(count + 2)])
    result = b.reshape(b.convert(result, op.result.type.dtype), results[0].type.shape)
    return [replace(o, results=tuple(results)) if result in o.results else o for o in b.ops]


def _together(own: Value, top: Value, total: Value, axis: int, b: Builder) -> Value:
    """Return the result of all parts along ``axis``: theirs, averaged by ``total * exp(top - max(top))``.

    Parts without a term have weight 0.
    """
    wide, shape = top.type.dtype, top.type.shape
    kept = [d for d in range(len(shape)) if d != axis]

    def over(x: Value, name: str, start: float) -> Value:
        return b.reduce(x, b.constant(start, TensorType(wide)), (axis,), b.combiner(name, wide))

    def spread(x: Value, dims: Sequence[int], shape: Sequence[Dim]) -> Value:
        return b.broadcast(x, dims, shape)

    def chosen(test: Value, x: Value) -> Value:
        return b.make("select", (test, b.constant(0, x.type), x))

    apart = b.make("sub", (top, spread(over(top, "max", -float("inf")), kept, shape)))
    nothing = b.make("eq", (total, b.constant(0, total.type)))  # a part of -inf alone: its own result is NaN
    weight = chosen(nothing, b.make("mul", (b.make("exp", (apart,)), total)))
    dims = range(len(shape))
    each = b.make("mul", (own, spread(weight, dims, own.type.shape)))
    each = chosen(spread(nothing, dims, own.type.shape), each)
    sums: Any = over(each, "add", 0.0)
    return b.make("div", (sums, spread(over(weight, "add", 0.0), range(len(kept)), sums.type.shape)))
