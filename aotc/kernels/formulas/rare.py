"""The algebra of formulas with functions for rare arguments: what needs a loop or a table is called, not inlined."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from aotc.kernels.formulas.large_angles import emit_sine_of_large
from aotc.kernels.formulas.llvm_algebra import Algebra
from aotc.kernels.formulas.llvm_values import ScalarValue
from aotc.kernels.formulas.log_gamma_negative import emit_log_gamma_of_negative
from aotc.kernels.formulas.remainder import emit_remainder
from aotc.kernels.llvm_types import F64, I64

_FUNCTIONS: dict[str, tuple[tuple[ir.Type, ...], Callable[[ir.Function], None]]] = {
    "sine_of_large": ((F64, I64), emit_sine_of_large),
    "remainder": ((F64, F64), emit_remainder),
    "log_gamma_of_negative": ((F64, F64), emit_log_gamma_of_negative),
}
"""The types of the arguments of each, and what emits its body; all return f64."""


def declare(module: ir.Module, name: str) -> ir.Function:
    """Return the rare function ``name``; add it to the module if it is new."""
    function = module.globals.get(f"aotc.{name}")
    if function is not None:
        return function
    types, emit = _FUNCTIONS[name]
    function = ir.Function(module, ir.FunctionType(F64, types), f"aotc.{name}")
    function.linkage = "internal"
    for attribute in ("noinline", "nounwind"):
        function.attributes.add(attribute)
    emit(function)
    return function


class FullAlgebra(Algebra):
    """The algebra that kernels are emitted with."""

    def rarely(
        self, condition: ScalarValue, name: str, args: Sequence[ScalarValue | int], usual: ScalarValue
    ) -> ScalarValue:
        """Return ``usual``, but where the condition holds, which is rare, the function ``name`` of ``args``."""
        before = self.builder.block
        with self.builder.if_then(condition.raw, likely=False):
            raw = [a.raw if isinstance(a, ScalarValue) else ir.Constant(I64, a) for a in args]
            found = self.builder.call(declare(self.builder.module, name), raw)
            inside = self.builder.block
        result = self.builder.phi(F64)
        result.add_incoming(usual.raw, before)
        result.add_incoming(found, inside)
        return self._wrap(result)
