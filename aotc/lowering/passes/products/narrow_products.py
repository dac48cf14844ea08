"""Products of integers of 8 bits that the model widens first: multiply what was there before.

Before::

    %0 = convert %x : i32[8, 64]     // %x: u8[8, 64]
    %1 = convert %w : i32[64, 8]     // %w: i8[64, 8]
    %2 = dot_general %0, %1 : i32[8, 8]
After::

    %2 = dot_general %x, %w : i32[8, 8]

Sums are of i32 in both, and wrap around alike. A constant counts as widened if its numbers fit; the left operand may be
unsigned on a CPU, whose tiles take it, while tensor cores take equal dtypes only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from aotc.ir.opset import OPS
from aotc.ir.tensor_ir import Module, Op, TensorType, Value
from aotc.lowering.analysis.constant_values import constant_of
from aotc.lowering.analysis.homes import homes_of
from aotc.lowering.passes.rewrite import Builder, rewrite_module
from aotc.options import Options
from aotc.targets import Target
from aotc.vmfb.dtypes import to_numpy


def narrow_products(module: Module, options: Options) -> Module:
    """Return ``module`` with products of operands that were widened to i32 as products of these."""
    home, _ = homes_of(module, options)
    return rewrite_module(module, partial(_rule, home))


def _rule(home: Callable[[Op], Target], op: Op, b: Builder) -> Sequence[Value] | None:
    if not OPS[op.name].sums or {v.type.dtype for v in (*op.operands, op.result)} != {"i32"}:
        return None
    lhs, rhs = op.operands
    unsigned = home(op).kind == "cpu"
    if not any(_widened(v, b) for v in op.operands):
        return None
    left, right = _fitting(lhs, ("i8", "u8") if unsigned else ("i8",), b), _fitting(rhs, ("i8",), b)
    if not left or not right:
        return None
    return b.append(replace(op, operands=(_narrow(lhs, left, b), _narrow(rhs, right, b))))


def _widened(v: Value, b: Builder) -> Value | None:
    """Return what ``v`` was before it was widened."""
    op = b.definitions.get(v)
    return op.operands[0] if op is not None and op.name == "convert" else None


def _fitting(v: Value, dtypes: Sequence[str], b: Builder) -> str:
    """Return the first of ``dtypes`` that holds ``v``, or the empty string."""
    before, array = _widened(v, b), constant_of(v, b.definitions)
    if before is not None:
        return before.type.dtype if before.type.dtype in dtypes else ""
    if array is None or not array.size:
        return ""
    limits = {dtype: np.iinfo(to_numpy(dtype)) for dtype in dtypes}
    return next((d for d, of in limits.items() if of.min <= array.min() and array.max() <= of.max), "")


def _narrow(v: Value, dtype: str, b: Builder) -> Value:
    """Return what ``v`` was before, or the constant of fewer bits."""
    before, array = _widened(v, b), constant_of(v, b.definitions)
    if before is not None:
        return before
    assert array is not None
    return b.constant(array, TensorType(dtype, v.type.shape))
