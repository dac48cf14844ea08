"""Comparisons of dims that the bounds of their symbols decide."""

from __future__ import annotations

from aotc.ir.dims import Dim, bounds


def decide(relation: str, a: Dim, b: Dim) -> bool | None:
    """Return whether ``a relation b`` holds for all values of the symbols, or for none; None if neither is proven.

    Parameters
    ----------
    relation : str
        ``eq``, ``ne``, ``lt``, ``le``, ``gt`` or ``ge``.
    a, b : Dim
    """
    low, high = bounds(a - b)
    below, not_above = high is not None and high < 0, high is not None and high <= 0
    above, not_below = low is not None and low > 0, low is not None and low >= 0
    same, apart = a == b or (not_above and not_below), below or above
    match relation:
        case "eq":
            proven, refuted = same, apart
        case "ne":
            proven, refuted = apart, same
        case "lt":
            proven, refuted = below, not_below
        case "le":
            proven, refuted = not_above, above
        case "gt":
            proven, refuted = above, not_above
        case _:
            proven, refuted = not_below, below
    return True if proven else False if refuted else None
