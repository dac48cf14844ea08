"""Slow paths for rare arguments: their table, and the algebra that calls them.

Code with loops or tables, such as the remainder of a large quotient, is called and not inlined, so that the common case
stays free of branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llvmlite import ir

from aotc.kernels.formulas.complex_forms import Pair
from aotc.kernels.formulas.complex_rare import quotient, root
from aotc.kernels.formulas.forms import power_of_two
from aotc.kernels.formulas.large_angles import emit_sine_of_large
from aotc.kernels.formulas.llvm_algebra import Algebra
from aotc.kernels.formulas.llvm_values import ScalarValue, emit_value_loop
from aotc.kernels.formulas.log_gamma_negative import emit_log_gamma_of_negative
from aotc.kernels.formulas.power import power_of_any
from aotc.kernels.llvm_types import F64, I64, i64
from aotc.kernels.symbol_table import declare_function

_STEP = 11  # bits of the quotient of one integer division: a remainder has 53 of 64 bits


def emit_remainder(function: ir.Function) -> None:
    """Emit ``f64 f(f64 a, f64 b)``: ``a mod b`` for finite ``a >= b > 0``, exact."""
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    m = Algebra(builder, 64)
    (above, n), (below, least) = (_significand_and_exponent(m, ScalarValue(builder, a)) for a in function.args)

    def divide(left: ScalarValue, r: ScalarValue) -> list[ScalarValue]:
        by = m.select(left < _STEP, left, _STEP)
        return [left - by, _exact_modulo(r << by, below)]

    first = _exact_modulo(above, below)
    _, r = emit_value_loop(builder, [n - least, first], lambda left, r: left > 0, divide)
    # r * 2**(least - 1075), by steps that are exact
    power = least - 1
    half = power >> 1
    small = m.to_float(r) * float.fromhex("0x1p-1074")
    builder.ret((small * power_of_two(m, half) * power_of_two(m, power - half)).raw)


def _significand_and_exponent(m: Algebra, x: ScalarValue) -> tuple[ScalarValue, ScalarValue]:
    """Return integers with ``x == significand * 2**(exponent - 1075)``."""
    bits = m.to_bits(x)
    exponent, fraction = m.shift_right_logical(bits, 52), bits & ((1 << 52) - 1)
    subnormal = exponent == 0
    return m.select(subnormal, fraction, fraction | (1 << 52)), m.select(subnormal, 1, exponent)


def _exact_modulo(a: ScalarValue, b: ScalarValue) -> ScalarValue:
    return ScalarValue(a.builder, a.builder.urem(a.raw, b.raw))


def _scalar_rare_emitter(formula: Callable[..., ScalarValue]) -> Callable[[ir.Function], None]:
    """Return the emitter of the body of a function that computes ``formula`` on 64-bit values."""

    def emit(function: ir.Function) -> None:
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        builder.ret(formula(Algebra(builder, 64), *(ScalarValue(builder, a) for a in function.args)).raw)

    return emit


def _complex_part_emitter(formula: Callable[..., Pair], pairs: int) -> Callable[[ir.Function], None]:
    """Return the emitter for a ``formula`` of pairs; the function's last argument chooses a part of the result."""

    def of_part(m: Algebra, *args: ScalarValue) -> ScalarValue:
        x, y = formula(m, *((args[2 * n], args[2 * n + 1]) for n in range(pairs)))
        return m.select(args[-1] == 0, x, y)

    return _scalar_rare_emitter(of_part)


RARE: dict[str, tuple[tuple[ir.Type, ...], Callable[[ir.Function], None]]] = {
    "sine_of_large": ((F64, I64), emit_sine_of_large),
    "remainder": ((F64, F64), emit_remainder),
    "log_gamma_of_negative": ((F64, F64), emit_log_gamma_of_negative),
    "power": ((F64, F64), _scalar_rare_emitter(power_of_any)),
    "quotient": ((F64, F64, F64, F64, I64), _complex_part_emitter(partial(quotient, from_32_bits=False), 2)),
    "quotient_of_narrow": ((F64, F64, F64, F64, I64), _complex_part_emitter(partial(quotient, from_32_bits=True), 2)),
    "root": ((F64, F64, I64), _complex_part_emitter(partial(root, from_32_bits=False), 1)),
    "root_of_narrow": ((F64, F64, I64), _complex_part_emitter(partial(root, from_32_bits=True), 1)),
}
"""Argument types, and the emitter of the body, of each rare function; all return f64."""

CHOICE = "aotc.rarely."
"""Prefix of the functions of a flag, the usual result and the arguments; ``emit.rare_calls`` defines them."""


def choice_function(module: ir.Module, name: str) -> ir.Function:
    """Return the function that selects between the usual result and the slow path ``name``; declare it if necessary."""
    return declare_function(module, CHOICE + name, ir.FunctionType(F64, (I64, F64, *RARE[name][0])))


class FullAlgebra(Algebra):
    """The algebra that emits kernels; unlike its base class it can call slow paths for rare arguments."""

    def rarely(
        self, condition: ScalarValue, name: str, args: Sequence[ScalarValue | int], usual: ScalarValue
    ) -> ScalarValue:
        """Return ``usual``, or where the condition holds, the result of the slow path ``name``."""
        flag = self.builder.zext(condition.raw, I64)
        raw = [a.raw if isinstance(a, ScalarValue) else i64(a) for a in args]
        return self._wrap(self.builder.call(choice_function(self.builder.module, name), [flag, usual.raw, *raw]))
