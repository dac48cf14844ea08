"""Emit scalar ops on floats of 16 bits and more.

``contract`` is the only fast-math flag: a product and a sum may become one FMA. ``max`` and ``min`` propagate NaN and
order -0.0 below 0.0.
"""

from __future__ import annotations

from llvmlite import ir

from aotc.ir.opset import SCALARS
from aotc.kernels.emit import functions
from aotc.kernels.emit.bf16_instructions import BF16, ROUNDED
from aotc.kernels.emit.convert import round_f32_to
from aotc.kernels.emit.memory import decode_element, encode_element
from aotc.kernels.formulas.llvm_values import call_intrinsic, intrinsic_method, intrinsic_type_suffix
from aotc.kernels.llvm_types import I1, Emit, has_bf16
from aotc.vmfb.dtypes import DTYPES

_CONTRACT = ("contract",)


def _llvm_float_instruction(name: str) -> Emit:
    return lambda b, *args: getattr(b, name)(*args, flags=_CONTRACT)


def _emit_float_sign(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    one, zero = ir.Constant(x.type, 1.0), ir.Constant(x.type, 0.0)
    signed = call_intrinsic(b, f"llvm.copysign.{intrinsic_type_suffix(x.type)}", x.type, [one, x])
    nonzero = b.fcmp_ordered("!=", x, zero)  # false for NaN, too: the sign of 0 and of NaN is the number itself
    return b.select(nonzero, signed, x)


def _emit_is_finite(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    size = call_intrinsic(b, f"llvm.fabs.{intrinsic_type_suffix(x.type)}", x.type, [x])
    return b.fcmp_ordered("<", size, ir.Constant(x.type, float("inf")))


def _emit_max_number(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    larger = b.fcmp_ordered(">", x, y)
    return b.select(b.or_(larger, b.fcmp_unordered("uno", y, y)), x, y)  # LLVM would call a library for maxnum of f16


def _emit_float_remainder(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return functions.call_math_function(b, "rem", [x, y])


PICKS = frozenset({"max", "max_number", "min"})
"""Ops whose result is one of their operands, so that it is not rounded again."""

ONE_BY_ONE: dict[str, Emit] = {
    "add": _llvm_float_instruction("fadd"),
    "sub": _llvm_float_instruction("fsub"),
    "mul": _llvm_float_instruction("fmul"),
    "div": _llvm_float_instruction("fdiv"),
    "neg": lambda b, x: b.fneg(x),
    "abs": intrinsic_method("fabs"),
    "max": intrinsic_method("maximum"),
    "min": intrinsic_method("minimum"),
    "floor": intrinsic_method("floor"),
    "ceil": intrinsic_method("ceil"),
    "round_even": intrinsic_method("rint"),
    "round_afz": intrinsic_method("round"),
    "sqrt": intrinsic_method("sqrt"),
}
"""Ops that are a single instruction or intrinsic, on scalars and on vectors."""

FLOATS: dict[str, Emit] = {
    **ONE_BY_ONE,
    "sign": _emit_float_sign,
    "is_finite": _emit_is_finite,
    "max_number": _emit_max_number,
    "rem": _emit_float_remainder,
    "real": lambda b, x: x,
    "conj": lambda b, x: x,
    "imag": lambda b, x: ir.Constant(x.type, 0.0),
}


def _emit_next_after(b: ir.IRBuilder, x: ir.Value, y: ir.Value, dtype: str) -> ir.Value:
    """Emit the neighbour of ``x`` towards ``y`` in the format of ``dtype``, by integer arithmetic on its bits."""
    raw = encode_element(b, x, dtype)
    kind = ir.IntType(DTYPES[dtype].bits)
    bits, target = (b.bitcast(v, kind) for v in (raw, encode_element(b, y, dtype)))
    one, zero = ir.Constant(kind, 1), ir.Constant(x.type, 0.0)
    grows = b.xor(b.fcmp_ordered("<", x, y), b.fcmp_ordered("<", x, zero))
    stepped = b.select(grows, b.add(bits, one), b.sub(bits, one))
    sign = b.and_(target, ir.Constant(kind, 1 << (kind.width - 1)))
    stepped = b.select(b.fcmp_ordered("==", x, zero), b.or_(sign, one), stepped)
    moved = decode_element(b, b.bitcast(stepped, raw.type) if raw.type != kind else stepped, dtype)
    value = b.select(b.fcmp_ordered("==", x, y), y, moved)
    return b.select(b.fcmp_unordered("uno", x, y), b.fadd(x, y), value)


def emit_float_op(builder: ir.IRBuilder, fn: str, args: list[ir.Value], dtype: str, result: str) -> ir.Value:
    """Emit the scalar op ``fn`` on floats of ``dtype``, of 16 bits or more."""
    if fn == "next_after":
        return _emit_next_after(builder, args[0], args[1], dtype)
    name = SCALARS[fn].approximates or fn
    has_short = (dtype == "bf16" or (name != fn and dtype == "f32")) and has_bf16(builder)
    if has_short and fn in ROUNDED and dtype == result == "bf16":
        return ROUNDED[fn](builder, *args)
    short = BF16.get(name) if has_short else None
    emit = short or FLOATS.get(name)
    value = emit(builder, *args) if emit else functions.call_math_function(builder, name, args)
    if value.type == I1 or result in ("f32", "f64") or fn in PICKS:
        return value
    return round_f32_to(builder, value, dtype)
