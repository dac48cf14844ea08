"""Emit scalar ops on integers and booleans.

Integers wrap. Division by 0 gives -1, its remainder the dividend. A shift by the width or more gives 0 (or the sign).
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from aotc.diagnostics import InternalError
from aotc.ir.opset import SCALARS
from aotc.kernels.emit.convert import narrow_int
from aotc.kernels.formulas.llvm_values import call_intrinsic, intrinsic_method, intrinsic_type_suffix
from aotc.kernels.llvm_types import I1, Emit
from aotc.vmfb.dtypes import DTYPES


def _signed_or_unsigned_emitter(signed: str, unsigned: str) -> Callable[[str], Emit]:
    """Return a function from the kind of an integer (``i`` or ``u``) to the emitter of one of two LLVM instructions."""
    return lambda kind: intrinsic_method(signed if kind == "i" else unsigned)


def _integer_division_emitter(quotient: bool) -> Callable[[str], Emit]:
    """Return a function from the kind of an integer to the emitter of division, or of the remainder.

    Division by 0 and of the lowest integer by -1 have defined results.
    """

    def make_division(kind: str) -> Emit:
        def emit_division(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
            """Emit a division whose divisor is replaced by 1 where LLVM's result would be undefined."""
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

        return emit_division

    return make_division


def _shift_emitter(name: str) -> Callable[[str], Emit]:
    """Return a function from the kind of an integer to the emitter of a shift that allows any shift amount."""

    def emit_shift(b: ir.IRBuilder, x: ir.Value, by: ir.Value) -> ir.Value:
        width = ir.Constant(x.type, x.type.width)
        fits = b.icmp_unsigned("<", by, width)
        if name == "ashr":
            last = ir.Constant(x.type, x.type.width - 1)
            return b.ashr(x, b.select(fits, by, last))
        # A select would be dropped by LLVM; NVPTX then uses a PTX shift, which only reads the low half of `by`.
        inside = b.and_(by, ir.Constant(x.type, x.type.width - 1))
        return b.select(fits, getattr(b, name)(x, inside), ir.Constant(x.type, 0))

    return lambda kind: emit_shift


def _integer_sign_emitter(kind: str) -> Emit:
    """Return the emitter of the sign function: -1, 0 or 1."""

    def emit_sign(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
        zero, one = ir.Constant(x.type, 0), ir.Constant(x.type, 1)
        positive = b.zext(b.icmp_unsigned("!=", x, zero), x.type) if x.type != I1 else x
        if kind != "i":
            return positive
        return b.select(b.icmp_signed("<", x, zero), ir.Constant(x.type, -1), b.select(
            b.icmp_signed(">", x, zero), one, zero))

    return emit_sign


def _integer_abs_emitter(kind: str) -> Emit:
    """Return the emitter of the absolute value."""

    def emit_abs(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
        if kind != "i":
            return x
        return b.select(b.icmp_signed("<", x, ir.Constant(x.type, 0)), b.neg(x), x)

    return emit_abs


def _integer_power_emitter(kind: str) -> Emit:
    """Return the emitter of integer powers by binary exponentiation; ``x**-n`` is ``1 / x**n`` in integer division."""

    def emit_power(b: ir.IRBuilder, x: ir.Value, n: ir.Value) -> ir.Value:
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

    return emit_power


def _logic_emitter(name: str) -> Callable[[str], Emit]:
    """Return a function from the kind of an integer to the emitter of a bitwise LLVM instruction."""
    return lambda kind: lambda b, *args: getattr(b, name)(*args)


def _bit_count_emitter(name: str) -> Callable[[str], Emit]:
    """Return a function from the kind of an integer to the emitter of ``ctpop``, ``ctlz`` or ``cttz``."""

    def emit_bit_count(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
        full = f"llvm.{name}.{intrinsic_type_suffix(x.type)}"
        extra = [] if name == "ctpop" else [ir.Constant(I1, 0)]
        return call_intrinsic(b, full, x.type, [x, *extra])

    return lambda kind: emit_bit_count


OF_THE_WIDTH: dict[str, Callable[[str], Emit]] = {
    "div": _integer_division_emitter(quotient=True),
    "pow": _integer_power_emitter,
    "shl": _shift_emitter("shl"),
    "shr_logic": _shift_emitter("lshr"),
    "shr_arith": _shift_emitter("ashr"),
    "popcnt": _bit_count_emitter("ctpop"),
    "clz": _bit_count_emitter("ctlz"),
}
"""Ops whose low result bits depend on the width of the type."""

INTEGERS: dict[str, Callable[[str], Emit]] = {
    **OF_THE_WIDTH,
    "add": _logic_emitter("add"),
    "sub": _logic_emitter("sub"),
    "mul": _logic_emitter("mul"),
    "rem": _integer_division_emitter(quotient=False),
    "neg": _logic_emitter("neg"),
    "abs": _integer_abs_emitter,
    "max": _signed_or_unsigned_emitter("smax", "umax"),
    "min": _signed_or_unsigned_emitter("smin", "umin"),
    "sign": _integer_sign_emitter,
    "and": _logic_emitter("and_"),
    "or": _logic_emitter("or_"),
    "xor": _logic_emitter("xor"),
    "not": _logic_emitter("not_"),
}


def emit_integer_op(builder: ir.IRBuilder, fn: str, args: list[ir.Value], dtype: str) -> ir.Value:
    """Emit the scalar op ``fn`` on integers or booleans of ``dtype``.

    Raises
    ------
    InternalError
        If the op is not defined for integers.
    """
    row = DTYPES[dtype]
    if row.kind == "b":
        fn = SCALARS[fn].on_bool or fn
    make_division = INTEGERS.get(fn)
    if make_division is None:
        raise InternalError(f"kernels: cannot emit the scalar op {fn} for {dtype}")
    if row.bits in (2, 4):
        return _emit_narrow_integer_op(builder, make_division, args, fn, dtype)
    return make_division(row.kind)(builder, *args)


def _emit_narrow_integer_op(
    builder: ir.IRBuilder, make_division: Callable[[str], Emit], args: list[ir.Value], fn: str, dtype: str
):
    """Emit an op on 2- or 4-bit integers: in 8 bits, or in the true width if the result depends on the width."""
    row = DTYPES[dtype]
    if fn in OF_THE_WIDTH:
        kind = ir.IntType(row.bits)
        value = make_division(row.kind)(builder, *[builder.trunc(a, kind) for a in args])
        return builder.sext(value, args[0].type) if row.kind == "i" else builder.zext(value, args[0].type)
    return narrow_int(builder, make_division(row.kind)(builder, *args), row)
