"""Sampling of tokens: parameters of a request, and selection of a token from logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

import numpy as np

from aotc.serve.errors import BAD, RequestFault, shown_value

# Upper bound of a requested temperature. JSON integers may exceed the range of a float; all tokens are equally likely
# far below this.
MOST_TEMPERATURE = 1e9


@dataclass(slots=True)
class Sampling:
    """Parameters of sampling.

    Attributes
    ----------
    temperature : float
        0 selects the most likely token.
    top_k : int
        Number of most likely tokens to sample from; 0 for all.
    random : numpy.random.Generator
    """

    temperature: float = 0.0
    top_k: int = 0
    random: np.random.Generator = field(default_factory=np.random.default_rng)


def parse_sampling(document: Mapping[str, Any], where: str) -> Sampling:
    """Parse the sampling parameters of a request: temperature, top_k and seed.

    Raises
    ------
    RequestFault
        Its message has the invalid parameter.
    """
    temperature = document.get("temperature", 0)
    good = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not good or not 0 <= temperature < MOST_TEMPERATURE:
        raise RequestFault(BAD, where, "temperature is not a number in range", shown_value(temperature), "0 or more")
    top_k = integer_of(document, "top_k", 0, (0, 1 << 31), where)
    seed = integer_of(document, "seed", -1, (0, 1 << 63), where) if "seed" in document else None
    return Sampling(float(temperature), top_k, np.random.default_rng(seed))


def integer_of(document: Mapping[str, Any], key: str, default: int, limits: tuple[int, int], where: str) -> int:
    """Return an integer parameter of a request, within ``limits`` (both included).

    Raises
    ------
    RequestFault
        If the parameter is not an integer within the limits.
    """
    found, (least, most) = document.get(key, default), limits
    if type(found) is not int or not least <= found <= most:
        raise RequestFault(BAD, where, f"{key} is not an integer in range", shown_value(found), f"{least} to {most}")
    return found


def next_token(first: np.ndarray, sampling: Sampling) -> int:
    """Select the next token from the first result of a model: the logits of all positions, or tokens.

    Integers are tokens that the model itself has selected. Floats are logits, from which this function samples.

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
    if not sampling.temperature or not isfinite(logits[best]):
        return best
    if 0 < sampling.top_k < logits.size:
        logits = np.where(logits >= np.partition(logits, -sampling.top_k)[-sampling.top_k], logits, -inf)
    with np.errstate(over="ignore"):  # of a low temperature: -inf, with probability 0
        weights = np.exp((logits - logits[best]) / sampling.temperature)
    return int(sampling.random.choice(logits.size, p=weights / weights.sum()))
