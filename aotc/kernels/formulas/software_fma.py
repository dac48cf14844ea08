"""Fused multiply-add for processors without the instruction: one rounding, in all cases.

In 32 bits, the product is exact in 64 bits, and the sum is rounded there to odd, so that the second rounding is correct
(S. Boldo and G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd",
2008). In 64 bits no float is wide enough: a function uses 128-bit integers.
"""

from __future__ import annotations

from llvmlite import ir

from aotc.kernels.formulas.llvm_values import ScalarValue, call_intrinsic
from aotc.kernels.llvm_types import F32, F64, I64, I128, i64

_NAME = "aotc.fma"
_MANTISSA, _BIAS = 52, 1075  # an f64 is its mantissa, an integer, times 2**(exponent - _BIAS)
_PRODUCT_LEFT, _SUM_LEFT = 20, 73  # left shifts of the product's and of the summand's mantissa: < 2**126
_LEAST = -1074  # exponent of the smallest subnormal f64


def fma32(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Emit ``a * b + c`` of f32 registers with one rounding."""
    x, y, z = (ScalarValue(builder, builder.fpext(v, F64)) for v in (a, b, c))
    product = x * y
    total = product + z
    back = total - product
    lost = (product - (total - back)) + (z - back)
    bits = ScalarValue(builder, builder.bitcast(total.raw, I64))
    # a NaN as the lost part is ignored: infinities stay
    inexact = ScalarValue(builder, builder.fcmp_ordered("!=", lost.raw, ir.Constant(F64, 0.0))) & ((bits & 1) == 0)
    outwards = builder.icmp_unsigned("==", (lost > 0.0).raw, (total > 0.0).raw)
    step = builder.select(outwards, i64(1), i64(-1))
    odd = builder.select(inexact.raw, builder.add(bits.raw, step), bits.raw)
    return builder.fptrunc(builder.bitcast(odd, F64), F32)


def fma64(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Emit ``a * b + c`` of f64 registers with one rounding."""
    function = builder.module.globals.get(_NAME)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(F64, [F64] * 3), _NAME)
        function.linkage = "internal"
        for attribute in ("noinline", "nounwind"):
            function.attributes.add(attribute)
        _Fma64(function).emit()
    return builder.call(function, [a, b, c])


class _Parts:
    """The parts of an f64: sign, mantissa (a 128-bit integer), exponent (1, not 0, if the mantissa is subnormal)."""

    def __init__(self, builder: ir.IRBuilder, value: ScalarValue) -> None:
        bits = ScalarValue(builder, builder.bitcast(value.raw, I64))
        raised = ScalarValue(builder, builder.lshr(bits.raw, i64(_MANTISSA))) & 0x7FF
        normal = ScalarValue(builder, builder.zext((raised != 0).raw, I64))
        mantissa = (bits & ((1 << _MANTISSA) - 1)) | (normal << _MANTISSA)
        self.negative = bits < 0
        self.finite = raised != 0x7FF
        self.exponent = raised + 1 - normal
        self.mantissa = ScalarValue(builder, builder.zext(mantissa.raw, I128))


class _Fma64:
    """Emitter of a fused multiply-add of f64: integers of a common unit, whose last bit is sticky."""

    def __init__(self, function: ir.Function) -> None:
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        self.values = [ScalarValue(self.builder, a) for a in function.args]

    def emit(self) -> None:
        x, y, z = (_Parts(self.builder, v) for v in self.values)
        a, b, c = self.values
        above = z.exponent - x.exponent - y.exponent + (_BIAS + _PRODUCT_LEFT)  # the summand's unit over the product's
        whole = (x.mantissa * y.mantissa) << _PRODUCT_LEFT
        product = self.shifted_right(whole, self.at_least_0(above - _SUM_LEFT))
        summand = self.shifted_right(z.mantissa << self.wide(self.between(above, _SUM_LEFT)), self.at_least_0(-above))
        unit = x.exponent + y.exponent - (2 * _BIAS + _PRODUCT_LEFT) + self.at_least_0(above - _SUM_LEFT)
        total = self.signed(product, x.negative ^ y.negative) + self.signed(summand, z.negative)
        size = self.signed(total, total < 0)
        rounded = self.rounded(size, unit)
        usual = self.select(total < 0, -rounded, rounded)
        # zero products, zero sums and non-finite values are correct with two roundings, too, except for an
        # infinite summand with a product that would only overflow
        plain = self.select(x.finite & y.finite & ~z.finite, c, a * b + c)
        exact = x.finite & y.finite & z.finite & (whole != 0) & (size != 0)
        self.builder.ret(self.select(exact, usual, plain).raw)

    def rounded(self, size: ScalarValue, unit: ScalarValue) -> ScalarValue:
        """Return ``size * 2**unit`` as f64: to nearest, ties to even, at 53 bits or at the smallest subnormal."""
        zeros = call_intrinsic(self.builder, "llvm.ctlz.i128", I128, [size.raw, ir.Constant(ir.IntType(1), 0)])
        length = 128 - self.narrow(ScalarValue(self.builder, zeros))
        drop = self.at_least_0(self.greater(length - (_MANTISSA + 1), _LEAST - unit))
        kept = size >> self.wide(drop)
        twice_the_rest = (size - (kept << self.wide(drop))) << 1
        one = ScalarValue(self.builder, ir.Constant(I128, 1)) << self.wide(drop)
        up = (twice_the_rest > one) | ((twice_the_rest == one) & ((kept & 1) != 0))
        whole = self.narrow(kept) + ScalarValue(self.builder, self.builder.zext(up.raw, I64))
        exponent = unit + drop
        half = exponent >> 1  # in two steps: 2**exponent alone may be out of range
        value = ScalarValue(self.builder, self.builder.sitofp(whole.raw, F64))
        return value * self.power_of_two(half) * self.power_of_two(exponent - half)

    def power_of_two(self, n: ScalarValue) -> ScalarValue:
        raised = (n + 1023) << _MANTISSA
        return ScalarValue(self.builder, self.builder.bitcast(raised.raw, F64))

    def shifted_right(self, value: ScalarValue, by: ScalarValue) -> ScalarValue:
        """Shift right; the last bit is 1 if any bit that was shifted out is."""
        amount = self.wide(self.select(by < 127, by, ScalarValue(self.builder, i64(127))))
        kept = value >> amount
        lost = ((kept << amount) != value).raw
        return kept | ScalarValue(self.builder, self.builder.zext(lost, I128))

    def signed(self, value: ScalarValue, negative: ScalarValue) -> ScalarValue:
        return self.select(negative, -value, value)

    def between(self, value: ScalarValue, high: int) -> ScalarValue:
        positive = self.at_least_0(value)
        return self.select(positive < high, positive, ScalarValue(self.builder, i64(high)))

    def at_least_0(self, value: ScalarValue) -> ScalarValue:
        return self.greater(value, ScalarValue(self.builder, i64(0)))

    def greater(self, a: ScalarValue, b: ScalarValue) -> ScalarValue:
        return self.select(a > b, a, b)

    def select(self, condition: ScalarValue, yes: ScalarValue, no: ScalarValue) -> ScalarValue:
        return ScalarValue(self.builder, self.builder.select(condition.raw, yes.raw, no.raw))

    def wide(self, value: ScalarValue) -> ScalarValue:
        return ScalarValue(self.builder, self.builder.zext(value.raw, I128))

    def narrow(self, value: ScalarValue) -> ScalarValue:
        return ScalarValue(self.builder, self.builder.trunc(value.raw, I64))
