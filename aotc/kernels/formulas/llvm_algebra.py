"""The scalar algebra of ``formulas.math`` that emits LLVM IR.

A :class:`ScalarValue` wraps an LLVM register with Python's operators, so that the functions of
:mod:`aotc.kernels.formulas.math` read as formulas. Only LLVM's target-independent intrinsics are used. Instructions
that a machine lacks come from :mod:`aotc.kernels.formulas.software_fma`: LLVM would call a C library for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from aotc.kernels.formulas.llvm_values import ScalarValue, call_intrinsic
from aotc.kernels.formulas.software_fma import fma32, fma64
from aotc.kernels.llvm_types import F32, F64, I1, I32, I64, has_reciprocals, lacks_instruction


class Algebra:
    """Operations of the algebra for one float type; each emits instructions and returns a :class:`ScalarValue`.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
        Where to emit.
    bits : int
        32 or 64: the float type, and the integer type of its bits.
    """

    def __init__(self, builder: ir.IRBuilder, bits: int) -> None:
        self.builder, self.bits = builder, bits
        self.float_type: ir.Type = F32 if bits == 32 else F64
        self.int_type: ir.Type = I32 if bits == 32 else I64

    def _wrap(self, raw: ir.Value) -> ScalarValue:
        return ScalarValue(self.builder, raw)

    def _unary(self, name: str, x: ScalarValue) -> ScalarValue:
        full = f"llvm.{name}.f{self.bits}"
        return self._wrap(call_intrinsic(self.builder, full, self.float_type, [x.raw]))

    def const(self, value: float) -> ScalarValue:
        """Return a float constant, rounded to the type."""
        return self._wrap(ir.Constant(self.float_type, value))

    def rarely(
        self, condition: ScalarValue, name: str, args: Sequence[ScalarValue | int], usual: ScalarValue
    ) -> ScalarValue:
        """Return ``usual``, or where the (rare) condition holds, the result of the slow path ``name`` on ``args``.

        Only kernels have slow paths: see :class:`aotc.kernels.formulas.rare.FullAlgebra`.
        """
        raise NotImplementedError

    def fma(self, a: ScalarValue, b: ScalarValue | float, c: ScalarValue | float) -> ScalarValue:
        """Return ``a * b + c`` with one rounding."""
        args = [x.raw if isinstance(x, ScalarValue) else ir.Constant(self.float_type, x) for x in (a, b, c)]
        if lacks_instruction(self.builder, "fma"):
            return self._wrap((fma32 if self.bits == 32 else fma64)(self.builder, *args))
        return self._wrap(call_intrinsic(self.builder, f"llvm.fma.f{self.bits}", self.float_type, args))

    def multiply_add(self, a: ScalarValue, b: ScalarValue, c: ScalarValue) -> ScalarValue:
        """Return ``a * b + c``, with one rounding if the machine has FMA, else with two."""
        return a * b + c if lacks_instruction(self.builder, "fma") else self.fma(a, b, c)

    def ratio(self, a: ScalarValue, b: ScalarValue) -> ScalarValue:
        """Return the rounded ``a / b`` of numbers far from the ends of their range.

        A GPU's general division tests for the ends of the range by a branch, which keeps independent divisions from
        overlapping.
        """
        if self.bits == 64 or not has_reciprocals(self.builder):
            return a / b
        kind = ir.FunctionType(F32, [F32])
        near = self._wrap(self.builder.asm(kind, "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b.raw], side_effect=False))
        near = self.fma(near, self.fma(-b, near, 1.0), near)
        found = a * near
        found = self.fma(self.fma(-b, found, a), near, found)
        return self.fma(self.fma(-b, found, a), near, found)

    def inverse_root(self, x: ScalarValue) -> ScalarValue:
        """Return ``1 / sqrt(x)``, within a unit and a half.

        A GPU's instruction is within four units; a Newton step does the rest, unless it yields NaN.
        """
        if self.bits == 64 or not has_reciprocals(self.builder):
            return self.const(1.0) / self.sqrt(x)
        kind = ir.FunctionType(F32, [F32])
        near = self._wrap(self.builder.asm(kind, "rsqrt.approx.f32 $0, $1;", "=f,f", [x.raw], side_effect=False))
        rest = self.fma(-(x * near), near, 1.0)
        return self.select(self.abs(rest) < 1.0, self.fma(near * 0.5, rest, near), near)

    def rint(self, x: ScalarValue) -> ScalarValue:
        """Round to the nearest integer, ties to even."""
        return self._unary("rint", x)

    def floor(self, x: ScalarValue) -> ScalarValue:
        """Round down."""
        return self._unary("floor", x)

    def trunc(self, x: ScalarValue) -> ScalarValue:
        """Round towards 0."""
        return self._unary("trunc", x)

    def abs(self, x: ScalarValue) -> ScalarValue:
        """Return the absolute value (also of -0.0 and NaN)."""
        return self._unary("fabs", x)

    def sqrt(self, x: ScalarValue) -> ScalarValue:
        """Return the correctly rounded square root."""
        return self._unary("sqrt", x)

    def copysign(self, x: ScalarValue, sign: ScalarValue) -> ScalarValue:
        """Return ``|x|`` with the sign bit of ``sign``."""
        full = f"llvm.copysign.f{self.bits}"
        return self._wrap(call_intrinsic(self.builder, full, self.float_type, [x.raw, sign.raw]))

    def select(self, condition: ScalarValue, yes: ScalarValue | float, no: ScalarValue | float) -> ScalarValue:
        """Return ``yes`` where the condition holds, else ``no``; both are evaluated."""
        kind = next((v.raw.type for v in (yes, no) if isinstance(v, ScalarValue)), self.float_type)
        a, b = (v.raw if isinstance(v, ScalarValue) else ir.Constant(kind, v) for v in (yes, no))
        return self._wrap(self.builder.select(condition.raw, a, b))

    def to_bits(self, x: ScalarValue) -> ScalarValue:
        """Return the bits as a signed integer."""
        return self._wrap(self.builder.bitcast(x.raw, self.int_type))

    def from_bits(self, i: ScalarValue) -> ScalarValue:
        """Return the float with these bits."""
        return self._wrap(self.builder.bitcast(i.raw, self.float_type))

    def to_int(self, x: ScalarValue) -> ScalarValue:
        """Convert to an integer of the same width, clamped; NaN gives 0."""
        name = f"llvm.fptosi.sat.i{self.bits}.f{self.bits}"
        return self._wrap(call_intrinsic(self.builder, name, self.int_type, [x.raw]))

    def to_float(self, i: ScalarValue) -> ScalarValue:
        """Convert a signed integer to a float."""
        return self._wrap(self.builder.sitofp(i.raw, self.float_type))

    def shift_right_logical(self, i: ScalarValue, by: ScalarValue | int) -> ScalarValue:
        """Shift right, with zeros from the left."""
        amount = by.raw if isinstance(by, ScalarValue) else ir.Constant(i.raw.type, by)
        return self._wrap(self.builder.lshr(i.raw, amount))

    def true(self) -> ScalarValue:
        """Return the condition that is always true."""
        return self._wrap(ir.Constant(I1, 1))

    @property
    def wide(self) -> Algebra:
        """Return the algebra of f64."""
        return type(self)(self.builder, 64)

    def widen(self, x: ScalarValue) -> ScalarValue:
        """Convert f32 to f64."""
        return self._wrap(self.builder.fpext(x.raw, F64)) if self.bits == 32 else x

    def narrow(self, x: ScalarValue) -> ScalarValue:
        """Round f64 to this float type."""
        return self._wrap(self.builder.fptrunc(x.raw, F32)) if self.bits == 32 else x
