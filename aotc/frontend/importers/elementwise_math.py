"""Import of MLIR's ``math`` ops, which occur next to StableHLO in models of torch-mlir, IREE and onnx-mlir."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from aotc.frontend.importers.elementwise import COMPLEX_CHLO, COMPOSITES
from aotc.frontend.session import Importer, ImportState
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


def _math_importer(name: str) -> Importer:
    return lambda state, op: state.bind(op, [state.one(name, state.operands(op))])


def _number_like(state: ImportState, value: float, like: Value) -> Value:
    return state.constant(np.array(value).astype(to_numpy(like.type.dtype)), like.type)


def _nan_like(state: ImportState, x: Value) -> Value:
    return state.one("ne", [x, x])


def _with_sign(state: ImportState, size: Value, sign: Value) -> Value:
    """Return the magnitude ``size`` with the sign of ``sign``, including the sign of a zero or a NaN."""
    t = TensorType(f"i{DTYPES[sign.type.dtype].bits}", sign.type.shape)
    bits = state.one("bitcast", [sign], {}, [t])
    negative = state.one("lt", [bits, state.constant(np.zeros((), to_numpy(t.dtype)), t)])
    size = state.one("abs", [size])
    return state.one("select", [negative, state.one("neg", [size]), size])


def _import_copysign(state: ImportState, op: Any) -> None:
    size, sign = state.operands(op)
    state.bind(op, [_with_sign(state, size, sign)])


def _import_trunc(state: ImportState, op: Any) -> None:
    (x,) = state.operands(op)
    state.bind(op, [_with_sign(state, state.one("floor", [state.one("abs", [x])]), x)])


def _import_is_infinite(state: ImportState, op: Any) -> None:
    (x,) = state.operands(op)
    state.bind(op, [state.one("eq", [state.one("abs", [x]), _number_like(state, np.inf, x)])])


def _import_is_nan(state: ImportState, op: Any) -> None:
    state.bind(op, [_nan_like(state, state.value(op.operands[0]))])


def _import_is_normal(state: ImportState, op: Any) -> None:
    (x,) = state.operands(op)
    least = _number_like(state, float(ml_dtypes.finfo(to_numpy(x.type.dtype)).smallest_normal), x)
    large = state.one("ge", [state.one("abs", [x]), least])
    state.bind(op, [state.one("and", [large, state.one("is_finite", [x])])])


def _import_clampf(state: ImportState, op: Any) -> None:
    x, low, high = state.operands(op)
    state.bind(op, [state.one("min", [state.one("max", [x, low]), high])])


def _f64_importer(function: Callable[[ImportState, list[Value]], Value]) -> Importer:
    """Return an importer that applies ``function`` in f64 and rounds the result to the op's type."""

    def importer(state: ImportState, op: Any) -> None:
        operands = state.operands(op)
        result = function(state, [state.convert(v, "f64") for v in operands])
        state.bind(op, [state.convert(result, operands[0].type.dtype)])

    return importer


def _logarithm_importer(base: float) -> Importer:
    """Return the importer of a logarithm, computed in f64: exact for powers of ``base`` after rounding."""
    divisor = float(np.log(base))
    return _f64_importer(lambda state, v: state.one("div", [state.one("log", v), _number_like(state, divisor, v[0])]))


def _emit_exp2(state: ImportState, values: list[Value]) -> Value:
    return state.one("pow", [_number_like(state, 2, values[0]), values[0]])


def _import_fma(state: ImportState, op: Any) -> None:
    """Import a fused multiply-add in f64, where a product of two f32 is exact; f64 has no wider type."""
    a, b, c = state.operands(op)
    if a.type.dtype == "f64":
        state.fail(f"{op.name} on f64 is not supported", "arith.mulf and arith.addf, which round twice")
    wide = [state.convert(v, "f64") for v in (a, b, c)]
    total = state.one("add", [state.one("mul", wide[:2]), wide[2]])
    state.bind(op, [state.convert(total, a.type.dtype)])


def _import_power_of_integer(state: ImportState, op: Any) -> None:
    """Import ``math.fpowi``, a float to the power of an integer."""
    x, exponent = state.operands(op)
    wide = "f64" if DTYPES[exponent.type.dtype].bits > 16 else "f32"  # f64 represents every exponent of i32
    dtype = x.type.dtype
    power = state.one("pow", [state.convert(x, wide), state.convert(exponent, wide)])
    state.bind(op, [state.convert(power, dtype)])


def _import_sincos(state: ImportState, op: Any) -> None:
    (x,) = state.operands(op)
    state.bind(op, [state.one("sin", [x]), state.one("cos", [x])])


def _import_trailing_zeros(state: ImportState, op: Any) -> None:
    """Import a count of trailing zeros as the number of ones in ``~x & (x - 1)``: the bits below the lowest one."""
    (x,) = state.operands(op)
    below = state.one("sub", [x, state.constant(np.array(1, to_numpy(x.type.dtype)), x.type)])
    state.bind(op, [state.one("popcnt", [state.one("and", [state.one("not", [x]), below])])])


_MEANINGS: dict[str, Importer] = {
    **{name: COMPOSITES[f"chlo.{name}"] for name in ("cosh", "sinh")},
    "copysign": _import_copysign,
    "trunc": _import_trunc,
    "isinf": _import_is_infinite,
    "isnan": _import_is_nan,
    "isnormal": _import_is_normal,
    "clampf": _import_clampf,
    "log2": _logarithm_importer(2),
    "log10": _logarithm_importer(10),
    "exp2": _f64_importer(_emit_exp2),
    "fma": _import_fma,
    "fpowi": _import_power_of_integer,
    "sincos": _import_sincos,
    "cttz": _import_trailing_zeros,
}

ELEMENTWISE_MATH: dict[str, Importer] = {
    **{name: _math_importer(ours) for name, ours in _DIRECT.items()},
    **{f"math.{name}": importer for name, importer in _MEANINGS.items()},
}
