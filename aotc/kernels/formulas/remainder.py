"""The remainder of a division whose quotient has more bits than a float: long division of the significands."""

from __future__ import annotations

from llvmlite import ir

from aotc.kernels.formulas.forms import power_of_two
from aotc.kernels.formulas.llvm_algebra import Algebra
from aotc.kernels.formulas.llvm_values import ScalarValue, loop

_STEP = 11  # bits of the quotient that one integer division gives: a remainder has 53 of 64


def emit_remainder(function: ir.Function) -> None:
    """Emit ``f64 f(f64 a, f64 b)``, ``a mod b`` for finite ``a >= b > 0``, exactly."""
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    m = Algebra(builder, 64)
    (above, n), (below, least) = (_parts(m, ScalarValue(builder, a)) for a in function.args)

    def divide(left: ScalarValue, r: ScalarValue) -> list[ScalarValue]:
        by = m.select(left < _STEP, left, _STEP)
        return [left - by, _modulo(r << by, below)]

    first = _modulo(above, below)
    _, r = loop(builder, [n - least, first], lambda left, r: left > 0, divide)
    # r * 2**(least - 1075), by steps that are exact
    power = least - 1
    half = power >> 1
    small = m.to_float(r) * float.fromhex("0x1p-1074")
    builder.ret((small * power_of_two(m, half) * power_of_two(m, power - half)).raw)


def _parts(m: Algebra, x: ScalarValue) -> tuple[ScalarValue, ScalarValue]:
    """Return integers with ``x == significand * 2**(exponent - 1075)``."""
    bits = m.to_bits(x)
    exponent, fraction = m.shift_right_logical(bits, 52), bits & ((1 << 52) - 1)
    subnormal = exponent == 0
    return m.select(subnormal, fraction, fraction | (1 << 52)), m.select(subnormal, 1, exponent)


def _modulo(a: ScalarValue, b: ScalarValue) -> ScalarValue:
    return ScalarValue(a.builder, a.builder.urem(a.raw, b.raw))


