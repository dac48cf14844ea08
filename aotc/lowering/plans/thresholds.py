"""Lowering's decisions by size, its sizes of blocks and its estimates of work: one row each.

A :class:`Limit` decides and is asked by :meth:`Limit.holds` only, so that a test can see both of its answers. A
:class:`BlockSize` says how much is done at a time, an :class:`Estimate` what a unit of work counts for. What is chosen
is handed on in attributes of ops and in kernels; nobody decides the same thing a second time.

Bounds of the compiler's own time (sweeps, look-back, recursion) are no decisions about the program and stand where
they are spent; so do a byte's 256 values and the like, which no measurement could change. The runtime and the formulas
of kernels have tables of their own. ``measured`` says where a value comes from; most were chosen by reasoning.
"""

from __future__ import annotations

from aotc.lowering.analysis import thresholds as analysis_table
from aotc.lowering.cost_model import work  # fmt: skip
from aotc.lowering.plans import attention as table_attention
from aotc.lowering.plans import cpu_reductions as table_columns
from aotc.lowering.plans import gpu_algorithms as table_algorithms
from aotc.lowering.plans import gpu_loops_rows as table_gpu
from aotc.lowering.plans import gpu_memory as table_gpu_memory
from aotc.lowering.plans import gpu_while as table_loops
from aotc.lowering.plans import matmul as table_products
from aotc.lowering.threshold import BlockSize, Estimate, Limit, rows_in

# fmt: off
# --- fusion --------------------------------------------------------------------

REGION_OPS = Limit(
    "region_ops", 96, "ops of a region",
    "chosen, not measured: lowering recurses over a region's ops (decision 28), and LLVM's time grows with its size",
)
REGION_BUFFERS = Limit(
    "region_buffers", 40, "buffers that a region reads",
    "chosen, not measured: a kernel keeps the addresses of all its buffers in registers or spills them",
)
REPEATED_MOVES = Limit(
    "repeated_moves", 16, "movements in a row",
    "chosen, not measured: all are composed again into the index of every reader, by recursion (decision 28)",
)
STRIDED_BYTES = Limit(
    "strided_bytes", (1 << 14) - 1, "bytes of a transpose that moves the last dim",
    "chosen, not measured: half of a first-level cache of 32 KiB; what is larger is read with a miss per element",
)
REPEATED_WORK = Limit(
    "repeated_work", 4, "scalar operations per element that a reader repeats, below -O3",
    "chosen, not measured: about what storing and loading the element would cost",
)
REPEATED_WORK_O3 = Limit(
    "repeated_work_o3", 16, "scalar operations per element that a reader repeats, at -O3",
    "chosen, not measured: one dear operation (work 16 in the op table) may be repeated once",
)
REGION_WORK = Limit(
    "region_work", 125, "hundredths of the scalar operations of a region's ops, one by one, that it does",
    "chosen, not measured: a quarter more arithmetic is less than the time of a pass over memory that fusion saves",
)
CLAMP_WORK = Estimate(
    "clamp_work", 3, "scalar operations that clamp the start of a slice", "by construction: convert, max, min"
)
TEST_WORK = Estimate(
    "test_work", 2, "scalar operations of a test of an index in a region",
    "by construction: the comparison, and the select or the conjunction that takes its answer",
)
STAGE_WORK = Limit(
    "stage_work", 4, "scalar operations per element that each stage of a row repeats",
    "chosen, not measured: dearer values are kept in a row of scratch memory (repeated_stage_work) and computed once",
)

# --- memory --------------------------------------------------------------------

SPREAD_BYTES = Limit(
    "spread_bytes", 1 << 18, "bytes of an arena in which commands never wait for memory",
    "chosen, not measured: it stays in a second-level cache",
)
SPREAD_PERCENT = Limit(
    "spread_percent", 12, "percent by which an arena grows so that commands need not wait for memory",
    "chosen, not measured: memory is the price of a wait that ends as soon as a thread is free",
)

OVERLAP_MEMORY = Limit(
    "overlap_memory", 100, "percent by which an arena grows so that loops and branches run beside others",
    "chosen, not measured: they take long, so that a wait for memory would cost whole cores",
)
REORDERED_PERCENT = Limit(
    "reordered_percent", 90, "percent of the memory of a function for which its ops are put in another order",
    "chosen, not measured: the model of memory is rough, and the order of the model is easier to follow",
)

# --- passes --------------------------------------------------------------------

HOISTED_BYTES = Limit(
    "hoisted_bytes", 1 << 20, "bytes of a result moved out of a loop",
    "chosen, not measured: a larger one would lie in memory during the whole loop instead of in a cache when needed",
)
LONG_SCAN = Limit(
    "long_scan", (1 << 15) - 1, "elements of a scan done on one core",
    "chosen, not measured: some ten microseconds of serial work, several claims of the scheduler",
)
FEW_SCANS = Limit(
    "few_scans", 7, "blocks of scans beside each other that leave cores idle",
    "chosen, not measured: 8 cores are common",
)
FEWEST_SCAN_PARTS = BlockSize(
    "fewest_scan_parts", 16, "parts of a long scan, at least",
    "chosen, not measured: two for each of 8 cores",
)
SCAN_PARTS = BlockSize(
    "scan_parts", 64, "parts of a long scan, at most",
    "chosen, not measured: the scan of the parts' ends is serial",
)
SCAN_LANES = BlockSize(
    "scan_lanes", 256, "neighbouring scans of a grid item",
    "chosen, not measured: their sums stay in the first-level cache and fill vectors",
)
SCAN_CHUNK = BlockSize(
    "scan_chunk", 256, "elements of a chunk of a scan of unknown length",
    "chosen, not measured: the square root of 65536; a known length takes its own root",
)
WINDOW_TERMS = Limit(
    "window_terms", 31, "elements of a window over several dims, done in one step",
    "chosen, not measured: each step more goes through memory once more",
)
WINDOW_LENGTH = Limit(
    "window_length", 63, "elements of a window over one dim, summed one by one",
    "chosen, not measured: two scans and what joins them take several passes over memory",
)
WINDOW_OVERLAP = Limit(
    "window_overlap", 15, "windows that an element lies in, each summing it again",
    "chosen, not measured: two scans and what joins them take several passes over memory",
)
REDUCED_ELEMENTS = Limit(
    "reduced_elements", (1 << 16) - 1, "elements of a reduction done in one step",
    "chosen, not measured: some ten microseconds of work, as much as waking other cores costs",
)
ENOUGH_RESULTS = Limit(
    "enough_results", (1 << 12) - 1, "results of a reduction that leave cores idle",
    "chosen, not measured: 4096 columns are 32 grid items (reduced_columns)",
)
REDUCED_TERMS = Limit(
    "reduced_terms", 255, "elements per result of a reduction done in one step",
    "chosen, not measured: with fewer the partial results are a large part of the work",
)
REDUCTION_PARTS = BlockSize(
    "reduction_parts", 64, "parts of a split reduction, at most",
    "chosen, not measured: a few for each of 16 cores",
)
REDUCTION_EXTENT = Limit(
    "reduction_extent", 4 * REDUCTION_PARTS.value, "extent of a reduction's first dim that itself is the parts",
    "chosen, not measured: four times reduction_parts; a longer one is cut into its divisors",
)
FEW_PARTS = Limit(
    "few_parts", 3, "parts too few to split a reduction for",
    "chosen, not measured: a second step costs a dispatch",
)
FEW_ROWS = Limit(
    "few_rows", 7, "results of a reduction over trailing dims that leave cores idle",
    "chosen, not measured: 8 cores are common",
)
GPU_IDLE_ROWS = Limit(
    "gpu_idle_rows", 131, "rows that leave multiprocessors of a GPU idle if each has a block",
    "an H200 has 132",
)
ROW_PART = BlockSize(
    "row_part", 1 << 15, "elements of a part of a row that a core reads once for two reductions, at most",
    "benchmarks/long_rows.py: 128 KiB of f32 stay in a second-level cache; parts of 4096 take 5 to 20 % longer",
)
GPU_ROW_PART = BlockSize(
    "gpu_row_part", 1 << 12, "elements of a part of a row that a GPU's block reads once for two reductions, at most",
    "benchmarks/long_rows.py",
)
FEWEST_ROW_PARTS = BlockSize(
    "fewest_row_parts", 16, "parts of such a row on a CPU, at least",
    "chosen, not measured: two for each of 8 cores",
)
LEAST_PART = BlockSize(
    "least_part", 512, "elements of such a part, at least",
    "chosen, not measured: with fewer the numbers of the parts are a large part of the work",
)
PADDED_PART = Limit(
    "padded_part", 1, "times a padded part that an array is to be added to it whole, not in the place of the part",
    "chosen, not measured: to read and write a half twice takes as long as the whole once",
)
FOLDED_BYTES = Limit(
    "folded_bytes", 64 * 1024, "bytes of a folded result of any growth",
    "chosen, not measured: so much does not fatten a bundle",
)
FOLDED_GROWTH = Limit(
    "folded_growth", 2, "times the bytes that a folded result has of what it is made of",
    "chosen, not measured: weights that are converted to wider floats are still folded",
)
FOLDED_BROADCAST = Limit(
    "folded_broadcast", 1 << 8, "bytes of a folded broadcast",
    "chosen, not measured: a kernel reads the operand of a broadcast as well as its result",
)
FOLDED_FLOPS = Limit(
    "folded_flops", 10**9, "floating-point operations of a folded product",
    "chosen, not measured: compile time; NumPy takes well below a second",
)
DFT_POINTS = Limit(
    "dft_points", 1 << 13, "points of a transform done in one piece",
    "chosen, not measured: two buffers of 8192 complex numbers of f64 are 256 KiB, which fit a second-level cache",
)

# --- loops and rows ------------------------------------------------------------

SCALAR_DEPTH = Limit(
    "scalar_depth", 12, "scalar operations nested in an expression",
    "chosen, not measured: deeper ones get a name, for the text's sake and the recursion's",
)
ACROSS_ELEMENTS = BlockSize(
    "across_elements", 256, "elements of an item of pieces of rows, where the next item's lie beside them",
    "1024 x 1024 f32 to panels of 32 columns, no row on a line, a Zen 5, us: by panels 220, so 88, by 1024 162",
)
ITEM_ELEMENTS = BlockSize(
    "item_elements", 1024, "elements of a grid item of trailing axes",
    "chosen, not measured: about a microsecond of a core",
)
SHORT_ITEM = Limit(
    "short_item", 512, "scalar operations of one step of the grid, of which an item takes several",
    "chosen, not measured: half of item_elements, so that at least two fit",
)
CHUNK = BlockSize(
    "chunk", 4096, "elements of a chunk of one long axis, at most",
    "chosen, not measured: 16 KiB of f32, half of a first-level cache of 32 KiB",
)
WHOLE_AXIS = Limit(
    "whole_axis", 2 * CHUNK.value - 1, "elements of an axis that is not cut",
    "chosen, not measured: less than two chunks",
)
SEGMENTS = Limit(
    "segments", 9, "ends of the segments that the tests of a loop cut it into",
    "chosen, not measured: the body is written once per segment",
)
UNROLLED_WINDOW = Limit(
    "unrolled_window", 8, "extent of a window's dim that is unrolled",
    "chosen, not measured: windows over two dims are unrolled to at most 64 terms",
)
UNROLLED_STEPS = Limit(
    "unrolled_steps", 8, "steps of a loop that is unrolled inside the kernel of a whole while loop",
    "chosen, not measured: values of up to 8 elements stay in registers",
)
ROW_SCRATCH = Limit(
    "row_scratch", 1 << 18, "bytes of the values of a row that are kept for later stages",
    "chosen, not measured: half of the target's second-level cache bounds it as well",
)
SHORT_ROW = Limit(
    "short_row", 63, "elements of a reduced row of which a grid item takes several",
    "chosen, not measured: a claim would cost more than a row",
)
THREAD_ROW = Limit(
    "thread_row", 95, "elements of a row that one GPU thread reduces",
    "chosen, not measured: most of a block's threads would have none",
)

# --- ops of their own ----------------------------------------------------------

UPDATE_WINDOW = BlockSize(
    "update_window", 64, "elements of the last dim of a scatter's window that a grid item of a CPU writes",
    "chosen, not measured: four cache lines of f32",
)
DFT_ELEMENTS = BlockSize(
    "dft_elements", 1 << 13, "points of the neighbouring transforms of a grid item",
    "chosen, not measured: as dft_points",
)
DFT_LANES = BlockSize(
    "dft_lanes", 16, "neighbouring transforms of a grid item at least, and steps of its vectors",
    "a vector of 512 bits of f32",
)
FACTOR_ROWS = Limit(
    "factor_rows", 127, "rows of a matrix that loops factor",
    "f32 on a core of a Zen 5, us in loops and by LAPACK: 96 rows 19, 21; 128 42, 27; 192 102, 61",
)
SOLVE_ROWS = Limit(
    "solve_rows", 31, "unknowns or right-hand sides, the fewer, of a triangular solve done in loops",
    "f32, a core of a Zen 5, BLAS in loops' time: 32 x 32 0.8 to 0.95, 64 x 64 0.75, 128 x 200 0.3, 200 x 32 0.25",
)
FEW_SOLVED_ROWS = Limit(
    "few_solved_rows", 3, "right-hand sides that are rows, each of which a triangular solve does by itself",
    "50 solves of 16 unknowns, a Zen 5, us by rows, turned: 4 rows 49, 12; 8 96, 32; 16 195, 22; 500 5834, 462",
)
SOLVE_COLUMNS = BlockSize(
    "solve_columns", 64, "right-hand sides of a grid item of a triangular solve",
    "chosen, not measured: four cache lines of f32",
)
MERGED_ROW = Limit(
    "merged_row", 9, "twice the bits of a row's length less the bytes of its keys, where merging wins",
    "chosen, not measured: a merge takes a pass per bit; a million f32 took 300 ms merged, 20 by digits (decision 29)",
)
INSERTED = Limit(
    "inserted", 24, "largest elements of a row that are found by insertion",
    "64 rows of 1000: 24 of random ones take 250 us inserted, 554 selected; of ascending ones 963 and 793",
)
INSERTED_ROW = Limit(
    "inserted_row", 64, "elements of a row whose largest are found by insertion, however many",
    "chosen, not measured: a radix sort counts 256 digits for each byte of the key",
)
INSERTED_BLOCK = BlockSize(
    "inserted_block", 32, "elements of a row that are looked at together", "chosen, not measured: two vectors of f32"
)
SELECTION_SPARE = BlockSize(
    "selection_spare", 256, "elements that the buffer of a selection takes in, at least, before it is sorted and cut",
    "the 40 largest of 8 rows of 8000 on a Zen 5, us, random and ascending: 64 73, 592; 256 73, 419; 768 89, 358",
)

# --- programs ------------------------------------------------------------------

LOOP_VALUE = Limit(
    "loop_value", 4096, "elements of a value made in a while loop that becomes one kernel",
    "chosen, not measured: more is worth several cores",
)
LOOP_ELEMENTS = Limit(
    "loop_elements", 1 << 15, "elements of all values made in a while loop that becomes one kernel",
    "chosen, not measured: 128 KiB of f32 stay in a second-level cache",
)
LOOP_BUFFERS = Limit(
    "loop_buffers", 60, "values that a while loop that becomes one kernel reads and returns",
    "chosen, not measured: they are the kernel's parameters",
)
LOOP_FLOPS = Limit(
    "loop_flops", 1 << 15, "operations per iteration of a while loop that becomes one kernel on a CPU",
    "chosen, not measured: 4 microseconds at 8 operations per nanosecond",
)
LOOP_FLOPS_CUDA = Limit(
    "loop_flops_cuda", 1 << 11, "operations per iteration of a while loop that becomes one kernel on a GPU",
    "chosen, not measured: one thread runs it, many times slower than a core",
)
LOOP_BLOCK_FLOPS = Limit(
    "loop_block_flops", 1 << 17, "operations per iteration of a while loop that becomes one block of threads of a GPU",
    "chosen, not measured: two microseconds of one multiprocessor, as long as two kernels of a graph take to begin",
)
LOOP_BLOCK_BYTES = Limit(
    "loop_block_bytes", 1 << 18, "bytes that the kernels of such a loop touch per iteration",
    "chosen, not measured: two microseconds of what one multiprocessor reads of the second-level cache",
)
LOOP_BLOCK_VALUE = Limit(
    "loop_block_value", 2048, "elements of a value that such a loop carries in shared memory",
    "chosen, not measured: 8 KiB of f32 of the 48 that a block has without asking",
)
LOOP_BLOCK_THREADS = BlockSize(
    "loop_block_threads", 512, "threads of such a block, at most",
    "chosen, not measured: 128 registers for each",
)
LOOP_TURNS = Limit(
    "loop_turns", 1 << 12, "iterations that a kernel of a GPU does without anyone looking who may end them",
    "chosen, not measured: some milliseconds at a microsecond each",
)
ALTERNATED_BYTES = Limit(
    "alternated_bytes", 1 << 12, "bytes of its states that an iteration copies for which a loop is not unrolled",
    "chosen, not measured: a copy of 4 KiB takes less than the command that makes it",
)
ALTERNATED_BYTES_CUDA = Limit(
    "alternated_bytes_cuda", 1 << 23, "such bytes on a GPU, where the number of iterations is not known",
    "chosen, not measured: a conditional node takes some microseconds, as 8 MiB do at 3 TB/s",
)
ORDER_WORKERS = BlockSize(
    "order_workers", 4, "workers by which orders of a graph's commands are compared",
    "chosen, not measured: with one all orders end at the same time, with many there is no order",
)
ORDER_GAIN = Limit(
    "order_gain", 1, "hundredths of a graph's time for which its commands stay in the order of the program",
    "chosen, not measured: neighbours of the program find their operands in caches",
)
ITEM_BLOCKS = BlockSize(
    "item_blocks", 512, "blocks of items whose bytes are known one by one, to see which wait for which",
    "chosen, not measured: a comparison of two commands takes a millisecond; items of larger grids are taken together",
)
FIRST_TILE = Limit(
    "first_tile", 50, "percent of a command's items that the first claim of another waits for",
    "chosen, not measured: what waits for more gains little by beginning sooner",
)
TILE_GAIN = Limit(
    "tile_gain", 20, "thousandths of two commands' time for which one waits for the other as a whole",
    "chosen, not measured",
)
TILE_CLAIM = Estimate(
    "tile_claim", 100, "nanoseconds more of a claim where commands wait for tiles", "chosen, not measured"
)
TILE_BYTES = Estimate(
    "tile_bytes", 40_000, "bytes in a microsecond that a command reads again from a near cache, if it waits for tiles",
    "benchmarks/tiles.py, one thread: 30 to 41 in a nanosecond (conv_pool, conv_pool_thin, rows)",
)

OVERLAP_NS = Limit(
    "overlap_ns", 4 * work.SERIAL_NS.value, "nanoseconds that loops and branches beside others save, and do not",
    "chosen, not measured: some times what waking threads takes, as the turns of a loop are a guess",
)
OVERLAP_PERCENT = Limit(
    "overlap_percent", 4, "hundredths of a program's time that loops and branches beside others save, and do not",
    "chosen, not measured: below, the estimates say little",
)

_TABLES = (
    analysis_table, table_algorithms, table_attention, table_columns, table_gpu, table_gpu_memory, table_loops,
    table_products, work,
)  # fmt: skip
ROWS = (*rows_in(globals()), *(row for table in _TABLES for row in table.ROWS))
