"""Definitions of LLVM intrinsics that libNVVM lacks, for all GPUs or for older ones."""

from __future__ import annotations

import re
from collections.abc import Callable

from llvmlite import ir

from aotc.kernels.formulas.llvm_values import call_intrinsic, intrinsic_type_suffix
from aotc.kernels.llvm_types import F32, I1, I8, Emit, has_nan_extremes

_TYPES = re.compile(r"(\.[if]\d+)+$")
"""Type suffix of an intrinsic's name."""


def add_intrinsic_body(function: ir.Function) -> None:
    """Define the LLVM intrinsic ``function`` if libNVVM lacks it and :data:`BODIES` has code for it."""
    emit = BODIES.get(function.name) or BODIES.get(_TYPES.sub("", function.name))
    if emit is None:
        return
    function.name = f"aotc.{function.name}"
    function.linkage = "internal"
    function.attributes.add("alwaysinline")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    builder.ret(emit(builder, *function.args))


def _nvvm_type_letter(kind: ir.Type) -> str:
    """Return the letters for a float type in the names of NVVM's intrinsics."""
    return "f" if kind == F32 else "d"


def _call_nvvm_intrinsic(name: str) -> Emit:
    return lambda b, x: call_intrinsic(b, f"llvm.nvvm.{name}.{_nvvm_type_letter(x.type)}", x.type, [x])


def _pick_by_comparison(compare: str, symbol: str) -> Emit:
    return lambda b, x, y: b.select(getattr(b, compare)(symbol, x, y), x, y)


def _nan_propagating_extreme(name: str) -> Emit:
    """Return the emitter of a minimum or maximum that propagates NaN and orders -0.0 below 0.0.

    PTX has an instruction for f32 since sm_80.
    """

    def emit_extreme(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
        if x.type == F32 and has_nan_extremes(b):
            kind = ir.FunctionType(F32, [F32, F32])
            return b.asm(kind, f"{name}.NaN.f32 $0, $1, $2;", "=f,f,f", [x, y], side_effect=False)
        number = call_intrinsic(b, f"llvm.nvvm.f{name}.{_nvvm_type_letter(x.type)}", x.type, [x, y])
        return b.select(b.fcmp_unordered("uno", x, y), b.fadd(x, y), number)

    return emit_extreme


def _round_ties_away(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Emit rounding to the nearest integer, ties away from 0; the fraction is exact."""
    whole = _call_nvvm_intrinsic("trunc")(b, x)
    part = _call_nvvm_intrinsic("fabs")(b, b.fsub(x, whole))
    away = call_intrinsic(b, f"llvm.copysign.{intrinsic_type_suffix(x.type)}", x.type, [ir.Constant(x.type, 1.0), x])
    return b.select(b.fcmp_ordered(">=", part, ir.Constant(x.type, 0.5)), b.fadd(whole, away), whole)


def _saturating_float_to_integer(signed: bool) -> Emit:
    """Return the emitter of a saturating float-to-integer conversion that maps NaN to 0.

    The instruction only clamps to 32 or 64 bits.
    """

    def emit_conversion(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
        to = b.function.return_value.type
        wide = ir.IntType(max(to.width, 32))
        name = {(32, True): "i", (32, False): "ui", (64, True): "ll", (64, False): "ull"}[wide.width, signed]
        found = call_intrinsic(b, f"llvm.nvvm.{_nvvm_type_letter(x.type)}2{name}.rz", wide, [x])
        if to.width < 32:
            found = b.trunc(_clamp_to_bits(b, found, to.width, signed), to)
        return b.select(b.fcmp_unordered("uno", x, x), ir.Constant(to, 0), found)

    return emit_conversion


def _clamp_to_bits(b: ir.IRBuilder, x: ir.Value, bits: int, signed: bool) -> ir.Value:
    least, largest = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    compare = "icmp_signed" if signed else "icmp_unsigned"
    below = _pick_by_comparison(compare, "<")(b, x, ir.Constant(x.type, largest))
    return _pick_by_comparison(compare, ">")(b, below, ir.Constant(x.type, least)) if signed else below


def _count_one_bits(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Emit the number of one bits of an integer with less than 8 bits."""
    return b.trunc(call_intrinsic(b, "llvm.ctpop.i8", I8, [b.zext(x, I8)]), x.type)


def _count_leading_zeros(b: ir.IRBuilder, x: ir.Value, zero_is_undefined: ir.Value) -> ir.Value:
    wide = call_intrinsic(b, "llvm.ctlz.i8", I8, [b.zext(x, I8), ir.Constant(I1, 0)])
    return b.trunc(b.sub(wide, ir.Constant(I8, I8.width - x.type.width)), x.type)


BODIES: dict[str, Callable[..., ir.Value]] = {
    "llvm.smax": _pick_by_comparison("icmp_signed", ">"),
    "llvm.smin": _pick_by_comparison("icmp_signed", "<"),
    "llvm.umax": _pick_by_comparison("icmp_unsigned", ">"),
    "llvm.umin": _pick_by_comparison("icmp_unsigned", "<"),
    "llvm.canonicalize": lambda b, x: x,  # only CPUs need it, for halves in vectors; max.NaN and min.NaN quiet a NaN
    "llvm.maximum": _nan_propagating_extreme("max"),
    "llvm.minimum": _nan_propagating_extreme("min"),
    "llvm.fabs": _call_nvvm_intrinsic("fabs"),
    "llvm.trunc": _call_nvvm_intrinsic("trunc"),
    "llvm.rint": _call_nvvm_intrinsic("round"),  # NVVM's round breaks ties to even
    "llvm.round": _round_ties_away,
    "llvm.fptosi.sat": _saturating_float_to_integer(signed=True),
    "llvm.fptoui.sat": _saturating_float_to_integer(signed=False),
    **{f"llvm.ctpop.i{n}": _count_one_bits for n in (1, 2, 4)},
    **{f"llvm.ctlz.i{n}": _count_leading_zeros for n in (1, 2, 4)},
}
"""The emitter of each, by its name with or without types."""
