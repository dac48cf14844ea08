"""LLVM registers with Python's operators, and calls of LLVM's target-independent intrinsics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from aotc.kernels.llvm_types import F32, F64, Emit
from aotc.kernels.symbol_table import declare_function

Number = bool | int | float


def call_intrinsic(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value], flags=()) -> ir.Value:
    """Emit a call of the LLVM intrinsic ``name`` (with its type suffix); declare it if necessary."""
    function = declare_function(builder.module, name, ir.FunctionType(result, [a.type for a in args]))
    return builder.call(function, args, fastmath=flags)


def intrinsic_type_suffix(kind: ir.Type) -> str:
    """Return the type suffix of intrinsic names: ``f32``, ``f64``, ``i32``, ``v16f32``..."""
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{intrinsic_type_suffix(kind.element)}"
    if isinstance(kind, ir.IntType):
        return f"i{kind.width}"
    return "f32" if kind == F32 else "f64"


def intrinsic_method(name: str) -> Emit:
    """Return a method that calls the LLVM intrinsic ``name``, with operands and result of one type."""
    return lambda b, *args: call_intrinsic(
        b, f"llvm.{name}.{intrinsic_type_suffix(args[0].type)}", args[0].type, list(args)
    )


class ScalarValue:
    """A register of type float, double, i1, i32 or i64, with operators.

    Integers are signed; ``>>`` is arithmetic. Python numbers become constants of the other operand's type.
    """

    __slots__ = ("builder", "raw")

    def __init__(self, builder: ir.IRBuilder, raw: ir.Value) -> None:
        self.builder, self.raw = builder, raw

    @property
    def is_float(self) -> bool:
        """Return True if the register is a float, False if an integer."""
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


def emit_value_loop(
    builder: ir.IRBuilder, state: Sequence[ScalarValue], more: Callable[..., ScalarValue],
    quadrant: Callable[..., Sequence[ScalarValue]],
) -> list[ScalarValue]:  # fmt: skip
    """Emit a loop over a tuple of values, and return their final values.

    While ``more(*state)`` is true, ``quadrant(*state)`` computes the next values.
    """
    before = builder.block
    head, body, after = (builder.append_basic_block(f"loop.{part}") for part in ("head", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    phis = [builder.phi(v.raw.type) for v in state]
    held = [ScalarValue(builder, phi) for phi in phis]
    builder.cbranch(more(*held).raw, body, after)
    builder.position_at_end(body)
    found = quadrant(*held)
    for phi, first, last in zip(phis, state, found, strict=True):
        phi.add_incoming(first.raw, before)
        phi.add_incoming(last.raw, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return held
