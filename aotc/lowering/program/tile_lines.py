"""The line of a tile edge for sizes that only a call knows: it holds for all of them, so its numbers are constants.

Items of both commands move through their common bytes by some bytes each. Where these are in a constant ratio and what
an item touches is at most a constant number of the earlier command's steps wide, the later command's item needs so many
of the earlier one's, whatever the sizes are; how many items there are is known when the call runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from math import gcd

from aotc.ir.dims import Dim, Expr, Monomial, bounds
from aotc.lowering.analysis.item_lines import ItemLine
from aotc.vmfb.abi import TileEdge


def line_for_all_sizes(number: int, pairs: Iterable[tuple[ItemLine, ItemLine]]) -> TileEdge | None:
    """Return the edge that waits for command ``number``, or None if no constants are right for all sizes.

    Of each pair the first line is nowhere above the first byte of an item of that command, the second nowhere below
    the end of an item of the command that waits.
    """
    found: TileEdge | None = None
    for first, end in pairs:
        ratio = _ratio(end.slope, first.slope)
        if ratio is None or (found and ratio != Fraction(found.times, found.over)):
            return None
        times, over = ratio.numerator, ratio.denominator
        steps = _steps((end.start - first.start) * over, first.slope)
        if steps is None:
            return None
        found = TileEdge(number, times, over, max(0, found.plus if found else 0, steps - times + over - 1))
    return found


def by_items(tile: TileEdge, of: int, by: int) -> TileEdge:
    """Return an edge over items, where ``tile`` is one over groups: of ``of`` items, and of ``by`` that wait."""
    times, over = of * tile.times, by * tile.over
    plus = of * (tile.times * (by - 1) + tile.plus * by)
    common = gcd(times, over, plus)
    return TileEdge(tile.producer, times // common, over // common, plus // common)


def _ratio(a: Dim, b: Dim) -> Fraction | None:
    """Return ``a / b`` if it is the same positive number for all sizes of which ``b`` is not 0."""
    one, other = (e.terms[0][1] if isinstance(e, Expr) else e for e in (a, b))
    low = bounds(b)[0]
    if not one or not other or low is None or low < 0 or a * other != b * one or one * other < 0:
        return None
    return Fraction(one, other)


def _steps(width: Dim, slope: Dim) -> int | None:
    """Return the least number of times that ``slope`` is surely no less than ``width``, or None if none is."""
    own = _coefficients(slope)
    shared = {-(-c // own[m]) for m, c in _coefficients(width).items() if own.get(m)}
    for times in sorted({0, *shared, *(n + 1 for n in shared)}):
        low = bounds(slope * times - width)[0]
        if times >= 0 and low is not None and low >= 0:
            return times
    return None


def _coefficients(e: Dim) -> dict[Monomial, int]:
    """Return the number before each product of names, with that of none."""
    return {**dict(e.terms), (): e.const} if isinstance(e, Expr) else {(): e}
