"""How GPUs do ops with a lowering of their own: decisions by size, which passes and regions ask; sizes of blocks."""

from __future__ import annotations

from aotc.lowering.threshold import BlockSize, Limit, rows_in

# fmt: off
THREAD_SORT = Limit(
    "thread_sort", 32, "elements of a row that one GPU thread sorts",
    "chosen, not measured: as many as a warp has threads; they lie in a thread's own memory",
)
GPU_SORT_BYTES = BlockSize(
    "gpu_sort_bytes", 16 << 10, "bytes of the elements that a GPU's block sorts, of which it has a second copy",
    "chosen, not measured: two blocks of 1024 threads on a multiprocessor, within the 48 KiB of every GPU",
)
MERGED_EACH = BlockSize(
    "merged_each", 8, "elements that a GPU's thread merges behind one search",
    "chosen, not measured: one thread for each element took four times as long on an H200",
)
MERGE_WAYS_UNKNOWN = BlockSize(
    "merge_ways_unknown", 16, "runs that a GPU merges in one pass over an array of unknown length",
    "chosen, not measured: few passes that only copy where the array is short",
)
KEPT_OF_RUN = Limit(
    "kept_of_run", 25, "hundredths of the elements that a GPU's block sorts of which top_k keeps the largest",
    "chosen, not measured: each pass leaves a quarter at most; above it the whole row is sorted",
)
DIGIT_THREADS = BlockSize(
    "digit_threads", 256, "threads of a GPU's block that orders elements by a digit, at most",
    "chosen, not measured: one for each digit, and several blocks on a multiprocessor",
)
LANE_DIGITS = BlockSize(
    "lane_digits", 16, "elements of each of these threads",
    "chosen, not measured: a block's sums over digits take as long as its elements",
)
DIGIT_SORT_BYTES = BlockSize(
    "digit_sort_bytes", 32 << 10, "bytes of the elements that a GPU's block orders by a digit",
    "chosen, not measured: 4096 of f32 and their places, within the 48 KiB of every GPU",
)
DIGIT_SORT_KEYS = Limit(
    "digit_sort_keys", 8, "bytes of the keys of an element that GPUs sort digit by digit",
    "chosen, not measured: more passes than merges of a million elements take",
)
DIGIT_SORT_MOVED = Limit(
    "digit_sort_moved", 16, "bytes of an element that each pass of such a sort moves; of larger ones the place",
    "chosen, not measured: gathering the rest at last reads and writes it once",
)
MERGED_SORT = Limit(
    "merged_sort", 0, "merges of all elements for each byte of their keys, rounded down, where GPUs sort by merging",
    "an NVIDIA H200, 2026-11-22: a merge of a million f32 takes 16 us, as long as a pass over a digit",
)
SERIAL_UPDATES = Limit(
    "serial_updates", 16, "updates of a scatter that a GPU applies one after the other",
    "chosen, not measured: a load and a store each, in all less than the launches of what goes side by side",
)
DENSE_SCATTER = Limit(
    "dense_scatter", 4, "rows of an array for each update, where sums of updates have the array's shape",
    "chosen, not measured: above it what is filled and read beside the array is more than the updates are",
)
CROWDED_CELLS = Limit(
    "crowded_cells", 4096, "elements that a GPU's block combines updates for in shared memory",
    "chosen, not measured: 32 KiB of i64; a million sums for 1000 elements waited 80 us for each other on an H200",
)
CROWDED_UPDATES = Limit(
    "crowded_updates", (1 << 16) - 1, "updates of a scatter that go to the GPU's memory at once, however few elements",
    "chosen, not measured: as many blocks as fill the multiprocessors would each clear and write all elements",
    unknown=True,
)
CROWDED_THREADS = BlockSize(
    "crowded_threads", 512, "threads of a GPU's block that combines updates in shared memory",
    "chosen, not measured: four blocks on a multiprocessor",
)
CROWDED_EACH = BlockSize(
    "crowded_each", 8, "updates of each of these threads", "chosen, not measured: 256 blocks for a million updates",
)
FILLED_BYTES = Limit(
    "filled_bytes", 4096, "bytes of an array of equal constants that a bundle for GPUs holds",
    "chosen, not measured: a launch writes as soon as a copy does, and weights nothing",
)
FILLED_BYTES_CPU = Limit(
    "filled_bytes_cpu", 1 << 14, "bytes of an array of equal constants that a bundle for CPUs holds",
    "chosen, not measured: the code of a kernel that fills takes less than a tenth of it",
)
THREAD_TRIANGLE = Limit(
    "thread_triangle", 12, "rows of a triangular matrix that one GPU thread factors or solves",
    "chosen, not measured: half a warp would have nothing to do, and many small ones fill the GPU",
)
TRIANGLE_THREADS = BlockSize(
    "triangle_threads", 512, "threads of a GPU's block that factors a matrix or solves a triangular system",
    "chosen, not measured: four warps for each of a multiprocessor's schedulers",
)
PANEL_BYTES = BlockSize(
    "panel_bytes", 128, "bytes of a column of a panel, which a GPU's block finishes before it takes it off the rest",
    "chosen, not measured: 32 f32 in a thread's registers, and a warp for the rows of the diagonal",
)
TRIANGLE_TILE = BlockSize(
    "triangle_tile", 4, "rows and columns of what a GPU's thread takes a panel off at a time",
    "chosen, not measured: eight loads, which are two vectors at best, for 16 products",
)
MIRROR_BYTES = BlockSize(
    "mirror_bytes", 64, "bytes of a row of the tiles in which a GPU's warps turn a matrix over",
    "chosen, not measured: two whole sectors; tiles of 16 warps lie within the 48 KiB of every GPU",
)
SOLVED_COLUMNS = BlockSize(
    "solved_columns", 32, "right-hand sides that a GPU's block solves for", "chosen, not measured: a warp's width",
)
FACTOR_WARPS = BlockSize(
    "factor_warps", 16, "warps of a GPU's block that factors a matrix column by column, at most",
    "chosen, not measured: as triangle_threads",
)
COLUMNS_OF_WARP = BlockSize(
    "columns_of_warp", 4, "columns of a matrix for each of these warps, at least",
    "chosen, not measured: all wait for the one that finds a pivot or a reflector",
)
PIVOT_PANEL_BYTES = BlockSize(
    "pivot_panel_bytes", 128, "bytes of a row of a panel of LU factors, which lies in a thread's registers",
    "an NVIDIA H200, 2026-11-23: 64 of 128 x 128 f32 and of 256 x 256 130 and 483 us (64 bytes: 143 and 611)",
)
PANEL_GROUP_BYTES = BlockSize(
    "panel_group_bytes", 32, "bytes of the columns that a thread takes such a panel off at a time",
    "an NVIDIA H200, 2026-11-23: 64 of 256 x 256 565 us (16 bytes: 575), 64 with 512 threads 597 (611)",
)
PANEL_THREADS = BlockSize(
    "panel_threads", 512, "threads of a GPU's block that finds LU factors by panels, at most",
    "an NVIDIA H200, 2026-11-23: 64 of 128 x 128 143 us (1024 threads: 161), 256 x 256 611 (565), panels of 64 bytes",
)
PANEL_ROWS = Limit(
    "panel_rows", 512, "rows of a matrix that LU factors are found of by panels, a thread for each",
    "chosen, not measured: with 64 bytes a row, 32 KiB of shared memory",
)
BLOCK_FACTOR = Limit(
    "block_factor", 1 << 16, "elements of a matrix that a GPU's block factors, and LAPACK does not",
    "chosen, not measured: 256 rows and columns, which stay near a multiprocessor",
)
JACOBI_BYTES = Limit(
    "jacobi_bytes", 94 << 10, "bytes of the columns that a GPU's block turns by Jacobi's method, with their vectors",
    "what a block may have of shared memory on every GPU of the table of targets, less what belongs to no column",
)
JACOBI_LANE_BYTES = BlockSize(
    "jacobi_lane_bytes", 128, "bytes of a column that a thread holds in registers while it turns them",
    "64 of its registers at most, for two; fewer threads a pair find its angle more rarely, and have shorter sums",
)
JACOBI_SWEEPS = BlockSize(
    "jacobi_sweeps", 30, "sweeps over all pairs of columns in which they are to become orthogonal, at most",
    "LAPACK's gesvj; random matrices of 64 rows take 7 to 10",
)
DFT_THREAD_POINTS = BlockSize(
    "dft_thread_points", 16, "points of a signal for each thread of a GPU's block; a thread alone transforms no more",
    "chosen, not measured: two butterflies of eight, in registers",
)
DFT_THREADS = BlockSize(
    "dft_threads", 256, "threads of a GPU's block that transforms a signal, at most",
    "chosen, not measured: signals of 4096 points have two butterflies of eight a thread",
)
GPU_SCAN_THREADS = BlockSize(
    "gpu_scan_threads", 256, "threads of a GPU's block that scan a row together",
    "chosen, not measured: eight blocks for each multiprocessor hide each other's barriers",
)
GPU_SCAN_BYTES = BlockSize(
    "gpu_scan_bytes", 32, "bytes of neighbouring elements that a thread scans on its own",
    "chosen, not measured: eight f32, fewer steps than the block then takes together",
)
GPU_SCAN_BLOCKS = BlockSize(
    "gpu_scan_blocks", 1024, "blocks that scan parts of rows, at least",
    "chosen, not measured: eight for each of 128 multiprocessors",
)
GPU_SCAN_COLUMNS = BlockSize(
    "gpu_scan_columns", 1 << 17, "threads that scan parts of columns, at least",
    "chosen, not measured: 1024 for each of 128 multiprocessors",
)
GPU_SCAN_PART = BlockSize(
    "gpu_scan_part", 1 << 11, "elements of a part of a row that a block scans, at least",
    "chosen, not measured: what its threads take in at a time",
)
SHORT_COLUMN = Limit(
    "short_column", 128, "elements of a column that a GPU's thread scans alone",
    "chosen, not measured: eight threads with their share of elements in registers",
)
COLUMN_SCAN_BLOCKS = Limit(
    "column_scan_blocks", 127, "blocks of neighbouring columns that are too few to be scanned in one pass",
    "chosen, not measured: a block for each multiprocessor",
)
COLUMN_SCAN_BYTES = BlockSize(
    "column_scan_bytes", 64, "bytes of neighbouring columns that a GPU's block scans",
    "chosen, not measured: two whole sectors, and two blocks a multiprocessor for 4096 columns of f32",
)
COLUMN_SCAN_EACH = BlockSize(
    "column_scan_each", 64, "bytes of a column that a GPU's thread scans in registers",
    "chosen, not measured: sixteen loads of f32 that are under way together",
)
COLUMN_SCAN_THREADS = BlockSize(
    "column_scan_threads", 512, "threads of a GPU's block that scans neighbouring columns, at most",
    "chosen, not measured: two blocks a multiprocessor, of which one loads while the other stores",
)
GPU_SCAN_COLUMN_PART = BlockSize(
    "gpu_scan_column_part", 32, "elements of a part of a column that a thread scans, at least",
    "chosen, not measured: the ends of the parts, scanned again, are few beside it",
)
SUMMED_ROW = Limit(
    "summed_row", 31, "floats of an update whose sums are found as integers, which a GPU adds in any order",
    "chosen, not measured: a warp has a float for each lane of what is sorted and then added in order",
)
COUNTED_UPDATES = Limit(
    "counted_updates", 1 << 13, "updates of rows whose order a GPU finds by comparing each with all others",
    "reasoning: 64M comparisons take all multiprocessors of an H200 some 5 us, sorts and merges of runs took 37",
)
COUNTED_WARPS = BlockSize(
    "counted_warps", 8, "warps of a GPU's block that share what its elements are compared with",
    "reasoning: 8192 elements give each scheduler of an H200 four warps",
)
SUMMED_PART = BlockSize(
    "summed_part", 32, "sorted updates that a GPU's thread adds in order, at least, of those to one row",
    "chosen, not measured: at most, about the square root of their number",
)
WINDOWS_OF_ELEMENT = Limit(
    "windows_of_element", 16, "windows an element lies in, whose gradients it adds up itself",
    "chosen, not measured: windows of 8 by 8 with strides of 2",
)
# fmt: on

ROWS = rows_in(globals())
