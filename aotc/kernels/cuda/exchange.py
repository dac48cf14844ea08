"""Emit exchanges between threads: values of a warp without memory, and a barrier of all blocks of a launch.

At the barrier of a launch the blocks count themselves in a word of global memory. The last block flips the word's top
bit. All blocks must run concurrently, which a cooperative launch guarantees. The first block adds the top bit minus the
increments of all others, so that the total is the top bit alone, and the word is ready for the next barrier.
"""

from __future__ import annotations

from llvmlite import ir

from aotc.ir.loop.ir import WARP
from aotc.kernels.formulas.llvm_values import call_intrinsic
from aotc.kernels.llvm_types import I1, I32, I64, VOID, i32

_EVERYBODY, _BUTTERFLY, _BALLOT = -1, 3, 3


def emit_warp_shuffle_xor(builder: ir.IRBuilder, value: ir.Value, mask: int) -> ir.Value:
    """Emit a warp shuffle: the value of thread ``t ^ mask``, where ``t`` is the calling thread.

    ``value`` is a number in memory form.
    """
    kind = value.type
    bits = 64 if kind == ir.DoubleType() else 32 if kind == ir.FloatType() else kind.width
    word = value if isinstance(kind, ir.IntType) else builder.bitcast(value, ir.IntType(bits))
    if bits < 32:
        found = builder.trunc(_shuffle_word(builder, builder.zext(word, I32), mask), kind)
        return found
    wide: ir.Value = ir.Constant(word.type, 0)
    for shift in range(0, bits, 32):
        part = word if bits == 32 else builder.trunc(builder.lshr(word, ir.Constant(word.type, shift)), I32)
        moved = _shuffle_word(builder, part, mask)
        if bits == 32:
            wide = moved
        else:
            wide = builder.or_(wide, builder.shl(builder.zext(moved, word.type), ir.Constant(word.type, shift)))
    return wide if isinstance(kind, ir.IntType) else builder.bitcast(wide, kind)


def _shuffle_word(builder: ir.IRBuilder, word: ir.Value, mask: int) -> ir.Value:
    arguments = [i32(_EVERYBODY), i32(_BUTTERFLY), word, i32(mask), i32(WARP - 1)]
    both = call_intrinsic(builder, "llvm.nvvm.shfl.sync.i32", ir.LiteralStructType([I32, I1]), arguments)
    return builder.extract_value(both, 0)


def emit_warp_match(builder: ir.IRBuilder, word: ir.Value, bits: int) -> ir.Value:
    """Emit the mask of threads of the warp whose lowest ``bits`` bits of ``word`` equal those of the calling thread.

    The code has a ballot for each bit, as the time of ``match.any`` grows with the number of different words.
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


def emit_warp_barrier(builder: ir.IRBuilder) -> None:
    """Emit a warp barrier: wait for the threads of the warp, and make their writes visible."""
    call_intrinsic(builder, "llvm.nvvm.bar.warp.sync", VOID, [i32(_EVERYBODY)])


BLOCK_BARRIER = "llvm.nvvm.barrier0"
_HIGHEST = 1 << 31


def emit_special_register(builder: ir.IRBuilder, name: str) -> ir.Value:
    """Emit the value of a special register of the thread: ``tid.x``, ``ctaid.x`` or ``nctaid.x``."""
    return call_intrinsic(builder, f"llvm.nvvm.read.ptx.sreg.{name}", I32, [])


def emit_grid_barrier(builder: ir.IRBuilder, counter: ir.Value) -> None:
    """Emit a barrier of all threads of all blocks; ``counter`` is the address of the barrier's word."""
    call_intrinsic(builder, BLOCK_BARRIER, VOID, [])
    one, transposed, met = (builder.append_basic_block(name) for name in ("count", "turned", "met"))
    builder.cbranch(builder.icmp_unsigned("==", emit_special_register(builder, "tid.x"), i32(0)), one, met)
    builder.position_at_end(one)
    place = builder.ptrtoint(counter, I64)
    rest = builder.sub(i32(_HIGHEST + 1 - (1 << 32)), emit_special_register(builder, "nctaid.x"))
    first = builder.icmp_unsigned("==", emit_special_register(builder, "ctaid.x"), i32(0))
    _inline_assembly(builder, VOID, "fence.acq_rel.gpu;", "", [])
    share = builder.select(first, rest, i32(1))
    before = _inline_assembly(builder, I32, "atom.add.acq_rel.gpu.u32 $0, [$1], $2;", "=r,l,r,", [place, share])
    builder.branch(transposed)
    builder.position_at_end(transposed)
    now = _inline_assembly(builder, I32, "ld.acquire.gpu.u32 $0, [$1];", "=r,l,", [place])
    same = builder.icmp_signed(">=", builder.xor(now, before), i32(0))
    builder.cbranch(same, transposed, met)
    builder.position_at_end(met)
    call_intrinsic(builder, BLOCK_BARRIER, VOID, [])


def _inline_assembly(
    builder: ir.IRBuilder, result: ir.Type, text: str, letters: str, values: list[ir.Value]
) -> ir.Value:
    kind = ir.FunctionType(result, [v.type for v in values])
    return builder.asm(kind, text, letters + "~{memory}", values, side_effect=True)
