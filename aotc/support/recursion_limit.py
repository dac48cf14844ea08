"""Raise the recursion limit for recursions with a known bound above Python's own limit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deeper_recursion(frames: int) -> Iterator[None]:
    """Raise Python's recursion limit by ``frames`` in the ``with`` block."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + frames)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
