"""Spread attention of few queries over parts of its terms: one head's keys are read by many multiprocessors.

Before::

    %o = attention %q, %k, %v {...} : bf16[8, 1, 32, 128]                       // keys of 32768 terms
After::

    %m, %w = attention %q, %k, %v {part = 2048, ...} : f32[16, 8, 1, 32, 128], f32[16, 8, 1, 32]
    %t = exp(%w - max over parts of %w)
    %o = convert (sum over parts of %m * %t) / (sum over parts of %t)

A part of which no term has weight has no mean, and the logarithm of its weight is -inf. The sums are in a fixed order.
"""

from __future__ import annotations

import math

from aotc.ir.tensor_ir import Module, Op, TensorType, Value, walk
from aotc.lowering.analysis.gpu.attention_tiles import sizes_of, terms_of_parts
from aotc.lowering.analysis.homes import homes_of
from aotc.lowering.passes.gpu.tensor_maths import Maths
from aotc.lowering.passes.rewrite import Builder, rewrite_module
from aotc.options import Options


def split_attention(module: Module, options: Options) -> Module:
    """Return ``module`` with attention of few queries in parts, on GPUs."""
    if not any(op.name == "attention" for f in module.functions.values() for op in walk(f.body)):
        return module
    home, _ = homes_of(module, options)

    def rule(op: Op, b: Builder) -> tuple[Value, ...] | None:
        if op.name != "attention" or "part" in op.attrs:
            return None
        target = home(op)
        sizes = sizes_of(tuple(v.type for v in op.operands), op.attrs) if target.kind == "cuda" else None
        part = terms_of_parts(sizes, target) if sizes is not None else 0
        return (_in_parts(op, part, b),) if part else None

    return rewrite_module(module, rule)


def _in_parts(op: Op, part: int, b: Builder) -> Value:
    """Append attention in parts and what puts them together; return the result."""
    out = op.result.type
    column = op.attrs["out_dims"][-1]
    attrs = {**op.attrs, "part": part}
    means, logs = b.op("attention", op.operands, attrs, ()).results
    maths, low = Maths(b), b.constant(-math.inf, TensorType("f32"))
    rows = tuple(size for d, size in enumerate(out.shape) if d != column)
    dims = tuple(range(1, len(rows) + 1))
    tops = b.reduce(logs, low, (0,), b.combiner("max", "f32"))
    weights = maths("exp", maths("sub", logs, b.broadcast(tops, dims, logs.type.shape)))
    zero = b.constant(0, TensorType("f32"))
    total = b.reduce(weights, zero, (0,), b.combiner("add", "f32"))
    wide = tuple(d + 1 for d in range(len(out.shape)) if d != column)
    spread, none = (b.broadcast(x, (0, *wide), means.type.shape) for x in (weights, maths("eq", logs, -math.inf)))
    there = maths.select(none, 0.0, means)
    sums = b.reduce(maths("mul", there, spread), zero, (0,), b.combiner("add", "f32"))
    over = b.broadcast(total, tuple(d for d in range(len(out.shape)) if d != column), out.shape)
    return b.convert(maths("div", sums, over), out.dtype)
