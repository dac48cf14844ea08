"""Thresholds of loops that turn on a GPU."""

from __future__ import annotations

from aotc.lowering.threshold import BlockSize, Limit, rows_in

HOISTED_PRODUCT_ROWS = Limit(
    "hoisted_product_rows", 128, "rows of a product in a loop that is done for all turns before it on a GPU",
    "chosen, not measured: of more a product fills a GPU by itself",
)
HOISTED_PRODUCT_BYTES = Limit(
    "hoisted_product_bytes", 1 << 28, "bytes of the results of such a product",
    "chosen, not measured: a part of the memory of a GPU",
)
HOISTED_PRODUCT_WASTE = Limit(
    "hoisted_product_waste", 64, "rows that are multiplied for each that a loop takes, or all if its turns are unknown",
    "chosen, not measured: a product of 64 times few rows takes no longer than two of them",
)
LOOP_OWN_FLOPS = Limit(
    "loop_own_flops", 256, "operations of a kernel with few results that each thread of such a block does by itself",
    "chosen, not measured: a barrier takes as long as some ten of them",
)
LOOP_GRID_FLOPS = Limit(
    "loop_grid_flops", 1 << 27, "operations per iteration of a while loop that becomes a kernel of all blocks of a GPU",
    "an LSTM cell of 2^26 took 8.5 us on an H200, as a graph 51; of 2^24 6 and 33 (benchmarks/gpu_loops.py)",
)
LOOP_GRID_BYTES = Limit(
    "loop_grid_bytes", 1 << 25, "bytes that the kernels of such a loop touch per iteration",
    "chosen, not measured: they stay in a second-level cache of 50 MB",
)
LOOP_GRID_VALUE = Limit(
    "loop_grid_value", 1 << 22, "elements of all values that are made in such a loop",
    "chosen, not measured: 16 MiB of f32 stay in a second-level cache",
)
LOOP_GRID_THREADS = BlockSize(
    "loop_grid_threads", 256, "threads of a block of such a loop, if no kernel inside is for another number",
    "chosen, not measured: 255 registers for each",
)
LOOP_GRID_BLOCKS = BlockSize(
    "loop_grid_blocks", 128, "blocks of such a loop, at most one for each multiprocessor",
    "chosen, not measured: an H200 has 132",
)
LOOP_PRODUCT_ROWS = BlockSize(
    "loop_product_rows", 16, "rows of a product in such a loop that a block takes, at most",
    "chosen, not measured: each element of B is then read from the second-level cache once for 16 rows",
)
LOOP_PRODUCT_COLS = BlockSize(
    "loop_product_cols", 64, "columns of such a product that a block takes, at most",
    "chosen, not measured: a tile and its slices are 16 KiB of shared memory",
)
LOOP_PRODUCT_PART = BlockSize(
    "loop_product_part", 4, "rows of such a product that a thread takes, at most; columns follow from that",
    "chosen, not measured: eight sums beside 24 elements that are under way",
)
LOOP_STAGE_BYTES = BlockSize(
    "loop_stage_bytes", 98_304, "bytes of shared memory for the operands of a product in such a loop, at most",
    "chosen, not measured: a block is alone on its multiprocessor, which has 227 KiB",
)
LOOP_STAGE_READS = BlockSize(
    "loop_stage_reads", 8, "reads of 16 bytes that a thread has under way when it brings operands to shared memory",
    "chosen, not measured: 32 registers",
)
LOOP_PRODUCT_TERMS = BlockSize(
    "loop_product_terms", 4, "terms of such a product that a thread reads at a time",
    "16 bytes of f32, the widest access",
)

ROWS = rows_in(globals())
