"""Scalar ops on registers, as LLVM IR: a table of op name and kind to a function.

Floats: only ``contract`` is allowed (a product and a sum may become one FMA);
``max`` and ``min`` propagate NaN and order -0.0 below 0.0. Integers wrap;
division by 0 gives -1, its remainder the dividend; a shift by the width or more
gives 0 (or the sign).
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from aotc.diagnostics import InternalError
from aotc.ir.opset import COMPARISONS, SCALARS
from aotc.kernels.emit import complex as emit_complex
from aotc.kernels.emit import math as emit_math
from aotc.kernels.emit import small_float as emit_small_float
from aotc.kernels.emit.convert import convert, narrow_int, round_to
from aotc.kernels.emit.memory import decode, encode
from aotc.kernels.formulas.llvm_algebra import call_intrinsic, suffix
from aotc.kernels.llvm_types import F64, I1, Register, computes_in, memory_type, part_dtype, register_type
from aotc.vmfb.dtypes import DTYPES
from aotc.vmfb.float_formats import SMALL_FLOATS

CONTRACT = ("contract",)
Emit = Callable[..., ir.Value]


def apply(builder: ir.IRBuilder, fn: str, args: list[Register], dtypes: list[str], result: str) -> Register:
    """Emit the scalar op ``fn``.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
        Where to emit.
    fn : str
        The op.
    args : list of registers
        The operands.
    dtypes : list of str
        Their dtypes.
    result : str
        The dtype of the result.

    Raises
    ------
    InternalError
        If there is no such op on these dtypes.
    """
    match fn:
        case "convert":
            return convert(builder, args[0], dtypes[0], result)
        case "bitcast":
            return _bitcast(builder, args[0], dtypes[0], result)
        case "select":
            return _select(builder, *args)
        case "complex":
            return (args[0], args[1])
    if dtypes[0] in SMALL_FLOATS:
        return _small_float(builder, fn, args, dtypes, result)
    if fn == "reduce_precision":
        return emit_math.reduce_precision(builder, args, dtypes[0])
    kind = DTYPES[dtypes[0]].kind
    if kind == "c":
        return emit_complex.apply(builder, fn, args, dtypes[0])
    if SCALARS[fn].total:
        return _compare_total(builder, fn, args)
    if fn in COMPARISONS:
        return _compare(builder, fn, args, kind)
    if kind == "f":
        return _float(builder, fn, args, dtypes[0], result)
    return _integer(builder, fn, args, dtypes[0])


def _small_float(builder: ir.IRBuilder, fn: str, args: list[Register], dtypes: list[str], result: str) -> Register:
    """Compute in f32 and round once, but for what is said of the codes themselves."""
    dtype = dtypes[0]
    if fn == "next_after":
        return emit_small_float.next_after(builder, args[0], args[1], dtype)
    if SCALARS[fn].total:
        keys = [emit_small_float.total_order_key(builder, x, dtype) for x in args]
        return builder.icmp_signed(SCALARS[fn].symbol, *keys)
    wide = [convert(builder, x, d, "f32") if d == dtype else x for x, d in zip(args, dtypes, strict=True)]
    of = "f32" if result == dtype else result
    value = apply(builder, fn, wide, ["f32" if d == dtype else d for d in dtypes], of)
    return convert(builder, value, of, result)


def _bitcast(builder: ir.IRBuilder, value: Register, source: str, to: str) -> Register:
    if source == to:
        return value
    if isinstance(value, tuple):
        raise InternalError(f"kernels: no bitcast of {source}")
    raw = encode(builder, value, source)
    if raw.type != memory_type(to):
        raw = builder.bitcast(raw, memory_type(to))
    return decode(builder, raw, to)


def _select(builder: ir.IRBuilder, condition: ir.Value, yes: Register, no: Register) -> Register:
    if isinstance(yes, tuple):
        return tuple(builder.select(condition, a, b) for a, b in zip(yes, no, strict=True))  # type: ignore[return-value]
    return builder.select(condition, yes, no)


def _compare(builder: ir.IRBuilder, fn: str, args: list[ir.Value], kind: str) -> ir.Value:
    symbol = SCALARS[fn].symbol
    if kind == "f":
        compare = builder.fcmp_unordered if fn == "ne" else builder.fcmp_ordered
    else:
        compare = builder.icmp_signed if kind == "i" else builder.icmp_unsigned
    return compare(symbol, *args)


def _compare_total(builder: ir.IRBuilder, fn: str, args: list[ir.Value]) -> ir.Value:
    """Compare floats in total order: by their bits, those of negative ones flipped."""
    keys = []
    for x in args:
        kind = ir.IntType(64 if x.type == F64 else 32)
        bits = builder.bitcast(x, kind)
        negative = builder.icmp_signed("<", bits, ir.Constant(kind, 0))
        flipped = builder.xor(bits, ir.Constant(kind, (1 << (kind.width - 1)) - 1))
        keys.append(builder.select(negative, flipped, bits))
    return builder.icmp_signed(SCALARS[fn].symbol, *keys)


# --- floats ------------------------------------------------------------------


def _plain(name: str) -> Emit:
    return lambda b, *args: getattr(b, name)(*args, flags=CONTRACT)


def _intrinsic(name: str) -> Emit:
    return lambda b, *args: call_intrinsic(b, f"llvm.{name}.{suffix(args[0].type)}", args[0].type, list(args))


def _float_sign(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    one, zero = ir.Constant(x.type, 1.0), ir.Constant(x.type, 0.0)
    signed = call_intrinsic(b, f"llvm.copysign.{suffix(x.type)}", x.type, [one, x])
    nonzero = b.fcmp_ordered("!=", x, zero)  # false for NaN too: 0 and NaN are their own sign
    return b.select(nonzero, signed, x)


def _is_finite(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    size = call_intrinsic(b, f"llvm.fabs.{suffix(x.type)}", x.type, [x])
    return b.fcmp_ordered("<", size, ir.Constant(x.type, float("inf")))


def _remainder(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return emit_math.call(b, "rem", [x, y])


FLOATS: dict[str, Emit] = {
    "add": _plain("fadd"),
    "sub": _plain("fsub"),
    "mul": _plain("fmul"),
    "div": _plain("fdiv"),
    "neg": lambda b, x: b.fneg(x),
    "abs": _intrinsic("fabs"),
    "max": _intrinsic("maximum"),
    "min": _intrinsic("minimum"),
    "floor": _intrinsic("floor"),
    "ceil": _intrinsic("ceil"),
    "round_even": _intrinsic("rint"),
    "round_afz": _intrinsic("round"),
    "sqrt": _intrinsic("sqrt"),
    "sign": _float_sign,
    "is_finite": _is_finite,
    "rem": _remainder,
    "real": lambda b, x: x,
    "conj": lambda b, x: x,
    "imag": lambda b, x: ir.Constant(x.type, 0.0),
}


def _next_after(b: ir.IRBuilder, x: ir.Value, y: ir.Value, dtype: str) -> ir.Value:
    """Step the bits of ``x`` in its own format by one towards ``y``."""
    raw = encode(b, x, dtype)
    kind = ir.IntType(DTYPES[dtype].bits)
    bits, target = (b.bitcast(v, kind) for v in (raw, encode(b, y, dtype)))
    one, zero = ir.Constant(kind, 1), ir.Constant(x.type, 0.0)
    grows = b.xor(b.fcmp_ordered("<", x, y), b.fcmp_ordered("<", x, zero))
    stepped = b.select(grows, b.add(bits, one), b.sub(bits, one))
    sign = b.and_(target, ir.Constant(kind, 1 << (kind.width - 1)))
    stepped = b.select(b.fcmp_ordered("==", x, zero), b.or_(sign, one), stepped)
    moved = decode(b, b.bitcast(stepped, raw.type) if raw.type != kind else stepped, dtype)
    value = b.select(b.fcmp_ordered("==", x, y), y, moved)
    return b.select(b.fcmp_unordered("uno", x, y), b.fadd(x, y), value)


def _float(builder: ir.IRBuilder, fn: str, args: list[ir.Value], dtype: str, result: str) -> ir.Value:
    if fn == "clamp":
        low = call_intrinsic(builder, f"llvm.maximum.{suffix(args[1].type)}", args[1].type, [args[0], args[1]])
        return call_intrinsic(builder, f"llvm.minimum.{suffix(args[1].type)}", args[1].type, [low, args[2]])
    if fn == "next_after":
        return _next_after(builder, args[0], args[1], dtype)
    emit = FLOATS.get(fn)
    value = emit(builder, *args) if emit else emit_math.call(builder, fn, args)
    if value.type == I1 or result in ("f32", "f64"):
        return value
    return round_to(builder, value, dtype)


# --- integers ----------------------------------------------------------------


def _signed(name: str, other: str) -> Callable[[str], Emit]:
    """Pick a builder method by signedness."""
    return lambda kind: lambda b, *args: getattr(b, name if kind == "i" else other)(*args)


def _integer_intrinsic(signed: str, unsigned: str) -> Callable[[str], Emit]:
    return lambda kind: _intrinsic(signed if kind == "i" else unsigned)


def _division(quotient: bool) -> Callable[[str], Emit]:
    """Division with the two undefined cases replaced: by 0, and the least integer by -1."""

    def make(kind: str) -> Emit:
        def emit(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
            width = x.type.width
            zero, one, ones = (ir.Constant(x.type, n) for n in (0, 1, -1))
            by_zero = b.icmp_unsigned("==", y, zero)
            safe = b.select(by_zero, one, y)
            overflow = None
            if kind == "i":
                least = b.icmp_unsigned("==", x, ir.Constant(x.type, -(1 << (width - 1))))
                overflow = b.and_(least, b.icmp_unsigned("==", y, ones))
                safe = b.select(overflow, one, safe)
            if quotient:
                value = b.sdiv(x, safe) if kind == "i" else b.udiv(x, safe)
                return b.select(by_zero, ones, value)
            value = b.srem(x, safe) if kind == "i" else b.urem(x, safe)
            return b.select(by_zero, x, value)

        return emit

    return make


def _shift(name: str) -> Callable[[str], Emit]:
    def emit(b: ir.IRBuilder, x: ir.Value, by: ir.Value) -> ir.Value:
        width = ir.Constant(x.type, x.type.width)
        fits = b.icmp_unsigned("<", by, width)
        if name == "ashr":
            last = ir.Constant(x.type, x.type.width - 1)
            return b.ashr(x, b.select(fits, by, last))
        inside = b.select(fits, by, ir.Constant(x.type, 0))
        return b.select(fits, getattr(b, name)(x, inside), ir.Constant(x.type, 0))

    return lambda kind: emit


def _integer_sign(kind: str) -> Emit:
    def emit(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
        zero, one = ir.Constant(x.type, 0), ir.Constant(x.type, 1)
        positive = b.zext(b.icmp_unsigned("!=", x, zero), x.type) if x.type != I1 else x
        if kind != "i":
            return positive
        return b.select(b.icmp_signed("<", x, zero), ir.Constant(x.type, -1), b.select(
            b.icmp_signed(">", x, zero), one, zero))

    return emit


def _abs(kind: str) -> Emit:
    def emit(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
        if kind != "i":
            return x
        return b.select(b.icmp_signed("<", x, ir.Constant(x.type, 0)), b.neg(x), x)

    return emit


def _power(kind: str) -> Emit:
    """Binary exponentiation; a negative exponent gives 1 / x**|n| as integers divide."""

    def emit(b: ir.IRBuilder, x: ir.Value, n: ir.Value) -> ir.Value:
        zero, one, ones = (ir.Constant(x.type, v) for v in (0, 1, -1))
        result: ir.Value = one
        base, left = x, n
        for bit in range(x.type.width):
            odd = b.icmp_unsigned("!=", b.and_(left, one), zero)
            result = b.select(odd, b.mul(result, base), result)
            if bit + 1 < x.type.width:
                base, left = b.mul(base, base), b.lshr(left, one)
        if kind != "i":
            return result
        odd = b.icmp_unsigned("!=", b.and_(n, one), zero)
        of_minus_one = b.select(odd, ones, one)
        unit = b.select(b.icmp_unsigned("==", x, one), one, zero)
        negative = b.select(b.icmp_unsigned("==", x, ones), of_minus_one, unit)
        return b.select(b.icmp_signed("<", n, zero), negative, result)

    return emit


def _logic(name: str) -> Callable[[str], Emit]:
    return lambda kind: lambda b, *args: getattr(b, name)(*args)


def _count(name: str) -> Callable[[str], Emit]:
    def emit(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
        full = f"llvm.{name}.{suffix(x.type)}"
        extra = [] if name == "ctpop" else [ir.Constant(I1, 0)]
        return call_intrinsic(b, full, x.type, [x, *extra])

    return lambda kind: emit


OF_THE_WIDTH: dict[str, Callable[[str], Emit]] = {
    "div": _division(quotient=True),
    "pow": _power,
    "shl": _shift("shl"),
    "shr_logic": _shift("lshr"),
    "shr_arith": _shift("ashr"),
    "popcnt": _count("ctpop"),
    "clz": _count("ctlz"),
}
"""Those of which the low bits of a result depend on the width of the type."""

INTEGERS: dict[str, Callable[[str], Emit]] = {
    **OF_THE_WIDTH,
    "add": _logic("add"),
    "sub": _logic("sub"),
    "mul": _logic("mul"),
    "rem": _division(quotient=False),
    "neg": _logic("neg"),
    "abs": _abs,
    "max": _integer_intrinsic("smax", "umax"),
    "min": _integer_intrinsic("smin", "umin"),
    "sign": _integer_sign,
    "and": _logic("and_"),
    "or": _logic("or_"),
    "xor": _logic("xor"),
    "not": _logic("not_"),
}


def _integer(builder: ir.IRBuilder, fn: str, args: list[ir.Value], dtype: str) -> ir.Value:
    row = DTYPES[dtype]
    if row.kind == "b":
        fn = SCALARS[fn].on_bool or fn
    if fn == "clamp":
        low = _integer(builder, "max", args[:2], dtype)
        return _integer(builder, "min", [low, args[2]], dtype)
    make = INTEGERS.get(fn)
    if make is None:
        raise InternalError(f"kernels: no scalar op {fn} on {dtype}")
    if row.bits in (2, 4):
        return _narrow_integer(builder, make, args, fn, dtype)
    return make(row.kind)(builder, *args)


def _narrow_integer(builder: ir.IRBuilder, make: Callable[[str], Emit], args: list[ir.Value], fn: str, dtype: str):
    """2- and 4-bit ops run on 8 bits; where the width matters, on a register of the true width."""
    row = DTYPES[dtype]
    if fn in OF_THE_WIDTH:
        kind = ir.IntType(row.bits)
        value = make(row.kind)(builder, *[builder.trunc(a, kind) for a in args])
        return builder.sext(value, args[0].type) if row.kind == "i" else builder.zext(value, args[0].type)
    return narrow_int(builder, make(row.kind)(builder, *args), row)


def constant(value: bool | int | float | complex, dtype: str) -> Register:
    """Return the register of a literal of ``dtype``."""
    row = DTYPES[dtype]
    kind = register_type(dtype)
    match row.kind:
        case "c":
            z = complex(value)
            return (_float_constant(z.real, part_dtype(dtype)), _float_constant(z.imag, part_dtype(dtype)))
        case "f":
            return _float_constant(float(value), dtype)  # type: ignore[arg-type]
        case "b":
            return ir.Constant(I1, int(bool(value)))
    return ir.Constant(kind, int(value))  # type: ignore[arg-type]


def _float_constant(value: float, dtype: str) -> ir.Value:
    if dtype in SMALL_FLOATS:
        return emit_small_float.constant(value, dtype)
    return ir.Constant(register_type(dtype), emit_math.rounded(value, dtype))


def combine(builder: ir.IRBuilder, reduce: str, old: Register, new: Register, dtype: str) -> Register:
    """Return ``reduce(old, new)`` where the order of combination is free, so that it vectorizes."""
    if DTYPES[dtype].kind != "f" or dtype in SMALL_FLOATS:
        return apply(builder, reduce, [old, new], [dtype, dtype], dtype)
    kind = suffix(old.type)
    match reduce:
        case "add":
            value = builder.fadd(old, new, flags=("reassoc", "nsz", "contract"))
        case "mul":
            value = builder.fmul(old, new, flags=("reassoc", "nsz", "contract"))
        case "max":
            value = call_intrinsic(builder, f"llvm.maximum.{kind}", old.type, [old, new], ("nsz",))
        case "min":
            value = call_intrinsic(builder, f"llvm.minimum.{kind}", old.type, [old, new], ("nsz",))
        case _:
            return apply(builder, reduce, [old, new], [dtype, dtype], dtype)
    return value if dtype == computes_in(dtype) else round_to(builder, value, dtype)
