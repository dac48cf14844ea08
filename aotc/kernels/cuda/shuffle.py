"""Exchange of values between the threads of a warp, without memory: ``shfl.sync`` moves 32-bit words."""

from __future__ import annotations

from llvmlite import ir

from aotc.ir.loop.ir import WARP
from aotc.kernels.formulas.llvm_values import call_intrinsic
from aotc.kernels.llvm_types import I1, I32, VOID, i32

_EVERYBODY, _BUTTERFLY, _BALLOT = -1, 3, 3


def exchanged(builder: ir.IRBuilder, value: ir.Value, mask: int) -> ir.Value:
    """Return ``value`` of thread ``t ^ mask``, in the memory form of a number."""
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


def matched(builder: ir.IRBuilder, word: ir.Value, bits: int) -> ir.Value:
    """Return the mask of threads of the warp whose lowest ``bits`` bits of ``word`` equal the calling thread's.

    It takes a ballot for each bit; the time of ``match.any`` grows with the number of different words.
    """
    same: ir.Value = i32(_EVERYBODY)
    for number in range(bits):
        bit = builder.icmp_unsigned("!=", builder.and_(word, i32(1 << number)), i32(0))
        both = call_intrinsic(
            builder, "llvm.nvvm.vote.sync", ir.LiteralStructType([I32, I1]), [i32(_EVERYBODY), i32(_BALLOT), bit]
        )
        votes = builder.extract_value(both, 0)
        same = builder.and_(same, builder.select(bit, votes, builder.not_(votes)))
    return same


def meet(builder: ir.IRBuilder) -> None:
    """Wait for the threads of the warp, and make their writes visible."""
    call_intrinsic(builder, "llvm.nvvm.bar.warp.sync", VOID, [i32(_EVERYBODY)])
