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

from aotc.kernels.cuda.ampere import copies_commit, copies_wait
from aotc.kernels.cuda.front_end import kernel_ir
from aotc.kernels.cuda.ptx import shared_base, unsigned_quotient
from aotc.kernels.cuda.templates.attention.mma_steps import (
    copy_terms,
    load_queries,
    multiply_values,
    products,
    put_query,
    store_rows,
)
from aotc.kernels.cuda.templates.attention.softmax_steps import (
    attention_scores,
    first_key_of_head,
    initial_softmax_statistics,
    key_count_of_row,
    online_softmax,
    pack_softmax_weights,
    rescale_accumulators,
    tile_order,
)
from aotc.kernels.cuda.templates.attention.tiles import WarpAttention
from aotc.kernels.cuda.templates.gemm.tiles import CHUNK, STAGING, SWIZZLE_BYTES
from aotc.kernels.cuda.templates.records import HeadGrid, Sizes, WarpRows
from aotc.kernels.cuda.templates.steps import matmul_extent, warp_meet, zeros
from aotc.kernels.cuda.templates.threads import LANE_MASK, WARP_BITS, WARP_TILE


@cache
def attention_texts(tiles: WarpAttention, pointers: int, dims: int) -> tuple[str, ...]:
    """Return the LLVM IR of the attention kernel with mma instructions (one warp per 16 queries).

    It calls the device functions of :mod:`.softmax_steps` and :mod:`.mma_steps`.
    """
    tables = (types.UniTuple(types.CPointer(types.uint8), pointers), types.UniTuple(types.int64, dims))
    return tuple(kernel_ir(_mma_attention_kernel(tiles), (*tables, types.int64), tiles.threads))


def _query_loader(tiles: WarpAttention) -> Callable[..., Any]:
    """Return the device function that loads a warp's queries: to registers, or to shared memory."""
    fetch, put, i32 = load_queries(tiles), put_query(tiles), types.int32
    stay, begin, each = tiles.queries_stay, tiles.queries, WARP_TILE * tiles.key_chunks * CHUNK

    @cuda.jit(device=True, inline="always")
    def held(pointers, dims, base, thread, z, row, m):
        return fetch(pointers, dims, z, row, i32(thread & LANE_MASK), m)

    @cuda.jit(device=True, inline="always")
    def staying(pointers, dims, base, thread, z, row, m):
        to, line = i32(i32(base + begin) + i32(thread >> WARP_BITS) * each), i32(0)
        while line < WARP_TILE:
            put(pointers, dims, to, z, i32(min(i32(row + line), i32(m - 1))), line, i32(thread & LANE_MASK))
            line = i32(line + 1)
        warp_meet()
        return to

    return staying if stay else held


def _mma_attention_kernel(tiles: WarpAttention) -> Callable[..., None]:
    """Return the kernel as a Python function for Numba; attributes of ``tiles`` are its constants.

    Invariant of the loop: ``sums`` are the weighted values of all keys so far, relative to the maxima in ``known``.
    Copies follow the protocol of :mod:`aotc.kernels.cuda.templates.gemm.mma`. Stages before ``whole`` need no mask.
    """
    rows, terms, stages, stage, key_bytes = tiles.rows, tiles.terms, tiles.stages, tiles.stage_bytes, tiles.key_bytes
    copy, load, multiply, add_values = copy_terms(tiles), _query_loader(tiles), products(tiles), multiply_values(tiles)
    score, know = attention_scores(tiles), online_softmax(tiles)
    shorten, pack_weights = rescale_accumulators(tiles), pack_softmax_weights(tiles)
    divide, store, clear = rescale_accumulators(tiles, last=True), store_rows(tiles), zeros(tiles.width // 2)
    wait_ready, wait_all, place = copies_wait(stages - 2), copies_wait(0), tile_order(cuda, tiles)
    m_of, n_of, heads_of = matmul_extent("rows"), matmul_extent("terms"), matmul_extent("batch")
    plain, above, i32 = bool(tiles.scale), SWIZZLE_BYTES - 1, types.int32

    def attention(pointers, dims, items):
        base = i32(i32(shared_base() + above) & i32(~above))
        thread = i32(cuda.threadIdx.x)
        m, n, heads = m_of(pointers, dims), n_of(pointers, dims), heads_of(pointers, dims)
        down, sizes = unsigned_quotient(i32(m + rows - 1), i32(rows)), Sizes(m, n)
        grid = HeadGrid(i32(down * heads), down, heads)
        z, first_row, end = place(pointers, dims, i32(cuda.blockIdx.x), grid, sizes)
        begin = first_key_of_head(pointers, dims, z, first_row)
        iterations = unsigned_quotient(i32(max(i32(end - begin), i32(0)) + terms - 1), i32(terms))
        row, lane = i32(first_row + (thread >> WARP_BITS) * WARP_TILE), i32(thread & LANE_MASK)
        warp = WarpRows(z, row, lane)
        for s in range(stages - 1):
            copy(pointers, dims, i32(base + s * stage), thread, z, i32(begin + s * terms), end)
            copies_commit()
        queries = load(pointers, dims, base, thread, z, row, m)
        sums, known = clear(), initial_softmax_statistics()
        whole = i32(0)
        if plain:
            unmasked = i32(min(key_count_of_row(pointers, dims, z, first_row), n) - begin)
            whole = unsigned_quotient(i32(max(unmasked, i32(0))), i32(terms))
        iteration, at, ahead = i32(0), i32(0), i32(stages - 1)
        while iteration < iterations:
            wait_ready()
            cuda.syncthreads()
            following = i32(begin + (iteration + stages - 1) * terms)
            if following < end:
                copy(pointers, dims, i32(base + ahead * stage), thread, z, following, end)
            copies_commit()
            place_of_keys = i32(base + at * stage)
            scores = multiply(queries, place_of_keys, lane)
            if iteration >= whole:
                scores = score(scores, warp, i32(begin + iteration * terms), sizes, pointers, dims)
            weights, known = know(scores, known)
            sums = add_values(shorten(sums, known), pack_weights(weights), i32(place_of_keys + key_bytes), lane)
            iteration, at, ahead = i32(iteration + 1), i32(at + 1), i32(ahead + 1)
            if at == stages:
                at = i32(0)
            if ahead == stages:
                ahead = i32(0)
        wait_all()
        cuda.syncthreads()
        means = divide(sums, known)
        store(means, known, i32(base + (thread >> WARP_BITS) * STAGING), warp, m, pointers, dims)

    return attention
