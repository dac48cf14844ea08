"""Format the memory of a call; also the units of :mod:`aotc.display.units`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aotc.display.units import count_text, size_text, time_text

__all__ = ["count_text", "size_text", "time_text", "working_memory"]


def working_memory(variants: Sequence[Mapping[str, Any]]) -> str:
    """Format the maximum memory of a call of any function of these variants on this machine, as text."""
    from aotc.vmfb.host.machine import thread_count, threads_within_memory_limit

    rows = [(v, row) for v in variants for row in v.get("memory", {}).values()]
    every, known = thread_count(None), []
    for v, row in rows:
        if row["arena"] is not None:
            host = next((space["arena"] for space in v.get("spaces", ()) if not space["device"]), row["arena"])
            threads = threads_within_memory_limit(every, v.get("memory_limit", 0), host or 0, row["scratch"])
            known.append((row["arena"] + threads * row["scratch"], threads if row["scratch"] else 0))
    least = "at least " if len(known) < len(rows) else ""
    if rows and not known:
        return "memory depends on shapes"
    size, threads = max(known, default=(0, 0))
    return f"memory peak {least}{size_text(size)}" + (f" with {count_text(threads, 'thread')}" if threads else "")
