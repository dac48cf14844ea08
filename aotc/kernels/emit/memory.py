"""Emit loads and stores of elements, and conversions between their form in memory and in registers."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from aotc.diagnostics import InternalError
from aotc.kernels.emit import half
from aotc.kernels.emit.convert import bf16_bits, narrow_int, to_bool_byte
from aotc.kernels.formulas.llvm_values import call_intrinsic, intrinsic_type_suffix
from aotc.kernels.llvm_types import F32, I1, I8, I32, VOID, Register, i32, i64, memory_type, register_type
from aotc.vmfb.dtypes import DTYPES
from aotc.vmfb.float_formats import SMALL_FLOATS

Annotate = Callable[[ir.Instruction], None]


def load_element(builder: ir.IRBuilder, address: ir.Value, dtype: str, annotate: Annotate) -> Register:
    """Emit the load of an element; ``annotate`` is called with each load instruction."""
    kind = memory_type(dtype)
    if DTYPES[dtype].kind == "c":
        second = builder.gep(address, [i64(1)], inbounds=True, source_etype=kind)
        return _load_register(builder, address, kind, annotate), _load_register(builder, second, kind, annotate)
    return decode_element(builder, _load_register(builder, address, kind, annotate), dtype)


def _load_register(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, annotate: Annotate) -> ir.Value:
    """Emit a load of LLVM type ``kind``, annotated."""
    raw = builder.load(address, typ=kind)
    annotate(raw)
    return raw


def freeze_value(builder: ir.IRBuilder, value: ir.Value, alone: bool) -> ir.Value:
    """Freeze a value: LLVM may assume that the result is not NaN, and it is an arbitrary number if the value is NaN.

    For a buffer of a single number (``alone``), LLVM would move a ``freeze`` into the loop that computed the number and
    lose the assumption. A fence hides the origin of the number there.
    """
    if alone:
        return call_intrinsic(
            builder, f"llvm.arithmetic.fence.{intrinsic_type_suffix(value.type)}", value.type, [value]
        )
    frozen = ir.Instruction(builder.block, value.type, "freeze", [value])
    builder._insert(frozen)  # llvmlite has no method for it
    return frozen


def store_element(builder: ir.IRBuilder, value: Register, address: ir.Value, dtype: str, annotate: Annotate) -> None:
    """Emit the store of an element; ``annotate`` is called with each store instruction."""
    if isinstance(value, tuple):
        second = builder.gep(address, [i64(1)], inbounds=True, source_etype=memory_type(dtype))
        annotate(builder.store(value[0], address))
        annotate(builder.store(value[1], second))
        return
    annotate(builder.store(encode_element(builder, value, dtype), address))


def prefetch_cache_line(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Emit a prefetch of the cache line of ``address`` into the first-level cache, for reading."""
    call_intrinsic(builder, "llvm.prefetch.p0", VOID, [address, *(i32(x) for x in (0, 3, 1))])


def decode_element(builder: ir.IRBuilder, raw: ir.Value, dtype: str) -> ir.Value:
    """Convert the form of a real element in memory (``raw``) to its form in registers."""
    row = DTYPES[dtype]
    match row.kind:
        case "b":
            return builder.trunc(raw, I1)
        case "i" | "u":
            return narrow_int(builder, raw, row)
    if dtype in SMALL_FLOATS:
        return raw if row.bits == 8 else builder.and_(raw, ir.Constant(I8, (1 << row.bits) - 1))
    match dtype:
        case "bf16":
            return builder.bitcast(builder.shl(builder.zext(raw, I32), i32(16)), F32)
        case "f16":
            return half.f16_bits_to_f32(builder, raw)
        case "f32" | "f64":
            return raw
    raise InternalError(f"kernels: cannot emit a load of {dtype}")


def encode_element(builder: ir.IRBuilder, value: ir.Value, dtype: str) -> ir.Value:
    """Convert the form of a real element in registers to its form in memory."""
    match dtype:
        case "i1":
            return to_bool_byte(builder, value)
        case "bf16":
            return bf16_bits(builder, value)
        case "f16":
            return half.f32_to_f16_bits(builder, value)
    if value.type != register_type(dtype):
        raise InternalError(f"kernels: cannot store a value of type {value.type} as {dtype}")
    return value
