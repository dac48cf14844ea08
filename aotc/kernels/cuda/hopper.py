"""PTX instructions of Hopper: transaction barriers, copies by the tensor memory accelerator (TMA), and warpgroups.

Addresses in shared memory have 32 bits; a barrier is the address of its 8 bytes. Each function also has a meaning in
Python, for the simulator of :mod:`aotc.kernels.cuda.block`. Operations complete there when they are issued, so fences
and waits for operations do nothing.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from llvmlite import ir

from aotc.kernels.cuda.block import PhaseBarrier, simulated_thread, swizzled_tile_offset
from aotc.kernels.cuda.ptx import F32, I16, I32, I64, NOTHING, llvm_instruction, ptx_instruction


@ptx_instruction("mbarrier.init.shared::cta.b64 [$0], $1;", NOTHING, I32, I32)
def barrier_init(barrier, arrivals):
    """Initialize a barrier in shared memory whose phase ends after ``arrivals`` arrivals."""
    simulated_thread().block.barriers[int(barrier)] = PhaseBarrier(int(arrivals))


@ptx_instruction("fence.mbarrier_init.release.cluster;", NOTHING)
def fence_barrier_init():
    """Make this thread's new barriers visible to the tensor memory accelerator."""


@ptx_instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", NOTHING, I32, I32)
def barrier_expect(barrier, size):
    """Arrive at a barrier; its phase then also waits for ``size`` copied bytes."""
    simulated_thread().block.barriers[int(barrier)].count_arrivals(1, int(size))


@ptx_instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", NOTHING, I32)
def barrier_arrive(barrier):
    """Arrive at a barrier without waiting."""
    simulated_thread().block.barriers[int(barrier)].count_arrivals(1, 0)


@ptx_instruction(
    "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;\n"
    "@p bra done;\nbra again;\ndone:\n}",
    NOTHING, I32, I32,
)  # fmt: skip
def barrier_wait(barrier, parity):
    """Wait until the barrier's phase with this parity has ended; parities of phases alternate, starting with 0."""
    simulated_thread().block.barriers[int(barrier)].wait(int(parity))


@ptx_instruction("fence.proxy.async.shared::cta;", NOTHING)
def fence_async_proxy():
    """Make this thread's writes to shared memory visible to the tensor memory accelerator."""


@ptx_instruction("bar.sync $0, $1;", NOTHING, I32, I32)
def named_barrier_wait(number, threads):
    """Arrive at a named barrier, and wait for all of its threads."""
    simulated_thread().block.named_barrier(int(number), int(threads)).wait_for_all()


@ptx_instruction("bar.arrive $0, $1;", NOTHING, I32, I32)
def named_barrier_arrive(number, threads):
    """Arrive at a named barrier without waiting."""
    simulated_thread().block.named_barrier(int(number), int(threads)).count_arrivals(1, 0)


def _simulate_tma_store(part: np.ndarray, to: int, barrier: int) -> None:
    """Store copied elements in simulated shared memory, swizzled, and count their bytes at the barrier."""
    block = simulated_thread().block
    rows, bytes_ = np.indices((len(part), part.shape[1] * part.itemsize))
    block.memory[to + swizzled_tile_offset(rows, bytes_)] = part.view(np.uint8)
    block.barriers[barrier].count_arrivals(0, -part.nbytes)


@cache
def tma_copy_box(rank: int):
    """Return the instruction that starts a TMA copy of a box of an array with ``rank`` dimensions."""
    place = ", ".join(f"${n}" for n in range(3, 3 + rank))
    text = (
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        f"[$0], [$1, {{{place}}}], [$2];"
    )

    @ptx_instruction(text, NOTHING, I32, I64, I32, *[I32] * rank)
    def start_box_copy(to, tensor_map, barrier, *place):
        """Start to copy the box at ``place``, innermost coordinate first; elements outside of the array are 0."""
        _simulate_tma_store(tensor_map.copied_box(*map(int, place)), int(to), int(barrier))

    return start_box_copy


@cache
def tma_copy_im2col(spatial: int):
    """Return the instruction that starts an im2col copy of a convolution's input with ``spatial`` spatial dims."""
    rank = spatial + 2
    place = ", ".join(f"${n}" for n in range(3, 3 + rank))
    tap = ", ".join(f"${n}" for n in range(3 + rank, 3 + rank + spatial))
    text = (
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        f"[$0], [$1, {{{place}}}], [$2], {{{tap}}};"
    )

    @ptx_instruction(text, NOTHING, I32, I64, I32, *[I32] * rank, *[I16] * spatial)
    def start_im2col_copy(to, tensor_map, barrier, *given):
        """Start to copy channels of consecutive pixels, shifted by a tap; elements outside of the array are 0."""
        _simulate_tma_store(tensor_map.copied_box(given[:rank], given[rank:]), int(to), int(barrier))

    return start_im2col_copy


@ptx_instruction("mov.u32 $0, %cluster_ctarank;", I32)
def cluster_rank():
    """Return the index of the block in its cluster."""
    return simulated_thread().block.rank


@ptx_instruction("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;", NOTHING)
def cluster_barrier():
    """Wait for all threads of the cluster, and make their writes to shared memory visible."""
    simulated_thread().block.cluster.wait_for_all()


_RANK_BITS = 24  # rank bits of an address, in Python; the bits below are the offset in a block's memory


@ptx_instruction("mapa.shared::cluster.u32 $0, $1, $2;", I32, I32, I32)
def address_in_cluster_block(place, rank):
    """Return the address of ``place`` in the shared memory of another block of the cluster."""
    return int(place) | int(rank) << _RANK_BITS


def _cluster_load_codegen(context, builder, signature, arguments):
    kind = ir.FunctionType(ir.FloatType(), [ir.IntType(32)])
    return builder.asm(kind, "ld.shared::cluster.f32 $0, [$1];", "=f,r,~{memory}", arguments, side_effect=True)


@llvm_instruction(lambda place: F32(I32), _cluster_load_codegen)
def load_from_cluster(place):
    """Load an f32 from the shared memory of another block of the cluster."""
    block = simulated_thread().block.cluster.blocks[int(place) >> _RANK_BITS]
    return block.memory.view(np.float32)[(int(place) & (1 << _RANK_BITS) - 1) // 4]


@ptx_instruction("wgmma.fence.sync.aligned;", NOTHING)
def wgmma_fence():
    """Make register writes visible to the wgmma instructions that follow."""


@ptx_instruction("wgmma.commit_group.sync.aligned;", NOTHING)
def wgmma_commit():
    """Commit the issued wgmma instructions as one group, for :func:`wgmma_wait`."""


def wgmma_wait(left: int):
    """Return the instruction that waits until at most ``left`` groups of wgmma instructions are incomplete."""

    @ptx_instruction(f"wgmma.wait_group.sync.aligned {left};", NOTHING)
    def wgmma_wait_group():
        pass

    return wgmma_wait_group


def set_max_registers(change: str, count: int):
    """Return the instruction by which a warpgroup releases registers (``dec``) or requests them (``inc``)."""

    @ptx_instruction(f"setmaxnreg.{change}.sync.aligned.u32 {count};", NOTHING)
    def setmaxnreg():
        pass

    return setmaxnreg
