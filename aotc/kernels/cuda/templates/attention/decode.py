"""Split-KV attention of up to 16 queries of a head on Hopper (decoding): bound by the bandwidth of keys and values.

All warps of a block, and all blocks of a cluster, have the same queries and split the keys: stages of keys are
distributed round-robin. Each warp has its own ring buffer in shared memory, which one of its lanes fills by the tensor
memory accelerator, and waits for no other warp; it computes the weights of its keys by ``mma``. At the end each warp
stores its accumulators in shared memory. They are merged within the block, and then within the cluster: each block
reads the memory of the others (distributed shared memory) for its share of the result. Split-KV is the method of T. Dao
et al., "Flash-Decoding for long-context inference" (2023).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from numba import cuda
from numba.cuda import types

from aotc.kernels.cuda.front_end import kernel_ir
from aotc.kernels.cuda.hopper import (
    address_in_cluster_block,
    barrier_expect,
    barrier_init,
    barrier_wait,
    cluster_meet,
    cluster_rank,
    fence_barrier_init,
    load_from_cluster,
)
from aotc.kernels.cuda.ptx import shared_base, unsigned_quotient
from aotc.kernels.cuda.templates.attention.decode_steps import (
    accumulator_pitch,
    divide_f32,
    exp2_f32,
    finite_or_zero,
    load_shared_f32,
    max_f32,
    row_maxima_offset,
    store_attention_element,
    store_partial_softmax,
    store_shared_f32,
    store_softmax_statistics,
)
from aotc.kernels.cuda.templates.attention.mma_steps import load_queries, multiply_values, products, put_query
from aotc.kernels.cuda.templates.attention.softmax_steps import (
    LOG2_E,
    attention_scores,
    first_key_of_head,
    initial_softmax_statistics,
    key_count_of_row,
    online_softmax,
    pack_softmax_weights,
    rescale_accumulators,
    tile_order,
)
from aotc.kernels.cuda.templates.attention.tiles import FewAttention
from aotc.kernels.cuda.templates.attention.wgmma_steps import load_attention_operand
from aotc.kernels.cuda.templates.gemm.tiles import ROWS, SWIZZLE_BYTES
from aotc.kernels.cuda.templates.records import HeadGrid, KeyRange, Ring, Sizes, WarpRing, WarpRows, next_stage
from aotc.kernels.cuda.templates.steps import matmul_extent, warp_meet, zeros
from aotc.kernels.cuda.templates.threads import BARRIER_BYTES, LANE_MASK, SUM_BYTES, WARP_BITS


@cache
def attention_texts(tiles: FewAttention, pointers: int, dims: int) -> tuple[str, ...]:
    """Return the LLVM IR of the decode attention kernel (few queries per head, split-KV).

    It calls the device functions that :mod:`aotc.kernels.cuda.templates.steps` names.
    """
    byte = types.CPointer(types.uint8)
    tables = (types.UniTuple(byte, 2), types.UniTuple(byte, pointers), types.UniTuple(types.int64, dims))
    return tuple(kernel_ir(_decode_attention_kernel(tiles), (*tables, types.int64), tiles.threads, maps=2))


def _accumulator_merger(tiles: FewAttention) -> Callable[..., Any]:
    """Return the device function that merges an element of the accumulators of several warps or blocks.

    It returns the merged value, the highest score and the sum of weights of its row. Each share is rescaled by ``2 **
    ((its maximum - the maximum of all) * factor)`` first.
    """
    pitch, tops, f32, i32 = accumulator_pitch(tiles), row_maxima_offset(tiles), types.float32, types.int32
    factor, apart = LOG2_E * (tiles.scale or 1.0), tiles.sum_bytes

    def merged(count: int, far: bool) -> Callable[..., Any]:
        @cuda.jit(device=True, inline="always")
        def read(place, number):
            if far:
                return load_from_cluster(address_in_cluster_block(place, i32(number)))
            return load_shared_f32(i32(place + number * apart))

        @cuda.jit(device=True, inline="always")
        def merge(base, row, col):
            own = i32(base + tops + row * SUM_BYTES)
            at = i32(i32(base + row * pitch) + col * SUM_BYTES)
            top = read(own, 0)
            for n in range(1, count):
                top = max_f32(top, read(own, n))
            floor = finite_or_zero(top)
            value, whole = f32(0), f32(0)
            for n in range(count):
                share = exp2_f32(f32(f32(read(own, n) - floor) * f32(factor)))
                whole = f32(whole + f32(share * read(i32(own + SUM_BYTES * ROWS), n)))
                value = f32(value + f32(share * read(at, n)))
            return value, top, whole

        return merge

    return merged


def _cluster_merger(tiles: FewAttention) -> Callable[..., None]:
    """Return the device function by which a cluster of blocks merges its accumulators and stores the result."""
    width, warps, cluster, threads, split = tiles.width, tiles.warps, tiles.cluster, tiles.threads, tiles.split
    pitch, tops, area, factor = (
        accumulator_pitch(tiles),
        row_maxima_offset(tiles),
        warps * tiles.sum_bytes,
        tiles.scale or 1.0,
    )
    merged, f32, i32 = _accumulator_merger(tiles), types.float32, types.int32
    of_warps, of_blocks = merged(warps, False), merged(cluster, True)

    @cuda.jit(device=True, inline="always")
    def finish(pointers, dims, z, row, col, value, top, whole):
        store_attention_element(pointers, dims, z, row, col, divide_f32(value, whole))
        if split and col == 0:
            store_softmax_statistics(pointers, dims, z, row, f32(top * f32(factor)), whole)

    @cuda.jit(device=True, inline="always")
    def put_together(pointers, dims, base, thread, rank, z, first_row, m):
        count = i32(i32(min(i32(m - first_row), i32(ROWS))) * width)
        cuda.syncthreads()
        e = thread
        while e < count:
            row = unsigned_quotient(e, i32(width))
            col = i32(e - row * width)
            value, top, whole = of_warps(base, row, col)
            if cluster == 1:
                finish(pointers, dims, z, i32(first_row + row), col, value, top, whole)
            else:
                store_shared_f32(i32(i32(base + area + row * pitch) + col * SUM_BYTES), value)
                if col == 0:
                    store_shared_f32(i32(base + area + tops + row * SUM_BYTES), top)
                    store_shared_f32(i32(base + area + tops + SUM_BYTES * ROWS + row * SUM_BYTES), whole)
            e = i32(e + threads)
        if cluster > 1:
            cluster_meet()
            e = i32(thread + rank * threads)
            while e < count:
                row = unsigned_quotient(e, i32(width))
                col = i32(e - row * width)
                value, top, whole = of_blocks(i32(base + area), row, col)
                finish(pointers, dims, z, i32(first_row + row), col, value, top, whole)
                e = i32(e + threads * cluster)
            cluster_meet()

    return put_together


def _decode_warp_functions(tiles: FewAttention) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return two device functions of a warp: prefetch of its first keys, and the loop over all its keys.

    A warp has ``iterations`` stages of keys, from ``first`` on. A stage is refilled as soon as the warp has used it:
    only its own lanes read it, so a warp barrier is enough.
    """
    terms, stages, stage, key_bytes = tiles.terms, tiles.stages, tiles.stage_bytes, tiles.key_bytes
    step, i32 = terms * tiles.warps * tiles.cluster, types.int32
    load_keys, load_values = load_attention_operand(tiles, 1), load_attention_operand(tiles, 2)
    multiply, add_values = products(tiles), multiply_values(tiles)
    score, know, shorten, pack_weights = (
        attention_scores(tiles),
        online_softmax(tiles),
        rescale_accumulators(tiles),
        pack_softmax_weights(tiles),
    )
    clear, following = zeros(tiles.width // 2), next_stage(cuda, stages)

    @cuda.jit(device=True, inline="always")
    def fetch(maps, pointers, dims, to, barrier, z, term):
        barrier_expect(barrier, i32(stage))
        load_keys(maps, pointers, dims, to, barrier, z, term)
        load_values(maps, pointers, dims, i32(to + key_bytes), barrier, z, term)

    @cuda.jit(device=True, inline="always")
    def begin(maps, pointers, dims, ring, lane, z, keys):
        if lane == 0:
            for s in range(stages):
                barrier_init(i32(ring.barriers + BARRIER_BYTES * s), i32(1))
            fence_barrier_init()
            s = i32(0)
            while s < min(keys.iterations, i32(stages)):
                to, barrier = i32(ring.stages + s * stage), i32(ring.barriers + BARRIER_BYTES * s)
                fetch(maps, pointers, dims, to, barrier, z, i32(keys.first + s * step))
                s = i32(s + 1)
        warp_meet()

    @cuda.jit(device=True, inline="always")
    def attend(maps, pointers, dims, queries, ring, warp, keys, sizes):
        sums, known, lane, iterations = clear(), initial_softmax_statistics(), warp.lane, keys.iterations
        iteration, at, term = i32(0), Ring(i32(0), i32(0)), keys.first
        while iteration < iterations:
            place, barrier = i32(ring.stages + at.stage * stage), i32(ring.barriers + BARRIER_BYTES * at.stage)
            barrier_wait(barrier, at.parity)
            scores = multiply(queries, place, lane)
            if i32(term + terms) > keys.whole:
                scores = score(scores, warp, term, sizes, pointers, dims)
            weights, known = know(scores, known)
            sums = add_values(shorten(sums, known), pack_weights(weights), i32(place + key_bytes), lane)
            warp_meet()
            if lane == 0 and i32(iteration + stages) < iterations:
                fetch(maps, pointers, dims, place, barrier, warp.z, i32(term + stages * step))
            iteration, at, term = i32(iteration + 1), following(at), i32(term + step)
        return sums, known

    return begin, attend


def _decode_query_loader(tiles: FewAttention) -> Callable[..., Any]:
    """Return the device function that loads the queries: to registers, or to shared memory by all warps together."""
    fetch, put_one, i32 = load_queries(tiles), put_query(tiles), types.int32
    stay, begin, warps = tiles.queries_stay, tiles.queries, tiles.warps

    @cuda.jit(device=True, inline="always")
    def held(pointers, dims, base, thread, z, row, m):
        return fetch(pointers, dims, z, row, i32(thread & LANE_MASK), m)

    @cuda.jit(device=True, inline="always")
    def staying(pointers, dims, base, thread, z, row, m):
        line = i32(thread >> WARP_BITS)
        while line < ROWS:
            own = i32(min(i32(row + line), i32(m - 1)))
            put_one(pointers, dims, i32(base + begin), z, own, line, i32(thread & LANE_MASK))
            line = i32(line + warps)
        cuda.syncthreads()
        return i32(base + begin)

    return staying if stay else held


def _decode_attention_kernel(tiles: FewAttention) -> Callable[..., None]:
    """Return the kernel as a Python function for Numba; attributes of ``tiles`` are its constants."""
    rows, terms, warps, cluster, bytes_of_sums = tiles.rows, tiles.terms, tiles.warps, tiles.cluster, tiles.sum_bytes
    ring_bytes, stages, barriers = tiles.stages * tiles.stage_bytes, tiles.stages, tiles.barriers
    (start, attend), put_together, put_down = (
        _decode_warp_functions(tiles),
        _cluster_merger(tiles),
        store_partial_softmax(tiles),
    )
    queries_of = _decode_query_loader(tiles)
    m_of, n_of, heads_of, place = (
        matmul_extent("rows"),
        matmul_extent("terms"),
        matmul_extent("batch"),
        tile_order(cuda, tiles),
    )
    plain, above, i32 = bool(tiles.scale), SWIZZLE_BYTES - 1, types.int32

    def attention(maps, pointers, dims, items):
        base = i32(i32(shared_base() + above) & i32(~above))
        thread = i32(cuda.threadIdx.x)
        warp, lane = i32(thread >> WARP_BITS), i32(thread & LANE_MASK)
        m, n, heads = m_of(pointers, dims), n_of(pointers, dims), heads_of(pointers, dims)
        down, tile, rank = unsigned_quotient(i32(m + rows - 1), i32(rows)), i32(cuda.blockIdx.x), i32(0)
        if cluster > 1:
            tile, rank = unsigned_quotient(tile, i32(cluster)), cluster_rank()
        sizes, grid = Sizes(m, n), HeadGrid(i32(down * heads), down, heads)
        z, row, end = place(pointers, dims, tile, grid, sizes)
        begin = first_key_of_head(pointers, dims, z, row)
        pieces = unsigned_quotient(i32(max(i32(end - begin), i32(0)) + terms - 1), i32(terms))
        mine = i32(rank * warps + warp)
        iterations = unsigned_quotient(i32(max(i32(pieces - mine), i32(0)) + warps * cluster - 1), i32(warps * cluster))
        whole = i32(0)
        if plain:
            whole = i32(min(key_count_of_row(pointers, dims, z, row), n))
        ring, first = i32(base + warp * ring_bytes), i32(mine * terms)
        own = i32(base + barriers + warp * (BARRIER_BYTES * stages))
        slots, keys = WarpRing(ring, own), KeyRange(i32(begin + first), iterations, whole)
        start(maps, pointers, dims, slots, lane, z, keys)
        queries = queries_of(pointers, dims, base, thread, z, row, m)
        sums, known = attend(maps, pointers, dims, queries, slots, WarpRows(z, row, lane), keys, sizes)
        cuda.syncthreads()
        put_down(sums, known, i32(base + warp * bytes_of_sums), lane)
        put_together(pointers, dims, base, thread, rank, z, row, m)

    return attention
