"""Flash attention on Hopper's tensor cores (wgmma): bf16 and f16, any score function, shared or separate heads of keys.

A block has one producer warpgroup, which copies, and up to three consumer warpgroups with 64 queries each. The producer
fills two ring buffers in shared memory, one of keys and one of values. A consumer processes the keys from the last to
the first. While tensor cores multiply its queries with the next keys, and the last weights with their values, it
computes the weights of the scores before (online softmax). The consumers use the tensor cores in turn, so that one
multiplies while another computes exponentials, as in J. Shah et al., "FlashAttention-3" (2024).

Rows of operands start at multiples of 16 bytes; the extents of heads, queries and keys are arbitrary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from numba import cuda
from numba.cuda import types

from aotc.kernels.cuda.front_end import compile_to_llvm_ir
from aotc.kernels.cuda.hopper import (
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_wait,
    fence_async_proxy,
    fence_barrier_init,
    named_barrier_arrive,
    named_barrier_wait,
    set_max_registers,
    wgmma_commit,
    wgmma_fence,
)
from aotc.kernels.cuda.ptx import divide_nonnegative, dynamic_shared_address
from aotc.kernels.cuda.templates.attention.softmax_steps import (
    attention_scores,
    attention_tile_order,
    initial_softmax_statistics,
    key_count_of_row,
    online_softmax,
    pack_softmax_weights,
    rescale_accumulators,
)
from aotc.kernels.cuda.templates.attention.tiles import WarpgroupAttention
from aotc.kernels.cuda.templates.attention.wgmma_steps import (
    issue_query_key_products,
    issue_value_products,
    load_attention_operand,
    store_warpgroup_rows,
    wait_for_wgmma_groups,
)
from aotc.kernels.cuda.templates.gemm.tiles import CHUNK, STAGING, SWIZZLE_BYTES
from aotc.kernels.cuda.templates.records import (
    Consumer,
    HeadGrid,
    KeyStages,
    Ring,
    Sizes,
    WarpRows,
    next_stage,
)
from aotc.kernels.cuda.templates.steps import matmul_extent, zero_accumulators
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

# Named barriers: those of each consumer's turn, then those of the start of its staging. There are 16, and barrier 0 is
# that of __syncthreads. PTX ISA, bar.
_TURN, _STORE = 1, 5
# Consumer warpgroups at most; more would not fit the registers of a multiprocessor.
THREE = 3
# Operands with a tensor map: queries, keys and values.
OPERANDS = 3
# Bytes for each stage before the barriers of values, and of queries: two barriers of keys, and two of values.
VALUE_BARRIERS, QUERY_BARRIERS = 2 * BARRIER_BYTES, 4 * BARRIER_BYTES


@cache
def wgmma_attention_texts(tiles: WarpgroupAttention, pointers: int, dims: int) -> tuple[str, ...]:
    """Compile the attention kernel with wgmma instructions to LLVM IR."""
    byte = types.CPointer(types.uint8)
    tables = (types.UniTuple(byte, OPERANDS), types.UniTuple(byte, pointers), types.UniTuple(types.int64, dims))
    return tuple(
        compile_to_llvm_ir(_wgmma_attention_kernel(tiles), (*tables, types.int64), tiles.threads, maps=OPERANDS)
    )


def _shared_memory_offsets(tiles: WarpgroupAttention) -> tuple[int, int, int]:
    """Return the offsets of keys, values and barriers in shared memory, in bytes.

    The barriers are: full and empty stages of keys, full and empty stages of values, full and empty queries.
    """
    keys = tiles.query_bytes
    values = keys + tiles.stages * tiles.key_bytes
    return keys, values, values + tiles.stages * tiles.value_bytes


def _attention_producer(tiles: WarpgroupAttention) -> Callable[..., None]:
    """Return the device function of the producer, which copies queries, keys and values for all tiles of the block.

    Keys are one stage ahead of values, as consumers need the next keys together with the last values.
    """
    terms, stages, key_bytes, value_bytes = tiles.terms, tiles.stages, tiles.key_bytes, tiles.value_bytes
    keys, values, barriers = _shared_memory_offsets(tiles)
    query_bytes, i32 = tiles.query_bytes, types.int32
    of_values, of_queries = barriers + VALUE_BARRIERS * stages, barriers + QUERY_BARRIERS * stages
    load_queries, load_keys, load_values = (load_attention_operand(tiles, n) for n in range(OPERANDS))
    place, following = attention_tile_order(cuda, tiles), next_stage(cuda, stages)

    @cuda.jit(device=True, inline="always")
    def produce_tiles(maps, pointers, dims, base, grid, sizes):
        tile, q_parity, k, v = i32(cuda.blockIdx.x), i32(0), Ring(i32(0), i32(0)), Ring(i32(0), i32(0))
        while tile < grid.count:
            z, row, end = place(pointers, dims, tile, grid, sizes)
            iterations = divide_nonnegative(i32(end + terms - 1), i32(terms))
            if iterations > 0:
                barrier_wait(i32(base + of_queries + BARRIER_BYTES), i32(q_parity ^ 1))
                barrier_expect(i32(base + of_queries), i32(query_bytes))
                load_queries(maps, pointers, dims, base, i32(base + of_queries), z, row)
                q_parity = i32(q_parity ^ 1)
            iteration = iterations
            while iteration >= 0 and iterations > 0:
                if iteration > 0:
                    full = i32(base + barriers + BARRIER_BYTES * k.stage)
                    barrier_wait(i32(full + BARRIER_BYTES * stages), i32(k.parity ^ 1))
                    barrier_expect(full, i32(key_bytes))
                    to = i32(base + keys + k.stage * key_bytes)
                    load_keys(maps, pointers, dims, to, full, z, i32((iteration - 1) * terms))
                    k = following(k)
                if iteration < iterations:
                    full = i32(base + of_values + BARRIER_BYTES * v.stage)
                    barrier_wait(i32(full + BARRIER_BYTES * stages), i32(v.parity ^ 1))
                    barrier_expect(full, i32(value_bytes))
                    to = i32(base + values + v.stage * value_bytes)
                    load_values(maps, pointers, dims, to, full, z, i32(iteration * terms))
                    v = following(v)
                iteration = i32(iteration - 1)
            tile = i32(tile + cuda.gridDim.x)

    return produce_tiles


def _overlapped_iteration(tiles: WarpgroupAttention, masked: bool) -> Callable[..., Any]:
    """Return the device function of an iteration: matmuls of two stages, overlapped with one softmax.

    The matmuls are the last weights times values, and the queries times the next keys. Two groups of wgmma are in
    flight: scores, then values. The softmax of the scores runs while the values' products do. The accumulators are
    rescaled after both, by the factor of the new maxima. ``masked`` applies masks and score functions.
    """
    stages, key_bytes, value_bytes, consumers = tiles.stages, tiles.key_bytes, tiles.value_bytes, tiles.consumers
    keys, values, barriers = _shared_memory_offsets(tiles)
    of_values, terms, i32 = barriers + VALUE_BARRIERS * stages, tiles.terms, types.int32
    multiply, add_values, update_softmax, rescale = (
        issue_query_key_products(tiles),
        issue_value_products(tiles),
        online_softmax(tiles),
        rescale_accumulators(tiles),
    )
    score, pack_weights = attention_scores(tiles, there=True), pack_softmax_weights(tiles)
    wait_scores, wait_both = (
        wait_for_wgmma_groups(1, terms // 2),
        wait_for_wgmma_groups(0, tiles.width // 2, terms // 2),
    )
    following = next_stage(cuda, stages)

    @cuda.jit(device=True, inline="always")
    def overlap_matmuls_and_softmax(own, warp, iteration, sums, packed, known, k, v):
        """Run one iteration; return accumulators, packed weights, softmax statistics, and both ring positions."""
        base = own.base
        barrier_wait(i32(base + barriers + BARRIER_BYTES * k.stage), k.parity)
        if consumers > 1:
            named_barrier_wait(i32(_TURN + own.number), i32(TWO_WARPGROUPS))
        wgmma_fence()
        scores = multiply(own.queries, i32(base + keys + k.stage * key_bytes))
        wgmma_commit()
        barrier_wait(i32(base + of_values + BARRIER_BYTES * v.stage), v.parity)
        sums = add_values(sums, packed, i32(base + values + v.stage * value_bytes))
        wgmma_commit()
        if consumers > 1:
            next_consumer = i32(own.number + 1)
            if next_consumer == consumers:
                next_consumer = i32(0)
            named_barrier_arrive(i32(_TURN + next_consumer), i32(TWO_WARPGROUPS))
        scores = wait_scores(scores)
        if own.leads:
            barrier_arrive(i32(base + barriers + BARRIER_BYTES * (stages + k.stage)))
        if masked:
            scores = score(scores, warp, i32(iteration * terms), own.sizes, own.pointers, own.dims)
        weights, known = update_softmax(scores, known)
        sums, weights = wait_both(sums, weights)
        if own.leads:
            barrier_arrive(i32(base + of_values + BARRIER_BYTES * (stages + v.stage)))
        packed = pack_weights(weights)
        sums = rescale(sums, known)
        return sums, packed, known, following(k), following(v)

    return overlap_matmuls_and_softmax


def _first_iteration(tiles: WarpgroupAttention) -> Callable[..., Any]:
    """Return the device function of the first iteration: scores and softmax weights of the first keys, no values."""
    stages, key_bytes, terms, i32 = tiles.stages, tiles.key_bytes, tiles.terms, types.int32
    keys, _, barriers = _shared_memory_offsets(tiles)
    multiply, update_softmax, score, pack_weights = (
        issue_query_key_products(tiles),
        online_softmax(tiles),
        attention_scores(tiles),
        pack_softmax_weights(tiles),
    )
    wait_scores, following = wait_for_wgmma_groups(0, terms // 2), next_stage(cuda, stages)

    @cuda.jit(device=True, inline="always")
    def compute_first_weights(own, warp, iteration, known, k):
        barrier_wait(i32(own.base + barriers + BARRIER_BYTES * k.stage), k.parity)
        wgmma_fence()
        scores = multiply(own.queries, i32(own.base + keys + k.stage * key_bytes))
        wgmma_commit()
        scores = wait_scores(scores)
        if own.leads:
            barrier_arrive(i32(own.base + barriers + BARRIER_BYTES * (stages + k.stage)))
        k = following(k)
        scores = score(scores, warp, i32(iteration * terms), own.sizes, own.pointers, own.dims)
        weights, known = update_softmax(scores, known)
        return pack_weights(weights), known, k

    return compute_first_weights


def _last_iteration(tiles: WarpgroupAttention) -> Callable[..., Any]:
    """Return the device function of the last iteration: the remaining weights times their values."""
    stages, value_bytes, i32 = tiles.stages, tiles.value_bytes, types.int32
    _, values, barriers = _shared_memory_offsets(tiles)
    of_values, add_values, wait_sums = (
        barriers + VALUE_BARRIERS * stages,
        issue_value_products(tiles),
        wait_for_wgmma_groups(0, tiles.width // 2),
    )
    following = next_stage(cuda, stages)

    @cuda.jit(device=True, inline="always")
    def add_last_values(own, sums, packed, v):
        barrier_wait(i32(own.base + of_values + BARRIER_BYTES * v.stage), v.parity)
        sums = add_values(sums, packed, i32(own.base + values + v.stage * value_bytes))
        wgmma_commit()
        sums = wait_sums(sums)
        if own.leads:
            barrier_arrive(i32(own.base + of_values + BARRIER_BYTES * (stages + v.stage)))
        return sums, following(v)

    return add_last_values


def _consumer_tile_loop(tiles: WarpgroupAttention) -> Callable[..., Any]:
    """Return the device function of a consumer's loop over all keys of a tile, masked iterations first."""
    terms, i32, plain, masked = tiles.terms, types.int32, bool(tiles.scale), tiles.causal or not tiles.scale
    first, last, of_queries = (
        _first_iteration(tiles),
        _last_iteration(tiles),
        _shared_memory_offsets(tiles)[2] + QUERY_BARRIERS * tiles.stages,
    )
    masked_iteration, plain_iteration = _overlapped_iteration(tiles, True), _overlapped_iteration(tiles, False)

    @cuda.jit(device=True, inline="always")
    def attend_to_keys(own, warp, tile, sums, known, k, v):
        barrier_wait(i32(own.base + of_queries), tile.parity)
        iteration, whole = i32(tile.iterations - 1), i32(0)
        packed, known, k = first(own, warp, iteration, known, k)
        if masked:
            if plain:
                whole = divide_nonnegative(
                    i32(max(key_count_of_row(own.pointers, own.dims, warp.z, tile.row), i32(0))), i32(terms)
                )
            while iteration > whole:
                iteration = i32(iteration - 1)
                sums, packed, known, k, v = masked_iteration(own, warp, iteration, sums, packed, known, k, v)
        if plain:
            while iteration > 0:
                iteration = i32(iteration - 1)
                sums, packed, known, k, v = plain_iteration(own, warp, iteration, sums, packed, known, k, v)
        sums, v = last(own, sums, packed, v)
        return sums, known, k, v

    return attend_to_keys


def _attention_consumer(tiles: WarpgroupAttention) -> Callable[..., None]:
    """Return the device function of a consumer, which computes 64 queries of each tile of the block."""
    terms, i32, consumers = tiles.terms, types.int32, tiles.consumers
    of_queries = _shared_memory_offsets(tiles)[2] + QUERY_BARRIERS * tiles.stages
    divide, clear, store = (
        rescale_accumulators(tiles, last=True),
        zero_accumulators(tiles.width // 2),
        store_warpgroup_rows(tiles),
    )
    place, attend_to_keys = attention_tile_order(cuda, tiles), _consumer_tile_loop(tiles)

    @cuda.jit(device=True, inline="always")
    def consume_tiles(pointers, dims, base, thread, grid, sizes):
        mine, warp = i32((thread >> WARPGROUP_BITS) - 1), i32((thread >> WARP_BITS) & WARP_MASK)
        lane = i32(thread & LANE_MASK)
        leads, queries = (thread & THREAD_MASK) == 0, i32(base + mine * WARPGROUP_TILE * CHUNK)
        tile, parity, k, v = i32(cuda.blockIdx.x), i32(0), Ring(i32(0), i32(0)), Ring(i32(0), i32(0))
        consumer = Consumer(pointers, dims, sizes, base, queries, mine, leads)
        if consumers > 1 and mine == 0:
            named_barrier_arrive(i32(_TURN), i32(TWO_WARPGROUPS))
        while tile < grid.count:
            z, row, end = place(pointers, dims, tile, grid, sizes)
            iterations, own = (
                divide_nonnegative(i32(end + terms - 1), i32(terms)),
                i32(row + mine * WARPGROUP_TILE + warp * WARP_TILE),
            )
            sums, known, warp_rows = clear(), initial_softmax_statistics(), WarpRows(z, own, lane)
            if iterations > 0:
                keys = KeyStages(row, iterations, parity)
                sums, known, k, v = attend_to_keys(consumer, warp_rows, keys, sums, known, k, v)
                parity = i32(parity ^ 1)
            means = divide(sums, known)
            named_barrier_wait(i32(_STORE + mine), i32(WARPGROUP))
            store(means, i32(queries + warp * STAGING), warp_rows, sizes.rows, pointers, dims)
            if iterations > 0:
                fence_async_proxy()
                if lane == 0:
                    barrier_arrive(i32(base + of_queries + BARRIER_BYTES))
            tile = i32(tile + cuda.gridDim.x)

    return consume_tiles


# Registers of a producer thread next to two consumer warpgroups of attention; it releases the rest to the consumers.
# The linker's log.
COPY_REGISTERS_OF_ATTENTION = 24
# Registers of a thread of two consumer warpgroups of attention. With COPY_REGISTERS_OF_ATTENTION they must fit the
# 65,536 registers of a multiprocessor; a single consumer warpgroup has enough in any case. The linker's log: none is
# spilled.
ATTENTION_REGISTERS = 240
# Registers of a producer thread next to three consumer warpgroups of attention: as COPY_REGISTERS_OF_ATTENTION. The
# linker's log.
COPY_REGISTERS_OF_THREE = 32
# Registers of a thread of three consumer warpgroups of attention: as ATTENTION_REGISTERS. The linker's log: keys of 64
# elements spill 32 bytes, and three warpgroups are still the fastest for them.
ATTENTION_REGISTERS_OF_THREE = 160


def _wgmma_attention_kernel(tiles: WarpgroupAttention) -> Callable[..., None]:
    """Return the kernel as a Python function for Numba, with the attributes of ``tiles`` as constants."""
    rows, stages, consumers = tiles.rows, tiles.stages, tiles.consumers
    barriers = _shared_memory_offsets(tiles)[2]
    produce_tiles, consume_tiles = _attention_producer(tiles), _attention_consumer(tiles)
    shares = consumers > 1
    few = COPY_REGISTERS_OF_THREE if consumers == THREE else COPY_REGISTERS_OF_ATTENTION
    many = ATTENTION_REGISTERS_OF_THREE if consumers == THREE else ATTENTION_REGISTERS
    give_registers, take_registers = set_max_registers("dec", few), set_max_registers("inc", many)
    m_of, n_of, heads_of = matmul_extent("rows"), matmul_extent("terms"), matmul_extent("batch")
    above, i32 = SWIZZLE_BYTES - 1, types.int32

    def wgmma_attention(maps, pointers, dims, items):
        base = i32(i32(dynamic_shared_address() + above) & i32(~above))
        thread = i32(cuda.threadIdx.x)
        m, n, heads = m_of(pointers, dims), n_of(pointers, dims), heads_of(pointers, dims)
        down = divide_nonnegative(i32(m + rows - 1), i32(rows))
        grid, sizes = HeadGrid(i32(down * heads), down, heads), Sizes(m, n)
        if thread == 0:
            for s in range(stages):
                for ring in range(2):
                    barrier = i32(base + barriers + BARRIER_BYTES * (2 * stages * ring + s))
                    barrier_init(barrier, i32(1))
                    barrier_init(i32(barrier + BARRIER_BYTES * stages), i32(consumers))
            of_queries = i32(base + barriers + QUERY_BARRIERS * stages)
            barrier_init(of_queries, i32(1))
            barrier_init(i32(of_queries + BARRIER_BYTES), i32(WARPGROUP_WARPS * consumers))
            fence_barrier_init()
        cuda.syncthreads()
        if thread < WARPGROUP:
            if shares:
                give_registers()
            if thread == 0:
                produce_tiles(maps, pointers, dims, base, grid, sizes)
        else:
            if shares:
                take_registers()
            consume_tiles(pointers, dims, base, thread, grid, sizes)

    return wgmma_attention
