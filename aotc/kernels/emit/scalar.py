"""Emit scalar ops on registers: ops of all dtypes, and the dispatch by the kind of the operands."""

from __future__ import annotations

from llvmlite import ir

from aotc.diagnostics import InternalError
from aotc.ir.opset import COMPARISONS, SCALARS, TOTAL
from aotc.kernels.emit import functions, integer, real, small_float
from aotc.kernels.emit.convert import convert_register, round_f32_to
from aotc.kernels.emit.memory import decode_element, encode_element
from aotc.kernels.formulas.complex import COMPLEX
from aotc.kernels.formulas.llvm_values import ScalarValue, call_intrinsic, intrinsic_type_suffix
from aotc.kernels.formulas.rare import FullAlgebra
from aotc.kernels.llvm_types import F32, F64, I1, Register, arithmetic_dtype, memory_type, register_type
from aotc.vmfb.dtypes import DTYPES, real_of
from aotc.vmfb.float_formats import SMALL_FLOATS


def emit_scalar_op(builder: ir.IRBuilder, fn: str, args: list[Register], dtypes: list[str], result: str) -> Register:
    """Emit a scalar op.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
        Position of the new instructions.
    fn : str
        Name of the op.
    args : list of registers
        The operands.
    dtypes : list of str
        Dtypes of the operands.
    result : str
        Dtype of the result.

    Raises
    ------
    InternalError
        If the op is not defined for these dtypes.
    """
    match fn:
        case "convert":
            return convert_register(builder, args[0], dtypes[0], result)
        case "bitcast":
            return _emit_bitcast(builder, args[0], dtypes[0], result)
        case "select":
            return _emit_select(builder, *args)
        case "complex":
            return (args[0], args[1])
    if dtypes[0] in SMALL_FLOATS:
        return _emit_small_float_op(builder, fn, args, dtypes, result)
    if fn == "reduce_precision":
        return functions.emit_reduce_precision(builder, args, dtypes[0])
    kind = DTYPES[dtypes[0]].kind
    if kind == "c":
        return _emit_complex_op(builder, fn, args, dtypes[0])
    if fn in TOTAL:
        return _compare_in_total_order(builder, fn, args)
    if fn in COMPARISONS:
        return emit_comparison(builder, fn, args, kind)
    if kind == "f":
        return real.emit_float_op(builder, fn, args, dtypes[0], result)
    return integer.emit_integer_op(builder, fn, args, dtypes[0])


def _emit_small_float_op(
    builder: ir.IRBuilder, fn: str, args: list[Register], dtypes: list[str], result: str
) -> Register:
    """Emit an op on floats of less than 16 bits: compute in f32 and round once, or operate on the bits themselves."""
    dtype = dtypes[0]
    if fn == "next_after":
        return small_float.small_float_next_after(builder, args[0], args[1], dtype)
    if fn in TOTAL:
        keys = [small_float.small_float_order_key(builder, x, dtype) for x in args]
        return builder.icmp_signed(SCALARS[fn].symbol, *keys)
    wide = [convert_register(builder, x, d, "f32") if d == dtype else x for x, d in zip(args, dtypes, strict=True)]
    if fn == "reduce_precision":
        return convert_register(builder, functions.emit_reduce_precision(builder, wide, dtype), "f32", result)
    of = "f32" if result == dtype else result
    value = emit_scalar_op(builder, fn, wide, ["f32" if d == dtype else d for d in dtypes], of)
    return convert_register(builder, value, of, result)


def _emit_bitcast(builder: ir.IRBuilder, value: Register, source: str, to: str) -> Register:
    """Emit the reinterpretation of a register of dtype ``source`` as dtype ``to``, of the same size."""
    if source == to:
        return value
    if isinstance(value, tuple):
        raise InternalError(f"kernels: cannot emit a bitcast of {source}")
    raw = encode_element(builder, value, source)
    if raw.type != memory_type(to):
        raw = builder.bitcast(raw, memory_type(to))
    return decode_element(builder, raw, to)


def _emit_select(builder: ir.IRBuilder, condition: ir.Value, yes: Register, no: Register) -> Register:
    if isinstance(yes, tuple):
        return tuple(builder.select(condition, a, b) for a, b in zip(yes, no, strict=True))  # type: ignore[return-value]
    return builder.select(condition, yes, no)


def emit_comparison(builder: ir.IRBuilder, fn: str, args: list[ir.Value], kind: str) -> ir.Value:
    """Emit a comparison of registers of ``kind`` (``f``, ``i`` or ``u``); floats and integers may be vectors."""
    symbol = SCALARS[fn].symbol
    if kind == "f":
        emit = builder.fcmp_unordered if fn == "ne" else builder.fcmp_ordered
    else:
        emit = builder.icmp_signed if kind == "i" else builder.icmp_unsigned
    return emit(symbol, *args)


def _compare_in_total_order(builder: ir.IRBuilder, fn: str, args: list[ir.Value]) -> ir.Value:
    """Emit a comparison of floats in total order, by their bits as integers; those of negative numbers are flipped."""
    keys = []
    for x in args:
        kind = ir.IntType(64 if x.type == F64 else 32)
        bits = builder.bitcast(x, kind)
        negative = builder.icmp_signed("<", bits, ir.Constant(kind, 0))
        flipped = builder.xor(bits, ir.Constant(kind, (1 << (kind.width - 1)) - 1))
        keys.append(builder.select(negative, flipped, bits))
    return builder.icmp_signed(SCALARS[fn].symbol, *keys)


def literal_register(value: bool | int | float | complex, dtype: str) -> Register:
    """Return the constant register of a Python number in ``dtype``."""
    row = DTYPES[dtype]
    kind = register_type(dtype)
    match row.kind:
        case "c":
            z = complex(value)
            return (_float_literal_register(z.real, real_of(dtype)), _float_literal_register(z.imag, real_of(dtype)))
        case "f":
            return _float_literal_register(float(value), dtype)  # type: ignore[arg-type]
        case "b":
            return ir.Constant(I1, int(bool(value)))
    return ir.Constant(kind, int(value))  # type: ignore[arg-type]


def _float_literal_register(value: float, dtype: str) -> ir.Value:
    if dtype in SMALL_FLOATS:
        return small_float.small_float_constant(value, dtype)
    return ir.Constant(register_type(dtype), functions.round_register_to_dtype(value, dtype))


def emit_combination(builder: ir.IRBuilder, reduce: str, old: Register, new: Register, dtype: str) -> Register:
    """Emit ``reduce(old, new)`` for a reduction op; LLVM may reorder the floats of a vectorized reduction."""
    if DTYPES[dtype].kind == "c" and reduce == "add":
        return tuple(emit_combination(builder, reduce, x, y, real_of(dtype)) for x, y in zip(old, new))  # type: ignore[return-value]
    if DTYPES[dtype].kind != "f" or dtype in SMALL_FLOATS:
        return emit_scalar_op(builder, reduce, [old, new], [dtype, dtype], dtype)
    kind = intrinsic_type_suffix(old.type)
    if dtype == "f16" and reduce in real.PICKS:
        new = call_intrinsic(builder, f"llvm.canonicalize.{kind}", new.type, [new])  # LLVM does not vectorize f16 here
    match reduce:
        case "add":
            value = builder.fadd(old, new, flags=("reassoc", "nsz", "contract"))
        case "mul":
            value = builder.fmul(old, new, flags=("reassoc", "nsz", "contract"))
        case "max":
            value = call_intrinsic(builder, f"llvm.maximum.{kind}", old.type, [old, new], ("nsz",))
        case "max_number":  # nnan: a NaN gives poison, which is frozen when it is loaded
            value = call_intrinsic(builder, f"llvm.maxnum.{kind}", old.type, [old, new], ("nnan", "nsz"))
        case "min":
            value = call_intrinsic(builder, f"llvm.minimum.{kind}", old.type, [old, new], ("nsz",))
        case _:
            return emit_scalar_op(builder, reduce, [old, new], [dtype, dtype], dtype)
    return value if dtype == arithmetic_dtype(dtype) or reduce in real.PICKS else round_f32_to(builder, value, dtype)


def _emit_complex_op(builder: ir.IRBuilder, fn: str, args: list[Register], dtype: str) -> Register:
    """Emit the scalar op ``fn`` on complex operands of ``dtype``.

    Raises
    ------
    InternalError
        If the op is not defined for complex numbers.
    """
    formula = COMPLEX.get(fn)
    if formula is None:
        raise InternalError(f"kernels: cannot emit the scalar op {fn} for {dtype}")
    first = args[0][0]  # type: ignore[index]
    algebra = FullAlgebra(builder, 32 if first.type == F32 else 64)
    pairs = [(ScalarValue(builder, a[0]), ScalarValue(builder, a[1])) for a in args]  # type: ignore[index]
    value = formula(algebra, *pairs)
    return tuple(v.raw for v in value) if isinstance(value, tuple) else value.raw  # type: ignore[return-value]
