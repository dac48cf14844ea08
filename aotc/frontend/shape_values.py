"""Abstract interpretation of shape arithmetic: the *shape value* of a small integer tensor is a tuple of dims.

:func:`fold_shape_value` evaluates one op on shape values, or returns None for an unknown value. So the size of a
dynamic result becomes the expression that the model computed for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from aotc.frontend.limits import SHAPE_ELEMENTS
from aotc.ir.dims.algebra import Dim, Expr, bounds, floordiv, maximum, minimum, mod, sym
from aotc.ir.dims.compare import decide_relation
from aotc.ir.dims.symbols import substitute
from aotc.ir.opset import COMPARISONS
from aotc.ir.opset.shape import SHAPE
from aotc.ir.opset.spec import static_sizes
from aotc.ir.tensor.ir import TensorType
from aotc.vmfb.dtypes import DTYPES, kind_of

Known = tuple[Dim, ...]


def has_shape_value(t: TensorType) -> bool:
    """Return True if ``t`` is an integer or boolean type of known, small size, which can have a shape value."""
    if kind_of(t.dtype) not in "iub" or not all(isinstance(d, int) for d in t.shape):
        return False
    return math.prod(static_sizes(t)) <= SHAPE_ELEMENTS


def static_element_count(t: TensorType) -> int:
    """Return the number of elements of a type of known size."""
    return math.prod(static_sizes(t))


def _divide_shape_values(a: Dim, b: Dim) -> Dim | None:
    """Return the quotient ``a / b``, rounded to 0 as in StableHLO; None if a sign is unknown."""
    if not isinstance(a, Expr) and not isinstance(b, Expr):
        return None if b == 0 else int(abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)
    if bounds(b)[0] == 0 or (not isinstance(b, Expr) and b < 0):
        return None
    plus, minus = _positive_and_negative_part(a)
    return _floor_divide_shape_values(plus, b) - _floor_divide_shape_values(minus, b)


def _positive_and_negative_part(a: Dim) -> tuple[Dim, Dim]:
    """Return the positive and the negative part of ``a``: ``(max(a, 0), max(-a, 0))``."""
    return maximum(a, 0), maximum(-a, 0)


def _floor_divide_shape_values(a: Dim, b: Dim) -> Dim:
    return floordiv(a, b) if isinstance(a, Expr) or a else 0


def _remainder_of_shape_values(a: Dim, b: Dim) -> Dim | None:
    """Return the remainder of ``a / b``, with the sign of ``a``; None if a sign is unknown."""
    quotient = _divide_shape_values(a, b)
    if quotient is None:
        return None
    if not isinstance(a, Expr) and not isinstance(b, Expr):
        return a - quotient * b
    plus, minus = _positive_and_negative_part(a)
    return (mod(plus, b) if plus != 0 else 0) - (mod(minus, b) if minus != 0 else 0)


def _sign_of_shape_value(a: Dim) -> Dim:
    return maximum(minimum(a, 1), -1)


def _compare_dims(name: str, a: Dim, b: Dim) -> Dim:
    """Return the comparison of two dims: 1 if it holds, 0 if not, an expression if that depends on the call."""
    decided = decide_relation(name, a, b)
    if decided is not None:
        return int(decided)
    match name:
        case "lt":
            return minimum(maximum(b - a, 0), 1)
        case "gt":
            return _compare_dims("lt", b, a)
        case "ge" | "le":
            return 1 - _compare_dims("lt" if name == "ge" else "gt", a, b)
    differ = minimum(maximum(a - b, b - a), 1)
    return differ if name == "ne" else 1 - differ


def _static_shape_value(a: Dim, b: Dim, fn: Callable[[int, int], int]) -> Dim | None:
    return None if isinstance(a, Expr) or isinstance(b, Expr) else fn(int(a), int(b))


_BINARY: dict[str, Callable[[Dim, Dim], Dim | None]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _divide_shape_values,
    "rem": _remainder_of_shape_values,
    "max": maximum,
    "min": minimum,
    "and": lambda a, b: _static_shape_value(a, b, lambda x, y: x & y),
    "or": lambda a, b: _static_shape_value(a, b, lambda x, y: x | y),
    **{name: partial(_compare_dims, name) for name in COMPARISONS},
}
_OF_BOOLEANS: dict[str, Callable[[Dim, Dim], Dim | None]] = {
    "and": minimum, "or": maximum, "max": maximum, "min": minimum,
    **{name: partial(_compare_dims, name) for name in COMPARISONS},
}  # fmt: skip


def fold_shape_value(
    name: str,
    operands: Sequence[Known],
    types: Sequence[TensorType],
    attrs: Mapping[str, Any],
    result: TensorType,
    positive: Mapping[str, Dim],
) -> Known | None:
    """Return the shape value of the result of op ``name``, or None if it is unknown.

    ``positive`` maps the names of symbols that assertions have proven positive to symbols with that bound.
    """
    if not positive:
        values = _shape_value_elements(name, operands, types, attrs, result)
    else:
        bounded = [tuple(substitute(v, positive) for v in operand) for operand in operands]
        sharper = _shape_value_elements(name, bounded, types, attrs, result)
        plain = {n: sym(n) for n in positive}
        values = sharper and [None if v is None else substitute(v, plain) for v in sharper]
    if values is None:
        return None
    fitting = [v for v in values if v is not None and _fits_dtype(v, result.dtype)]
    if len(fitting) != len(values):
        return None
    return tuple(v if isinstance(v, Expr) else int(v) for v in fitting)


def _fits_dtype(value: Dim, dtype: str) -> bool:
    """Return True if ``value`` fits an integer or boolean dtype; symbolic sizes need 32 bits."""
    row = DTYPES[dtype]
    if row.kind == "b":
        return isinstance(value, Expr) or value in (0, 1)
    if isinstance(value, Expr):
        return row.bits >= 32
    low, high = (-(1 << (row.bits - 1)), 1 << (row.bits - 1)) if row.kind == "i" else (0, 1 << row.bits)
    return low <= value < high


def fold_boolean_by_one_operand(name: str, operands: Sequence[Known]) -> Known | None:
    """Return the shape value of a boolean ``and``/``or`` that one operand alone determines, else None."""
    match name:
        case "and":
            decisive = 0
        case "or":
            decisive = 1
        case _:
            return None
    for values in operands:
        if all(v == decisive for v in values):
            return values
    return None


def _shape_value_elements(
    name: str, operands: Sequence[Known], types: Sequence[TensorType], attrs: Mapping[str, Any], result: TensorType
) -> Sequence[Dim | None] | None:
    """Evaluate op ``name`` on shape values; return the elements of its result, or None if it has no rule."""
    if name in _BINARY:
        rule = _BINARY[name] if types[0].dtype != "i1" else _OF_BOOLEANS.get(name)
        return None if rule is None else [rule(a, b) for a, b in zip(*operands)]
    match name:
        case "constant":
            value = np.broadcast_to(attrs["value"], static_sizes(result)).reshape(-1)
            return [int(v) for v in value]
        case "dim":
            return [attrs["expr"]]
        case "convert":
            return operands[0] if kind_of(result.dtype) != "b" or kind_of(types[0].dtype) == "b" else None
        case "neg":
            return [-a for a in operands[0]]
        case "abs":
            return [maximum(a, -a) for a in operands[0]]
        case "sign":
            return [_sign_of_shape_value(a) for a in operands[0]]
        case "not":
            return [1 - a for a in operands[0]] if result.dtype == "i1" else None
        case "select":
            if types[0].shape != result.shape:
                return None
            picked = zip(*operands)
            # A symbolic predicate is 0 or 1.
            return [b + p * (a - b) if isinstance(p, Expr) else (a if p else b) for p, a, b in picked]
        case "reshape":
            return operands[0]
        case "concatenate":
            return _concatenated_shape_values(operands, types, attrs["dim"])
        case "slice" | "broadcast":
            return _moved_shape_values(name, operands[0], types[0], attrs, result)
    return None


def _concatenated_shape_values(operands: Sequence[Known], types: Sequence[TensorType], dim: int) -> Sequence[Dim]:
    """Return the elements of a concatenation along ``dim``, in row-major order."""
    parts = []
    for elements, t in zip(operands, types):
        part = np.empty(len(elements), object)
        part[:] = elements
        parts.append(part.reshape(static_sizes(t)))
    return list(np.concatenate(parts, dim).reshape(-1))


def _moved_shape_values(
    name: str, elements: Known, source: TensorType, attrs: Mapping[str, Any], result: TensorType
) -> Sequence[Dim] | None:
    """Return the elements of a slice or broadcast, by moving their numbers."""
    places = np.arange(len(elements)).reshape([int(d) for d in source.shape if isinstance(d, int)])
    moved = SHAPE[name].reference([places], attrs, (), (result,))[0]
    return [elements[int(i)] for i in moved.reshape(-1)]
