"""Bytes, seconds and counts for people."""

from __future__ import annotations


def size_text(size: int) -> str:
    """Return ``size`` bytes as ``12.3 MB`` (powers of 1000)."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def time_text(seconds: float) -> str:
    """Return a duration with three digits and a fitting unit: ``12.3 us``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds} s"


def count_text(count: int, noun: str) -> str:
    """Return ``1 kernel`` or ``2 kernels``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
