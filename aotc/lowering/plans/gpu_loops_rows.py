"""Lowering's decisions for loops and rows on a GPU: how many elements a thread takes, how many threads a row.

See :mod:`aotc.lowering.plans.thresholds` for what the rows mean.
"""

from __future__ import annotations

from aotc.lowering.threshold import BlockSize, Limit, rows_in

# fmt: off
BLOCK_THREADS = BlockSize(
    "block_threads", 256, "threads of a block that works on a tile, or on several rows",
    "docs/status.md: tiles of 256 threads reach 93 % of a copy's speed on an H200",
)
RECOMPUTED_BYTES = Limit(
    "recomputed_bytes", 1 << 16, "bytes of a value that a GPU stores for several kernels, however cheap it is",
    "chosen, not measured: it is written and read in less than the launch of a kernel takes",
)
LANE_BYTES = BlockSize(
    "lane_bytes", 16, "bytes of the widest array that a thread reads at once",
    "the widest access of NVIDIA's GPUs",
)
LANE_ELEMENTS = BlockSize(
    "lane_elements", 4, "independent elements of a thread, at least",
    "an H200: one scalar a thread copies 2770 GB/s, four 4285",
)
LANE_STATEMENTS = Limit(
    "lane_statements", 512, "statements of a thread that does several elements",
    "chosen, not measured: registers, and the time to compile them",
)
LANE_THREADS = Limit(
    "lane_threads", (1 << 16) - 1, "threads too few to keep a GPU busy, so that each does fewer elements",
    "chosen, not measured: 512 threads for each of 128 multiprocessors",
)
TURNED_EDGE = BlockSize(
    "turned_edge", 64, "elements of an edge of a tile that is turned in shared memory",
    "an H200: 64 with vectors reach 93 % of a copy's speed, 32 without them 85 %",
)
TURNED_BYTES = BlockSize(
    "turned_bytes", 16 << 10, "bytes of a tile that is turned in shared memory",
    "chosen, not measured: three blocks and more of 256 threads for each multiprocessor",
)
TURNED_EXTENT = Limit(
    "turned_extent", 15, "elements of an axis along which tiles would be too thin",
    "chosen, not measured: the cache holds the lines that so few rows read",
)
ROW_ELEMENTS = BlockSize(
    "row_elements", 16, "elements of a row of up to a warp that a thread takes; twice as many of a longer one",
    "an H200: a warp a row of 1024 f32 is at 80 % of a copy's speed and more",
)
ROW_REGISTERS = BlockSize(
    "row_registers", 32, "registers that hold a thread's part of each array of a row",
    "an H200: 1024 threads with 32 of them do a softmax of rows of 32768 f32 at 98 % of a copy's speed",
)
KEPT_REGISTERS = BlockSize(
    "kept_registers", 96, "registers of a thread that hold all its parts of a row",
    "chosen, not measured: 255 are the most of a thread, 128 those of one of 512",
)
KEPT_REGISTERS_LONG = BlockSize(
    "kept_registers_long", 32, "registers of a thread of the largest blocks that hold all its parts of a row",
    "by construction: 1024 threads have 64 each",
)
ROW_STATEMENTS = Limit(
    "row_statements", 128, "statements of a thread that does its whole part of a row side by side",
    "chosen, not measured: what each of them names takes a register; longer ones go vector by vector",
)
LONG_ROW_THREADS = BlockSize(
    "long_row_threads", 1024, "threads of the longest rows",
    "the most of a block",
)
SMALL_REDUCTION = Limit(
    "small_reduction", 1 << 12, "elements of a reduction that single threads do",
    "chosen, not measured: no more than launching the kernel takes",
)
UNROLLED_VECTORS = BlockSize(
    "unrolled_vectors", 4, "vectors of a row that a thread has under way at once, where it does not keep them",
    "an H200: one vector a thread fills the memory's queues only where there are many threads",
)
COLUMN_THREADS = BlockSize(
    "column_threads", 32, "threads of a block side by side that reduce columns",
    "a warp, so that each reads whole lines",
)
COLUMN_ROWS = BlockSize(
    "column_rows", 4, "rows that a thread which reduces columns has under way at once",
    "chosen, not measured: as unrolled_vectors",
)
NARROW_ELEMENTS = Limit(
    "narrow_elements", 1 << 22, "elements whose columns are reduced in one step by blocks of few, if blocks are few",
    "an H200: 3072 x 768 of f32 take 5.4 us, but 4096 x 4096 23.2, 70 % of a copy's speed",
)
NARROW_BYTES = BlockSize(
    "narrow_bytes", 32, "bytes of columns of a block that reduces them, at least",
    "what memory is read by",
)
NARROW_COLUMNS = BlockSize(
    "narrow_columns", 8, "columns of such a block, at least",
    "by construction: narrow_bytes of f32",
)
NARROW_BLOCKS = Limit(
    "narrow_blocks", 47, "such blocks that leave so much of a GPU idle that its columns are split",
    "chosen, not measured: a third of an H200's 132 multiprocessors",
)
NARROW_ROWS = BlockSize(
    "narrow_rows", 8, "rows that a thread of such a block has under way at once",
    "chosen, not measured: a multiprocessor has one of them",
)
GPU_BLOCKS = BlockSize(
    "gpu_blocks", 1056, "blocks of a GPU's reduction, at most, if it is split for them",
    "chosen, not measured: eight for each of an H200's 132 multiprocessors",
)
GPU_BLOCK_COLUMNS = BlockSize(
    "gpu_block_columns", 4 * COLUMN_THREADS.value, "columns that a block of a GPU reduces",
    "by construction: column_threads vectors of f32",
)
GPU_PART_TERMS = BlockSize(
    "gpu_part_terms", 256, "elements of a part of a split reduction of a GPU, at least",
    "chosen, not measured: less than a vector for each thread of a small block",
)
GPU_REGION_OPS = Limit(
    "gpu_region_ops", 192, "ops of a region of a GPU",
    "chosen, not measured: Threefry with its counters, which would write and read all its words once more",
)
UNROLLED_TURNS = Limit(
    "unrolled_turns", 8, "turns of a loop that is written out on a GPU",
    "chosen, not measured: Threefry has five",
)
UNROLLED_OPS = Limit(
    "unrolled_ops", 160, "ops of all turns of such a loop, but those that only move",
    "chosen, not measured: what gpu_region_ops leaves for the rest of the region",
)
SHORT_CARRIED = Limit(
    "short_carried", 1 << 12, "elements of what a loop carries on a GPU that is not written out for it",
    "chosen, not measured: it may be one kernel with its loop",
)

ROWS = rows_in(globals())
