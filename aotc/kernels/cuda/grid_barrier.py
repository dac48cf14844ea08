"""Barrier of all blocks of a launch: the blocks count themselves in a word of memory.

The last block flips the word's top bit. All blocks must run concurrently, which a cooperative launch guarantees. The
first block adds the top bit minus the increments of all others, so that the total is the top bit alone, and the word is
ready for the next barrier.
"""

from __future__ import annotations

from llvmlite import ir

from aotc.kernels.formulas.llvm_values import call_intrinsic
from aotc.kernels.llvm_types import I32, I64, VOID, i32

BLOCK_BARRIER = "llvm.nvvm.barrier0"
_HIGHEST = 1 << 31


def special(builder: ir.IRBuilder, name: str) -> ir.Value:
    """Return a special register of the thread: ``tid.x``, ``ctaid.x``, ``nctaid.x``."""
    return call_intrinsic(builder, f"llvm.nvvm.read.ptx.sreg.{name}", I32, [])


def meet_all(builder: ir.IRBuilder, counter: ir.Value) -> None:
    """Wait for all threads of all blocks, and make their writes visible; ``counter`` is the address of the word."""
    call_intrinsic(builder, BLOCK_BARRIER, VOID, [])
    one, turned, met = (builder.append_basic_block(name) for name in ("count", "turned", "met"))
    builder.cbranch(builder.icmp_unsigned("==", special(builder, "tid.x"), i32(0)), one, met)
    builder.position_at_end(one)
    place = builder.ptrtoint(counter, I64)
    rest = builder.sub(i32(_HIGHEST + 1 - (1 << 32)), special(builder, "nctaid.x"))
    first = builder.icmp_unsigned("==", special(builder, "ctaid.x"), i32(0))
    _asm(builder, VOID, "fence.acq_rel.gpu;", "", [])
    share = builder.select(first, rest, i32(1))
    before = _asm(builder, I32, "atom.add.acq_rel.gpu.u32 $0, [$1], $2;", "=r,l,r,", [place, share])
    builder.branch(turned)
    builder.position_at_end(turned)
    now = _asm(builder, I32, "ld.acquire.gpu.u32 $0, [$1];", "=r,l,", [place])
    same = builder.icmp_signed(">=", builder.xor(now, before), i32(0))
    builder.cbranch(same, turned, met)
    builder.position_at_end(met)
    call_intrinsic(builder, BLOCK_BARRIER, VOID, [])


def _asm(builder: ir.IRBuilder, result: ir.Type, text: str, letters: str, values: list[ir.Value]) -> ir.Value:
    kind = ir.FunctionType(result, [v.type for v in values])
    return builder.asm(kind, text, letters + "~{memory}", values, side_effect=True)
