"""How attention is computed: how much at a time, and when at all."""

from __future__ import annotations

from aotc.lowering.analysis.costs.row import BlockSize, Limit, rows_in

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
    "decoded_rows", 4, "rows of queries whose scores are dot products, vectors of terms",
    "a core of Zen 5, bf16, depth 64: 8 rows take 1.34 of the time that vectors of queries take, half of them empty",
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
DOT_SUMS = BlockSize(
    "dot_sums", 16, "vectors of sums of scores of few rows at a time",
    "chosen: of 32 registers some hold queries and keys",
)
DOT_TERMS = BlockSize(
    "dot_terms", 4, "terms whose scores of few rows are summed at a time",
    "a core of Zen 5, keys of 128 in bf16: 2, 4 and 8 at a time take the same time within 4 %",
)
FETCHED_KEYS = BlockSize(
    "fetched_keys", 8192, "bytes of keys ahead of which others are fetched that few rows are multiplied with",
    "a core of Zen 5, 4 rows, keys of 128 in bf16: 2048 0.54 of the speed of reading, 8192 0.63, 16384 0.62",
)
# fmt: on

ROWS = rows_in(globals())
