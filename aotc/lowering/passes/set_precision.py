"""Set the precision of f32 products and convolutions by the option ``matmul_precision``, where the model sets none.

The option ``bf16`` rounds both operands; sums are f32. Before::

    %2 = matmul %0, %1 : f32[8, 8]
After::

    %3 = convert %0 : bf16[8, 64]    and %4 of %1
    %2 = matmul %3, %4 : f32[8, 8]

``bf16x3`` splits each operand into two bf16 numbers, the rounded value and the remainder, and adds the three largest of
the four products, so that 16 bits of each operand count. ``highest`` prevents GPUs from rounding operands to TF32.

The op ``attention`` is computed in ``bf16`` where that pays: on a CPU with instructions for pairs of bf16, unless it
has so few rows that it reads keys in place. Elsewhere it is computed in f32.

Source: G. Henry, P. Tang, A. Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
Computations" (2019). A value that is infinite in f32 or in bf16 has the remainder 0, and the two small products count
only where they are finite: so a sum with an infinite term is the same as in f32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from aotc.ir.opset import OPS
from aotc.ir.tensor.ir import Module, Op, TensorType, Value
from aotc.lowering.passes.rewrite import Builder, rewrite_module
from aotc.lowering.placement.op_targets import op_targets
from aotc.lowering.plans.attention.cpu_blocks import gains_by_pairs
from aotc.options import Options
from aotc.targets import Target


def set_precision(module: Module, options: Options) -> Module:
    """Return ``module`` with every ``matmul`` and ``conv`` of f32 in the precision of the options."""
    precision = options.matmul_precision
    if precision == "model":
        return module
    home, _ = op_targets(module, options)
    return rewrite_module(module, partial(_set_precision_rule, precision, home))


def _set_precision_rule(precision: str, home: Callable[[Op], Target], op: Op, b: Builder) -> Sequence[Value] | None:
    """Return the values that replace an f32 product, computed in ``precision``; None for other ops."""
    if precision == "bf16" and op.name == "attention" and gains_by_pairs(op, home(op)):
        keys = [b.convert(x, "bf16") for x in op.operands[:3]]
        short = TensorType("bf16", op.result.type.shape)
        return (b.convert(b.make("attention", [*keys, *op.operands[3:]], op.attrs, short), "f32"),)
    if not OPS[op.name].sums or op.attrs.get("precision", "DEFAULT") not in (None, "DEFAULT"):
        return None
    if {v.type.dtype for v in (*op.operands, op.result)} != {"f32"}:
        return None
    match precision:
        case "highest":
            return (_matmul_of_bf16_parts(op, op.operands, {"precision": "HIGHEST"}, b),)
        case "bf16":
            return (_matmul_of_bf16_parts(op, [b.convert(x, "bf16") for x in op.operands], {}, b),)
    (left, left_rest), (right, right_rest) = (_split_to_bf16(x, b) for x in op.operands)
    small = b.make("add", [_matmul_of_bf16_parts(op, pair, {}, b) for pair in ((left, right_rest), (left_rest, right))])
    return (b.make("add", [_matmul_of_bf16_parts(op, (left, right), {}, b), _value_where_finite(small, small, b)]),)


def _matmul_of_bf16_parts(op: Op, operands: Sequence[Value], attrs: dict[str, object], b: Builder) -> Value:
    return b.make(op.name, operands, {**op.attrs, **attrs}, op.result.type)


def _split_to_bf16(x: Value, b: Builder) -> tuple[Value, Value]:
    """Return ``x`` rounded to bf16, and the rounded remainder; the remainder of an infinite number is 0."""
    high = b.convert(x, "bf16")
    back = b.convert(high, "f32")
    return high, b.convert(_value_where_finite(back, b.make("sub", (x, back)), b), "bf16")


def _value_where_finite(test: Value, value: Value, b: Builder) -> Value:
    """Return ``value`` where ``test`` is finite, and 0 elsewhere."""
    none = b.broadcast(b.constant(0.0, TensorType("f32", ())), (), value.type.shape)
    return b.make("select", (b.make("is_finite", (test,)), value, none))
