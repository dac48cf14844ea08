"""How attention is computed: how much at a time, and when at all."""

from __future__ import annotations

from aotc.lowering.threshold import BlockSize, Limit, rows_in

# fmt: off
ATTENTION_ROWS = BlockSize(
    "attention_rows", 64, "rows of queries of a grid item of attention, about",
    "chosen, not measured: keys and values are read from the second-level cache once for so many rows",
)
ATTENTION_TERMS = BlockSize(
    "attention_terms", 256, "terms between two changes of the maximum in attention, about",
    "chosen, not measured: a block of scores stays in a second-level cache beside its keys and values",
)
DECODED_ROWS = Limit(
    "decoded_rows", 8, "rows of queries whose scores are dot products",
    "a core of Zen 5, 8 rows of 65536 terms of 64: 0.46 (f32) and 0.55 (bf16) of the time of vectors of queries",
)
UNKNOWN_ROWS = BlockSize(
    "unknown_rows", 4, "rows of the form for few rows where only a call knows how many there are",
    "chosen: so many are multiplied with each key even if there are fewer",
)
IDLE_ITEMS = Limit(
    "idle_items", 3, "grid items of attention that leave workers idle",
    "chosen, not measured: a few heads of one row beside 4 to 16 cores",
)
TERM_PARTS = BlockSize(
    "term_parts", 8, "parts that the terms of attention are split into, at most",
    "chosen, not measured: 8 cores are common",
)
PART_TERMS = BlockSize(
    "part_terms", 1024, "terms of such a part, at least",
    "chosen, not measured: 20 microseconds of a core for a row of depth 64, some times what combining parts takes",
)
FEW_SCORES = Limit(
    "few_scores", 127, "scores of a head too few for attention as one kernel",
    "Zen 5 (EPYC), two threads: 16 rows and terms take 0.91 of the time of three kernels, 8 take 1.01",
)
FETCHED_KEYS = BlockSize(
    "fetched_keys", 16384, "bytes of keys, or values, ahead of which others are fetched for few rows",
    "a core of Zen 5, keys of 16 heads of 128 in bf16 in their order: of the speed of reading 0 0.75, 4096 0.8, "
    "8192 0.88, 16384 0.93 to 1.08",
)
ROW_TERMS = BlockSize(
    "row_terms", 64, "terms of a block of few rows and many heads, at least",
    "chosen: sums are rescaled once in a block, which is a sixty-fourth of what they are added to",
)
ROW_SUMS = BlockSize(
    "row_sums", 65536, "bytes of queries, or of sums, of all heads that an item of few rows has side by side, at most",
    "chosen: they are read for each term, from a second-level cache at the most",
)
DOT_TERMS = BlockSize(
    "dot_terms", 4, "terms whose keys are multiplied with queries at a time, at most",
    "a core of Zen 5, of the speed of reading: 4 queries of bf16 1 0.54, 2 0.74, 4 0.75; one of i8 1 0.62, 4 0.7; one "
    "of bf16 1 1.03, 4 0.87, and f32 of several heads 1 0.72, 4 0.56, so there it is one, as memory has them",
)
TURNED_WORDS = BlockSize(
    "turned_words", 4, "words that a key of which words are turned has a multiple of",
    "so many are turned at a time: the part of a register that its shuffles stay within",
)
TURNED_QUERIES = BlockSize(
    "turned_queries", 4, "queries for each vector of a key, at least, for which its words are turned",
    "a core of Zen 5, bf16: 8 queries of 64 take 0.84 of the time (from memory 0.97 to 1.06), 4 of 64 up to 1.2",
)
PAIR_TERMS = BlockSize(
    "pair_terms", 8, "terms whose values are multiplied by pairs at a time",
    "a core of Zen 5, 4 queries of 8 heads of 128: of the speed of reading 4 0.57, 8 0.75, 32 0.52; by f32 0.68",
)
BYTE_BLOCK = BlockSize(
    "byte_block", 32, "terms that a block has a multiple of where integers are multiplied as integers",
    "so many have their values in a tile at the most; those that fill none are multiplied one by one",
)
DIGIT_TERMS = BlockSize(
    "digit_terms", 1024, "terms of a block times its heads where integers are multiplied as integers, about",
    "chosen: sums of a block are converted once, and scales of it are copied",
)
LEAST_DIGIT_TERMS = BlockSize(
    "least_digit_terms", 128, "terms of such a block, at least",
    "as DIGIT_TERMS",
)
BYTE_TERMS = BlockSize(
    "byte_terms", 8, "terms whose values are multiplied as integers at a time",
    "a core of Zen 5, a prototype, 16 heads of 128 side by side, of the speed of reading: 8 0.89, 16 0.66, 32 0.52",
)
BYTE_VALUES = BlockSize(
    "byte_values", 256, "columns of eight values that are multiplied as integers at a time, in their order",
    "a core of Zen 5, 8 queries that share a key of 64: 32 terms take 0.65 of the time of f32, 8 terms 0.92",
)
VALUE_TERMS = BlockSize(
    "value_terms", 4, "terms whose values are added at a time, of integers or where queries share them",
    "a core of Zen 5, values of 128 in bf16 in its second cache, 4 queries: 1 24 GB/s, 2 38, 4 51, 8 56; 1 query 93, "
    "136, 135, 129, but from memory 1 is fastest, as it reads in order",
)
KEY_QUERIES = Limit(
    "key_queries", 8, "queries of an item that share a key",
    "chosen: so many vectors of sums and two of keys are registers",
)
# fmt: on

ROWS = rows_in(globals())
