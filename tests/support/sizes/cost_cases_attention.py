"""The cases of :mod:`support.cost_cases` for attention on a CPU."""

from __future__ import annotations

from support.cost_cases import SOFTMAX, pair, sizes

ATTENTION = lambda q, k: SOFTMAX(q @ k.T / 4) @ k

LIMITS = {
    "decoded_rows": pair(ATTENTION, [(3, 16), (100, 16)], [(20, 16), (100, 16)]),
    "idle_items": pair(ATTENTION, [(1, 16), (2048, 16)], [(300, 16), (2048, 16)]),
    "few_scores": pair(ATTENTION, [(8, 16), (9, 16)], [(20, 16), (100, 16)]),
}

DECODE = sizes(ATTENTION, lambda n: [(1, 16), (n, 16)], 1001, 2048, 9216)

BLOCKS = {
    "attention_rows": sizes(ATTENTION, lambda n: [(n, 16), (40, 16)], 50, 64, 70),
    "attention_terms": sizes(ATTENTION, lambda n: [(20, 16), (n, 16)], 200, 256, 600),
    "part_terms": DECODE,
    "term_parts": DECODE,
    "fetched_keys": DECODE,
    "row_terms": HEADS,
    "row_sums": HEADS,
    "value_terms": sizes(ATTENTION, lambda n: [(4, 16), (n, 16)], 100, 128, 131),
}
