"""Thresholds that several modules of lowering read; :mod:`aotc.lowering.threshold` explains the kinds of rows."""

from __future__ import annotations

from aotc.lowering.threshold import BlockSize, Limit

COLUMN_TERMS = BlockSize(
    24,
    "vector registers, of 32, for the row elements that one step of a column reduction adds; fewer in proportion on "
    "CPUs with fewer registers",
    "4096 x 4096 on a Zen 5, GB/s: 4 rows with 4 terms at a time 25, with 6 26; 8 rows with 2 terms 11, with 4 17; 1 "
    "row with prefetch and 8 terms 29.6, with 4 30.1",
)
SHARED_ROWS = Limit(
    8,
    "result rows, at most, that one grid item accumulates together because they read the same operand",
    "8 rows x 4096 x 4096 on a Zen 5: 3.9 ms; panels of 8 rows and 3 vectors take 6.0 ms, one row at a time 10 ms",
)
COLUMN_ITEMS = BlockSize(
    8,
    "grid items, at least, of a reduction over leading axes whose items stay large enough",
    "8 cores are common",
)
FETCH_LINE = BlockSize(
    64,
    "bytes that one prefetch loads",
    "the cache line of all x86-64 CPUs and of most AArch64 CPUs",
)
TURNED_TILE = BlockSize(
    128,
    "rows and columns of a tile that a transpose finishes before the next one, at most; a grid item has the rows of "
    "one tile",
    "f32 on one core of a Zen 5, us for 1024 x 1024 and for 2048 x 2048: tiles of 32 257 and 1676, 64 250 and 1340, "
    "128 222 and 1180, 256 228 and 1162; items of 16 rows and all columns 217 and 1650 to 3400",
)
FEW_TURNED = Limit(
    31,
    "rows or columns of a region up to which an operand that is read across its rows is not transposed first",
    "x.T + y of f32 on one core of a Zen 5, time with the transpose relative to without: 32 x 32 1.0, 32 x 512 0.76, "
    "512 x 32 0.83, 64 x 65536 0.37, 256 x 256 0.50, 1024 x 1024 0.11, 1088 x 1088 0.77",
)
TURNED_OPERANDS = Limit(
    4,
    "operands of a region, at most, that are transposed block by block before they are read; with more, none is",
    "each needs a block of one cache line by one cache line of elements on the stack of a worker, 1 to 4 KiB",
)
MERGED_EACH = BlockSize(
    8,
    "elements that a GPU thread merges after one search for its first element",
    "on an H200, one thread per element took four times as long",
)
DIGIT_THREADS = BlockSize(
    256,
    "threads, at most, of the GPU block that sorts elements by one digit of a radix sort",
    "one thread for each of the 256 digits, and several blocks fit on a multiprocessor",
)
LANE_DIGITS = BlockSize(
    16,
    "elements per thread of a block that sorts by a digit",
    "a block then spends about as long on the sums over its digits as on its elements",
)
BLOCK_FACTOR = Limit(
    1 << 16,
    "elements of a matrix, at most, that one GPU block factors; LAPACK factors larger ones on the host",
    "256 rows by 256 columns, which stay close to a multiprocessor",
)
BLOCK_THREADS = BlockSize(
    256,
    "threads of a GPU block that works on a tile or on several rows",
    "tiles of 256 threads reach 93 % of the speed of a copy on an H200",
)
LANE_BYTES = BlockSize(
    16,
    "bytes that a GPU thread loads at once from the array with the widest elements",
    "the widest load and store of NVIDIA GPUs",
)
LANE_THREADS = Limit(
    (1 << 16) - 1,
    "threads of a launch up to which a GPU is not busy: threads get fewer elements each, so that there are more "
    "threads",
    "512 threads on each of 128 multiprocessors",
)
ROW_REGISTERS = BlockSize(
    32,
    "registers per thread, at most, for its part of one array of a row",
    "an H200: 1024 threads with 32 registers each compute a softmax of rows of 32768 f32 at 98 % of the speed of a "
    "copy",
)
KEPT_REGISTERS_LONG = BlockSize(
    32,
    "registers per thread, in blocks of 1024 threads, for its parts of all arrays of a row",
    "by construction: a thread of such a block has 64 registers in all",
)
LONG_ROW_THREADS = BlockSize(1024, "threads that share one row, at most", "the largest block of a GPU")
COLUMN_THREADS = BlockSize(
    32,
    "threads of a block that reduce adjacent columns",
    "one warp, so that each of its reads covers whole cache lines",
)
NARROW_ELEMENTS = Limit(
    1 << 22,
    "elements of a column reduction, at most, that fills the GPU with blocks of fewer columns; a larger one may be "
    "split instead",
    "an H200: 3072 x 768 of f32 take 5.4 us, but 4096 x 4096 take 23.2 us, 70 % of the speed of a copy",
)

# --- fusion --------------------------------------------------------------------

REGION_BUFFERS = Limit(
    40,
    "buffers, at most, that a fused region reads",
    "a kernel holds the addresses of all its buffers in registers or spills them",
)
STRIDED_BYTES = Limit(
    (1 << 14) - 1,
    "bytes of an array up to which strided access to it is accepted; a larger transpose of the last dim is written to "
    "memory",
    "half of a first-level cache of 32 KiB; strides through a larger array cost a cache miss per element",
)
REPEATED_WORK = Limit(
    4,
    "scalar operations per element, at most, that every reader may recompute below -O3",
    "about the cost of storing and loading the element",
)
REGION_WORK = Limit(
    125,
    "percent of the scalar operations of its separate ops, at most, that a fused region executes",
    "a quarter more arithmetic costs less than the pass over memory that fusion saves",
)

# --- passes --------------------------------------------------------------------

SCAN_LANES = BlockSize(
    256,
    "adjacent scans that one grid item computes together",
    "their running sums stay in the first-level cache and fill vectors",
)
REDUCED_ELEMENTS = Limit(
    (1 << 16) - 1,
    "elements of a reduction, at most, that is always done in one step; larger ones may be split into partial results",
    "about ten microseconds of work, as long as it takes to wake other cores",
)
FEW_ROWS = Limit(
    7,
    "results of a reduction over trailing dims, at most, that leave CPU cores idle",
    "8 cores are common",
)
GPU_IDLE_ROWS = Limit(
    131,
    "rows or other parts of one block each, at most, that leave multiprocessors of a GPU idle",
    "an H200 has 132 multiprocessors",
)
FOLDED_BYTES = Limit(
    64 * 1024,
    "bytes of a constant-folded result, at most, that is stored however small its operands are",
    "too little to matter for the size of a bundle",
)
FOLDED_GROWTH = Limit(
    2,
    "bytes of a folded result above FOLDED_BYTES, at most, for each byte of its operands",
    "weights that are converted to floats of twice the width are still folded",
)
FOLDED_BROADCAST = Limit(
    1 << 8,
    "bytes of a broadcast, at most, that is folded although it is larger than its operand",
    "a kernel reads the operand of a broadcast as fast as its result",
)

# --- loops and rows ------------------------------------------------------------

ITEM_ELEMENTS = BlockSize(1024, "elements of the trailing axes in one grid item", "about a microsecond of one core")
CHUNK = BlockSize(
    4096,
    "elements, at most, of the chunks into which one long axis is divided",
    "16 KiB of f32, half of a first-level cache of 32 KiB",
)
SEGMENTS = Limit(
    9,
    "boundaries, both ends included, of the segments into which index tests divide a loop; with more, it is not "
    "divided",
    "the loop body is written once per segment",
)
UNROLLED_STEPS = Limit(
    8,
    "iterations of a loop, at most, that is unrolled in the kernel of a whole while loop",
    "values of up to 8 elements stay in registers",
)

# --- programs ------------------------------------------------------------------

LOOP_VALUE = Limit(
    4096,
    "elements, at most, of each value computed in a while loop that becomes one kernel",
    "a larger value is worth several cores",
)
LOOP_ELEMENTS = Limit(
    1 << 15,
    "elements, at most, of all values together in a while loop that becomes one kernel",
    "128 KiB of f32 stay in a second-level cache",
)
LOOP_TURNS = Limit(
    1 << 12,
    "iterations of a while loop, at most, in one launch of its GPU kernel; the host can end a call between launches",
    "a few milliseconds at a microsecond per iteration",
)
ORDER_WORKERS = BlockSize(
    4,
    "workers assumed when the schedule compares orders of the commands of a graph",
    "with one worker all orders take the same time, with many the order hardly matters",
)
