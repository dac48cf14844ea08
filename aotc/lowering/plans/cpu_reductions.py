"""How a CPU reduces leading axes, and some trailing ones at a time, what it turns and cuts: its decisions by size."""

from __future__ import annotations

from aotc.lowering.threshold import BlockSize, Limit, rows_in

REDUCED_COLUMNS = BlockSize(
    "reduced_columns", 128, "columns that a grid item reduces side by side, or multiples of these",
    "chosen, not measured: 8 vectors of 16 f32, which stay in registers",
)
NARROW_CPU_COLUMNS = Limit(
    "narrow_cpu_columns", 128, "columns of an item on a CPU to which one row is added at a time",
    "chosen, not measured: their accumulators stay in registers",
)
LIGHT_COLUMN = Limit(
    "light_column", 12, "operations on each element of a reduction of which an item takes several rows at a time",
    "chosen, not measured: of more the code would grow, and its time is not memory's",
)
ACCUMULATOR_PERCENT = BlockSize(
    "accumulator_percent", 75, "percent of the first-level cache for the accumulators of an item's columns",
    "1 row x 4096 x 4096 of f32 on one core of a Zen 5, GB/s by columns: 128 28, 512 38, 1024 53, all 51",
)
COLUMN_TERMS = BlockSize(
    "column_terms", 24, "factors of rows that are added at a time, of 32 registers",
    "4096 x 4096 on a Zen 5, GB/s: 4 rows by 4, 6 25, 26; 8 by 2, 4 11, 17; fetched, 1 row by 8, 4 29.6, 30.1",
)
SHARED_ROWS = Limit(
    "shared_rows", 8, "steps of an axis whose accumulators an item has all, as an operand is the same for all",
    "8 rows x 4096 x 4096 on a Zen 5: 3.9 ms; panels of 8 rows and 3 vectors 6.0, one row at a time 10",
)
COLUMN_ITEMS = BlockSize(
    "column_items", 8, "items of a reduction over leading axes, at least, if each has enough elements",
    "chosen, not measured: 8 cores are common",
)
COLUMN_ITEM_ELEMENTS = BlockSize(
    "column_item_elements", 1 << 14, "elements of an item of columns, at least",
    "chosen, not measured: some microseconds of a core",
)
LONG_PIECES = Limit(
    "long_pieces", (1 << 13) - 1, "columns whose sums are split by terms, not into blocks of fewer columns",
    "8192 columns are 8 items of 1024, whose rows of 4 KiB memory gives as fast as whole ones: see accumulator_percent",
)
PART_ELEMENTS = BlockSize(
    "part_elements", 1 << 14, "elements of a part of a split reduction over leading axes, at least",
    "chosen, not measured: some microseconds of a core",
)
COLUMN_PART_TERMS = BlockSize(
    "column_part_terms", 32, "terms of a part of a split reduction for each row that is summed beside others, at least",
    "one core of a Zen 5, ms by 32, 64: 1 row x 4096 x 4096 2.02, 2.04; 8 rows 3.64, 3.56; 8 x 1024 x 1024 0.11, 0.13",
)
RESTED_ROWS = Limit(
    "rested_rows", 1, "rows of sums of columns whose terms, if their number has no divisor, are parts and a rest",
    "times 4099 x 4097 on a core of a busy Zen 5, of the time in blocks of columns: 1 row 0.92, 4 1.08, 8 1.09",
)
BLOCK_ROWS = BlockSize(
    "block_rows", 4, "rows that are summed at a time with what all of them are multiplied with",
    "4096 x 4096 on a Zen 5, times 1 column by 1, 2, 4, 8 rows: 2.19, 1.85, 1.73, 1.95 ms; 4 columns, GB/s: 16, 20, 29;"
    " bf16 times 1 column 0.92, 1.61, 1.42 ms",
)
FEW_BLOCK_ROWS = Limit(
    "few_block_rows", 3, "rows that are summed one by one",
    "chosen, not measured: fewer than block_rows",
)
SHORT_BLOCK_ROW = Limit(
    "short_block_row", 63, "elements of rows that are summed one by one",
    "a core of a Zen 5, of the time one by one: 1000 rows of 64 to 100 times a column 0.64, in batches 0.74 to 0.97",
)
UNROLLED_ROW = Limit(
    "unrolled_row", 8, "elements of a row that is written out on a CPU, so that neighbouring rows share vectors",
    "8192 rows of f32 on a Zen 5, us: sums of 3 4.1, 0.6 written out, of 8 3.1, 2.8, of 9 6.4, 17; norms of 8 9.0, 3.0",
)
UNROLLED_LONGER_ROW = Limit(
    "unrolled_longer_row", 14, "the same of an even number, or if dear functions are taken of the elements",
    "8192 rows of f32 on a Zen 5, us: sums of 14 50, 25 written out, of 16 5, 29; log-sum-exp of 13 181, 59",
)
LIGHT_NUMBERS = Limit(
    "light_numbers", 8, "work, as vectors, on the numbers of a short row that are not computed with those of others",
    "8192 rows of 20 f32 on a Zen 5, us: logistic (14) of sums 42, 22 with 16 rows, x / norm (6) 26, 34",
)
ROW_BLOCK_ELEMENTS = BlockSize(
    "row_block_elements", 1 << 15, "elements of the rows of an item that are summed in blocks",
    "chosen, not measured: some microseconds of a core",
)
NEAR_BYTES = Limit(
    "near_bytes", 1 << 18, "bytes of a matrix beside few rows or columns of which nothing is fetched ahead",
    "8 rows, one core of a Zen 5, us without and with: 384 x 512 21, 19; 1024 x 1024 110, 108; 4096 x 4096 5393, 3250",
)
UNFETCHED_COLUMNS = Limit(
    "unfetched_columns", 2, "columns that rows of a matrix are summed beside without being fetched ahead",
    "4096 x 4096, one core of a Zen 5, ms without, with: 1 column (in C) 1.38, 1.71; 2 1.91, 1.83; 8 4.3, 3.7",
)
FETCHED_BYTES = BlockSize(
    "fetched_bytes", 2048, "bytes ahead of which rows of a matrix are fetched that are summed beside some columns",
    "4096 x 4096 times 8 columns on one core of a Zen 5, ms: 512 3.89, 1024 3.70, 2048 3.73, 4096 3.74; none 4.25",
)
WHOLE_COLUMNS = Limit(
    "whole_columns", 4, "columns that whole rows of a matrix are summed beside, not in parts",
    "a core of a busy Zen 5, of the time of whole rows: 4096 x 4096 x 3 1.05, x 4 1.03, x 8 0.81; 2048 x 2048 x 5 0.80",
)
PART_BYTES = BlockSize(
    "part_bytes", 2048, "bytes of a part of rows",
    "4096 x 4096 times 8 columns on one core of a Zen 5, in C, ms by 1024, 2048, 4096, whole: 1.94, 1.67, 1.86, 3.3",
)
PART_ROWS = BlockSize(
    "part_rows", 96, "rows of an item that are summed in parts",
    "as part_bytes, by 24, 96: 1.78, 1.67; their sums are 48 KiB with 8 columns",
)
FETCHED_TURNS = BlockSize(
    "fetched_turns", 1, "turns of some rows each after which a part that is fetched is summed",
    "as part_bytes, of the speed of reading, on a busy core: 0 0.47, 1 0.75, 2 0.64",
)
FETCH_LINE = BlockSize(
    "fetch_line", 64, "bytes that are fetched ahead at once",
    "a cache line of all x86-64 and most AArch64 CPUs",
)
TURNED_ROWS = BlockSize(
    "turned_rows", 16, "rows of an item that copies what lies apart in its operand, side by side in the next row",
    "f32 1024 x 1024 and 2048 x 2048, one core of a Zen 5, us: by 1 row 4070 and 28700, by 8 400 and 3230, so 350 and "
    "1620, by 32 690 and 3260, by 64 800 and 28200: they are a line of the operand, and pages of the result",
)
TURNED_TILE = BlockSize(
    "turned_tile", 128, "rows, and columns, whose blocks follow each other where axes are exchanged; rows of an item",
    "f32, one core of a Zen 5, us of 1024 x 1024 and 2048 x 2048: 32 257 and 1676, 64 250 and 1340, 128 222 and 1180, "
    "256 228 and 1162; items of 16 rows and all columns 217 and 1650 to 3400",
)
TURNED_ELEMENTS = BlockSize(
    "turned_elements", 1 << 15, "elements of an item that exchanges two axes, at most",
    "chosen, not measured: some microseconds of a core",
)
FEW_TURNED = Limit(
    "few_turned", 31, "rows, or columns, of a region too few for what it reads across its rows to be turned first",
    "x.T + y of f32, one core of a Zen 5, of the time without: 32 x 32 1.0, 32 x 512 0.76, 512 x 32 0.83, 64 x 65536 "
    "0.37, 256 x 256 0.50, 1024 x 1024 0.11, 1088 x 1088 0.77",
)
TURNED_OPERANDS = Limit(
    "turned_operands", 4, "operands of a region that are turned first, block by block",
    "chosen, not measured: each takes a line's elements squared of a worker's stack, 1 to 4 KiB",
)
MANY_SEGMENTS = Limit(
    "many_segments", 129, "ends of the segments of a loop that does little else than copy",
    "f32 [256, 400] of 9 to 80 parts side by side, one core of a Zen 5, of XLA's time: cut 0.2 to 0.5, as 9 segments "
    "with tests of the others in the last 8 to 24",
)
SEGMENT_OPERATIONS = Limit(
    "segment_operations", 256, "operations, but for tests, that all segments of a loop that is cut more often have",
    "chosen, not measured: about as much code as a loop with an exponential has",
)
UNKNOWN_COLUMNS = BlockSize(
    "unknown_columns", 512, "columns of an item if only a call knows how many there are",
    "chosen, not measured: between pieces that memory likes and items for several cores",
)

ROWS = rows_in(globals())
