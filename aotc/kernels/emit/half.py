"""Conversions of f16, 16 bits in memory and an f32 in a register: by an instruction, or by integer arithmetic.

Both forms have the same bits, even for NaN: its highest bits stay, and it becomes quiet.
"""

from __future__ import annotations

from llvmlite import ir

from aotc.kernels.emit.small_float import rounded_small_float_magnitude
from aotc.kernels.llvm_types import F32, HALF, I16, I32, i32, lacks_instruction
from aotc.vmfb.float_formats import FloatFormat

_F16 = FloatFormat(5, 10, 15, "ieee")
_SHIFT = 23 - _F16.mantissa_bits  # of the mantissa of f32
_REBIAS = (127 - _F16.bias) << 23
_QUIET, _QUIET_F16 = 1 << 22, 1 << 9
_MAGNITUDE, _INFINITY = 0x7FFFFFFF, 0x7F800000


def f16_bits_to_f32(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Convert the f16 in an i16 register to f32, exactly."""
    if not lacks_instruction(builder, "f16"):
        return builder.fpext(builder.bitcast(bits, HALF), F32)
    wide = builder.zext(bits, I32)
    magnitude = builder.and_(wide, i32(_F16.sign - 1))
    moved = builder.shl(magnitude, i32(_SHIFT))
    unit = ir.Constant(F32, 2.0 ** (_F16.least_exponent - _F16.mantissa_bits))
    subnormal = builder.bitcast(builder.fmul(builder.sitofp(magnitude, F32), unit), I32)
    small = builder.icmp_unsigned("<", magnitude, i32(1 << _F16.mantissa_bits))
    value = builder.select(small, subnormal, builder.add(moved, i32(_REBIAS)))
    value = builder.select(
        builder.icmp_unsigned(">=", magnitude, i32(_F16.infinity)), builder.or_(moved, i32(_INFINITY)), value
    )
    is_nan = builder.icmp_unsigned(">", magnitude, i32(_F16.infinity))
    value = builder.or_(value, builder.select(is_nan, i32(_QUIET), i32(0)))
    sign = builder.shl(builder.and_(wide, i32(_F16.sign)), i32(16))
    return builder.bitcast(builder.or_(value, sign), F32)


def f32_to_f16_bits(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Round an f32 to f16, to nearest, ties to even; return its bits as an i16."""
    if not lacks_instruction(builder, "f16"):
        return builder.bitcast(builder.fptrunc(value, HALF), I16)
    bits = builder.bitcast(value, I32)
    magnitude = builder.and_(bits, i32(_MAGNITUDE))
    code = rounded_small_float_magnitude(builder, value, magnitude, _F16)
    code = builder.select(builder.icmp_unsigned(">", code, i32(_F16.largest)), i32(_F16.infinity), code)
    payload = builder.and_(builder.lshr(bits, i32(_SHIFT)), i32(_QUIET_F16 - 1))
    nan = builder.or_(payload, i32(_F16.infinity | _QUIET_F16))
    code = builder.select(builder.icmp_unsigned(">", magnitude, i32(_INFINITY)), nan, code)
    sign = builder.and_(builder.lshr(bits, i32(16)), i32(_F16.sign))
    return builder.trunc(builder.or_(code, sign), I16)
