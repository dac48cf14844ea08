"""Matmuls of tensors quantized to 8 bits or less, computed on i8 integers: ten times as fast as on floats.

The right operand of a quantized matmul has no zero point, so with ``a = (q - z) * s`` and ``b = p * t``::

    sum(a * b) = (sum(q * p) - z * sum(p)) * s * t

The sums are exact in i32. ``sum(p)`` is one number for each output feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aotc.frontend.importers.reduction import sum_over
from aotc.frontend.quantized.math import quantize
from aotc.frontend.quantized.types import Quantization, quantization_of
from aotc.frontend.session import ImportState
from aotc.ir.dims.algebra import product
from aotc.ir.tensor.ir import Op, TensorType, Value

PRODUCTS = frozenset({
    "stablehlo.convolution", "stablehlo.dot", "stablehlo.dot_general", "stablehlo.dynamic_conv",
})  # fmt: skip
_FIT_I8 = ("i2", "i4", "i8", "u2", "u4")
U8_SHIFT = 128


def is_int8_matmul(op: Any) -> bool:
    """Return True if ``op`` is a matmul of integers of up to 8 bits whose left operand has a single scale."""
    if op.name not in PRODUCTS:
        return False
    lhs, rhs = (quantization_of(v.type) for v in list(op.operands)[:2])
    if lhs is None or rhs is None or lhs.axis is not None or any(rhs.zeros):
        return False
    return lhs.storage in (*_FIT_I8, "u8") and rhs.storage in _FIT_I8 and lhs.expressed == rhs.expressed == "f32"


def uint8_operand_as_int8(state: ImportState, v: Value, q: Quantization) -> Value:
    """Return the integers ``v`` as i8; u8 integers are reduced by ``U8_SHIFT``, as their zero point is."""
    if q.storage == "u8":
        flipped = state.one("xor", [v, state.constant(np.uint8(U8_SHIFT), v.type)])
        return state.one("bitcast", [flipped], {}, [TensorType("i8", v.type.shape)])
    return state.convert(v, "i8")


# Terms of a dot product of 8-bit integers, less their zero points, up to which it is summed in i32. Each term is at
# most 255 * 128, and 2**16 * 255 * 128 is less than 2**31. Longer sums are computed in floating point.
I32_TERMS = 1 << 16


def bind_integer_matmul(state: ImportState, op: Any) -> bool:
    """Bind the result of ``op``: the sums of the integer matmul that was just emitted, corrected and scaled.

    Return False, without a binding, if the sums may not fit i32, or if the right operand's scales vary along a
    contracted dim.
    """
    lhs, rhs = (quantization_of(v.type) for v in list(op.operands)[:2])
    assert lhs is not None
    assert rhs is not None
    plain = state.blocks[-1].pop()
    places = _result_dims_of_right_operand(plain)
    summed = [d for d in range(plain.operands[1].type.rank) if d not in places]
    terms = product(plain.operands[1].type.shape[d] for d in summed)
    if not isinstance(terms, int) or terms > I32_TERMS or (rhs.axis is not None and rhs.axis not in places):
        return False
    zero = lhs.zeros[0] - (U8_SHIFT if lhs.storage == "u8" else 0)
    total = _zero_point_sums(state, plain, zero, places, summed)
    result = quantization_of(op.results[0].type)
    scales = np.array(rhs.scales) * lhs.scales[0]
    axis = None if rhs.axis is None else places[rhs.axis]
    if result is not None and _is_rescaling_unnecessary(result, scales, axis):
        state.bind(op, [total])
        return True
    real = state.one("mul", [state.convert(total, "f32"), _scales_as_row(state, scales, axis, total.type)])
    target = state.dtype(op.results[0].type)
    state.bind(op, [state.convert(real, target) if result is None else quantize(state, real, result)])
    return True


def _result_dims_of_right_operand(plain: Op) -> dict[int, int]:
    """Map each dim of the right operand that is not contracted to its dim in the result."""
    a, rank = plain.attrs, plain.result.type.rank
    if plain.name == "convolution":
        return {a["kernel_output"]: a["output_feature"]}
    dims_left = set(range(plain.operands[1].type.rank)) - set(a["rhs_contract"])
    free = sorted(dims_left - set(a["rhs_batch"]))
    return dict(zip(a["rhs_batch"], range(rank))) | dict(zip(free, range(rank - len(free), rank)))


def _zero_point_sums(state: ImportState, plain: Op, zero: int, places: Mapping[int, int], summed: list[int]) -> Value:
    """Return the sums of ``(q - zero) * p``. In a convolution, padding and dilation insert ``zero`` among the ``q``."""
    lhs, rhs = plain.operands
    attrs = dict(plain.attrs)
    if plain.name == "convolution" and zero:
        lhs = _pad_with_zero_point(state, lhs, attrs, zero)
    t = plain.result.type
    total = state.one(plain.name, [lhs, rhs], attrs, [t])
    if not zero:
        return total
    row = sum_over(state, state.convert(rhs, "i32"), tuple(summed))
    dims = tuple(places[d] for d in sorted(places))
    spread = state.one("broadcast", [row], {"dims": dims}, [t])
    return state.one("sub", [total, state.one("mul", [spread, state.constant(np.int32(zero), t)])])


def _pad_with_zero_point(state: ImportState, lhs: Value, attrs: dict[str, Any], zero: int) -> Value:
    """Pad and dilate ``lhs`` with ``zero`` by the attributes ``attrs``, and remove these attributes."""
    low, high, interior = ([0] * lhs.type.rank for _ in range(3))
    for d, (before, after), dilation in zip(attrs["input_spatial"], attrs["padding"], attrs["lhs_dilation"]):
        low[d], high[d], interior[d] = before, after, dilation - 1
    if not any((*low, *high, *interior)):
        return lhs
    attrs["padding"] = ((0, 0),) * len(attrs["padding"])
    attrs["lhs_dilation"] = (1,) * len(attrs["lhs_dilation"])
    value = state.constant(np.int8(zero), TensorType("i8"))
    widths = {"low": tuple(low), "high": tuple(high), "interior": tuple(interior)}
    return state.one("pad", [lhs, value], widths)


def _is_rescaling_unnecessary(result: Quantization, scales: np.ndarray, axis: int | None) -> bool:
    """Return True if the integer sums are the quantized result without scaling and rounding."""
    if result.storage != "i32" or any(result.zeros) or (result.low, result.high) != (-(1 << 31), (1 << 31) - 1):
        return False
    same = len(result.scales) == len(scales) and result.axis == axis
    return same and np.array_equal(np.array(result.scales, np.float32), scales.astype(np.float32))


def _scales_as_row(state: ImportState, scales: np.ndarray, axis: int | None, like: TensorType) -> Value:
    """Return the scales of a tensor as f32 of the shape of ``like``; ``axis`` is None for one scale."""
    t = TensorType("f32", like.shape)
    if axis is None:
        return state.constant(np.float32(scales[0]), t)
    row = state.constant(scales.astype(np.float32), TensorType("f32", scales.shape))
    return state.one("broadcast", [row], {"dims": (axis,)}, [t])
