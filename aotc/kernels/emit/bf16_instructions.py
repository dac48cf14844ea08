"""bf16 functions of one or two instructions on NVIDIA's GPUs, and their formulas in f32 for other targets.

The functions of :data:`BF16` have at least 11 correct bits, while bf16 has 8. A result therefore rarely differs from
the correctly rounded one, and by at most one unit in the last place; a quotient never differs. The functions of
:data:`ROUNDED` are correctly rounded.
"""

from __future__ import annotations

from llvmlite import ir

from aotc.kernels.formulas.llvm_values import call_intrinsic
from aotc.kernels.llvm_types import F32, I16, I32, Emit

_LOG2_E = 1.4426950408889634


def round_to_bf16_register(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Round an f32 register to bf16; the result is the upper half of a 32-bit register whose lower half is 0."""
    kind = ir.FunctionType(I32, [F32, F32])
    zero = ir.Constant(F32, 0.0)
    pair = builder.asm(kind, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [value, zero], side_effect=False)
    return builder.bitcast(pair, F32)


def bf16_bits_by_instruction(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Round an f32 register to bf16 by the machine's instruction; return the 16 bits."""
    return builder.asm(ir.FunctionType(I16, [F32]), "cvt.rn.bf16.f32 $0, $1;", "=h,f", [value], side_effect=False)


def _ptx_instruction_emitter(text: str) -> Emit:
    """Return the emitter of the PTX instruction ``text`` on f32 registers."""
    return lambda b, *args: b.asm(
        ir.FunctionType(F32, [F32] * len(args)), f"{text} {', '.join(f'${n}' for n in range(len(args) + 1))};",
        ",".join(["=f", *("f" * len(args))]), list(args), side_effect=False,
    )  # fmt: skip


def _emit_bf16_exp(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Emit ``e**x`` by the instruction for ``2**x``."""
    return _ptx_instruction_emitter("ex2.approx.f32")(b, b.fmul(x, ir.Constant(F32, _LOG2_E)))


def _emit_bf16_logistic(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Emit the logistic function: ``1 / (1 + e**-x)``, or ``e**x / (1 + e**x)`` where that overflows."""
    size = call_intrinsic(b, "llvm.fabs.f32", F32, [x])
    power = _emit_bf16_exp(b, b.fneg(size))
    whole = _ptx_instruction_emitter("rcp.approx.f32")(b, b.fadd(power, ir.Constant(F32, 1.0)))
    return b.select(b.fcmp_ordered("<", x, ir.Constant(F32, 0.0)), b.fmul(power, whole), whole)


def _sum_or_product_as_fma(number: str, operands: str) -> Emit:
    """Return the emitter of a bf16 sum or product as an ``fma`` of ``operands``, which include a constant ``number``.

    f32 arithmetic, rounded afterwards, has the same bits for twice the instructions: f32 represents any product of two
    bf16, and the rounding error of a sum never crosses the midpoint of two bf16. The operand is the upper half of a
    register.
    """
    text = (
        f"{{.reg .b16 low, x, y, c; mov.b32 {{low, x}}, $1; mov.b32 {{low, y}}, $2; mov.b16 c, {number}; "
        f"fma.rn.bf16 x, {operands}; mov.b16 low, 0; mov.b32 $0, {{low, x}};}}"
    )
    kind = ir.FunctionType(I32, [I32, I32])

    def emit_fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
        raw = b.asm(kind, text, "=r,r,r", [b.bitcast(v, I32) for v in (x, y)], side_effect=False)
        return b.bitcast(raw, F32)

    return emit_fma


ROUNDED: dict[str, Emit] = {
    "add": _sum_or_product_as_fma("0x3F80", "x, c, y"),  # 1
    "mul": _sum_or_product_as_fma("0x8000", "x, y, c"),  # -0, to which also -0 may be added
    "sub": _sum_or_product_as_fma("0xBF80", "y, c, x"),  # -1
}

BF16: dict[str, Emit] = {
    "div": _ptx_instruction_emitter("div.full.f32"),
    "exp": _emit_bf16_exp,
    "logistic": _emit_bf16_logistic,
    "tanh": _ptx_instruction_emitter("tanh.approx.f32"),
}
