"""Quantization and dequantization as ops of the tensor IR."""

from __future__ import annotations

import numpy as np

from aotc.frontend.quantized.types import Quantization
from aotc.frontend.session import ImportState
from aotc.ir.tensor.ir import TensorType, Value
from aotc.vmfb.dtypes import DTYPES, to_numpy


def dequantize(state: ImportState, v: Value, q: Quantization) -> Value:
    """Return the floats ``(v - zero) * scale`` of the integers ``v``."""
    x = v
    if any(q.zeros):
        work = _working_type(q)
        x = state.one("sub", [state.convert(x, work), broadcast_along_axis(state, q.zeros, work, v, q)])
    x = state.convert(x, q.expressed)
    return state.one("mul", [x, broadcast_along_axis(state, q.scales, q.expressed, v, q)])


def quantize(state: ImportState, x: Value, q: Quantization) -> Value:
    """Return the integers ``clamp(round(x / scale) + zero)``, rounded to nearest even; NaN becomes 0, as in StableHLO.

    Zero points and bounds are applied in a float type that represents every storage integer, so no sum overflows.
    """
    x = state.convert(x, q.expressed)
    scaled = state.one("div", [x, broadcast_along_axis(state, q.scales, q.expressed, x, q)])
    work = "f32" if DTYPES[q.storage].bits <= 16 else "f64"
    whole = state.convert(state.one("round_even", [scaled]), work)
    if any(q.zeros):
        whole = state.one("add", [whole, broadcast_along_axis(state, q.zeros, work, x, q)])
    for fn, bound in (("max", q.low), ("min", q.high)):
        whole = state.one(fn, [whole, broadcast_along_axis(state, (bound,), work, x, q)])
    return state.convert(whole, q.storage)


def _working_type(q: Quantization) -> str:
    return "i32" if DTYPES[q.storage].bits <= 16 else "i64"


def broadcast_along_axis(state: ImportState, values: tuple, dtype: str, like: Value, q: Quantization) -> Value:
    """Broadcast ``values`` to the shape of ``like``: a single number, or one number per index of the axis."""
    t = TensorType(dtype, like.type.shape)
    if q.axis is None or len(set(values)) == 1:
        return state.constant(np.array(values[0]).astype(to_numpy(dtype)), t)
    row = state.constant(np.array(values).astype(to_numpy(dtype)), TensorType(dtype, (len(values),)))
    return state.one("broadcast", [row], {"dims": (q.axis,)}, [t])
