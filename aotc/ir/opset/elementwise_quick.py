"""Scalar functions on two or three NumPy scalars: the same results as the references on arrays, in less time."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from aotc.ir.opset.elementwise_scalars import ScalarOp
from aotc.vmfb.dtypes import DTYPES, from_numpy, to_numpy

_INFIX: dict[str, Callable] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_PREFIX: dict[str, Callable] = {"-": operator.neg, "~": operator.invert}
_FLOATS = {np.float32, np.float64}
_COMPLEX = {np.complex64, np.complex128}
_INTEGERS = {np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64}
_F32_EXPONENT, _F32_MANTISSA = 8, 23


def quick_scalar(scalar: ScalarOp, kinds: tuple[type, ...], exact: Callable) -> Callable:
    """Return a function that computes ``scalar`` on NumPy scalars of the types ``kinds``, faster than ``exact``.

    ``exact`` is the general implementation; it is returned if there is no faster one.
    """
    if scalar.name == "select" and kinds[0] is np.bool_ and kinds[1] is kinds[2]:
        return lambda which, a, b: a if which else b
    one, same = kinds[0], len(set(kinds)) == 1
    if not same or scalar.total:
        return exact
    if one is int and scalar.result == "bool" and scalar.symbol:
        compare = _INFIX[scalar.symbol]
        return lambda a, b: np.bool_(compare(a, b))
    if one in _COMPLEX and scalar.symbol == "*":  # its operator rounds differently
        return np.multiply
    if scalar.symbol and one in _FLOATS | _INTEGERS | _COMPLEX | {np.bool_}:
        return (_PREFIX if scalar.arity == 1 else _INFIX)[scalar.symbol]
    if one in _FLOATS and isinstance(scalar.reference, np.ufunc):
        return scalar.reference
    if one in _FLOATS | _INTEGERS:
        return _checked_fast_path(scalar.name, one, exact)
    return exact


def _checked_fast_path(name: str, kind: type, exact: Callable) -> Callable:
    """Return a function for op ``name`` that handles common operands fast and calls ``exact`` for all others."""
    whole, signed = kind in _INTEGERS, issubclass(kind, np.signedinteger)
    bits = np.dtype(kind).itemsize * 8
    match name:
        case "max":
            return lambda a, b: a if a > b else b if a < b else exact(a, b)
        case "min":
            return lambda a, b: a if a < b else b if a > b else exact(a, b)
        case "div":
            return (lambda a, b: a // b if a >= 0 and b > 0 else exact(a, b)) if whole else operator.truediv
        case "rem" if whole:
            return lambda a, b: a % b if a >= 0 and b > 0 else exact(a, b)
        case "shl":
            return lambda a, b: a << b if 0 <= b < bits else exact(a, b)
        case "shr_arith" | "shr_logic" if signed == (name == "shr_arith"):
            return lambda a, b: a >> b if 0 <= b < bits else exact(a, b)
        case "popcnt" if not signed:
            return lambda a: kind(int(a).bit_count())
    return exact


def quick_convert(source: type, dtype: str, exact: Callable) -> Callable:
    """Return a function that converts scalars to ``dtype``: NumPy's if it agrees with StableHLO, else ``exact``."""
    if not issubclass(source, np.generic):
        return exact
    given, wanted, kind = DTYPES[from_numpy(np.dtype(source))], DTYPES[dtype], to_numpy(dtype)
    whole = (given.kind in "iu" and given.bits >= 8) or given.kind == "b"
    if whole and (dtype in ("f32", "f64") or (wanted.kind in "iu" and wanted.bits >= 8)):
        return lambda x: x.astype(kind)
    if given.name in ("f16", "bf16", "f32") and dtype in ("f16", "bf16", "f32", "f64"):
        return lambda x: x.astype(kind)
    return exact


def quick_precision(x: Any, exponent_bits: int, mantissa_bits: int) -> Any:
    """Round the f32 ``x`` to ``mantissa_bits``.

    Return None if that is not enough: for NaN, for other dtypes, and for fewer exponent bits than f32.
    """
    if type(x) is not np.float32 or exponent_bits < _F32_EXPONENT or mantissa_bits >= _F32_MANTISSA or x != x:
        return None
    bits, drop = int(x.view(np.uint32)), _F32_MANTISSA - mantissa_bits
    bits += (1 << (drop - 1)) - 1 + (bits >> drop & 1)
    return np.uint32(bits >> drop << drop).view(np.float32)
