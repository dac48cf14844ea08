"""A higher recursion limit, for recursion with a known bound above Python's own limit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deeper_recursion(frames: int) -> Iterator[None]:
    """Raise Python's recursion limit by ``frames`` while the block runs."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + frames)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
