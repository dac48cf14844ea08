"""Emit the functions of ``formulas.math`` as LLVM functions, each defined once per module.

Each becomes an internal ``alwaysinline`` function of float or double. A kernel that uses ``exp`` ten times has ten
calls until LLVM inlines them.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from aotc.diagnostics import InternalError
from aotc.ir.opset.elementwise import exponent_bits_rounded
from aotc.ir.opset.spec import cast_array
from aotc.kernels.formulas import math as formulas
from aotc.kernels.formulas.llvm_values import ScalarValue, intrinsic_type_suffix
from aotc.kernels.formulas.rare import FullAlgebra
from aotc.kernels.llvm_types import F32, Register


def round_register_to_dtype(value: float, dtype: str) -> float:
    """Return ``value`` rounded to a value of float dtype ``dtype``."""
    return float(cast_array(np.asarray(value, np.float64), dtype))


def call_math_function(builder: ir.IRBuilder, fn: str, args: list[ir.Value]) -> ir.Value:
    """Emit a call of the function ``fn`` of ``formulas.math`` on float or double registers.

    Raises
    ------
    InternalError
        If the function does not exist.
    """
    formula = formulas.FUNCTIONS.get(fn)
    if formula is None:
        raise InternalError(f"kernels: cannot emit the scalar op {fn} for {intrinsic_type_suffix(args[0].type)}")
    kind = args[0].type
    name = f"aotc.{fn}.{intrinsic_type_suffix(kind)}"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(kind, [kind] * len(args)), name)
        function.linkage = "internal"
        function.attributes.add("alwaysinline")
        inner = ir.IRBuilder(function.append_basic_block("entry"))
        algebra = FullAlgebra(inner, 32 if kind == F32 else 64)
        inner.ret(formula(algebra, *[ScalarValue(inner, a) for a in function.args]).raw)
    return builder.call(function, args)


def emit_reduce_precision(builder: ir.IRBuilder, args: list[Register], dtype: str) -> ir.Value:
    """Emit the rounding of a float to fewer exponent and mantissa bits (``stablehlo.reduce_precision``).

    The second and third operand are the numbers of bits, both constant.

    Raises
    ------
    InternalError
        If the numbers of bits are not constants.
    """
    value, exponent, mantissa = args
    if not isinstance(exponent, ir.Constant) or not isinstance(mantissa, ir.Constant):
        raise InternalError("kernels: reduce_precision needs constant bits")
    algebra = FullAlgebra(builder, 32 if value.type == F32 else 64)
    rounded_value = formulas.reduce_precision(
        algebra, ScalarValue(builder, value), int(exponent.constant), int(mantissa.constant),
        exponent_bits_rounded(dtype),
    )  # fmt: skip
    return rounded_value.raw
