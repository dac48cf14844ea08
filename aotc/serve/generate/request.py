"""Generation requests: parsing and sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

import numpy as np

from aotc.serve.errors import BAD, RequestFault, shown
from aotc.serve.limits import MOST_TOKENS
from aotc.serve.protocol import timeout_of

# Tokens to generate if a request does not specify a number.
USUAL_TOKENS = 64


_KEYS = (
    "tokens", "max_tokens", "stop", "temperature", "top_k", "seed", "timeout", "sequence_id", "sequence_start",
    "sequence_end",
)  # fmt: skip


@dataclass(slots=True)
class GenerationRequest:
    """A generation request.

    Attributes
    ----------
    tokens : list of int
        May be empty if a sequence is continued.
    most : int
        Maximum number of tokens to generate.
    stop : frozenset of int
        Tokens that end the generation.
    temperature : float
        0 selects the most likely token.
    top_k : int
        Number of most likely tokens to sample from; 0 for all.
    random : numpy.random.Generator
    timeout : float or None
        Maximum seconds for the whole request.
    sequence : str
        Name of the sequence, for continuation by later requests; "" for none.
    starts, ends : bool
        True for the first, and for the last, request of the sequence.
    """

    tokens: list[int]
    most: int = USUAL_TOKENS
    stop: frozenset[int] = frozenset()
    temperature: float = 0.0
    top_k: int = 0
    random: np.random.Generator = field(default_factory=np.random.default_rng)
    timeout: float | None = None
    sequence: str = ""
    starts: bool = False
    ends: bool = False


# Upper bound of a requested temperature. JSON integers may exceed the range of a float; all tokens are equally likely
# far below this.
MOST_TEMPERATURE = 1e9


def parse_request(document: Mapping[str, Any], where: str) -> GenerationRequest:
    """Parse the parameters of a request.

    Raises
    ------
    RequestFault
        Its message has the invalid parameter.
    """
    unknown = document.keys() - set(_KEYS)
    if unknown:
        raise RequestFault(BAD, where, f"there is no {sorted(unknown)[0][:40]!r} here", expected=", ".join(_KEYS))
    sequence, starts, ends = _sequence(document, where)
    continues = bool(sequence) and not starts
    tokens = _integers(document.get("tokens", [] if continues else None), "tokens", where)
    if not tokens and not continues:
        raise RequestFault(BAD, where, "tokens is empty", expected='"tokens": [1, 2, 3]')
    most = _number(document, "max_tokens", USUAL_TOKENS, 1, MOST_TOKENS, where)
    stop = _integers(document.get("stop", []), "stop", where)
    temperature = document.get("temperature", 0)
    good = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not good or not 0 <= temperature < MOST_TEMPERATURE:
        raise RequestFault(BAD, where, "temperature is no number", shown(temperature), "0 or more")
    top_k = _number(document, "top_k", 0, 0, 1 << 31, where)
    seed = _number(document, "seed", -1, 0, 1 << 63, where) if "seed" in document else None
    random, timeout = np.random.default_rng(seed), timeout_of(document, where)
    return GenerationRequest(
        tokens, most, frozenset(stop), float(temperature), top_k, random, timeout, sequence, starts, ends
    )


# Maximum characters of a sequence id, because ids are stored. A UUID has 36.
SEQUENCE_LETTERS = 128


def _sequence(document: Mapping[str, Any], where: str) -> tuple[str, bool, bool]:
    """Return name, start flag and end flag of a sequence; the names 0 and "" mean none."""
    name = document.get("sequence_id", "")
    if isinstance(name, bool) or not isinstance(name, int | str) or len(str(name)) > SEQUENCE_LETTERS:
        expected = f"an integer, or at most {SEQUENCE_LETTERS} letters"
        raise RequestFault(BAD, where, "sequence_id is no name", shown(name), expected)
    marks = [document.get(key, False) for key in ("sequence_start", "sequence_end")]
    if not all(isinstance(mark, bool) for mark in marks):
        raise RequestFault(BAD, where, "sequence_start and sequence_end are true or false", shown(marks))
    if any(marks) and not name:
        raise RequestFault(BAD, where, "a sequence has no name", expected='"sequence_id": 7')
    return str(name) if name else "", marks[0], marks[1]


def _integers(found: Any, key: str, where: str) -> list[int]:
    if not isinstance(found, list) or not set(map(type, found)) <= {int}:
        raise RequestFault(BAD, where, f"{key} is no list of integers", shown(found), f'"{key}": [1, 2, 3]')
    return found


def _number(document: Mapping[str, Any], key: str, usual: int, least: int, most: int, where: str) -> int:
    found = document.get(key, usual)
    if type(found) is not int or not least <= found <= most:
        raise RequestFault(BAD, where, f"{key} is no number that it can be", shown(found), f"{least} to {most}")
    return found


def choose(first: np.ndarray, parameters: GenerationRequest) -> int:
    """Return the next token for the last position: the model's own choice, or sampled from logits.

    Raises
    ------
    RequestFault
        If there are no logits, or all of them are NaN.
    """
    if first.dtype.kind in "iu":
        return int(first.reshape(-1)[-1])
    logits = np.asarray(first[(-1,) * (first.ndim - 1)], np.float64)
    if not logits.size:
        found = f"{first.dtype} {list(first.shape)}"
        raise RequestFault(BAD, "", "the model computed no logits", found, "a logit for each token")
    if np.isnan(logits).all():
        what, found = "all logits that the model computed are NaN", f"{logits.size} NaN, {first.dtype}"
        raise RequestFault(BAD, "", what, found, "numbers", "check the weights and the state of the sequence")
    logits = np.where(np.isnan(logits), -inf, logits)
    best = int(logits.argmax())
    if not parameters.temperature or not isfinite(logits[best]):
        return best
    if 0 < parameters.top_k < logits.size:
        logits = np.where(logits >= np.partition(logits, -parameters.top_k)[-parameters.top_k], logits, -inf)
    with np.errstate(over="ignore"):  # of a low temperature: -inf, with probability 0
        weights = np.exp((logits - logits[best]) / parameters.temperature)
    return int(parameters.random.choice(logits.size, p=weights / weights.sum()))
