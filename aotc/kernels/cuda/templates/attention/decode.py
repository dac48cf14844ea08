"""Split-KV attention on Hopper for decoding: up to 16 queries of a head, bound by the bandwidth of keys and values.

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

from aotc.kernels.cuda.front_end import compile_to_llvm_ir
from aotc.kernels.cuda.hopper import (
    address_in_cluster_block,
    barrier_expect,
    barrier_init,
    barrier_wait,
    cluster_barrier,
    cluster_rank,
    fence_barrier_init,
    load_from_cluster,
)
from aotc.kernels.cuda.ptx import divide_nonnegative, dynamic_shared_address
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
from aotc.kernels.cuda.templates.attention.mma_steps import (
    load_queries,
    multiply_queries_by_keys,
    multiply_weights_by_values,
    store_query_to_shared_memory,
)
from aotc.kernels.cuda.templates.attention.softmax_steps import (
    LOG2_E,
    attention_scores,
    attention_tile_order,
    first_key_of_head,
    initial_softmax_statistics,
    key_count_of_row,
    online_softmax,
    pack_softmax_weights,
    rescale_accumulators,
)
from aotc.kernels.cuda.templates.attention.tiles import FewAttention
from aotc.kernels.cuda.templates.attention.wgmma_steps import load_attention_operand
from aotc.kernels.cuda.templates.gemm.tiles import ROWS, SWIZZLE_BYTES
from aotc.kernels.cuda.templates.records import HeadGrid, KeyRange, Ring, Sizes, WarpRing, WarpRows, next_stage
from aotc.kernels.cuda.templates.steps import matmul_extent, warp_barrier, zero_accumulators
from aotc.kernels.cuda.templates.threads import BARRIER_BYTES, LANE_MASK, SUM_BYTES, WARP_BITS


@cache
def decode_attention_texts(tiles: FewAttention, pointers: int, dims: int) -> tuple[str, ...]:
    """Compile the decoding attention kernel to LLVM IR.

    It calls the device functions that :mod:`aotc.kernels.cuda.templates.steps` names.
    """
    byte = types.CPointer(types.uint8)
    tables = (types.UniTuple(byte, 2), types.UniTuple(byte, pointers), types.UniTuple(types.int64, dims))
    return tuple(compile_to_llvm_ir(_decode_attention_kernel(tiles), (*tables, types.int64), tiles.threads, maps=2))


def _accumulator_merger(tiles: FewAttention) -> Callable[..., Any]:
    """Return a function that creates the device function to merge accumulators of warps or of blocks.

    The device function merges the shares of an element; it returns the merged value, the highest score and the sum of
    weights of its row. Each share is first rescaled by ``2 ** ((its maximum - the maximum of all) * factor)``.
    """
    pitch, tops, f32, i32 = accumulator_pitch(tiles), row_maxima_offset(tiles), types.float32, types.int32
    factor, stride = LOG2_E * (tiles.scale or 1.0), tiles.sum_bytes

    def merge_function(count: int, far: bool) -> Callable[..., Any]:
        """Return the device function that merges ``count`` shares: of the cluster's blocks if ``far``, or of warps."""

        @cuda.jit(device=True, inline="always")
        def read_share(place, number):
            if far:
                return load_from_cluster(address_in_cluster_block(place, i32(number)))
            return load_shared_f32(i32(place + number * stride))

        @cuda.jit(device=True, inline="always")
        def merge_element(base, row, col):
            own = i32(base + tops + row * SUM_BYTES)
            at = i32(i32(base + row * pitch) + col * SUM_BYTES)
            top = read_share(own, 0)
            for n in range(1, count):
                top = max_f32(top, read_share(own, n))
            floor = finite_or_zero(top)
            value, whole = f32(0), f32(0)
            for n in range(count):
                share = exp2_f32(f32(f32(read_share(own, n) - floor) * f32(factor)))
                whole = f32(whole + f32(share * read_share(i32(own + SUM_BYTES * ROWS), n)))
                value = f32(value + f32(share * read_share(at, n)))
            return value, top, whole

        return merge_element

    return merge_function


def _cluster_merger(tiles: FewAttention) -> Callable[..., None]:
    """Return the device function by which the blocks of a cluster merge their accumulators and store the result."""
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
    def store_result(pointers, dims, z, row, col, value, top, whole):
        store_attention_element(pointers, dims, z, row, col, divide_f32(value, whole))
        if split and col == 0:
            store_softmax_statistics(pointers, dims, z, row, f32(top * f32(factor)), whole)

    @cuda.jit(device=True, inline="always")
    def merge_and_store(pointers, dims, base, thread, rank, z, first_row, m):
        """Merge the accumulators of this block's warps, then those of all blocks; store this block's rows."""
        count = i32(i32(min(i32(m - first_row), i32(ROWS))) * width)
        cuda.syncthreads()
        e = thread
        while e < count:
            row = divide_nonnegative(e, i32(width))
            col = i32(e - row * width)
            value, top, whole = of_warps(base, row, col)
            if cluster == 1:
                store_result(pointers, dims, z, i32(first_row + row), col, value, top, whole)
            else:
                store_shared_f32(i32(i32(base + area + row * pitch) + col * SUM_BYTES), value)
                if col == 0:
                    store_shared_f32(i32(base + area + tops + row * SUM_BYTES), top)
                    store_shared_f32(i32(base + area + tops + SUM_BYTES * ROWS + row * SUM_BYTES), whole)
            e = i32(e + threads)
        if cluster > 1:
            cluster_barrier()
            e = i32(thread + rank * threads)
            while e < count:
                row = divide_nonnegative(e, i32(width))
                col = i32(e - row * width)
                value, top, whole = of_blocks(i32(base + area), row, col)
                store_result(pointers, dims, z, i32(first_row + row), col, value, top, whole)
                e = i32(e + threads * cluster)
            cluster_barrier()

    return merge_and_store


def _decode_warp_functions(tiles: FewAttention) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return two device functions of a warp: the prefetch of its first keys, and the loop over all its keys.

    A warp has ``keys.iterations`` stages of keys, from ``keys.first`` on. A stage is refilled as soon as the warp has
    used it: only its own lanes read it, so a warp barrier is enough.
    """
    terms, stages, stage, key_bytes = tiles.terms, tiles.stages, tiles.stage_bytes, tiles.key_bytes
    step, i32 = terms * tiles.warps * tiles.cluster, types.int32
    load_keys, load_values = load_attention_operand(tiles, 1), load_attention_operand(tiles, 2)
    multiply, add_values = multiply_queries_by_keys(tiles), multiply_weights_by_values(tiles)
    score, update_softmax, rescale, pack_weights = (
        attention_scores(tiles),
        online_softmax(tiles),
        rescale_accumulators(tiles),
        pack_softmax_weights(tiles),
    )
    clear, following = zero_accumulators(tiles.width // 2), next_stage(cuda, stages)

    @cuda.jit(device=True, inline="always")
    def copy_stage(maps, pointers, dims, to, barrier, z, term):
        barrier_expect(barrier, i32(stage))
        load_keys(maps, pointers, dims, to, barrier, z, term)
        load_values(maps, pointers, dims, i32(to + key_bytes), barrier, z, term)

    @cuda.jit(device=True, inline="always")
    def prefetch_keys(maps, pointers, dims, ring, lane, z, keys):
        if lane == 0:
            for s in range(stages):
                barrier_init(i32(ring.barriers + BARRIER_BYTES * s), i32(1))
            fence_barrier_init()
            s = i32(0)
            while s < min(keys.iterations, i32(stages)):
                to, barrier = i32(ring.stages + s * stage), i32(ring.barriers + BARRIER_BYTES * s)
                copy_stage(maps, pointers, dims, to, barrier, z, i32(keys.first + s * step))
                s = i32(s + 1)
        warp_barrier()

    @cuda.jit(device=True, inline="always")
    def attend_to_keys(maps, pointers, dims, queries, ring, warp, keys, sizes):
        """Process all keys of the warp; return accumulators and softmax statistics."""
        sums, known, lane, iterations = clear(), initial_softmax_statistics(), warp.lane, keys.iterations
        iteration, at, term = i32(0), Ring(i32(0), i32(0)), keys.first
        while iteration < iterations:
            place, barrier = i32(ring.stages + at.stage * stage), i32(ring.barriers + BARRIER_BYTES * at.stage)
            barrier_wait(barrier, at.parity)
            scores = multiply(queries, place, lane)
            if i32(term + terms) > keys.whole:
                scores = score(scores, warp, term, sizes, pointers, dims)
            weights, known = update_softmax(scores, known)
            sums = add_values(rescale(sums, known), pack_weights(weights), i32(place + key_bytes), lane)
            warp_barrier()
            if lane == 0 and i32(iteration + stages) < iterations:
                copy_stage(maps, pointers, dims, place, barrier, warp.z, i32(term + stages * step))
            iteration, at, term = i32(iteration + 1), following(at), i32(term + step)
        return sums, known

    return prefetch_keys, attend_to_keys


def _decode_query_loader(tiles: FewAttention) -> Callable[..., Any]:
    """Return the device function that loads the queries, to registers or to shared memory by all warps of the block."""
    fetch, put_one, i32 = load_queries(tiles), store_query_to_shared_memory(tiles), types.int32
    in_shared_memory, begin, warps = tiles.queries_stay, tiles.queries, tiles.warps

    @cuda.jit(device=True, inline="always")
    def load_to_registers(pointers, dims, base, thread, z, row, m):
        return fetch(pointers, dims, z, row, i32(thread & LANE_MASK), m)

    @cuda.jit(device=True, inline="always")
    def load_to_shared_memory(pointers, dims, base, thread, z, row, m):
        line = i32(thread >> WARP_BITS)
        while line < ROWS:
            own = i32(min(i32(row + line), i32(m - 1)))
            put_one(pointers, dims, i32(base + begin), z, own, line, i32(thread & LANE_MASK))
            line = i32(line + warps)
        cuda.syncthreads()
        return i32(base + begin)

    return load_to_shared_memory if in_shared_memory else load_to_registers


def _decode_attention_kernel(tiles: FewAttention) -> Callable[..., None]:
    """Return the kernel as a Python function for Numba, with the attributes of ``tiles`` as constants."""
    rows, terms, warps, cluster, bytes_of_sums = tiles.rows, tiles.terms, tiles.warps, tiles.cluster, tiles.sum_bytes
    ring_bytes, stages, barriers = tiles.stages * tiles.stage_bytes, tiles.stages, tiles.barriers
    (start, attend), merge_and_store, store_partial = (
        _decode_warp_functions(tiles),
        _cluster_merger(tiles),
        store_partial_softmax(tiles),
    )
    queries_of = _decode_query_loader(tiles)
    m_of, n_of, heads_of, place = (
        matmul_extent("rows"),
        matmul_extent("terms"),
        matmul_extent("batch"),
        attention_tile_order(cuda, tiles),
    )
    plain, above, i32 = bool(tiles.scale), SWIZZLE_BYTES - 1, types.int32

    def decode_attention(maps, pointers, dims, items):
        base = i32(i32(dynamic_shared_address() + above) & i32(~above))
        thread = i32(cuda.threadIdx.x)
        warp, lane = i32(thread >> WARP_BITS), i32(thread & LANE_MASK)
        m, n, heads = m_of(pointers, dims), n_of(pointers, dims), heads_of(pointers, dims)
        down, tile, rank = divide_nonnegative(i32(m + rows - 1), i32(rows)), i32(cuda.blockIdx.x), i32(0)
        if cluster > 1:
            tile, rank = divide_nonnegative(tile, i32(cluster)), cluster_rank()
        sizes, grid = Sizes(m, n), HeadGrid(i32(down * heads), down, heads)
        z, row, end = place(pointers, dims, tile, grid, sizes)
        begin = first_key_of_head(pointers, dims, z, row)
        pieces = divide_nonnegative(i32(max(i32(end - begin), i32(0)) + terms - 1), i32(terms))
        mine = i32(rank * warps + warp)
        iterations = divide_nonnegative(
            i32(max(i32(pieces - mine), i32(0)) + warps * cluster - 1), i32(warps * cluster)
        )
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
        store_partial(sums, known, i32(base + warp * bytes_of_sums), lane)
        merge_and_store(pointers, dims, base, thread, rank, z, row, m)

    return decode_attention
