"""PTX instructions in numba.cuda: the text of each, and beside it what it means in Python.

::

    @ptx("ex2.approx.ftz.f32 $0, $1;", F32, F32)
    def exp2(x):
        return np.exp2(np.float32(x))

A kernel that calls ``exp2`` has the instruction; Python that calls it computes the meaning.
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
    """What Numba compiles to an instruction, ``text``; called by Python it is its ``meaning``."""

    def __init__(self, text: str, meaning: Callable[..., Any], typed: Callable[..., Any]) -> None:
        super().__init__(meaning.__name__, typed)
        self.text, self.meaning, self.__doc__ = text, meaning, meaning.__doc__
        self._register()

    def __call__(self, *operands: Any) -> Any:
        """Return what the instruction computes."""
        return self.meaning(*operands)


def assembly(builder: ir.IRBuilder, text: str, result: Any, operands: list[Any], values: list[ir.Value]) -> ir.Value:
    """Emit ``text`` on ``values`` of the types ``operands``; without a result it has effects on memory."""
    effects = result == NOTHING
    letters = [_LETTERS[o] for o in operands] + (["~{memory}"] if effects else [])
    letters = letters if effects else [f"={_LETTERS[result]}", *letters]
    kind = ir.FunctionType(ir.VoidType() if effects else _KINDS[result], [_KINDS[o] for o in operands])
    return builder.asm(kind, text, ",".join(letters), values, side_effect=effects)


def ptx(text: str, result: Any, *operands: Any) -> Callable[[Callable[..., Any]], PtxInstruction]:
    """Return a decorator of the meaning of an instruction.

    Parameters
    ----------
    text : str
        Of the instruction: ``$0`` is its result if it has one, then come its operands.
    result : numba.cuda.types.Type
        :data:`NOTHING` for one that writes or waits: the compiler moves no access to memory across it.
    *operands : numba.cuda.types.Type
        Of the operands, which arguments are converted to.
    """

    def generate(context, builder, signature, arguments):
        value = assembly(builder, text, result, list(operands), list(arguments))
        return context.get_dummy_value() if result == NOTHING else value

    return emitted(lambda *given: result(*operands), generate, text)


def emitted(typed: Callable[..., Any], generate: Callable[..., Any], text: str = "") -> Any:
    """Return a decorator of the meaning of what ``generate`` emits.

    Parameters
    ----------
    typed : callable
        Returns the signature for the types of the arguments.
    generate : callable
        As ``numba.cuda.extending.intrinsic`` has it: of context, builder, signature and arguments.
    text : str
        Of the instruction, if it is one.
    """

    def make(meaning: Callable[..., Any]) -> PtxInstruction:
        def definition(typing_context, *given):
            return typed(*given), generate

        first = Parameter("typing_context", Parameter.POSITIONAL_OR_KEYWORD)
        definition.__signature__ = Signature([first, *signature(meaning).parameters.values()])  # Numba passes by it
        return PtxInstruction(text, meaning, definition)

    return make


@ptx("div.s32 $0, $1, $2;", I32, I32, I32)
def quotient(a, b):
    """Return ``a / b`` rounded down, of numbers that are not negative."""
    return a // b


def _generate_shared_base(context, builder, signature, arguments):
    memory = ir.GlobalVariable(builder.module, ir.ArrayType(ir.IntType(8), 0), DYNAMIC_SHARED, addrspace=3)
    memory.align = SWIZZLE_BYTES
    return builder.ptrtoint(memory, ir.IntType(32))


@emitted(I32, _generate_shared_base)
def shared_base():
    """Return where the dynamic shared memory of the block begins."""
    return 0
