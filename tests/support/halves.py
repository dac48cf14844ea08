"""Half of the pairs of two lists of parameters in CI, all in ``make test-all``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def half_of_pairs(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Return all pairs; every second one, as on a chessboard, is marked slow: each value still occurs."""
    rows, columns = list(first), list(second)
    return [
        pytest.param(x, y, id=f"{y}-{x}", marks=[pytest.mark.slow] * ((i + j) % 2))
        for j, y in enumerate(columns)
        for i, x in enumerate(rows)
    ]
