"""Scalar ops on floats of 16 bits and more.

``contract`` is the only fast-math flag: a product and a sum may become one FMA. ``max`` and ``min`` propagate NaN and
order -0.0 below 0.0.
"""

from __future__ import annotations

from llvmlite import ir

from aotc.ir.opset import SCALARS
from aotc.kernels.emit import functions
from aotc.kernels.emit.bf16_instructions import BF16, ROUNDED
from aotc.kernels.emit.convert import round_to
from aotc.kernels.emit.memory import decode, encode
from aotc.kernels.formulas.llvm_values import call_intrinsic, intrinsic, suffix
from aotc.kernels.llvm_types import I1, Emit, has_bf16
from aotc.vmfb.dtypes import DTYPES

_CONTRACT = ("contract",)


def _plain(name: str) -> Emit:
    return lambda b, *args: getattr(b, name)(*args, flags=_CONTRACT)


def _sign(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    one, zero = ir.Constant(x.type, 1.0), ir.Constant(x.type, 0.0)
    signed = call_intrinsic(b, f"llvm.copysign.{suffix(x.type)}", x.type, [one, x])
    nonzero = b.fcmp_ordered("!=", x, zero)  # false for NaN, too: the sign of 0 and of NaN is the number itself
    return b.select(nonzero, signed, x)


def _is_finite(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    size = call_intrinsic(b, f"llvm.fabs.{suffix(x.type)}", x.type, [x])
    return b.fcmp_ordered("<", size, ir.Constant(x.type, float("inf")))


def _max_number(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    larger = b.fcmp_ordered(">", x, y)
    return b.select(b.or_(larger, b.fcmp_unordered("uno", y, y)), x, y)  # LLVM would call a library for maxnum of f16


def _remainder(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return functions.call(b, "rem", [x, y])


PICKS = frozenset({"max", "max_number", "min"})
"""Ops whose result is one of their operands, so that it is not rounded again."""

ONE_BY_ONE: dict[str, Emit] = {
    "add": _plain("fadd"),
    "sub": _plain("fsub"),
    "mul": _plain("fmul"),
    "div": _plain("fdiv"),
    "neg": lambda b, x: b.fneg(x),
    "abs": intrinsic("fabs"),
    "max": intrinsic("maximum"),
    "min": intrinsic("minimum"),
    "floor": intrinsic("floor"),
    "ceil": intrinsic("ceil"),
    "round_even": intrinsic("rint"),
    "round_afz": intrinsic("round"),
    "sqrt": intrinsic("sqrt"),
}
"""Ops that are a single instruction or intrinsic, on scalars and on vectors."""

FLOATS: dict[str, Emit] = {
    **ONE_BY_ONE,
    "sign": _sign,
    "is_finite": _is_finite,
    "max_number": _max_number,
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


def apply(builder: ir.IRBuilder, fn: str, args: list[ir.Value], dtype: str, result: str) -> ir.Value:
    """Emit the scalar op ``fn`` on floats of ``dtype``, of 16 bits or more."""
    if fn == "next_after":
        return _next_after(builder, args[0], args[1], dtype)
    name = SCALARS[fn].approximates or fn
    has_short = (dtype == "bf16" or (name != fn and dtype == "f32")) and has_bf16(builder)
    if has_short and fn in ROUNDED and dtype == result == "bf16":
        return ROUNDED[fn](builder, *args)
    short = BF16.get(name) if has_short else None
    emit = short or FLOATS.get(name)
    value = emit(builder, *args) if emit else functions.call(builder, name, args)
    if value.type == I1 or result in ("f32", "f64") or fn in PICKS:
        return value
    return round_to(builder, value, dtype)
