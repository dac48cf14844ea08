"""PTX instructions as Python functions: each has the text of an instruction, and a simulation in Python.

::

    @ptx_instruction("ex2.approx.ftz.f32 $0, $1;", F32, F32)
    def exp2(x):
        return np.exp2(np.float32(x))

In a compiled kernel ``exp2`` is the instruction; a call from Python runs the simulation.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import _Intrinsic

from aotc.kernels.cuda import front_end  # noqa: F401  (it prepares NumPy for numba.cuda)
from aotc.kernels.cuda.templates.gemm.tiles import SWIZZLE_BYTES

F32, F64, I16, I32, I64 = types.float32, types.float64, types.int16, types.int32, types.int64
NOTHING = types.void
DYNAMIC_SHARED = "aotc_dynamic_shared"
_LETTERS = {F32: "f", F64: "d", I16: "h", I32: "r", I64: "l"}
_KINDS = {F32: ir.FloatType(), F64: ir.DoubleType()}
_KINDS |= {I16: ir.IntType(16), I32: ir.IntType(32), I64: ir.IntType(64)}


class PtxInstruction(_Intrinsic):
    """A function that Numba compiles to the instruction ``text``; a call from Python simulates it by ``meaning``."""

    def __init__(self, text: str, meaning: Callable[..., Any], typed: Callable[..., Any]) -> None:
        super().__init__(meaning.__name__, typed)
        self.text, self.meaning, self.__doc__ = text, meaning, meaning.__doc__
        self._register()

    def __call__(self, *operands: Any) -> Any:
        """Run the simulation of the instruction."""
        return self.meaning(*operands)


def emit_inline_assembly(
    builder: ir.IRBuilder, text: str, result: Any, operands: list[Any], values: list[ir.Value]
) -> ir.Value:
    """Emit the inline assembly ``text`` on ``values`` of the types ``operands``; return its result.

    An instruction without a result is assumed to access memory.
    """
    effects = result == NOTHING
    letters = [_LETTERS[o] for o in operands] + (["~{memory}"] if effects else [])
    letters = letters if effects else [f"={_LETTERS[result]}", *letters]
    kind = ir.FunctionType(ir.VoidType() if effects else _KINDS[result], [_KINDS[o] for o in operands])
    return builder.asm(kind, text, ",".join(letters), values, side_effect=effects)


def ptx_instruction(text: str, result: Any, *operands: Any) -> Callable[[Callable[..., Any]], PtxInstruction]:
    """Return a decorator for the Python simulation of a PTX instruction; Numba compiles calls to the instruction.

    Parameters
    ----------
    text : str
        Text of the instruction: ``$0`` is its result, if any; the operands follow.
    result : numba.cuda.types.Type
        :data:`NOTHING` for an instruction that writes or waits: the compiler moves no memory access across it.
    *operands : numba.cuda.types.Type
        Types of the operands; arguments are converted to them.
    """

    def codegen(context, builder, signature, arguments):
        value = emit_inline_assembly(builder, text, result, list(operands), list(arguments))
        return context.get_dummy_value() if result == NOTHING else value

    return llvm_instruction(lambda *given: result(*operands), codegen, text)


def llvm_instruction(typed: Callable[..., Any], codegen: Callable[..., Any], text: str = "") -> Any:
    """Return a decorator for the Python simulation of an operation for which ``codegen`` emits LLVM IR.

    Parameters
    ----------
    typed : callable
        Returns the signature for the types of the arguments.
    codegen : callable
        As in ``numba.cuda.extending.intrinsic``: a function of context, builder, signature and arguments.
    text : str
        Text of the instruction, if the operation is a single one.
    """

    def decorate(meaning: Callable[..., Any]) -> PtxInstruction:
        def typing_function(typing_context, *given):
            return typed(*given), codegen

        first = Parameter("typing_context", Parameter.POSITIONAL_OR_KEYWORD)
        typing_function.__signature__ = Signature(
            [first, *signature(meaning).parameters.values()]
        )  # Numba passes by it
        return PtxInstruction(text, meaning, typing_function)

    return decorate


@ptx_instruction("div.s32 $0, $1, $2;", I32, I32, I32)
def divide_nonnegative(a, b):
    """Return ``a // b`` of non-negative integers, by fewer instructions than Python's division."""
    return a // b


def _shared_base_codegen(context, builder, signature, arguments):
    memory = ir.GlobalVariable(builder.module, ir.ArrayType(ir.IntType(8), 0), DYNAMIC_SHARED, addrspace=3)
    memory.align = SWIZZLE_BYTES
    return builder.ptrtoint(memory, ir.IntType(32))


@llvm_instruction(I32, _shared_base_codegen)
def dynamic_shared_address():
    """Return the address of the block's dynamic shared memory."""
    return 0
