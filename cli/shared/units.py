"""Bytes, seconds and counts as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aotc.diagnostics import size_text


def time_text(seconds: float) -> str:
    """Return a duration with three digits and a suitable unit: ``12.3 us``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds} s"


def count_text(count: int, noun: str) -> str:
    """Return ``1 kernel`` or ``2 kernels``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def working_memory(variants: Sequence[Mapping[str, Any]]) -> str:
    """Return the maximum memory of a call of any function of these variants on this machine, as text."""
    from aotc.vmfb.host.machine import thread_count, threads_within

    rows = [(v, row) for v in variants for row in v.get("memory", {}).values()]
    every, known = thread_count(None), []
    for v, row in rows:
        if row["arena"] is not None:
            host = next((space["arena"] for space in v.get("spaces", ()) if not space["device"]), row["arena"])
            threads = threads_within(every, v.get("memory_limit", 0), host or 0, row["scratch"])
            known.append((row["arena"] + threads * row["scratch"], threads if row["scratch"] else 0))
    least = "at least " if len(known) < len(rows) else ""
    if rows and not known:
        return "memory depends on shapes"
    size, threads = max(known, default=(0, 0))
    return f"memory peak {least}{size_text(size)}" + (f" with {count_text(threads, 'thread')}" if threads else "")


def bytes_text(size: int | str) -> str:
    """Return a size as text; a size that depends on the call is text already."""
    return size if isinstance(size, str) else f"{size:,}"
