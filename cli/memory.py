"""What a bundle says of memory: what calls take, and the space of every buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aotc.vmfb.bundle import Bundle


def buffers_of(opened: Bundle, variant: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every buffer of a variant: those of its functions, then what its kernels make for themselves."""
    debug = opened.manifest.get("debug") or {}
    target, kernels = variant["target"], debug.get("kernels") or {}
    rows = [
        {"of": function, "name": name, "space": space, "bytes": size, "offset": offset, "first": first, "last": last}
        for function, found in (debug.get("memory") or {}).get(target, {}).items()
        for name, space, size, offset, first, last in found
    ]
    for kernel in variant["kernels"]:
        for name, space, kind, size in kernels.get(f"{target}/{kernel['name']}", {}).get("buffers", ()):
            rows.append({"of": kernel["name"], "name": f"{name}: {kind}", "space": space, "bytes": size})
    return rows


def memory_lines(memory: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each function whose threads have memory of their own."""
    return [f"a call of {name} takes {peak_text(row)}" for name, row in memory.items() if row["scratch"]]


def peak_text(row: Mapping[str, Any]) -> str:
    """Return what a call takes: the arena, and as much again for each thread."""
    from aotc_cli.sizes import size_text

    arena = "an arena that depends on shapes" if row["arena"] is None else f"{size_text(row['arena'])} of arena"
    return f"{arena} and {size_text(row['scratch'])} for each thread" if row["scratch"] else arena


def working_memory(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what a call of any of these functions takes at most on this machine."""
    from aotc.vmfb.machine import thread_count
    from aotc_cli.sizes import size_text

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
