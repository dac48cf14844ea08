"""Flash attention on the tensor cores of any GPU from Ampere on (mma); on Hopper, for few queries of each head.

As in T. Dao, "FlashAttention-2" (2023), warps share no rows, so that they exchange no statistics: each warp of a block
has 16 queries in registers. All threads copy keys and values to the stages of a ring buffer in shared memory; the next
stages are in flight while the warps compute the softmax weights of one (online softmax: the accumulators are rescaled
whenever a row's maximum grows). For few queries a block has a single warp, which waits for no other; a multiprocessor
runs several such blocks, each with a part of the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from numba import cuda
from numba.cuda import types

from aotc.kernels.cuda.ampere import commit_async_copies, wait_for_async_copies
from aotc.kernels.cuda.front_end import compile_to_llvm_ir
from aotc.kernels.cuda.ptx import divide_nonnegative, dynamic_shared_address
from aotc.kernels.cuda.templates.attention.mma_steps import (
    copy_keys_and_values,
    load_queries,
    multiply_queries_by_keys,
    multiply_weights_by_values,
    store_attention_rows,
    store_query_to_shared_memory,
)
from aotc.kernels.cuda.templates.attention.softmax_steps import (
    attention_scores,
    attention_tile_order,
    first_key_of_head,
    initial_softmax_statistics,
    key_count_of_row,
    online_softmax,
    pack_softmax_weights,
    rescale_accumulators,
)
from aotc.kernels.cuda.templates.attention.tiles import WarpAttention
from aotc.kernels.cuda.templates.gemm.tiles import CHUNK, STAGING, SWIZZLE_BYTES
from aotc.kernels.cuda.templates.records import HeadGrid, Sizes, WarpRows
from aotc.kernels.cuda.templates.steps import matmul_extent, warp_barrier, zero_accumulators
from aotc.kernels.cuda.templates.threads import LANE_MASK, WARP_BITS, WARP_TILE


@cache
def mma_attention_texts(tiles: WarpAttention, pointers: int, dims: int) -> tuple[str, ...]:
    """Compile the attention kernel with mma instructions to LLVM IR.

    It calls the device functions of :mod:`.softmax_steps` and :mod:`.mma_steps`.
    """
    tables = (types.UniTuple(types.CPointer(types.uint8), pointers), types.UniTuple(types.int64, dims))
    return tuple(compile_to_llvm_ir(_mma_attention_kernel(tiles), (*tables, types.int64), tiles.threads))


def _mma_query_loader(tiles: WarpAttention) -> Callable[..., Any]:
    """Return the device function that loads a warp's queries: to registers, or to shared memory."""
    fetch, put, i32 = load_queries(tiles), store_query_to_shared_memory(tiles), types.int32
    stay, begin, each = tiles.queries_stay, tiles.queries, WARP_TILE * tiles.key_chunks * CHUNK

    @cuda.jit(device=True, inline="always")
    def load_to_registers(pointers, dims, base, thread, z, row, m):
        return fetch(pointers, dims, z, row, i32(thread & LANE_MASK), m)

    @cuda.jit(device=True, inline="always")
    def load_to_shared_memory(pointers, dims, base, thread, z, row, m):
        to, line = i32(i32(base + begin) + i32(thread >> WARP_BITS) * each), i32(0)
        while line < WARP_TILE:
            put(pointers, dims, to, z, i32(min(i32(row + line), i32(m - 1))), line, i32(thread & LANE_MASK))
            line = i32(line + 1)
        warp_barrier()
        return to

    return load_to_shared_memory if stay else load_to_registers


# Invariant of the loop: ``sums`` are the weighted values of all keys so far, relative to the maxima in ``known``.
# Copies follow the protocol of aotc.kernels.cuda.templates.gemm.mma. Stages before ``whole`` need no mask.
def _mma_attention_kernel(tiles: WarpAttention) -> Callable[..., None]:
    """Return the kernel as a Python function for Numba, with the attributes of ``tiles`` as constants."""
    rows, terms, stages, stage, key_bytes = tiles.rows, tiles.terms, tiles.stages, tiles.stage_bytes, tiles.key_bytes
    copy, load, place = copy_keys_and_values(tiles), _mma_query_loader(tiles), attention_tile_order(cuda, tiles)
    multiply, add_values = multiply_queries_by_keys(tiles), multiply_weights_by_values(tiles)
    score, update_softmax = attention_scores(tiles), online_softmax(tiles)
    rescale, pack_weights = rescale_accumulators(tiles), pack_softmax_weights(tiles)
    divide, store = rescale_accumulators(tiles, last=True), store_attention_rows(tiles)
    clear = zero_accumulators(tiles.width // 2)
    wait_ready, wait_all = wait_for_async_copies(stages - 2), wait_for_async_copies(0)
    m_of, n_of, heads_of = matmul_extent("rows"), matmul_extent("terms"), matmul_extent("batch")
    plain, above, i32 = bool(tiles.scale), SWIZZLE_BYTES - 1, types.int32

    def mma_attention(pointers, dims, items):
        base = i32(i32(dynamic_shared_address() + above) & i32(~above))
        thread = i32(cuda.threadIdx.x)
        m, n, heads = m_of(pointers, dims), n_of(pointers, dims), heads_of(pointers, dims)
        down, sizes = divide_nonnegative(i32(m + rows - 1), i32(rows)), Sizes(m, n)
        grid = HeadGrid(i32(down * heads), down, heads)
        z, first_row, end = place(pointers, dims, i32(cuda.blockIdx.x), grid, sizes)
        begin = first_key_of_head(pointers, dims, z, first_row)
        iterations = divide_nonnegative(i32(max(i32(end - begin), i32(0)) + terms - 1), i32(terms))
        row, lane = i32(first_row + (thread >> WARP_BITS) * WARP_TILE), i32(thread & LANE_MASK)
        warp = WarpRows(z, row, lane)
        for s in range(stages - 1):
            copy(pointers, dims, i32(base + s * stage), thread, z, i32(begin + s * terms), end)
            commit_async_copies()
        queries = load(pointers, dims, base, thread, z, row, m)
        sums, known, whole = clear(), initial_softmax_statistics(), i32(0)
        if plain:
            unmasked = i32(min(key_count_of_row(pointers, dims, z, first_row), n) - begin)
            whole = divide_nonnegative(i32(max(unmasked, i32(0))), i32(terms))
        iteration, at, ahead = i32(0), i32(0), i32(stages - 1)
        while iteration < iterations:
            wait_ready()
            cuda.syncthreads()
            following = i32(begin + (iteration + stages - 1) * terms)
            if following < end:
                copy(pointers, dims, i32(base + ahead * stage), thread, z, following, end)
            commit_async_copies()
            place_of_keys = i32(base + at * stage)
            scores = multiply(queries, place_of_keys, lane)
            if iteration >= whole:
                scores = score(scores, warp, i32(begin + iteration * terms), sizes, pointers, dims)
            weights, known = update_softmax(scores, known)
            sums = add_values(rescale(sums, known), pack_weights(weights), i32(place_of_keys + key_bytes), lane)
            iteration, at, ahead = i32(iteration + 1), i32(at + 1), i32(ahead + 1)
            if at == stages:
                at = i32(0)
            if ahead == stages:
                ahead = i32(0)
        wait_all()
        cuda.syncthreads()
        means = divide(sums, known)
        store(means, known, i32(base + (thread >> WARP_BITS) * STAGING), warp, m, pointers, dims)

    return mma_attention
