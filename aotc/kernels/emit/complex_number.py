"""Scalar ops on complex numbers: pairs of registers."""

from __future__ import annotations

from llvmlite import ir

from aotc.diagnostics import InternalError
from aotc.kernels.formulas.complex import COMPLEX
from aotc.kernels.formulas.llvm_values import ScalarValue
from aotc.kernels.formulas.rare import FullAlgebra
from aotc.kernels.llvm_types import F32, Register


def apply(builder: ir.IRBuilder, fn: str, args: list[Register], dtype: str) -> Register:
    """Emit the scalar op ``fn`` on complex operands of ``dtype``.

    Raises
    ------
    InternalError
        If complex numbers do not have the op.
    """
    formula = COMPLEX.get(fn)
    if formula is None:
        raise InternalError(f"kernels: no scalar op {fn} on {dtype}")
    first = args[0][0]  # type: ignore[index]
    algebra = FullAlgebra(builder, 32 if first.type == F32 else 64)
    pairs = [(ScalarValue(builder, a[0]), ScalarValue(builder, a[1])) for a in args]  # type: ignore[index]
    value = formula(algebra, *pairs)
    return tuple(v.raw for v in value) if isinstance(value, tuple) else value.raw  # type: ignore[return-value]
