"""Matmul on Hopper's tensor cores (wgmma): bf16, f16, TF32, i8 and f8, with an arbitrary epilogue.

A block has one producer warpgroup, which copies, and one or two consumer warpgroups, which multiply. The producer fills
the stages of a ring buffer in shared memory by the tensor memory accelerator (TMA). A consumer multiplies its 64 rows
stage after stage and then releases the stage. The accumulators of a tile stay in registers until the epilogue, which
processes them in pieces and writes 16 bytes of a row at a time. Blocks are persistent: each computes one tile after the
other, in an order in which concurrent tiles share operands in the L2 cache. Two consumers either share each tile, or
alternate between tiles ("ping-pong"): one runs its epilogue while the other multiplies. CUTLASS calls these schedules
warp-specialized persistent, cooperative or ping-pong.

Rows of both operands start at multiples of 16 bytes; their extents are arbitrary. A batch of matmuls is one launch.

With swapped operands, columns of B take the place of rows of A. A matmul of few rows then fills the instructions, and
f32 that is contiguous along its rows, which tensor cores do not read from shared memory, becomes the operand that they
read from registers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from numba import cuda
from numba.cuda import types

from aotc.kernels.cuda.front_end import compile_to_llvm_ir
from aotc.kernels.cuda.hopper import (
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_wait,
    fence_barrier_init,
    named_barrier_arrive,
    named_barrier_wait,
    set_max_registers,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from aotc.kernels.cuda.ptx import divide_nonnegative, dynamic_shared_address
from aotc.kernels.cuda.templates.gemm.register_operands import (
    empty_register_operand,
    issue_register_products,
    load_register_operand,
    wait_for_register_products,
)
from aotc.kernels.cuda.templates.gemm.tiles import CHUNK, STAGING, SWIZZLE_BYTES, WarpgroupTiles
from aotc.kernels.cuda.templates.gemm.wgmma_steps import (
    issue_stage_products,
    load_operand_stage,
    prefetch_epilogue_of_warp,
    store_result_tile,
)
from aotc.kernels.cuda.templates.records import Ring, Sizes, TileGrid, TilePlace, next_stage
from aotc.kernels.cuda.templates.steps import matmul_extent, matmul_tile_order, swapped_operand_pair, zero_accumulators
from aotc.kernels.cuda.templates.threads import (
    BARRIER_BYTES,
    LANE_MASK,
    THREAD_MASK,
    TWO_WARPGROUPS,
    WARP_BITS,
    WARP_MASK,
    WARP_TILE,
    WARPGROUP,
    WARPGROUP_BITS,
    WARPGROUP_TILE,
    WARPGROUP_WARPS,
)

_TURN = 1  # and the next: named barriers of two consumers that alternate between tiles


@cache
def wgmma_gemm_texts(tiles: WarpgroupTiles, pointers: int, dims: int) -> tuple[str, ...]:
    """Compile a matmul kernel with wgmma instructions to LLVM IR.

    It calls device functions that :mod:`aotc.kernels.cuda.templates.steps` names.
    """
    byte = types.CPointer(types.uint8)
    tables = (types.UniTuple(byte, 2), types.UniTuple(byte, pointers), types.UniTuple(types.int64, dims))
    return tuple(compile_to_llvm_ir(_wgmma_gemm_kernel(tiles), (*tables, types.int64), tiles.threads, maps=2))


def _shared_memory_offsets(tiles: WarpgroupTiles) -> tuple[int, int, int]:
    """Return the offsets of staging areas, full barriers and empty barriers in shared memory, in bytes."""
    staging = tiles.ring_bytes
    full = staging + tiles.consumers * WARPGROUP_WARPS * STAGING
    return staging, full, full + BARRIER_BYTES * tiles.stages


def _gemm_producer(tiles: WarpgroupTiles) -> Callable[..., None]:
    """Return the device function of the producer: one thread fills stage after stage, for all tiles of the block.

    Invariant: stage s is written only after its empty barrier completed the phase of its last use. ``parity`` flips
    whenever the ring buffer wraps around.
    """
    rows, cols, depth, stage = tiles.rows, tiles.cols, tiles.depth, tiles.stage_bytes
    (_, full, empty), following = _shared_memory_offsets(tiles), next_stage(cuda, tiles.stages)
    copy, place, i32 = load_operand_stage(tiles), matmul_tile_order(cuda, rows, cols, tiles.batched), types.int32

    @cuda.jit(device=True, inline="always")
    def produce_tiles(maps, pointers, dims, base, grid):
        tile, ring = i32(cuda.blockIdx.x), Ring(i32(0), i32(0))
        while tile < grid.count:
            own, iteration = place(tile, grid.down, grid.across), i32(0)
            while iteration < grid.iterations:
                barrier_wait(i32(base + empty + BARRIER_BYTES * ring.stage), i32(ring.parity ^ 1))
                barrier = i32(base + full + BARRIER_BYTES * ring.stage)
                barrier_expect(barrier, i32(stage))
                copy(maps, pointers, dims, i32(base + ring.stage * stage), barrier, own, i32(iteration * depth))
                iteration, ring = i32(iteration + 1), following(ring)
            tile = i32(tile + cuda.gridDim.x)

    return produce_tiles


# Invariant: one group of products is in flight, so a stage is released one iteration after its products were issued. If
# the consumers alternate between tiles, each skips the stages of the other's tile, and named barriers pass the tensor
# cores from one to the other.
def _gemm_consumer(tiles: WarpgroupTiles) -> Callable[..., None]:
    """Return the device function of a consumer warpgroup, which computes 64 rows of each tile of the block."""
    rows, cols, stages, stage = tiles.rows, tiles.cols, tiles.stages, tiles.stage_bytes
    staging, full, empty = _shared_memory_offsets(tiles)
    steps, store = issue_stage_products(tiles), store_result_tile(tiles)
    clear = zero_accumulators(tiles.parts * tiles.width // 2, tiles.sum)
    ask, locate = prefetch_epilogue_of_warp(tiles), _warp_position_function(tiles)
    first, second = swapped_operand_pair(tiles, 0, rows * CHUNK)
    wait_all, wait_but_one = wgmma_wait(0), wgmma_wait(1)
    place, following, i32 = matmul_tile_order(cuda, rows, cols, tiles.batched), next_stage(cuda, stages), types.int32
    tall, every = (0, 2) if tiles.in_turn else (WARPGROUP_TILE, 1)  # rows, and tiles, from one consumer to the next
    shift = tall * CHUNK

    @cuda.jit(device=True, inline="always")
    def advance_ring(ring, count):
        """Return the ring position ``count`` stages later, after the stages of the other consumer's tile."""
        rounds = divide_nonnegative(i32(ring.stage + count), i32(stages))
        return Ring(i32(ring.stage + count - rounds * stages), i32(ring.parity ^ (rounds & 1)))

    @cuda.jit(device=True, inline="always")
    def consume_tiles(pointers, dims, base, thread, sizes, grid):
        mine, warp = i32((thread >> WARPGROUP_BITS) - 1), i32((thread >> WARP_BITS) & WARP_MASK)
        lane = i32(thread & LANE_MASK)
        leads = (thread & THREAD_MASK) == 0
        own, iterations = i32(base + staging + (mine * WARPGROUP_WARPS + warp) * STAGING), grid.iterations
        tile, ring = i32(cuda.blockIdx.x), Ring(i32(0), i32(0))
        if every == 2 and mine == 1:
            tile = i32(tile + cuda.gridDim.x)
            ring = advance_ring(ring, iterations)
            named_barrier_arrive(i32(_TURN), i32(TWO_WARPGROUPS))
        while tile < grid.count:
            part, ends = locate(place(tile, grid.down, grid.across), i32(mine * tall + warp * WARP_TILE), sizes)
            ahead = ask(lane, part, ends, pointers, dims)
            sums = clear()
            iteration, before = i32(0), i32(0)
            if every == 2:
                named_barrier_wait(i32(_TURN + mine), i32(TWO_WARPGROUPS))
            while iteration < iterations:
                barrier_wait(i32(base + full + BARRIER_BYTES * ring.stage), ring.parity)
                wgmma_fence()
                at = i32(base + ring.stage * stage)
                sums = steps(sums, i32(at + first + mine * shift), i32(at + second), iteration)
                wgmma_commit()
                if iteration > 0:
                    wait_but_one()
                    if leads:
                        barrier_arrive(i32(base + empty + BARRIER_BYTES * before))
                before = ring.stage
                iteration, ring = i32(iteration + 1), following(ring)
            if every == 2:
                named_barrier_arrive(i32(_TURN + 1 - mine), i32(TWO_WARPGROUPS))
            wait_all()
            if iterations > 0 and leads:
                barrier_arrive(i32(base + empty + BARRIER_BYTES * before))
            store(sums, ahead, own, lane, part, ends, pointers, dims)
            tile = i32(tile + every * cuda.gridDim.x)
            if every == 2:
                ring = advance_ring(ring, iterations)

    return consume_tiles


def _warp_position_function(tiles: WarpgroupTiles) -> Callable[..., tuple[TilePlace, Sizes]]:
    """Return the device function that computes a warp's position in the result from the index of a tile."""
    transposed, i32 = tiles.transposed, types.int32

    @cuda.jit(device=True, inline="always")
    def locate_warp(tile, own, sizes):
        if transposed:
            return TilePlace(tile.z, i32(tile.col + own), tile.row), Sizes(sizes.cols, sizes.rows)
        return TilePlace(tile.z, i32(tile.row + own), tile.col), sizes

    return locate_warp


def _gemm_register_consumer(tiles: WarpgroupTiles) -> Callable[..., None]:
    """Return the device function of a consumer whose first operand is in registers.

    Each warp releases stages by itself.
    """
    rows, cols, stage, following = tiles.rows, tiles.cols, tiles.stage_bytes, next_stage(cuda, tiles.stages)
    staging, full, empty = _shared_memory_offsets(tiles)
    steps, clear, store = (
        issue_register_products(tiles),
        zero_accumulators(tiles.width // 2, tiles.sum),
        store_result_tile(tiles),
    )
    load, nothing_held, wait, ask = (
        load_register_operand(tiles),
        empty_register_operand(),
        wait_for_register_products(tiles),
        prefetch_epilogue_of_warp(tiles),
    )
    first, second = swapped_operand_pair(tiles, 0, rows * CHUNK)
    place, locate, i32 = matmul_tile_order(cuda, rows, cols, tiles.batched), _warp_position_function(tiles), types.int32

    @cuda.jit(device=True, inline="always")
    def consume_tiles(pointers, dims, base, thread, sizes, grid):
        mine, warp = i32((thread >> WARPGROUP_BITS) - 1), i32((thread >> WARP_BITS) & WARP_MASK)
        lane = i32(thread & LANE_MASK)
        own, iterations = i32(base + staging + (mine * WARPGROUP_WARPS + warp) * STAGING), grid.iterations
        begin = i32(base + first + mine * WARPGROUP_TILE * CHUNK)
        tile, ring = i32(cuda.blockIdx.x), Ring(i32(0), i32(0))
        while tile < grid.count:
            own_rows = i32(mine * WARPGROUP_TILE + warp * WARP_TILE)
            part, ends = locate(place(tile, grid.down, grid.across), own_rows, sizes)
            ahead = ask(lane, part, ends, pointers, dims)
            sums, held, iteration = clear(), nothing_held(), i32(0)
            if iterations > 0:
                barrier_wait(i32(base + full + BARRIER_BYTES * ring.stage), ring.parity)
                held = load(i32(begin + ring.stage * stage), thread)
            while iteration < iterations:
                sums = steps(sums, held, i32(base + ring.stage * stage + second), iteration)
                wgmma_commit()
                loaded, before = held, ring.stage
                iteration, ring = i32(iteration + 1), following(ring)
                if iteration < iterations:
                    barrier_wait(i32(base + full + BARRIER_BYTES * ring.stage), ring.parity)
                    loaded = load(i32(begin + ring.stage * stage), thread)
                sums = wait(sums, held)
                if lane == 0:
                    barrier_arrive(i32(base + empty + BARRIER_BYTES * before))
                held = loaded
            store(sums, ahead, own, lane, part, ends, pointers, dims)
            tile = i32(tile + cuda.gridDim.x)

    return consume_tiles


# Registers of a thread of the producer warpgroup; it releases the rest to the consumers. The kernel needs fewer than
# 40.
COPY_REGISTERS = 40


def _wgmma_gemm_kernel(tiles: WarpgroupTiles) -> Callable[..., None]:
    """Return the kernel as a Python function for Numba, with the attributes of ``tiles`` as constants."""
    rows, cols, depth, stages, consumers = tiles.rows, tiles.cols, tiles.depth, tiles.stages, tiles.consumers
    _, full, empty = _shared_memory_offsets(tiles)
    arrivals = WARPGROUP_WARPS * consumers if tiles.in_registers else 1 if tiles.in_turn else consumers
    produce_tiles, consume_tiles = (
        _gemm_producer(tiles),
        (_gemm_register_consumer if tiles.in_registers else _gemm_consumer)(tiles),
    )
    give_registers, take_registers = set_max_registers("dec", COPY_REGISTERS), set_max_registers("inc", tiles.registers)
    m_of, n_of, k_of, z_of = (
        matmul_extent("rows"),
        matmul_extent("cols"),
        matmul_extent("depth"),
        matmul_extent("batch"),
    )
    above, i32 = SWIZZLE_BYTES - 1, types.int32

    def wgmma_gemm(maps, pointers, dims, items):
        base = i32(i32(dynamic_shared_address() + above) & i32(~above))
        thread = i32(cuda.threadIdx.x)
        m, n, k = m_of(pointers, dims), n_of(pointers, dims), k_of(pointers, dims)
        down, across = (
            divide_nonnegative(i32(m + rows - 1), i32(rows)),
            divide_nonnegative(i32(n + cols - 1), i32(cols)),
        )
        iterations = divide_nonnegative(i32(k + depth - 1), i32(depth))
        count = i32(i32(down * across) * z_of(pointers, dims))
        grid = TileGrid(count, down, across, iterations)
        if thread == 0:
            for s in range(stages):
                barrier_init(i32(base + full + BARRIER_BYTES * s), i32(1))
                barrier_init(i32(base + empty + BARRIER_BYTES * s), i32(arrivals))
            fence_barrier_init()
        cuda.syncthreads()
        if thread < WARPGROUP:
            give_registers()
            if thread == 0:
                produce_tiles(maps, pointers, dims, base, grid)
        else:
            take_registers()
            consume_tiles(pointers, dims, base, thread, Sizes(m, n), grid)

    return wgmma_gemm
