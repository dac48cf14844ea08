"""Python's cyclic garbage collector, paused during compilation."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable the cyclic garbage collector in the ``with`` block.

    A collection scans the whole program, and a compilation leaves no cyclic garbage.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        (gc.enable if enabled else gc.disable)()
