"""Emit conversions of floats of less than 16 bits: one decoder and one rounding for all formats.

A register of such a dtype has the bit pattern, so copies, selects and bitcasts never change the bits. All other ops
decode to f32, compute there and round once. Both directions are branch-free integer arithmetic without lookup tables,
which LLVM vectorizes.
"""

from __future__ import annotations

import struct

import numpy as np
from llvmlite import ir

from aotc.kernels.formulas.llvm_values import call_intrinsic
from aotc.kernels.llvm_types import F32, I8, I32, i32
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.float_formats import SMALL_FLOATS, FloatFormat

_MANTISSA, _BIAS = 23, 127
_MAGNITUDE, _INFINITY, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000


def small_float_constant(value: float, dtype: str) -> ir.Value:
    """Return the bit pattern of ``value`` in ``dtype`` as a constant."""
    with np.errstate(all="ignore"):
        code = np.asarray(value, np.float32).astype(to_numpy(dtype)).view(np.uint8)
    return ir.Constant(I8, int(code))


def small_float_to_f32(builder: ir.IRBuilder, code: ir.Value, dtype: str) -> ir.Value:
    """Convert the bit pattern of a small float to f32, exactly; NaN becomes a quiet NaN."""
    row = SMALL_FLOATS[dtype]
    wide = builder.zext(code, I32)
    if row.special == "power":
        return _power_of_two_code_to_f32(builder, wide)
    magnitude = builder.and_(wide, i32(row.sign - 1))
    shift = _MANTISSA - row.mantissa_bits
    normal = builder.add(builder.shl(magnitude, i32(shift)), i32((_BIAS - row.bias) << _MANTISSA))
    unit = ir.Constant(F32, 2.0 ** (row.least_exponent - row.mantissa_bits))
    subnormal = builder.bitcast(builder.fmul(builder.sitofp(magnitude, F32), unit), I32)
    small = builder.icmp_unsigned("<", magnitude, i32(1 << row.mantissa_bits))
    bits = builder.select(small, subnormal, normal)
    match row.special:
        case "ieee":
            is_infinite = builder.icmp_unsigned("==", magnitude, i32(row.infinity))
            special = builder.select(is_infinite, i32(_INFINITY), i32(_NAN))
            bits = builder.select(builder.icmp_unsigned("<", magnitude, i32(row.infinity)), bits, special)
        case "fn":
            bits = builder.select(builder.icmp_unsigned("==", magnitude, i32(row.nan)), i32(_NAN), bits)
    sign = builder.shl(builder.and_(wide, i32(row.sign)), i32(31 - row.exponent_bits - row.mantissa_bits))
    bits = builder.or_(bits, sign)
    if row.special == "fnuz":
        bits = builder.select(builder.icmp_unsigned("==", wide, i32(row.nan)), i32(_NAN), bits)
    return builder.bitcast(bits, F32)


def _power_of_two_code_to_f32(builder: ir.IRBuilder, wide: ir.Value) -> ir.Value:
    """Convert the bit pattern of a format that has only an exponent (E8M0) to f32."""
    least = builder.icmp_unsigned("==", wide, i32(0))  # 2**-127 is subnormal in f32
    bits = builder.select(least, i32(1 << (_MANTISSA - 1)), builder.shl(wide, i32(_MANTISSA)))
    bits = builder.select(builder.icmp_unsigned("==", wide, i32(255)), i32(_NAN), bits)
    return builder.bitcast(bits, F32)


def f32_to_small_float(builder: ir.IRBuilder, value: ir.Value, dtype: str) -> ir.Value:
    """Round an f32 to the bit pattern of a small float, to nearest, ties to even."""
    row = SMALL_FLOATS[dtype]
    bits = builder.bitcast(value, I32)
    magnitude = builder.and_(bits, i32(_MAGNITUDE))
    if row.special == "power":
        return _f32_to_power_of_two_code(builder, bits, magnitude)
    code = rounded_small_float_magnitude(builder, value, magnitude, row)
    sign = builder.shl(builder.lshr(bits, i32(31)), i32(row.exponent_bits + row.mantissa_bits))
    is_nan = builder.icmp_unsigned(">", magnitude, i32(_INFINITY))
    too_large = builder.icmp_unsigned(">", code, i32(row.largest))
    match row.special:
        case "ieee":
            code = builder.select(too_large, builder.select(is_nan, i32(row.nan), i32(row.overflow)), code)
            code = builder.or_(code, sign)
        case "fn":
            code = builder.or_(builder.select(too_large, i32(row.nan), code), sign)
        case "fnuz":
            is_zero = builder.icmp_unsigned("==", code, i32(0))
            signed = builder.select(is_zero, code, builder.or_(code, sign))
            code = builder.select(too_large, i32(row.nan), signed)
        case "finite":
            code = builder.or_(builder.select(too_large, i32(row.overflow), code), sign)
            code = builder.select(is_nan, i32(row.nan), code)
    return builder.trunc(code, I8)


def rounded_small_float_magnitude(
    builder: ir.IRBuilder, value: ir.Value, magnitude: ir.Value, row: FloatFormat
) -> ir.Value:
    """Round ``|value|`` to the bit pattern of a format, as if its exponent had no upper limit.

    A normal number is rounded by adding half a unit in the last place, less one if the last bit is even. A subnormal
    number is added to the power of two whose last place in f32 is that of the format: the addition rounds.
    """
    shift = _MANTISSA - row.mantissa_bits
    odd = builder.and_(builder.lshr(magnitude, i32(shift)), i32(1))
    up = builder.add(builder.add(magnitude, i32((1 << (shift - 1)) - 1)), odd)
    normal = builder.sub(builder.lshr(up, i32(shift)), i32((_BIAS - row.bias) << row.mantissa_bits))
    base = 2.0 ** (_MANTISSA + row.least_exponent - row.mantissa_bits)
    size = call_intrinsic(builder, "llvm.fabs.f32", F32, [value])
    summed = builder.bitcast(builder.fadd(size, ir.Constant(F32, base)), I32)
    subnormal = builder.sub(summed, i32(struct.unpack("<i", struct.pack("<f", base))[0]))
    least = i32((_BIAS + row.least_exponent) << _MANTISSA)
    return builder.select(builder.icmp_unsigned("<", magnitude, least), subnormal, normal)


def _f32_to_power_of_two_code(builder: ir.IRBuilder, bits: ir.Value, magnitude: ir.Value) -> ir.Value:
    """Round an f32 to the bit pattern of a power of two (E8M0).

    Midpoints are rounded up, numbers below 2**-127 to 2**-127; 0 and negative numbers become NaN.
    """
    half = 1 << (_MANTISSA - 1)
    code = builder.lshr(builder.add(magnitude, i32(half)), i32(_MANTISSA))
    code = builder.select(builder.icmp_unsigned("<=", magnitude, i32(half)), i32(0), code)
    last = (254 << _MANTISSA) + half - 1
    positive = builder.icmp_unsigned("<", builder.sub(bits, i32(1)), i32(last))
    return builder.trunc(builder.select(positive, code, i32(255)), I8)


def small_float_order_key(builder: ir.IRBuilder, code: ir.Value, dtype: str) -> ir.Value:
    """Return an i32 whose order is that of all bit patterns: by value, -0 below 0, NaN beyond infinity of its sign.

    The only NaN of an ``fnuz`` format has the sign bit, and so is below all numbers.
    """
    row = SMALL_FLOATS[dtype]
    wide = builder.zext(code, I32)
    if row.special == "power":
        return wide
    magnitude = builder.and_(wide, i32(row.sign - 1))
    below = builder.neg(magnitude)
    if row.special == "fnuz":
        is_nan = builder.icmp_unsigned("==", wide, i32(row.nan))
        below = builder.select(is_nan, i32(-row.sign), below)
    else:
        below = builder.sub(below, i32(1))
    return builder.select(_is_negative_code(builder, wide, row), below, magnitude)


def small_float_next_after(builder: ir.IRBuilder, code: ir.Value, other: ir.Value, dtype: str) -> ir.Value:
    """Return the bit pattern next to ``code`` towards ``other``; beyond the largest number, that of an overflow."""
    row = SMALL_FLOATS[dtype]
    x, y = (small_float_to_f32(builder, v, dtype) for v in (code, other))
    up = builder.fcmp_ordered("<", x, y)
    wide = builder.zext(code, I32)
    step = builder.select(up, i32(1), i32(-1))
    if row.special == "power":
        stepped = builder.add(wide, step)
    else:
        magnitude = builder.and_(wide, i32(row.sign - 1))
        was_negative = _is_negative_code(builder, wide, row)
        key = builder.add(builder.select(was_negative, builder.neg(magnitude), magnitude), step)
        at_zero = builder.icmp_unsigned("==", key, i32(0))
        negative = builder.icmp_signed("<", key, i32(0))
        if row.special != "fnuz":
            negative = builder.or_(negative, builder.and_(at_zero, was_negative))
        size = builder.select(builder.icmp_signed("<", key, i32(0)), builder.neg(key), key)
        too_large = builder.icmp_unsigned(">", size, i32(row.largest))
        signed = builder.or_(builder.select(too_large, i32(row.overflow & (row.sign - 1)), size),
                             builder.select(negative, i32(row.sign), i32(0)))
        stepped = builder.select(too_large, i32(row.nan), signed) if row.special == "fnuz" else signed
    result = builder.select(builder.fcmp_ordered("==", x, y), builder.zext(other, I32), stepped)
    is_nan = builder.fcmp_unordered("uno", x, y)
    return builder.trunc(builder.select(is_nan, i32(row.nan), result), I8)


def _is_negative_code(builder: ir.IRBuilder, wide: ir.Value, row: FloatFormat) -> ir.Value:
    """Return True in lanes whose bit pattern has the sign bit."""
    return builder.icmp_unsigned("!=", builder.and_(wide, i32(row.sign)), i32(0))
