"""Seconds, bytes and counts as text."""

from __future__ import annotations

from aotc.diagnostics import size_text

__all__ = ["bytes_text", "count_text", "size_text", "time_text"]


def time_text(seconds: float) -> str:
    """Format a duration with three digits and a suitable unit: ``12.3 us``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds} s"


def count_text(count: int, noun: str) -> str:
    """Format a number with a noun: ``1 kernel`` or ``2 kernels``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def bytes_text(size: int | str) -> str:
    """Format a size in bytes; return a size that depends on the call, which is text already, unchanged."""
    return size if isinstance(size, str) else f"{size:,}"
