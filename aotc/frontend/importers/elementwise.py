"""Import of elementwise StableHLO and CHLO ops."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir.dialects import stablehlo

from aotc.frontend.constants import elements
from aotc.frontend.requirements import with_shape
from aotc.frontend.session import Importer, State
from aotc.ir.opset import SCALARS
from aotc.ir.tensor_ir import TensorType
from aotc.vmfb.dtypes import DTYPES, kind_of, to_numpy
from aotc.vmfb.float_formats import SMALL_FLOATS

DIRECT = {
    "stablehlo.negate": "neg", "stablehlo.abs": "abs", "stablehlo.sign": "sign", "stablehlo.exponential": "exp",
    "stablehlo.exponential_minus_one": "expm1", "stablehlo.log": "log", "stablehlo.log_plus_one": "log1p",
    "stablehlo.sqrt": "sqrt", "stablehlo.rsqrt": "rsqrt", "stablehlo.cbrt": "cbrt", "stablehlo.sine": "sin",
    "stablehlo.cosine": "cos", "stablehlo.tan": "tan", "stablehlo.tanh": "tanh", "stablehlo.logistic": "logistic",
    "stablehlo.floor": "floor", "stablehlo.ceil": "ceil", "stablehlo.round_nearest_even": "round_even",
    "stablehlo.round_nearest_afz": "round_afz", "stablehlo.is_finite": "is_finite", "stablehlo.not": "not",
    "stablehlo.popcnt": "popcnt", "stablehlo.count_leading_zeros": "clz", "stablehlo.real": "real",
    "stablehlo.imag": "imag", "stablehlo.add": "add", "stablehlo.subtract": "sub", "stablehlo.multiply": "mul",
    "stablehlo.divide": "div", "stablehlo.remainder": "rem", "stablehlo.power": "pow", "stablehlo.maximum": "max",
    "stablehlo.minimum": "min", "stablehlo.atan2": "atan2", "stablehlo.and": "and", "stablehlo.or": "or",
    "stablehlo.xor": "xor", "stablehlo.shift_left": "shl", "stablehlo.shift_right_arithmetic": "shr_arith",
    "stablehlo.shift_right_logical": "shr_logic", "stablehlo.complex": "complex",
}  # fmt: skip
CHLO = {
    "chlo.erf": "erf", "chlo.erfc": "erfc", "chlo.erf_inv": "erf_inv", "chlo.conj": "conj",
    "chlo.lgamma": "lgamma", "chlo.next_after": "next_after", "chlo.tan": "tan",
}  # fmt: skip


def _direct(name: str) -> Importer:
    def importer(state: State, op: Any) -> None:
        operands = state.operands(op)
        if SCALARS[name].result == "real" and kind_of(operands[0].type.dtype) not in "fci":
            state.fail(f"{op.name} is not defined on {operands[0].type.dtype}")
        state.bind(op, [state.one(name, operands)])

    return importer


def _compare(state: State, op: Any) -> None:
    direction = stablehlo.ComparisonDirectionAttr(op.attributes["comparison_direction"]).value.lower()
    operands = state.operands(op)
    total = "compare_type" in op.attributes and kind_of(operands[0].type.dtype) == "f"
    if total and stablehlo.ComparisonTypeAttr(op.attributes["compare_type"]).value == "TOTALORDER":
        direction += "_total"
    state.bind(op, [state.one(direction, operands)])


def _select(state: State, op: Any) -> None:
    pred, first, second = state.operands(op)
    pred = state.broadcast_scalar(pred, first.type.shape) if pred.type.rank == 0 else pred
    state.bind(op, [state.one("select", [pred, first, second])])


def _clamp(state: State, op: Any) -> None:
    low, x, high = state.operands(op)
    low, high = (state.broadcast_scalar(v, x.type.shape) if v.type.rank == 0 else v for v in (low, high))
    state.bind(op, [state.one("min", [state.one("max", [x, low]), high])])


def _convert(state: State, op: Any) -> None:
    (x,) = state.operands(op)
    state.bind(op, [state.convert(x, state.dtype(op.results[0].type))])


def _bitcast(state: State, op: Any) -> None:
    (x,) = state.operands(op)
    dtype, shape = state.session.parts(op.results[0].type)
    dims = x.type.shape if len(shape) <= x.type.rank else (*x.type.shape, shape[-1])
    if len(shape) < x.type.rank:  # the last dim holds the parts of one element
        parts = DTYPES[dtype].bits // max(DTYPES[x.type.dtype].bits, 1)
        x = with_shape(state, x, (*x.type.shape[:-1], parts))
    state.bind(op, [state.one("bitcast", [x], {}, [TensorType(dtype, dims[: len(shape)])])])


def _reduce_precision(state: State, op: Any) -> None:
    attrs = {k: op.attributes[k].value for k in ("exponent_bits", "mantissa_bits")}
    state.bind(op, [state.one("reduce_precision", state.operands(op), attrs)])


def _constant(state: State, op: Any) -> None:
    t = state.static_type(op.results[0].type)
    try:
        array = elements(op, t)
    except ValueError as error:
        state.fail(str(error))
    state.bind(op, [state.constant(array, t)])


def _square(state: State, op: Any) -> None:
    (x,) = state.operands(op)
    state.bind(op, [state.one("mul", [x, x])])


def _is_infinite(name: str) -> Importer:
    def importer(state: State, op: Any) -> None:
        (x,) = state.operands(op)
        if x.type.dtype in SMALL_FLOATS:  # not all have an infinity to compare with
            x = state.convert(x, "f32")
        bound = np.array(-np.inf if name == "is_neg_inf" else np.inf).astype(to_numpy(x.type.dtype))
        x = state.one("abs", [x]) if name == "is_inf" else x
        state.bind(op, [state.one("eq", [x, state.constant(bound, x.type)])])

    return importer


ELEMENTWISE: dict[str, Importer] = {
    **{name: _direct(ours) for name, ours in (DIRECT | CHLO).items()},
    **{f"chlo.{name}": _is_infinite(name) for name in ("is_inf", "is_pos_inf", "is_neg_inf")},
    "stablehlo.compare": _compare,
    "stablehlo.select": _select,
    "stablehlo.clamp": _clamp,
    "stablehlo.convert": _convert,
    "stablehlo.bitcast_convert": _bitcast,
    "stablehlo.reduce_precision": _reduce_precision,
    "stablehlo.constant": _constant,
    "chlo.constant": _constant,
    "sdy.constant": _constant,
    "chlo.square": _square,
}
