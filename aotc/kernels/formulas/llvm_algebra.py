"""The scalar algebra of ``formulas.math`` over LLVM values.

A :class:`Value` wraps an LLVM register with Python's operators, so that the
functions of :mod:`aotc.kernels.formulas.math` read as formulas. Only LLVM's own
target-independent intrinsics are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from aotc.kernels.llvm_types import F32, F64, I1, I32, I64, Emit

Number = bool | int | float


def call_intrinsic(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value], flags=()) -> ir.Value:
    """Call the LLVM intrinsic ``name`` (with its type suffix), declaring it if new."""
    module = builder.module
    function = module.globals.get(name)
    if function is None:
        function = ir.Function(module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args, fastmath=flags)


def suffix(kind: ir.Type) -> str:
    """Return how intrinsic names spell a scalar type: ``f32``, ``f64``, ``i32``..."""
    if isinstance(kind, ir.IntType):
        return f"i{kind.width}"
    return "f32" if kind == F32 else "f64"


def intrinsic(name: str) -> Emit:
    """Return what calls the LLVM intrinsic ``name`` whose operands and result are of one type."""
    return lambda b, *args: call_intrinsic(b, f"llvm.{name}.{suffix(args[0].type)}", args[0].type, list(args))


def loop(
    builder: ir.IRBuilder, state: Sequence[ScalarValue], more: Callable[..., ScalarValue],
    turn: Callable[..., Sequence[ScalarValue]],
) -> list[ScalarValue]:  # fmt: skip
    """Emit ``while more(*state): state = turn(*state)``; return the last state."""
    before = builder.block
    head, body, after = (builder.append_basic_block(f"loop.{part}") for part in ("head", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    phis = [builder.phi(v.raw.type) for v in state]
    held = [ScalarValue(builder, phi) for phi in phis]
    builder.cbranch(more(*held).raw, body, after)
    builder.position_at_end(body)
    found = turn(*held)
    for phi, first, last in zip(phis, state, found, strict=True):
        phi.add_incoming(first.raw, before)
        phi.add_incoming(last.raw, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return held


class ScalarValue:
    """A register of type float, double, i1, i32 or i64, with operators.

    Integers are signed; ``>>`` is arithmetic. Python numbers become constants of
    the type of the other operand.
    """

    __slots__ = ("builder", "raw")

    def __init__(self, builder: ir.IRBuilder, raw: ir.Value) -> None:
        self.builder, self.raw = builder, raw

    @property
    def is_float(self) -> bool:
        """Is the register a float (else an integer)?"""
        return self.raw.type in (F32, F64)

    def _other(self, other: ScalarValue | Number) -> ir.Value:
        return other.raw if isinstance(other, ScalarValue) else ir.Constant(self.raw.type, other)

    def _wrap(self, raw: ir.Value) -> ScalarValue:
        return ScalarValue(self.builder, raw)

    def _arithmetic(self, fn: str, a: ir.Value, b: ir.Value) -> ScalarValue:
        return self._wrap(getattr(self.builder, ("f" if self.is_float else "") + fn)(a, b))

    def __add__(self, other: ScalarValue | Number) -> ScalarValue:
        return self._arithmetic("add", self.raw, self._other(other))

    __radd__ = __add__

    def __sub__(self, other: ScalarValue | Number) -> ScalarValue:
        return self._arithmetic("sub", self.raw, self._other(other))

    def __rsub__(self, other: Number) -> ScalarValue:
        return self._arithmetic("sub", self._other(other), self.raw)

    def __mul__(self, other: ScalarValue | Number) -> ScalarValue:
        return self._arithmetic("mul", self.raw, self._other(other))

    __rmul__ = __mul__

    def __truediv__(self, other: ScalarValue | Number) -> ScalarValue:
        return self._wrap(self.builder.fdiv(self.raw, self._other(other)))

    def __rtruediv__(self, other: Number) -> ScalarValue:
        return self._wrap(self.builder.fdiv(self._other(other), self.raw))

    def __neg__(self) -> ScalarValue:
        return self._wrap(self.builder.fneg(self.raw) if self.is_float else self.builder.neg(self.raw))

    def __and__(self, other: ScalarValue | Number) -> ScalarValue:
        return self._wrap(self.builder.and_(self.raw, self._other(other)))

    def __or__(self, other: ScalarValue | Number) -> ScalarValue:
        return self._wrap(self.builder.or_(self.raw, self._other(other)))

    def __xor__(self, other: ScalarValue | Number) -> ScalarValue:
        return self._wrap(self.builder.xor(self.raw, self._other(other)))

    def __invert__(self) -> ScalarValue:
        return self._wrap(self.builder.not_(self.raw))

    def __lshift__(self, other: ScalarValue | int) -> ScalarValue:
        return self._wrap(self.builder.shl(self.raw, self._other(other)))

    def __rshift__(self, other: ScalarValue | int) -> ScalarValue:
        return self._wrap(self.builder.ashr(self.raw, self._other(other)))

    def _compare(self, fn: str, other: ScalarValue | Number) -> ScalarValue:
        compare = self.builder.icmp_signed
        if self.is_float:
            compare = self.builder.fcmp_unordered if fn == "!=" else self.builder.fcmp_ordered
        return self._wrap(compare(fn, self.raw, self._other(other)))

    def __lt__(self, other: ScalarValue | Number) -> ScalarValue:
        return self._compare("<", other)

    def __le__(self, other: ScalarValue | Number) -> ScalarValue:
        return self._compare("<=", other)

    def __gt__(self, other: ScalarValue | Number) -> ScalarValue:
        return self._compare(">", other)

    def __ge__(self, other: ScalarValue | Number) -> ScalarValue:
        return self._compare(">=", other)

    def __eq__(self, other: ScalarValue | Number) -> ScalarValue:  # type: ignore[override]
        return self._compare("==", other)

    def __ne__(self, other: ScalarValue | Number) -> ScalarValue:  # type: ignore[override]
        return self._compare("!=", other)

    __hash__ = None  # type: ignore[assignment]


class Algebra:
    """The helpers of the algebra for one float type.

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

    def fma(self, a: ScalarValue, b: ScalarValue | float, c: ScalarValue | float) -> ScalarValue:
        """Return ``a * b + c`` with one rounding."""
        args = [x.raw if isinstance(x, ScalarValue) else ir.Constant(self.float_type, x) for x in (a, b, c)]
        return self._wrap(call_intrinsic(self.builder, f"llvm.fma.f{self.bits}", self.float_type, args))

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
        """Return ``yes`` where the condition holds, else ``no``; both are computed."""
        kind = next((v.raw.type for v in (yes, no) if isinstance(v, ScalarValue)), self.float_type)
        a, b = (v.raw if isinstance(v, ScalarValue) else ir.Constant(kind, v) for v in (yes, no))
        return self._wrap(self.builder.select(condition.raw, a, b))

    def to_bits(self, x: ScalarValue) -> ScalarValue:
        """Return the bits as a signed integer."""
        return self._wrap(self.builder.bitcast(x.raw, self.int_type))

    def from_bits(self, i: ScalarValue) -> ScalarValue:
        """Return the float that has these bits."""
        return self._wrap(self.builder.bitcast(i.raw, self.float_type))

    def to_int(self, x: ScalarValue) -> ScalarValue:
        """Convert to an integer of as many bits, clamped; NaN gives 0."""
        name = f"llvm.fptosi.sat.i{self.bits}.f{self.bits}"
        return self._wrap(call_intrinsic(self.builder, name, self.int_type, [x.raw]))

    def to_float(self, i: ScalarValue) -> ScalarValue:
        """Convert a signed integer to a float."""
        return self._wrap(self.builder.sitofp(i.raw, self.float_type))

    def shift_right_logical(self, i: ScalarValue, by: ScalarValue | int) -> ScalarValue:
        """Shift zeros in from the left."""
        amount = by.raw if isinstance(by, ScalarValue) else ir.Constant(i.raw.type, by)
        return self._wrap(self.builder.lshr(i.raw, amount))

    def true(self) -> ScalarValue:
        """Return the condition that always holds."""
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
