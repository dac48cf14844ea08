"""Matmul on the tensor cores of any GPU from Ampere on (mma), with an arbitrary epilogue.

Operands are bf16, f16, TF32, i8, f8 or f64. Each warp of a block has a part of its tile, usually of 32 rows and 64
columns. All threads copy the stages of a ring buffer in shared memory, ``stages - 1`` stages ahead of the products: a
multistage pipeline in the terms of CUTLASS. The epilogue and the requirements on the arrays are those of
:mod:`aotc.kernels.cuda.templates.mma_gemm.wgmma`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from numba import cuda
from numba.cuda import types

from aotc.ir.loop.ir import WARP
from aotc.kernels.cuda.ampere import commit_async_copies, wait_for_async_copies
from aotc.kernels.cuda.front_end import compile_to_llvm_ir
from aotc.kernels.cuda.ptx import divide_nonnegative, dynamic_shared_address
from aotc.kernels.cuda.templates.gemm.computed_operands import compute_operand_stage, store_computed_stage
from aotc.kernels.cuda.templates.gemm.mma_steps import copy_operand_stage, multiply_operand_stage, store_warp_tile
from aotc.kernels.cuda.templates.gemm.tiles import CHUNK, STAGING, SWIZZLE_BYTES, WarpTiles
from aotc.kernels.cuda.templates.records import Extents, Sizes, TilePlace
from aotc.kernels.cuda.templates.steps import matmul_extent, matmul_tile_order, zero_accumulators
from aotc.kernels.cuda.templates.threads import LANE_MASK, WARP_BITS


@cache
def mma_gemm_texts(tiles: WarpTiles, pointers: int, dims: int) -> tuple[str, ...]:
    """Compile a matmul kernel with mma instructions to LLVM IR.

    It calls device functions that :mod:`aotc.kernels.cuda.templates.steps` names.
    """
    tables = (types.UniTuple(types.CPointer(types.uint8), pointers), types.UniTuple(types.int64, dims))
    return tuple(compile_to_llvm_ir(_mma_gemm_kernel(tiles), (*tables, types.int64), tiles.threads))


def _mma_gemm_kernel(tiles: WarpTiles) -> Callable[..., None]:
    """Return the kernel as a Python function for Numba, with the attributes of ``tiles`` as constants.

    Invariant: before iteration i, groups of copies up to stage i are complete, and the barrier has shown that no warp
    still reads the stage that is filled next. A group is committed in every iteration, even if it is empty, so that
    ``wait_for_async_copies(stages - 2)`` counts correctly.
    """
    rows, cols, depth, stages, stage = tiles.rows, tiles.cols, tiles.depth, tiles.stages, tiles.stage_bytes
    a_bytes, warp_rows, warp_cols = rows * CHUNK, tiles.warp_rows, tiles.warp_cols
    copy, steps, store = copy_operand_stage(tiles), multiply_operand_stage(tiles), store_warp_tile(tiles)
    compute, put = compute_operand_stage(tiles), store_computed_stage(tiles)
    clear = zero_accumulators(warp_rows * warp_cols // WARP, tiles.sum)
    wait_ready, wait_all = wait_for_async_copies(stages - 2), wait_for_async_copies(0)
    place = matmul_tile_order(cuda, rows, cols, tiles.batched)
    m_of, n_of, k_of = matmul_extent("rows"), matmul_extent("cols"), matmul_extent("depth")
    across_warps, above, i32 = cols // warp_cols, SWIZZLE_BYTES - 1, types.int32

    def mma_gemm(pointers, dims, items):
        base = i32(i32(dynamic_shared_address() + above) & i32(~above))
        thread = i32(cuda.threadIdx.x)
        m, n, k = m_of(pointers, dims), n_of(pointers, dims), k_of(pointers, dims)
        down = divide_nonnegative(i32(m + rows - 1), i32(rows))
        across = divide_nonnegative(i32(n + cols - 1), i32(cols))
        iterations, extents = divide_nonnegative(i32(k + depth - 1), i32(depth)), Extents(m, n, k)
        tile = place(i32(cuda.blockIdx.x), down, across)
        for s in range(stages - 1):
            begin, first = i32(base + s * stage), i32(s * depth)
            copy(pointers, dims, begin, thread, tile, first, extents)
            commit_async_copies()
            if first < k:
                put(compute(pointers, dims, thread, tile, first, extents), begin, thread)
        warp = i32(thread >> WARP_BITS)
        warp_row = i32(divide_nonnegative(warp, i32(across_warps)) * warp_rows)
        warp_col = i32((warp & (across_warps - 1)) * warp_cols)
        sums = clear()
        iteration, at, ahead = i32(0), i32(0), i32(stages - 1)
        while iteration < iterations:
            wait_ready()
            cuda.syncthreads()
            following, to = i32((iteration + stages - 1) * depth), i32(base + ahead * stage)
            if following < k:
                copy(pointers, dims, to, thread, tile, following, extents)
            commit_async_copies()
            held = compute(pointers, dims, thread, tile, following, extents)
            begin = i32(base + at * stage)
            sums = steps(sums, begin, i32(begin + a_bytes), i32(thread & LANE_MASK), warp_row, warp_col)
            put(held, to, thread)
            iteration, at, ahead = i32(iteration + 1), i32(at + 1), i32(ahead + 1)
            if at == stages:
                at = i32(0)
            if ahead == stages:
                ahead = i32(0)
        wait_all()
        cuda.syncthreads()
        own, lane = i32(base + warp * STAGING), i32(thread & LANE_MASK)
        part = TilePlace(tile.z, i32(tile.row + warp_row), i32(tile.col + warp_col))
        store(sums, own, lane, part, Sizes(m, n), pointers, dims)

    return mma_gemm
