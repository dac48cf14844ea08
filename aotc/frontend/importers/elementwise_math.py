"""Import of MLIR's ``math`` ops, which occur next to StableHLO in models of torch-mlir, IREE and onnx-mlir."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from aotc.frontend.importers.elementwise import COMPLEX_CHLO, COMPOSITES
from aotc.frontend.session import Importer, State
from aotc.ir.tensor.ir import TensorType, Value
from aotc.vmfb.dtypes import DTYPES, to_numpy

_DIRECT = {
    "math.absf": "abs", "math.absi": "abs", "math.atan2": "atan2", "math.cbrt": "cbrt", "math.ceil": "ceil",
    "math.cos": "cos", "math.ctlz": "clz", "math.ctpop": "popcnt", "math.erf": "erf", "math.erfc": "erfc",
    "math.exp": "exp", "math.expm1": "expm1", "math.floor": "floor", "math.isfinite": "is_finite", "math.log": "log",
    "math.log1p": "log1p", "math.powf": "pow", "math.round": "round_afz", "math.roundeven": "round_even",
    "math.rsqrt": "rsqrt", "math.sin": "sin", "math.sqrt": "sqrt", "math.tan": "tan", "math.tanh": "tanh",
}  # fmt: skip
OF_CHLO = tuple(COMPLEX_CHLO.values())
"""Ops on tensors that are replaced by the CHLO op of the same name at the import."""


def _direct(name: str) -> Importer:
    return lambda state, op: state.bind(op, [state.one(name, state.operands(op))])


def _number(state: State, value: float, like: Value) -> Value:
    return state.constant(np.array(value).astype(to_numpy(like.type.dtype)), like.type)


def _nan(state: State, x: Value) -> Value:
    return state.one("ne", [x, x])


def _signed(state: State, size: Value, sign: Value) -> Value:
    """Return ``size`` with the sign of ``sign``, including the sign of a zero or a NaN."""
    t = TensorType(f"i{DTYPES[sign.type.dtype].bits}", sign.type.shape)
    bits = state.one("bitcast", [sign], {}, [t])
    negative = state.one("lt", [bits, state.constant(np.zeros((), to_numpy(t.dtype)), t)])
    size = state.one("abs", [size])
    return state.one("select", [negative, state.one("neg", [size]), size])


def _copysign(state: State, op: Any) -> None:
    size, sign = state.operands(op)
    state.bind(op, [_signed(state, size, sign)])


def _trunc(state: State, op: Any) -> None:
    (x,) = state.operands(op)
    state.bind(op, [_signed(state, state.one("floor", [state.one("abs", [x])]), x)])


def _is_infinite(state: State, op: Any) -> None:
    (x,) = state.operands(op)
    state.bind(op, [state.one("eq", [state.one("abs", [x]), _number(state, np.inf, x)])])


def _is_nan(state: State, op: Any) -> None:
    state.bind(op, [_nan(state, state.value(op.operands[0]))])


def _is_normal(state: State, op: Any) -> None:
    (x,) = state.operands(op)
    least = _number(state, float(ml_dtypes.finfo(to_numpy(x.type.dtype)).smallest_normal), x)
    large = state.one("ge", [state.one("abs", [x]), least])
    state.bind(op, [state.one("and", [large, state.one("is_finite", [x])])])


def _clampf(state: State, op: Any) -> None:
    x, low, high = state.operands(op)
    state.bind(op, [state.one("min", [state.one("max", [x, low]), high])])


def _wide(function: Callable[[State, list[Value]], Value]) -> Importer:
    """Return an importer that applies ``function`` in f64 and rounds the result to the op's type."""

    def importer(state: State, op: Any) -> None:
        operands = state.operands(op)
        result = function(state, [state.convert(v, "f64") for v in operands])
        state.bind(op, [state.convert(result, operands[0].type.dtype)])

    return importer


def _logarithm(base: float) -> Importer:
    """Return the importer of a logarithm, computed in f64: exact for powers of ``base`` after rounding."""
    divisor = float(np.log(base))
    return _wide(lambda state, v: state.one("div", [state.one("log", v), _number(state, divisor, v[0])]))


def _exp2(state: State, values: list[Value]) -> Value:
    return state.one("pow", [_number(state, 2, values[0]), values[0]])


def _fma(state: State, op: Any) -> None:
    """Import a fused multiply-add in f64, where a product of two f32 is exact; f64 has no wider type."""
    a, b, c = state.operands(op)
    if a.type.dtype == "f64":
        state.fail(f"{op.name} on f64 is not supported", "arith.mulf and arith.addf, which round twice")
    wide = [state.convert(v, "f64") for v in (a, b, c)]
    total = state.one("add", [state.one("mul", wide[:2]), wide[2]])
    state.bind(op, [state.convert(total, a.type.dtype)])


def _power_of_integer(state: State, op: Any) -> None:
    """Import ``math.fpowi``, a float to the power of an integer."""
    x, exponent = state.operands(op)
    wide = "f64" if DTYPES[exponent.type.dtype].bits > 16 else "f32"  # f64 represents every exponent of i32
    dtype = x.type.dtype
    power = state.one("pow", [state.convert(x, wide), state.convert(exponent, wide)])
    state.bind(op, [state.convert(power, dtype)])


def _sincos(state: State, op: Any) -> None:
    (x,) = state.operands(op)
    state.bind(op, [state.one("sin", [x]), state.one("cos", [x])])


def _trailing_zeros(state: State, op: Any) -> None:
    """Count trailing zeros as the ones of ``~x & (x - 1)``: the bits below the lowest one."""
    (x,) = state.operands(op)
    below = state.one("sub", [x, state.constant(np.array(1, to_numpy(x.type.dtype)), x.type)])
    state.bind(op, [state.one("popcnt", [state.one("and", [state.one("not", [x]), below])])])


_MEANINGS: dict[str, Importer] = {
    **{name: COMPOSITES[f"chlo.{name}"] for name in ("cosh", "sinh")},
    "copysign": _copysign,
    "trunc": _trunc,
    "isinf": _is_infinite,
    "isnan": _is_nan,
    "isnormal": _is_normal,
    "clampf": _clampf,
    "log2": _logarithm(2),
    "log10": _logarithm(10),
    "exp2": _wide(_exp2),
    "fma": _fma,
    "fpowi": _power_of_integer,
    "sincos": _sincos,
    "cttz": _trailing_zeros,
}

ELEMENTWISE_MATH: dict[str, Importer] = {
    **{name: _direct(ours) for name, ours in _DIRECT.items()},
    **{f"math.{name}": importer for name, importer in _MEANINGS.items()},
}
