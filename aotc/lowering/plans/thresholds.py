"""Thresholds that several modules of lowering read: see :mod:`aotc.lowering.threshold` for what a row is."""

from __future__ import annotations

from aotc.lowering.threshold import BlockSize, Limit

COLUMN_TERMS = BlockSize(
    24,
    "factors of rows that are added at a time, of 32 registers",
    "4096 x 4096 on a Zen 5, GB/s: 4 rows by 4, 6 25, 26; 8 by 2, 4 11, 17; fetched, 1 row by 8, 4 29.6, 30.1",
)
SHARED_ROWS = Limit(
    8,
    "steps of an axis whose accumulators an item has all, as an operand is the same for all",
    "8 rows x 4096 x 4096 on a Zen 5: 3.9 ms; panels of 8 rows and 3 vectors 6.0, one row at a time 10",
)
COLUMN_ITEMS = BlockSize(
    8,
    "items of a reduction over leading axes, at least, if each has enough elements",
    "8 cores are common",
)
FETCH_LINE = BlockSize(64, "bytes that are fetched ahead at once", "a cache line of all x86-64 and most AArch64 CPUs")
TURNED_TILE = BlockSize(
    128,
    "rows, and columns, whose blocks follow each other where axes are exchanged; rows of an item",
    "f32, one core of a Zen 5, us of 1024 x 1024 and 2048 x 2048: 32 257 and 1676, 64 250 and 1340, 128 222 and "
    "1180, 256 228 and 1162; items of 16 rows and all columns 217 and 1650 to 3400",
)
FEW_TURNED = Limit(
    31,
    "rows, or columns, of a region too few for what it reads across its rows to be turned first",
    "x.T + y of f32, one core of a Zen 5, of the time without: 32 x 32 1.0, 32 x 512 0.76, 512 x 32 0.83, 64 x 65536 "
    "0.37, 256 x 256 0.50, 1024 x 1024 0.11, 1088 x 1088 0.77",
)
TURNED_OPERANDS = Limit(
    4,
    "operands of a region that are turned first, block by block",
    "each takes a line's elements squared of a worker's stack, 1 to 4 KiB",
)
MERGED_EACH = BlockSize(
    8,
    "elements that a GPU's thread merges behind one search",
    "one thread for each element took four times as long on an H200",
)
DIGIT_THREADS = BlockSize(
    256,
    "threads of a GPU's block that orders elements by a digit, at most",
    "one for each digit, and several blocks on a multiprocessor",
)
LANE_DIGITS = BlockSize(
    16,
    "elements of each of these threads",
    "a block's sums over digits take as long as its elements",
)
TRIANGLE_THREADS = BlockSize(
    512,
    "threads of a GPU's block that factors a matrix or solves a triangular system",
    "four warps for each of a multiprocessor's schedulers",
)
BLOCK_FACTOR = Limit(
    1 << 16,
    "elements of a matrix that a GPU's block factors, and LAPACK does not",
    "256 rows and columns, which stay near a multiprocessor",
)
BLOCK_THREADS = BlockSize(
    256,
    "threads of a block that works on a tile, or on several rows",
    "docs/status.md: tiles of 256 threads reach 93 % of a copy's speed on an H200",
)
LANE_BYTES = BlockSize(
    16,
    "bytes of the widest array that a thread reads at once",
    "the widest access of NVIDIA's GPUs",
)
LANE_ELEMENTS = BlockSize(
    4,
    "independent elements of a thread, at least",
    "an H200: one scalar a thread copies 2770 GB/s, four 4285",
)
LANE_THREADS = Limit(
    (1 << 16) - 1,
    "threads too few to keep a GPU busy, so that each does fewer elements",
    "512 threads for each of 128 multiprocessors",
)
ROW_REGISTERS = BlockSize(
    32,
    "registers that hold a thread's part of each array of a row",
    "an H200: 1024 threads with 32 of them do a softmax of rows of 32768 f32 at 98 % of a copy's speed",
)
KEPT_REGISTERS_LONG = BlockSize(
    32,
    "registers of a thread of the largest blocks that hold all its parts of a row",
    "by construction: 1024 threads have 64 each",
)
LONG_ROW_THREADS = BlockSize(1024, "threads of the longest rows", "the most of a block")
COLUMN_THREADS = BlockSize(
    32,
    "threads of a block side by side that reduce columns",
    "a warp, so that each reads whole lines",
)
NARROW_ELEMENTS = Limit(
    1 << 22,
    "elements whose columns are reduced in one step by blocks of few, if blocks are few",
    "an H200: 3072 x 768 of f32 take 5.4 us, but 4096 x 4096 23.2, 70 % of a copy's speed",
)

# --- fusion --------------------------------------------------------------------

REGION_BUFFERS = Limit(
    40,
    "buffers that a region reads",
    "a kernel keeps the addresses of all its buffers in registers or spills them",
)
STRIDED_BYTES = Limit(
    (1 << 14) - 1,
    "bytes of a transpose that moves the last dim",
    "half of a first-level cache of 32 KiB; what is larger is read with a miss per element",
)
REPEATED_WORK = Limit(
    4,
    "scalar operations per element that a reader repeats, below -O3",
    "about what storing and loading the element would cost",
)
REGION_WORK = Limit(
    125,
    "hundredths of the scalar operations of a region's ops, one by one, that it does",
    "a quarter more arithmetic is less than the time of a pass over memory that fusion saves",
)

# --- passes --------------------------------------------------------------------

SCAN_LANES = BlockSize(
    256,
    "neighbouring scans of a grid item",
    "their sums stay in the first-level cache and fill vectors",
)
REDUCED_ELEMENTS = Limit(
    (1 << 16) - 1,
    "elements of a reduction done in one step",
    "some ten microseconds of work, as much as waking other cores costs",
)
FEW_ROWS = Limit(7, "results of a reduction over trailing dims that leave cores idle", "8 cores are common")
GPU_IDLE_ROWS = Limit(131, "rows that leave multiprocessors of a GPU idle if each has a block", "an H200 has 132")
FOLDED_BYTES = Limit(64 * 1024, "bytes of a folded result of any growth", "so much does not fatten a bundle")
FOLDED_GROWTH = Limit(
    2,
    "times the bytes that a folded result has of what it is made of",
    "weights that are converted to wider floats are still folded",
)
FOLDED_BROADCAST = Limit(
    1 << 8,
    "bytes of a folded broadcast",
    "a kernel reads the operand of a broadcast as well as its result",
)

# --- loops and rows ------------------------------------------------------------

ITEM_ELEMENTS = BlockSize(1024, "elements of a grid item of trailing axes", "about a microsecond of a core")
CHUNK = BlockSize(
    4096,
    "elements of a chunk of one long axis, at most",
    "16 KiB of f32, half of a first-level cache of 32 KiB",
)
SEGMENTS = Limit(
    9,
    "ends of the segments that the tests of a loop cut it into",
    "the body is written once per segment",
)
UNROLLED_STEPS = Limit(
    8,
    "steps of a loop that is unrolled inside the kernel of a whole while loop",
    "values of up to 8 elements stay in registers",
)

# --- programs ------------------------------------------------------------------

LOOP_VALUE = Limit(
    4096,
    "elements of a value made in a while loop that becomes one kernel",
    "more is worth several cores",
)
LOOP_ELEMENTS = Limit(
    1 << 15,
    "elements of all values made in a while loop that becomes one kernel",
    "128 KiB of f32 stay in a second-level cache",
)
LOOP_TURNS = Limit(
    1 << 12,
    "iterations that a kernel of a GPU does without anyone looking who may end them",
    "some milliseconds at a microsecond each",
)
ORDER_WORKERS = BlockSize(
    4,
    "workers by which orders of a graph's commands are compared",
    "with one all orders end at the same time, with many there is no order",
)
