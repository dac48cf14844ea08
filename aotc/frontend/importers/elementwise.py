"""Import of elementwise StableHLO and CHLO ops."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir.dialects import stablehlo

from aotc.frontend.constants import constant_elements
from aotc.frontend.requirements import require_shape
from aotc.frontend.session import Importer, ImportState
from aotc.ir.opset import SCALARS
from aotc.ir.tensor.ir import TensorType, Value
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
    "chlo.digamma": "digamma", "chlo.lgamma": "lgamma", "chlo.next_after": "next_after", "chlo.tan": "tan",
}  # fmt: skip
COMPLEX_CHLO = {
    "chlo.acos": "acos", "chlo.acosh": "acosh", "chlo.asin": "asin", "chlo.asinh": "asinh", "chlo.atan": "atan",
    "chlo.atanh": "atanh",
}  # fmt: skip
"""CHLO ops that have an importer for complex numbers; jaxlib expands them for real ones."""


def is_complex_only(op: Any, name: str) -> bool:
    """Return True if the CHLO op ``name`` has an importer for complex numbers only, and ``op`` has real operands."""
    return name in COMPLEX_CHLO and "complex<" not in str(op.operands[0].type)


def _elementwise_importer(name: str) -> Importer:
    """Return the importer of a StableHLO op that is the elementwise tensor op ``name``."""

    def importer(state: ImportState, op: Any) -> None:
        operands = state.operands(op)
        if SCALARS[name].result == "real" and kind_of(operands[0].type.dtype) not in "fci":
            state.fail(f"{op.name} is not defined on {operands[0].type.dtype}")
        state.bind(op, [state.one(name, operands)])

    return importer


def _import_compare(state: ImportState, op: Any) -> None:
    """Import ``compare``: one op per direction, with another name for the total order of floats."""
    direction = stablehlo.ComparisonDirectionAttr(op.attributes["comparison_direction"]).value.lower()
    operands = state.operands(op)
    total = "compare_type" in op.attributes and kind_of(operands[0].type.dtype) == "f"
    if total and stablehlo.ComparisonTypeAttr(op.attributes["compare_type"]).value == "TOTALORDER":
        direction += "_total"
    state.bind(op, [state.one(direction, operands)])


def _import_select(state: ImportState, op: Any) -> None:
    pred, first, second = state.operands(op)
    pred = state.broadcast_scalar(pred, first.type.shape) if pred.type.rank == 0 else pred
    state.bind(op, [state.one("select", [pred, first, second])])


def _import_clamp(state: ImportState, op: Any) -> None:
    low, x, high = state.operands(op)
    low, high = (state.broadcast_scalar(v, x.type.shape) if v.type.rank == 0 else v for v in (low, high))
    state.bind(op, [state.one("min", [state.one("max", [x, low]), high])])


def _import_convert(state: ImportState, op: Any) -> None:
    (x,) = state.operands(op)
    state.bind(op, [state.convert(x, state.dtype(op.results[0].type))])


def _import_bitcast(state: ImportState, op: Any) -> None:
    """Import ``bitcast_convert``; the last dim has the parts of an element if dtypes differ in width."""
    (x,) = state.operands(op)
    dtype, shape = state.session.parts(op.results[0].type)
    dims = x.type.shape if len(shape) <= x.type.rank else (*x.type.shape, shape[-1])
    if len(shape) < x.type.rank:  # the last dim has the parts of one element
        parts = DTYPES[dtype].bits // max(DTYPES[x.type.dtype].bits, 1)
        x = require_shape(state, x, (*x.type.shape[:-1], parts))
    state.bind(op, [state.one("bitcast", [x], {}, [TensorType(dtype, dims[: len(shape)])])])


def _import_reduce_precision(state: ImportState, op: Any) -> None:
    attrs = {k: op.attributes[k].value for k in ("exponent_bits", "mantissa_bits")}
    state.bind(op, [state.one("reduce_precision", state.operands(op), attrs)])


def _import_constant(state: ImportState, op: Any) -> None:
    """Import a constant; refuse elements that cannot be read."""
    t = state.static_type(op.results[0].type)
    try:
        array = constant_elements(op, t)
    except ValueError as error:
        state.fail(str(error))
    state.bind(op, [state.constant(array, t)])


def _complex_parts(state: ImportState, z: Value) -> tuple[Value, Value]:
    return state.one("real", [z]), state.one("imag", [z])


def _import_square(state: ImportState, op: Any) -> None:
    """Import ``chlo.square`` as ``x * x``; complex squares avoid overflow of their parts' squares."""
    (x,) = state.operands(op)
    if kind_of(x.type.dtype) != "c":
        return state.bind(op, [state.one("mul", [x, x])])
    a, b = _complex_parts(state, x)  # their squares may overflow one by one
    ab, size = state.one("mul", [a, b]), [state.one("abs", [v]) for v in (a, b)]
    product = state.one("mul", [state.one("sub", [a, b]), state.one("add", [a, b])])
    real = state.one("select", [state.one("eq", size), state.one("sub", size), product])  # NaN of two infinities
    state.bind(op, [state.one("complex", [real, state.one("add", [ab, ab])])])


def _hyperbolic_importer(name: str) -> Importer:
    """Return the importer of ``chlo.cosh`` or ``chlo.sinh``, more accurate than jaxlib's ``exp(x + log(1/2))``.

    Real numbers use ``exp(|x| - c)`` times the constant ``exp(c) / 2``, which overflows only where the result does.
    Complex numbers use ``cosh z = cos iz`` and ``sinh z = -i sin iz``.
    """
    is_cosh = name == "cosh"

    def importer(state: ImportState, op: Any) -> None:
        """Import ``sinh`` or ``cosh``; of complex numbers by sine and cosine of the number times i."""
        (x,) = state.operands(op)
        if kind_of(x.type.dtype) == "c":
            a, b = _complex_parts(state, x)
            swapped = state.one("complex", [state.one("neg", [b]), a])
            value = state.one("cos" if is_cosh else "sin", [swapped])
            if not is_cosh:
                real, imag = _complex_parts(state, value)
                value = state.one("complex", [imag, state.one("neg", [real])])
            return state.bind(op, [value])
        wide = x if DTYPES[x.type.dtype].bits >= 32 else state.convert(x, "f32")
        state.bind(op, [state.convert(_hyperbolic_of(state, wide, is_cosh), x.type.dtype)])

    return importer


# c and exp(c) / 2. c has 12 bits after the point, so that |x| - c is exact where its rounding error would matter. Among
# such numbers between 3/4 and 11/4, its exp(c) / 2 is nearest to a number of the type, within 2e-4 units in the last
# place.
_HALF_POWERS = {"f32": (2.38916015625, 5.4521660804748535), "f64": (2.239990234375, 4.696619778069918)}


def _hyperbolic_of(state: ImportState, x: Value, is_cosh: bool) -> Value:
    """Return cosh or sinh of real ``x``, without overflow of intermediates; sinh near 0 uses ``expm1``."""
    number = lambda v: state.constant(np.array(v, to_numpy(x.type.dtype)), x.type)
    size = state.one("abs", [x])
    shift, half_power = _HALF_POWERS[x.type.dtype]
    large = state.one("mul", [state.one("exp", [state.one("sub", [size, number(shift)])]), number(half_power)])
    small = state.one("div", [number(0.25), large])
    if is_cosh:
        return state.one("add", [large, small])
    near = state.one("expm1", [size])  # large and small cancel where x is small; beyond this it may overflow
    sum_ = state.one("add", [near, state.one("div", [near, state.one("add", [near, number(1)])])])
    is_large = state.one("gt", [size, number(10)])
    value = state.one(
        "select", [is_large, state.one("sub", [large, small]), state.one("mul", [sum_, number(0.5)])]
    )
    return state.one("mul", [value, state.one("sign", [x])])


def _is_infinite_importer(name: str) -> Importer:
    """Return the importer of ``is_inf``, ``is_pos_inf`` or ``is_neg_inf``: a comparison with infinity."""

    def importer(state: ImportState, op: Any) -> None:
        """Import a test for infinity of either or one sign."""
        (x,) = state.operands(op)
        if x.type.dtype in SMALL_FLOATS:  # not all formats have an infinity to compare with
            x = state.convert(x, "f32")
        bound = np.array(-np.inf if name == "is_neg_inf" else np.inf).astype(to_numpy(x.type.dtype))
        x = state.one("abs", [x]) if name == "is_inf" else x
        state.bind(op, [state.one("eq", [x, state.constant(bound, x.type)])])

    return importer


COMPOSITES: dict[str, Importer] = {
    **{name: _elementwise_importer(ours) for name, ours in (CHLO | COMPLEX_CHLO).items()},
    **{f"chlo.{name}": _is_infinite_importer(name) for name in ("is_inf", "is_pos_inf", "is_neg_inf")},
    **{f"chlo.{name}": _hyperbolic_importer(name) for name in ("cosh", "sinh")},
    "chlo.square": _import_square,
}
"""CHLO ops that ``jax.export`` writes as ``stablehlo.composite`` with their names."""

ELEMENTWISE: dict[str, Importer] = {
    **{name: _elementwise_importer(ours) for name, ours in DIRECT.items()},
    **COMPOSITES,
    "stablehlo.compare": _import_compare,
    "stablehlo.select": _import_select,
    "stablehlo.clamp": _import_clamp,
    "stablehlo.convert": _import_convert,
    "stablehlo.bitcast_convert": _import_bitcast,
    "stablehlo.reduce_precision": _import_reduce_precision,
    "stablehlo.constant": _import_constant,
    "chlo.constant": _import_constant,
    "arith.constant": _import_constant,
    "sdy.constant": _import_constant,
}
