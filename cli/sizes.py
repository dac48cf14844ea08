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
    """Return what a call of any of these functions takes at most on this machine."""
    from aotc.vmfb.machine import thread_count

    threads = thread_count(None)
    known = [row["arena"] + threads * row["scratch"] for row in rows if row["arena"] is not None]
    count = f" with {threads} threads" if any(row["scratch"] for row in rows) else ""
    least = "at least " if len(known) < len(rows) else ""
    if rows and not known:
        return "memory depends on shapes"
    return f"memory peak {least}{size_text(max(known, default=0))}{count}"


def bytes_text(size: int | str) -> str:
    """Return a size that may be the text of what depends on the call."""
    return size if isinstance(size, str) else f"{size:,}"
