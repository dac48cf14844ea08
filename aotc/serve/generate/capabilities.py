"""Checks whether a bundle can generate, and whether one call can decode several sequences.

A bundle generates if it has two functions: ``prefill(tokens) -> (logits, *state)`` and ``decode(token, *state) ->
(logits, *state)``. The first result may be the next token itself, an integer. Sequences can be decoded together if
``decode`` has a symbolic batch dim. It must be the first dim of the token and of the first result and one dim of each
array of the state, and rows must be independent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from aotc.serve.batching import SYMBOL, reason_rows_depend
from aotc.serve.errors import BAD, RequestFault
from aotc.vmfb.dtypes import kind_of
from aotc.vmfb.module import LoadedModule

PREFILL, DECODE = "prefill", "decode"
Rows = Sequence[Mapping[str, Any]]


def check_functions(module: LoadedModule, where: str) -> None:
    """Refuse a model that cannot generate.

    Raises
    ------
    RequestFault
        If the model lacks one of the functions, or their types do not match.
    """
    if not {PREFILL, DECODE} <= module.functions.keys():
        found = ", ".join(module.functions)
        raise RequestFault(BAD, where, "the model does not generate", found, f"functions {PREFILL} and {DECODE}")
    prefill, decode = module.functions[PREFILL].signature, module.functions[DECODE].signature
    for name, signature in ((PREFILL, prefill), (DECODE, decode)):
        first = signature.arguments[0] if signature.arguments else None
        if first is None or kind_of(first["dtype"]) not in "iu":
            taken = None if first is None else first["dtype"]
            raise RequestFault(BAD, f"{where}.{name}", "its first argument is not tokens", taken, "integers")
    state = [_type_of_row(row) for row in decode.arguments[1:]]
    for name, signature in ((PREFILL, prefill), (DECODE, decode)):
        made = [_type_of_row(row) for row in signature.results[1:]]
        same = len(made) == len(state) and all(_result_may_be_argument(x, y) for x, y in zip(made, state))
        if not same or not signature.results or len(prefill.arguments) != 1:
            place, what = f"{where}.{name}", "its results are not the state arguments of decode"
            raise RequestFault(BAD, place, what, f"{len(made)} arrays: {made}"[:400], f"{len(state)}: {state}"[:400])


def _type_of_row(row: Mapping[str, Any]) -> tuple[str, list[int | str]]:
    return row["dtype"], row["dims"]


def _result_may_be_argument(x: tuple[str, list[int | str]], y: tuple[str, list[int | str]]) -> bool:
    """Return True if a result of type ``x`` may be an argument of type ``y``; symbolic sizes match any size."""
    sizes = all(isinstance(a, str) or isinstance(b, str) or a == b for a, b in zip(x[1], y[1]))
    return x[0] == y[0] and len(x[1]) == len(y[1]) and sizes


def batch_axes(module: LoadedModule) -> tuple[tuple[int, ...], str]:
    """Return the batch dim of each array of the state, and the reason if sequences cannot be batched, else ""."""
    prefill, decode = module.functions[PREFILL].signature, module.functions[DECODE].signature
    token, symbol = decode.arguments[0], ""
    if token["dims"] and isinstance(token["dims"][0], str) and SYMBOL.match(token["dims"][0]):
        symbol = token["dims"][0]
    if not symbol or any(d != 1 for d in token["dims"][1:]):
        return (), f"{DECODE} takes no symbolic number of texts, one token of each"
    axes = [_batch_axis_of(row, symbol) for row in decode.arguments]
    if None in axes:
        return (), f"not every array of the state has one dim {symbol}"
    if [_batch_axis_of(row, symbol) for row in decode.results] != [0, *axes[1:]]:
        return (), f"{symbol} is not the same dim of what {DECODE} gives"
    state = [int(a) for a in axes[1:] if a is not None]
    if any(isinstance(d := row["dims"][a], int) and d != 1 for row, a in zip(prefill.results[1:], state)):
        return (), f"{PREFILL} returns the state of several sequences"
    why = reason_rows_depend(module, DECODE, decode.arguments, symbol, (0, *state))
    return (() if why else tuple(state)), why


def _batch_axis_of(row: Mapping[str, Any], symbol: str) -> int | None:
    """Return the number of the dim that equals ``symbol``; None if no dim equals it or several depend on it.

    None if several dims depend on the symbol, or none equals it.
    """
    word = re.compile(rf"\b{re.escape(symbol)}\b")
    found = [n for n, d in enumerate(row["dims"]) if isinstance(d, str) and word.search(d)]
    return found[0] if len(found) == 1 and row["dims"][found[0]] == symbol else None
