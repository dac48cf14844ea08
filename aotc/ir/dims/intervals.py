"""Interval arithmetic of integers: inclusive ends, None for an unknown one."""

from __future__ import annotations

from typing import TypeAlias

Interval: TypeAlias = tuple[int | None, int | None]


def multiplied(x: Interval, y: Interval) -> Interval:
    """Return the interval of products of a number in ``x`` and one in ``y``."""
    (a, b), (c, d) = x, y
    if a is not None and c is not None and a >= 0 and c >= 0:
        return a * c, (None if b is None or d is None else b * d)
    if a is None or b is None or c is None or d is None:
        return None, None
    corners = [a * c, a * d, b * c, b * d]
    return min(corners), max(corners)


def called(fn: str, x: Interval, y: Interval) -> Interval:
    """Return the interval of ``fn`` (``//``, ``%``, ``max`` or ``min``) on a number in ``x`` and one in ``y``."""
    (a, b), (c, d) = x, y
    match fn:
        case "//" if c is not None and c > 0 and a is not None and a >= 0:
            return (0 if d is None else a // d), (None if b is None else b // c)
        case "//" if c is not None and c > 0 and c == d:
            return (None if a is None else a // c), (None if b is None else b // c)
        case "%" if c is not None and c > 0:
            top = None if d is None else d - 1
            if a is not None and a >= 0 and b is not None:
                top = b if top is None else min(b, top)
            return 0, top
        case "max":
            low = max((n for n in (a, c) if n is not None), default=None)
            return low, (None if b is None or d is None else max(b, d))
        case "min":
            high = min((n for n in (b, d) if n is not None), default=None)
            return (None if a is None or c is None else min(a, c)), high
    return None, None
