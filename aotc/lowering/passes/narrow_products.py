"""Let matmuls multiply the original operands of 8 or 16 bits where the model widens them before the matmul.

Before::

    %0 = convert %x : i32[8, 64]     // %x: u8[8, 64]
    %1 = convert %w : i32[64, 8]     // %w: i8[64, 8]
    %2 = dot_general %0, %1 : i32[8, 8]
After::

    %2 = dot_general %x, %w : i32[8, 8]

Sums are i32 in both, with equal overflow. A constant counts as widened if its numbers fit the narrow dtype. The left
operand may be unsigned on a CPU, whose tiles support it; tensor cores require equal dtypes.

A CPU's tiles also accept an f32 left operand with a bf16 or f16 right operand, which they widen in registers: half the
memory, the same numbers. The left operand is not narrowed, as instructions for pairs of bf16 round sums differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np

from aotc.ir.opset import OPS, PRODUCTS
from aotc.ir.tensor.ir import Module, Op, TensorType, Value
from aotc.lowering.analysis.constant_values import constant_of
from aotc.lowering.passes.rewrite import Builder, rewrite_module
from aotc.lowering.placement.op_targets import op_targets
from aotc.options import Options
from aotc.targets import Target
from aotc.vmfb.dtypes import to_numpy


def narrow_products(module: Module, options: Options) -> Module:
    """Return ``module`` with matmuls of widened operands as matmuls of the original operands."""
    home, _ = op_targets(module, options)
    return rewrite_module(
        module, partial(_narrow_product_rule, home, options.matmul_precision in ("model", "highest")), PRODUCTS
    )


def _narrow_product_rule(home: Callable[[Op], Target], keeps_f32: bool, op: Op, b: Builder) -> Sequence[Value] | None:
    """Return the product of the operands before they were widened, if the target multiplies them exactly; else None."""
    spec = OPS[op.name]
    if not spec.sums or not any(_value_before_widening(v, b) for v in op.operands):
        return None
    shapes = [cast("tuple[int, ...]", v.type.shape) for v in op.operands]
    if spec.terms(op.attrs, shapes) == 1:  # no sum, but a multiplication
        return None
    target = home(op)
    dtypes: tuple[tuple[str, ...], ...]
    match sorted({v.type.dtype for v in (*op.operands, op.result)}):
        case ["i32"]:
            dtypes = ("i8", "u8") if target.kind == "cpu" else ("i8",), ("i8",)
        case ["f32"] if target.kind == "cpu" and keeps_f32:
            dtypes = ("f32",), tuple(dtype for dtype in ("bf16", "f16") if dtype not in target.lacks)
        case _:
            return None
    narrow = [_narrowest_exact_dtype(v, of, b) for v, of in zip(op.operands, dtypes, strict=True)]
    if not all(narrow):
        return None
    return b.append(replace(op, operands=tuple(_narrowed_value(v, dtype, b) for v, dtype in zip(op.operands, narrow))))


def _value_before_widening(v: Value, b: Builder) -> Value | None:
    """Return the value from which ``v`` was widened, or None."""
    op = b.definitions.get(v)
    return op.operands[0] if op is not None and op.name == "convert" else None


def _narrowest_exact_dtype(v: Value, dtypes: Sequence[str], b: Builder) -> str:
    """Return the first of ``dtypes`` that represents all numbers of ``v``, or an empty string."""
    before, array = _value_before_widening(v, b), constant_of(v, b.definitions)
    if v.type.dtype in dtypes:
        return v.type.dtype
    if before is not None:
        return before.type.dtype if before.type.dtype in dtypes else ""
    if array is None or not array.size or array.dtype.kind != "i":
        return ""
    limits = {dtype: np.iinfo(to_numpy(dtype)) for dtype in dtypes}
    return next((d for d, of in limits.items() if of.min <= array.min() and array.max() <= of.max), "")


def _narrowed_value(v: Value, dtype: str, b: Builder) -> Value:
    """Return ``v`` as ``dtype``: the value before it was widened, or a narrower constant."""
    before, array = _value_before_widening(v, b), constant_of(v, b.definitions)
    if v.type.dtype == dtype:
        return v
    if before is not None:
        return before
    assert array is not None
    return b.constant(array, TensorType(dtype, v.type.shape))
