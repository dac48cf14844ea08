"""Numbers of the hardware that templates share: threads of warps and warpgroups, and named barriers."""

from __future__ import annotations

from aotc.ir.loop.ir import WARP

# Bits of a thread's number that are its lane in a warp, and their mask. CUDA C++ Programming Guide, SIMT architecture.
WARP_BITS = WARP.bit_length() - 1
LANE_MASK = WARP - 1
# Warps and threads of a warpgroup, the bits of a thread's number within one, and masks of the number of a warp and of a
# thread within one. PTX ISA, warpgroup.
WARPGROUP_WARPS = 4
WARPGROUP = WARPGROUP_WARPS * WARP
WARPGROUP_BITS = WARPGROUP.bit_length() - 1
WARP_MASK = WARPGROUP_WARPS - 1
THREAD_MASK = WARPGROUP - 1
# Threads of two warpgroups, which meet at a named barrier: one that arrives, and one that waits. PTX ISA, bar.arrive.
TWO_WARPGROUPS = 2 * WARPGROUP
# Rows of accumulators of a warp, and of a warpgroup. PTX ISA, layout of the accumulators of mma.m16n8 and wgmma.m64n8.
WARP_TILE = 16
WARPGROUP_TILE = WARPGROUP_WARPS * WARP_TILE
# Bytes of a barrier in shared memory. PTX ISA, mbarrier object.
BARRIER_BYTES = 8
# Bytes that a thread copies, loads or stores at once. PTX ISA, cp.async and vectors of ld and st.
PIECE_BYTES = 16
# Bytes of an element of the accumulators in shared memory: f32.
SUM_BYTES = 4


def first_row_of_warp(thread: int) -> int:
    """Return the first row of a thread's warp in the tile of its warpgroup, for the simulator."""
    return WARP_TILE * (thread // WARP % WARPGROUP_WARPS)
