"""Bytes, seconds and counts for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aotc.diagnostics import size_text


def time_text(seconds: float) -> str:
    """Return a duration with three digits and a fitting unit: ``12.3 us``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds} s"


def count_text(count: int, noun: str) -> str:
    """Return ``1 kernel`` or ``2 kernels``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def working_memory(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what a call of any of these functions takes at most on this machine.

    ``memory_limit`` of a row is that of its variant, 0 without one: fewer threads keep to it.
    """
    from aotc.vmfb.machine import thread_count

    most = thread_count(None)
    taken = []
    for row in rows:
        if row["arena"] is not None:
            threads = _threads(most, row["arena"], row["scratch"], row["memory_limit"])
            taken.append((row["arena"] + threads * row["scratch"], threads, row["scratch"]))
    if rows and not taken:
        return "memory depends on shapes"
    peak, threads, scratch = max(taken, default=(0, 0, 0))
    count = f" with {count_text(threads, 'thread')}" if scratch else ""
    least = "at least " if len(taken) < len(rows) else ""
    return f"memory peak {least}{size_text(peak)}{count}"


def _threads(most: int, arena: int, scratch: int, limit: int) -> int:
    """Return how many threads a call has that takes ``scratch`` bytes for each, under a limit."""
    return max(min(most, (limit - arena) // scratch), 1) if limit and scratch else most


def bytes_text(size: int | str) -> str:
    """Return a size that may be the text of what depends on the call."""
    return size if isinstance(size, str) else f"{size:,}"
