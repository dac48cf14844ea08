"""Emit conversions between element types as LLVM IR.

Float to integer truncates, clamps, and maps NaN to 0, as XLA does. Any type to ``i1`` is a test against 0. A complex
number is converted to real by its real part.
"""

from __future__ import annotations

from llvmlite import ir

from aotc.diagnostics import InternalError
from aotc.kernels.emit import bf16_instructions, half, small_float
from aotc.kernels.formulas.llvm_values import call_intrinsic, intrinsic_type_suffix
from aotc.kernels.llvm_types import (
    F32,
    F64,
    I1,
    I8,
    I16,
    I32,
    Register,
    has_bf16,
    has_saturating_conversions,
    i32,
    register_type,
)
from aotc.vmfb.dtypes import DTYPES, DType, real_of
from aotc.vmfb.float_formats import SMALL_FLOATS


def convert_register(builder: ir.IRBuilder, value: Register, source: str, to: str) -> Register:
    """Convert a register from dtype ``source`` to dtype ``to`` (``stablehlo.convert``)."""
    if source == to:
        return value
    if DTYPES[to].kind == "c":
        part = real_of(to)
        if isinstance(value, tuple):
            inner = real_of(source)
            return (_convert_real(builder, value[0], inner, part), _convert_real(builder, value[1], inner, part))
        return (_convert_real(builder, value, source, part), ir.Constant(register_type(part), 0.0))
    if isinstance(value, tuple):
        return _convert_real(builder, value[0], real_of(source), to)
    return _convert_real(builder, value, source, to)


def _convert_real(builder: ir.IRBuilder, value: ir.Value, source: str, to: str) -> ir.Value:
    """Convert a register between real dtypes, by the kinds of both."""
    if source == to:
        return value
    if source in SMALL_FLOATS:
        return _convert_real(builder, small_float.small_float_to_f32(builder, value, source), "f32", to)
    a, b = DTYPES[source], DTYPES[to]
    match a.kind == "f", b.kind:
        case True, "f":
            return _convert_float_to_float(builder, value, b)
        case True, "b":
            return builder.fcmp_unordered("!=", value, ir.Constant(value.type, 0.0))
        case True, _:
            return _convert_float_to_int(builder, value, b)
        case False, "f":
            return _convert_int_to_float(builder, value, a, b)
        case False, "b":
            return builder.icmp_unsigned("!=", value, ir.Constant(value.type, 0))
    return narrow_int(builder, _resize_integer(builder, value, a, register_type(to)), b)


def _resize_integer(builder: ir.IRBuilder, value: ir.Value, row: DType, kind: ir.Type) -> ir.Value:
    """Extend or truncate an integer register to the LLVM type ``kind``; ``row`` is its present dtype."""
    if value.type.width == kind.width:
        return value
    if value.type.width > kind.width:
        return builder.trunc(value, kind)
    return builder.sext(value, kind) if row.kind == "i" else builder.zext(value, kind)


def narrow_int(builder: ir.IRBuilder, value: ir.Value, row: DType) -> ir.Value:
    """Wrap an 8-bit register to the 2 or 4 bits of ``row``; other dtypes are unchanged."""
    if row.bits >= 8 or row.kind not in "iu":
        return value
    unused = ir.Constant(value.type, 8 - row.bits)
    high = builder.shl(value, unused)
    return builder.ashr(high, unused) if row.kind == "i" else builder.lshr(high, unused)


def _convert_float_to_float(builder: ir.IRBuilder, value: ir.Value, to: DType) -> ir.Value:
    """Convert a float register to the float dtype ``to``."""
    if to.bits == 64:
        return builder.fpext(value, F64) if value.type == F32 else value
    if to.bits == 32:
        return builder.fptrunc(value, F32) if value.type == F64 else value
    if value.type == F64:
        value = _round_f64_to_odd_f32(builder, value)
    return round_f32_to(builder, value, to.name)


def _round_f64_to_odd_f32(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Narrow f64 to f32 with rounding to odd, so that a second rounding to fewer bits is correct.

    The result is the f32 next to ``value`` towards 0, with its last bit set if that f32 is inexact.
    """
    near = builder.fptrunc(value, F32)
    back = builder.fpext(near, F64)
    size = call_intrinsic(builder, "llvm.fabs.f64", F64, [value])
    back_size = call_intrinsic(builder, "llvm.fabs.f64", F64, [back])
    above = builder.fcmp_ordered(">", back_size, size)
    inexact = builder.fcmp_ordered("!=", back, value)
    bits = builder.bitcast(near, I32)
    down = builder.sub(bits, builder.zext(above, I32))
    return builder.bitcast(builder.or_(down, builder.zext(inexact, I32)), F32)


def round_f32_to(builder: ir.IRBuilder, value: ir.Value, to: str) -> ir.Value:
    """Round an f32 register to the float dtype ``to``, to nearest, ties to even."""
    if to in SMALL_FLOATS:
        return small_float.f32_to_small_float(builder, value, to)
    match to:
        case "bf16" if has_bf16(builder):
            return bf16_instructions.round_to_bf16_register(builder, value)
        case "bf16":
            bits = bf16_bits(builder, value)
            return builder.bitcast(builder.shl(builder.zext(bits, I32), i32(16)), F32)
        case "f16":
            return half.f16_bits_to_f32(builder, half.f32_to_f16_bits(builder, value))
        case "f32" | "f64":
            return value
    raise InternalError(f"kernels: cannot emit a conversion to {to}")


def bf16_bits(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Round an f32 register to bf16 and return its 16 bits; NaN stays a NaN."""
    known = _widened_bf16(builder, value)
    if known is not None:
        return known
    if has_bf16(builder):
        return bf16_instructions.bf16_bits_by_instruction(builder, value)
    bits = builder.bitcast(value, I32)
    last = builder.and_(builder.lshr(bits, i32(16)), i32(1))
    rounded = builder.add(builder.add(bits, i32(0x7FFF)), last)
    quiet = builder.or_(bits, i32(0x400000))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.lshr(builder.select(is_nan, quiet, rounded), i32(16)), I16)


def _widened_bf16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value | None:
    """Return the 16 bits of the bf16 that ``value``, an f32 register, was widened from; None for other registers."""
    match value:
        case ir.CastInstr(
            opname="bitcast",
            operands=[ir.Instruction(opname="shl", operands=[ir.CastInstr() as wide, ir.Constant() as n])],
        ) if n.constant == 16 and wide.opname == "zext" and wide.operands[0].type == I16:
            return wide.operands[0]
        case ir.CastInstr(opname="bitcast", operands=[ir.CallInstr(callee=ir.InlineAsm()) as pair]) if pair.type == I32:
            return builder.trunc(builder.lshr(pair, i32(16)), I16)
    return None


def _convert_float_to_int(builder: ir.IRBuilder, value: ir.Value, to: DType) -> ir.Value:
    """Convert a float register to an integer dtype: truncate, clamp to its range, and map NaN to 0."""
    if not has_saturating_conversions(builder) and (to.bits < 32 or to.name == "i32"):
        return _clamp_and_convert_to_i32(builder, value, to)
    fn = "fptosi" if to.kind == "i" else "fptoui"
    kind = ir.IntType(to.bits)
    name = f"llvm.{fn}.sat.i{to.bits}.{intrinsic_type_suffix(value.type)}"
    whole = call_intrinsic(builder, name, kind, [value])
    if to.bits >= 8:
        return whole
    return builder.sext(whole, I8) if to.kind == "i" else builder.zext(whole, I8)


def _clamp_and_convert_to_i32(builder: ir.IRBuilder, value: ir.Value, to: DType) -> ir.Value:
    """Clamp in the float's type, then convert to i32; LLVM's saturating conversion is not vectorized on x86."""
    signed = to.kind == "i"
    low, high = (-(1 << (to.bits - 1)), (1 << (to.bits - 1)) - 1) if signed else (0, (1 << to.bits) - 1)
    top = float(high) if value.type == F64 or to.bits < 32 else 2.0**31 - 128  # the f32 before 2**31
    floor, ceiling = (ir.Constant(value.type, float(x)) for x in (low, top))
    near = builder.select(builder.fcmp_ordered(">", value, floor), value, floor)
    near = builder.select(builder.fcmp_ordered("<", near, ceiling), near, ceiling)
    whole = builder.fptosi(near, I32)
    if top != high:
        whole = builder.select(builder.fcmp_ordered(">", value, ceiling), i32(high), whole)
    whole = builder.select(builder.fcmp_unordered("uno", value, value), i32(0), whole)
    return whole if to.bits == 32 else builder.trunc(whole, ir.IntType(max(to.bits, 8)))


def _convert_int_to_float(builder: ir.IRBuilder, value: ir.Value, source: DType, to: DType) -> ir.Value:
    """Convert an integer register to a float dtype."""
    if to.bits >= 32 or source.bits <= 16:
        kind = F64 if to.bits == 64 else F32
        exact = builder.sitofp(value, kind) if source.kind == "i" else builder.uitofp(value, kind)
        return exact if to.bits >= 32 else round_f32_to(builder, exact, to.name)
    return _convert_wide_int_to_short_float(builder, value, source, to)


def _convert_wide_int_to_short_float(builder: ir.IRBuilder, value: ir.Value, source: DType, to: DType) -> ir.Value:
    """Convert a 32- or 64-bit integer to a float of up to 16 bits with one rounding.

    Bits below the 40th from the top are combined into a sticky bit first.
    """
    if source.bits == 64:
        sticky = ir.Constant(value.type, (1 << 24) - 1)
        low = builder.and_(value, sticky)
        inexact = builder.zext(builder.icmp_unsigned("!=", low, ir.Constant(value.type, 0)), value.type)
        odd = builder.shl(inexact, ir.Constant(value.type, 23))  # the highest of them: f64 would round off a lower one
        short = builder.or_(builder.and_(value, builder.not_(sticky)), odd)
        top = builder.ashr if source.kind == "i" else builder.lshr
        high = top(value, ir.Constant(value.type, 53 - 1))
        zero, ones = ir.Constant(value.type, 0), ir.Constant(value.type, -1)
        fits = builder.icmp_unsigned("==", high, zero)
        if source.kind == "i":
            fits = builder.or_(fits, builder.icmp_unsigned("==", high, ones))
        value = builder.select(fits, value, short)
    wide = builder.sitofp(value, F64) if source.kind == "i" else builder.uitofp(value, F64)
    return round_f32_to(builder, _round_f64_to_odd_f32(builder, wide), to.name)


def to_bool_byte(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Convert an ``i1`` register to a byte 0 or 1."""
    return builder.zext(value, I8) if value.type == I1 else value
