"""Generation requests, and their parsing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aotc.serve.errors import BAD, RequestFault, shown_value
from aotc.serve.generate.sampling import Sampling, integer_of, parse_sampling
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
    tokens : ndarray
        int64, one dim; may be empty if a sequence is continued. Not a list: a list of a million integers would hold the
        GIL so long that health checks are late.
    most : int
        Maximum number of tokens to generate.
    stop : ndarray
        Tokens that end the generation, as ``tokens``.
    sampling : Sampling
    timeout : float or None
        Maximum seconds for the whole request.
    sequence : str
        Name of the sequence, for continuation by later requests; "" for none.
    starts, ends : bool
        True for the first, and for the last, request of the sequence.
    """

    tokens: np.ndarray
    most: int = USUAL_TOKENS
    stop: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    sampling: Sampling = field(default_factory=Sampling)
    timeout: float | None = None
    sequence: str = ""
    starts: bool = False
    ends: bool = False


def parse_request(document: Mapping[str, Any], where: str) -> GenerationRequest:
    """Parse the parameters of a generation request.

    Raises
    ------
    RequestFault
        Its message has the invalid parameter.
    """
    unknown = document.keys() - set(_KEYS)
    if unknown:
        raise RequestFault(BAD, where, f"there is no {sorted(unknown)[0][:40]!r} here", expected=", ".join(_KEYS))
    sequence, starts, ends = _sequence_parameters(document, where)
    continues = bool(sequence) and not starts
    tokens = _integer_list(document.get("tokens", [] if continues else None), "tokens", where)
    if not tokens.size and not continues:
        raise RequestFault(BAD, where, "tokens is empty", expected='"tokens": [1, 2, 3]')
    most = integer_of(document, "max_tokens", USUAL_TOKENS, (1, MOST_TOKENS), where)
    stop = _integer_list(document.get("stop", []), "stop", where)
    sampling, timeout = parse_sampling(document, where), timeout_of(document, where)
    return GenerationRequest(tokens, most, stop, sampling, timeout, sequence, starts, ends)


# Maximum characters of a sequence id, because ids are stored. A UUID has 36.
SEQUENCE_LETTERS = 128


def _sequence_parameters(document: Mapping[str, Any], where: str) -> tuple[str, bool, bool]:
    """Return name, start flag and end flag of a request's sequence; the names 0 and "" mean no sequence."""
    name = document.get("sequence_id", "")
    if isinstance(name, bool) or not isinstance(name, int | str) or len(str(name)) > SEQUENCE_LETTERS:
        expected = f"an integer, or at most {SEQUENCE_LETTERS} letters"
        raise RequestFault(BAD, where, "sequence_id is not a name", shown_value(name), expected)
    marks = [document.get(key, False) for key in ("sequence_start", "sequence_end")]
    if not all(isinstance(mark, bool) for mark in marks):
        raise RequestFault(BAD, where, "sequence_start and sequence_end are true or false", shown_value(marks))
    if any(marks) and not name:
        raise RequestFault(BAD, where, "a sequence has no name", expected='"sequence_id": 7')
    return str(name) if name else "", marks[0], marks[1]


def _integer_list(found: Any, key: str, where: str) -> np.ndarray:
    """Convert a parameter of JSON to an int64 array; refuse other elements than integers."""
    if isinstance(found, np.ndarray):
        return found
    if not isinstance(found, list) or not set(map(type, found)) <= {int}:
        raise RequestFault(BAD, where, f"{key} is not a list of integers", shown_value(found), f'"{key}": [1, 2, 3]')
    try:
        return np.array(found, np.int64)
    except OverflowError:
        raise RequestFault(BAD, where, f"one of {key} is out of range", expected="64 bits") from None
