"""Cases of :mod:`support.cost_cases` for attention on a CPU."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from support.cost_cases import SOFTMAX, VNNI, pair, sizes

ATTENTION = lambda q, k: SOFTMAX(q @ k.T / 4) @ k


def batched(q: Any, k: Any) -> Any:
    """Return scores with heads as the inner dim of keys: a head's queries are multiplied with keys side by side."""
    s = jnp.einsum("ntd,snd->nts", q, k) / 4
    return jnp.einsum("nts,snd->ntd", SOFTMAX(s), k)


def shared(q: Any, k: Any) -> Any:
    """Return scores of queries with the same keys; the longer of the two axes becomes the rows."""
    return jnp.einsum("nts,sd->ntd", SOFTMAX(jnp.einsum("ntd,sd->nts", q, k) / 4), k)


def in_stack(q: Any, k: Any) -> Any:
    """Return scores with the keys of the layer that the data select."""
    return ATTENTION(q, k[(q[0, 0] > 0).astype(jnp.int32)])


def of_bytes(q: Any, k: Any) -> Any:
    """Return scores of queries that share keys, which are integers with a scale."""
    keys = k.astype(jnp.float32) * 0.01
    return SOFTMAX(q.astype(jnp.float32) @ keys.T) @ keys


def few(terms: int) -> list[tuple[int, ...]]:
    """Return the shapes of four queries and ``terms`` keys."""
    return [(4, 64), (terms, 64)]


LIMITS = {
    "key_queries": pair(shared, [(2, 3, 16), (100, 16)], [(3, 4, 16), (100, 16)]),
    "decoded_rows": pair(ATTENTION, [(3, 16), (100, 16)], [(20, 16), (100, 16)]),
    "idle_items": pair(ATTENTION, [(1, 16), (2048, 16)], [(300, 16), (2048, 16)]),
    "short_line": pair(in_stack, [(20, 8), (3, 100, 8)], [(20, 16), (3, 100, 16)]),
    "few_scores": pair(ATTENTION, [(8, 16), (9, 16)], [(20, 16), (100, 16)]),
}

DECODE = sizes(ATTENTION, lambda n: [(1, 16), (n, 16)], 1001, 2048, 9216)

HEADS = sizes(batched, lambda n: [(n, 1, 16), (100, n, 16)], 2, 5, 1100)

QUADS = {"dtype": "int8", "target": VNNI}
BYTES = sizes(of_bytes, few, 31, 32, 130, **QUADS)
TURNED = sizes(ATTENTION, lambda n: [(n, 64), (100, 64)], 7, 8, dtype="bfloat16")

BLOCKS = {
    "attention_rows": sizes(ATTENTION, lambda n: [(n, 16), (40, 16)], 50, 64, 70),
    "attention_terms": sizes(ATTENTION, lambda n: [(20, 16), (n, 16)], 200, 256, 600),
    "part_terms": DECODE,
    "term_parts": DECODE,
    "fetched_keys": DECODE,
    "row_terms": HEADS,
    "row_sums": HEADS,
    "dot_terms": sizes(ATTENTION, lambda n: [(1, 16), (n, 16)], 1001, 1024, 1030),
    "pair_terms": sizes(ATTENTION, lambda n: [(4, 16), (n, 16)], 100, 128, 131),
    **dict.fromkeys(("byte_block", "byte_terms", "byte_values"), BYTES),
    **dict.fromkeys(("digit_terms", "least_digit_terms"), BYTES + sizes(of_bytes, few, 1000, 1024, 1100, **QUADS)),
    **dict.fromkeys(("turned_queries", "turned_words"), TURNED),
    "unknown_rows": sizes(ATTENTION, lambda n: [(n, 16), (100, 16)], 3, 4, 9),
    "value_terms": sizes(ATTENTION, lambda n: [(4, 16), (n, 16)], 100, 128, 131),
}
