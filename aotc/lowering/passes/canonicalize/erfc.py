"""Recognise the complementary error function in JAX's expansion of it: three polynomials and an exponential.

JAX exports ``erfc`` of 32 bits (exact gelu, ``norm.cdf``) as::

    %90 = select(|%x| < 1, 1 - %x * T(%x * %x), select(%x < 0, 2 - %tail, %tail))
    ->
    %90 = erfc %x

where the tail is an exponential times one of two polynomials. The expansion computes all of them for each element, with
three divisions; the op ``erfc`` has one division, and an error of 5 units in the last place instead of 64.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.analysis.constant_values import splat_of
from aotc.lowering.passes.rewrite import Builder

Pattern = Any  # "x", the argument; a number; or (op, operands...)


def _horner_pattern(at: Pattern, *coefficients: float) -> Pattern:
    """Return the pattern of a polynomial by Horner's rule, highest power first."""
    first, second, *rest = coefficients
    start = ("add", ("mul", at, first), second)
    return reduce(lambda total, c: ("add", ("mul", total, at), c), rest, start)


_SQUARE = ("mul", "x", "x")
_INVERSE = ("div", 1.0, _SQUARE)
_NEAR = _horner_pattern(
    _SQUARE, 7.853861353153693e-5, -8.010193625184903e-4, 5.188327685732524e-3, -2.685381193529856e-2,
    1.128358514861418e-1, -3.761262582423300e-1, 1.128379165726710,
)  # fmt: skip
_MIDDLE = _horner_pattern(
    _INVERSE, 2.326819970068386e-2, -1.387039388740657e-1, 3.687424674597105e-1, -5.824733027278666e-1,
    6.210004621745983e-1, -4.944515323274145e-1, 3.404879937665872e-1, -2.741127028184656e-1, 5.638259427386472e-1,
)  # fmt: skip
_FAR = _horner_pattern(
    _INVERSE, -1.047766399936249e1, 1.297719955372516e1, -7.495518717768503, 2.921019019210786, -1.015265279202700,
    4.218463358204948e-1, -2.820767439740514e-1, 5.641895067754075e-1,
)  # fmt: skip
_POWER = ("mul", ("exp", ("neg", _SQUARE)), ("div", 1.0, ("abs", "x")))
_DECAYED = ("mul", _POWER, ("select", ("lt", ("abs", "x"), 2.0), _MIDDLE, _FAR))
_TAIL = ("select", ("lt", ("neg", _SQUARE), -88.7228390520683), 0.0, _DECAYED)
_ERFC = (
    "select",
    ("lt", ("abs", "x"), 1.0),
    ("sub", 1.0, ("mul", "x", _NEAR)),
    ("select", ("lt", "x", 0.0), ("sub", 2.0, _TAIL), _TAIL),
)


def erfc_from_expansion(op: Op, b: Builder) -> Value | None:
    """Return ``erfc`` in place of a ``select`` that is the end of its 32-bit expansion, or None."""
    test = b.definitions.get(op.operands[0])
    size = b.definitions.get(test.operands[0]) if test is not None and test.name == "lt" else None
    if size is None or size.name != "abs" or op.result.type.dtype != "f32":
        return None
    for x in (size.operands[0], size.result):  # the latter if the argument is itself an abs
        if all(_matches_erfc_pattern(v, part, x, b) for v, part in zip(op.operands, _ERFC[1:], strict=True)):
            return b.make("erfc", (x,))
    return None


def _matches_erfc_pattern(v: Value, pattern: Pattern, x: Value, b: Builder) -> bool:
    """Return True if the ops that compute ``v`` match ``pattern`` of an expansion of ``erfc(x)``."""
    if pattern == "x":
        return v is x
    if isinstance(pattern, float):
        number = splat_of(v, b.definitions)
        return number is not None and bool(number == np.float32(pattern))
    op, (name, *parts) = b.definitions.get(v), pattern
    if pattern == ("abs", "x") and v is x:
        return op is not None and op.name == "abs"
    return (
        op is not None
        and op.name == name
        and all(_matches_erfc_pattern(*pair, x, b) for pair in zip(op.operands, parts))
    )
