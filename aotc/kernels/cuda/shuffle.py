"""Values from a thread to another of its warp, without memory: ``shfl.sync`` moves words of 32 bits."""

from __future__ import annotations

from llvmlite import ir

from aotc.ir.loop_ir import WARP
from aotc.kernels.formulas.llvm_values import call_intrinsic
from aotc.kernels.llvm_types import I1, I32, i32

_EVERYBODY, _BUTTERFLY = -1, 3


def exchanged(builder: ir.IRBuilder, value: ir.Value, mask: int) -> ir.Value:
    """Return what thread ``t ^ mask`` has for ``value``, the memory form of a number."""
    kind = value.type
    bits = 64 if kind == ir.DoubleType() else 32 if kind == ir.FloatType() else kind.width
    word = value if isinstance(kind, ir.IntType) else builder.bitcast(value, ir.IntType(bits))
    if bits < 32:
        found = builder.trunc(_word(builder, builder.zext(word, I32), mask), kind)
        return found
    wide: ir.Value = ir.Constant(word.type, 0)
    for shift in range(0, bits, 32):
        part = word if bits == 32 else builder.trunc(builder.lshr(word, ir.Constant(word.type, shift)), I32)
        moved = _word(builder, part, mask)
        if bits == 32:
            wide = moved
        else:
            wide = builder.or_(wide, builder.shl(builder.zext(moved, word.type), ir.Constant(word.type, shift)))
    return wide if isinstance(kind, ir.IntType) else builder.bitcast(wide, kind)


def _word(builder: ir.IRBuilder, word: ir.Value, mask: int) -> ir.Value:
    arguments = [i32(_EVERYBODY), i32(_BUTTERFLY), word, i32(mask), i32(WARP - 1)]
    both = call_intrinsic(builder, "llvm.nvvm.shfl.sync.i32", ir.LiteralStructType([I32, I1]), arguments)
    return builder.extract_value(both, 0)
