"""Simplify elementwise ops by exact identities only, which also hold for signed zeros and NaN.

Each rule returns the value that replaces the result of the op, or None.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from aotc.ir.opset import COMMUTATIVE
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.analysis.constant_values import iota_dim, splat_of
from aotc.lowering.passes.canonicalize.erfc import erfc_from_expansion
from aotc.lowering.passes.rewrite import Builder
from aotc.vmfb.dtypes import DTYPES, kind_of
from aotc.vmfb.float_formats import SMALL_FLOATS

# Largest magnitude of the binary exponent of a divisor. Division by a power of two equals multiplication by its inverse
# while the inverse is a normal number, also in f16. IEEE 754: the smallest normal f16 is 2^-14.
EXACT_EXPONENT = 14


Rule = Callable[[Op, Builder], "Value | None"]

_MANTISSA = {"f16": 11, "bf16": 8, "f32": 24, "f64": 53}


def simplify_algebra(op: Op, b: Builder) -> Value | None:
    """Return a simpler value equal to the result of the elementwise ``op``, or None."""
    rule = _RULES.get(op.name)
    if rule is not None:
        return rule(op, b)
    return _simplify_binary(op, b) if len(op.operands) == 2 else None


def _cancel_inverse_rule(name: str, part: int = 0) -> Rule:
    """Return the rule that cancels an op with its inverse ``name``: the result is the operand of ``name``."""

    def cancel_inverse(op: Op, b: Builder) -> Value | None:
        inner = b.definitions.get(op.operands[0])
        return inner.operands[part] if inner is not None and inner.name == name else None

    return cancel_inverse


def _drop_repeated_op_rule(*names: str) -> Rule:
    """Return the rule that replaces an op by its operand if one of the ops ``names`` computes the operand."""

    def drop_repeated_op(op: Op, b: Builder) -> Value | None:
        inner = b.definitions.get(op.operands[0])
        return op.operands[0] if inner is not None and inner.name in names else None

    return drop_repeated_op


def _simplify_binary(op: Op, b: Builder) -> Value | None:
    """Simplify an elementwise op of two operands that are equal, or of which one is a constant."""
    x, y = op.operands
    right = splat_of(y, b.definitions)
    if right is None and op.name in COMMUTATIVE and splat_of(x, b.definitions) is not None:
        return b.make(op.name, (y, x))
    if x is y:
        return _simplify_same_operands(op, x, kind_of(x.type.dtype), b)
    if right is None:
        return None
    kind = kind_of(x.type.dtype)
    if op.name == "pow":
        return _power_as_products(x, right, kind, b)
    if kind == "f":
        return _simplify_float_and_constant(op, x, float(right), b)
    if kind in "iu":
        return _simplify_integer_and_constant(op, x, y, int(right), b)
    return _simplify_bool_and_constant(op, x, y, bool(right), b) if kind == "b" else None


def _simplify_same_operands(op: Op, x: Value, kind: str, b: Builder) -> Value | None:
    """Simplify ``x op x``, such as ``x - x`` to 0 for integers."""
    match op.name:
        case "max" | "min" if kind != "c":
            return x
        case "and" | "or":
            return x
        case "sub" | "xor" if kind in "iub":
            return b.constant(0, x.type)
        case "eq" | "le" | "ge" if kind in "iub":
            return b.constant(True, op.result.type)
        case "ne" | "lt" | "gt" if kind in "iub":
            return b.constant(False, op.result.type)
    return None


def _simplify_float_and_constant(op: Op, x: Value, c: float, b: Builder) -> Value | None:
    """Simplify a float op with the constant ``c`` as right operand, without a change of bits."""
    match op.name:
        case "mul" | "div" if c == 1:
            return x
        case "mul" if x.type.dtype in _MANTISSA and _is_power_of_two_fraction(c):
            return _distribute_scale_over_sum(x, c, b)
        case "sub" if c == 0 and math.copysign(1, c) > 0:
            return x
        case "add" if c == 0 and math.copysign(1, c) < 0:
            return x
        case "div" if x.type.dtype in _MANTISSA and math.isfinite(c) and c != 0:
            mantissa, exponent = math.frexp(c)
            if abs(mantissa) == 0.5 and abs(exponent) <= EXACT_EXPONENT:
                return b.make("mul", (x, b.constant(1 / c, x.type)))
    return None


def _is_power_of_two_fraction(c: float) -> bool:
    """Return True if ``c`` is a power of two below 1: a half, a quarter and so on."""
    mantissa, exponent = math.frexp(c)
    return mantissa == 0.5 and -EXACT_EXPONENT < exponent < 1


def _distribute_scale_over_sum(x: Value, c: float, b: Builder) -> Value | None:
    """Rewrite ``(t + k) * c`` as ``t * c + k * c``: one instruction (FMA) with the same bits.

    Gelu contains half of ``1 + tanh``. f16 is left alone, as the product with a small ``t`` may underflow there.
    """
    definition = b.definitions.get(x)
    if definition is None or definition.name != "add" or x.type.dtype == "f16":
        return None
    constant = splat_of(definition.operands[1], b.definitions)
    term = math.inf if constant is None else float(constant)
    if not 2.0**-EXACT_EXPONENT < abs(term * c) <= abs(term) < 2.0**EXACT_EXPONENT:
        return None
    scaled = b.make("mul", (definition.operands[0], b.constant(c, x.type)))
    return b.make("add", (scaled, b.constant(term * c, x.type)))


def _simplify_integer_and_constant(op: Op, x: Value, y: Value, c: int, b: Builder) -> Value | None:
    """Simplify an integer op with the constant ``c`` (the value ``y``) as right operand."""
    all_ones = -1 if kind_of(x.type.dtype) == "i" else (1 << DTYPES[x.type.dtype].bits) - 1
    match op.name, c:
        case "add" | "sub" | "or" | "xor" | "shl" | "shr_arith" | "shr_logic", 0:
            return x
        case "mul" | "div", 1:
            return x
        case "mul" | "and", 0:
            return y
        case "rem", 1:
            return b.constant(0, x.type)
        case "lt" | "ge", 0 if iota_dim(x, b.definitions) is not None:
            return b.constant(op.name == "ge", op.result.type)
        case "and", _ if c == all_ones:
            return x
        case "or", _ if c == all_ones:
            return y
    return None


def _simplify_bool_and_constant(op: Op, x: Value, y: Value, c: bool, b: Builder) -> Value | None:
    """Simplify a logical op with the constant ``c`` (the value ``y``) as right operand."""
    match op.name, c:
        case ("and" | "mul" | "eq" | "min", True) | ("or" | "add" | "xor" | "ne" | "max", False):
            return x
        case ("and" | "mul" | "min", False) | ("or" | "add" | "max", True):
            return y
        case ("xor" | "ne", True) | ("eq", False):
            return b.make("not", (x,))
    return None


def _power_as_products(x: Value, exponent: np.ndarray, kind: str, b: Builder) -> Value | None:
    """Rewrite ``x**1``, ``x**2`` and ``x**3`` as products, as XLA does."""
    if kind not in "iuf" or float(exponent) not in (1, 2, 3):
        return None
    result = x
    for _ in range(int(exponent) - 1):
        result = b.make("mul", (result, x))
    return result


def _simplify_select(op: Op, b: Builder) -> Value | None:
    """Simplify a ``select`` with a constant, negated or boolean operand."""
    pred, x, y = op.operands
    constant = splat_of(pred, b.definitions)
    if constant is not None:
        return x if bool(constant) else y
    if x is y:
        return x
    definition = b.definitions.get(pred)
    if definition is not None and definition.name == "not":
        return b.make("select", (definition.operands[0], y, x))
    if x.type.dtype == "i1":
        left, right = splat_of(x, b.definitions), splat_of(y, b.definitions)
        if left is not None and right is not None and bool(left) != bool(right):
            return pred if bool(left) else b.make("not", (pred,))
    return erfc_from_expansion(op, b)


def _simplify_convert(op: Op, b: Builder) -> Value | None:
    """Remove a conversion to the same dtype, and the first of two conversions if it is lossless."""
    x = op.operands[0]
    target = op.result.type
    if x.type.dtype == target.dtype:
        return x
    inner = b.definitions.get(x)
    if (
        inner is None
        or inner.name != "convert"
        or not _is_lossless_conversion(inner.operands[0].type.dtype, x.type.dtype)
    ):
        return None
    source = inner.operands[0]
    return b.convert(source, target.dtype)


def _is_lossless_conversion(source: str, wide: str) -> bool:
    """Return True if ``wide`` represents every ``source`` exactly: a further conversion then reads the same number."""
    a, w = DTYPES[source], DTYPES[wide]
    if a.kind == "b":
        return wide not in SMALL_FLOATS or SMALL_FLOATS[wide].special != "power"  # powers of two have no 0
    if a.kind == "f":
        exact = a.name in _MANTISSA and w.name in _MANTISSA and _MANTISSA[a.name] <= _MANTISSA[w.name]
        return exact and (a.name, w.name) not in (("bf16", "f16"), ("f16", "bf16"))
    if a.kind in "iu" and w.kind in "iu":
        return w.bits > a.bits and (a.kind == w.kind or a.kind == "u")
    return False


_RULES: dict[str, Rule] = {
    "convert": _simplify_convert,
    "select": _simplify_select,
    "neg": _cancel_inverse_rule("neg"),
    "not": _cancel_inverse_rule("not"),
    "conj": _cancel_inverse_rule("conj"),
    "real": _cancel_inverse_rule("complex", 0),
    "imag": _cancel_inverse_rule("complex", 1),
    "abs": _drop_repeated_op_rule("abs"),
    "floor": _drop_repeated_op_rule("floor", "ceil"),
    "ceil": _drop_repeated_op_rule("floor", "ceil"),
}
