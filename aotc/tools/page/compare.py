"""Comparison of two bundles by the facts of their pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aotc.vmfb.profile.cost_record import digest_of

Facts = Mapping[str, Any]


def compare(first: Facts, second: Facts) -> dict[str, Any]:
    """Return ``whole``, a row for each figure, and ``kernels``, a row for each kernel of either bundle."""
    return {"first": first["path"], "second": second["path"], "whole": _whole(first, second),
            "kernels": _kernels(first, second)}  # fmt: skip


def _whole(first: Facts, second: Facts) -> list[dict[str, Any]]:
    numbers = {
        "file": ("bytes", lambda f: f["bytes"]),
        "kernels": ("count", lambda f: len(f["kernels"])),
        "commands": ("count", lambda f: len(f["steps"])),
        "kernels' code": ("bytes", lambda f: sum(k["code_bytes"] for k in f["kernels"].values())),
        "bytes read and written": ("bytes", lambda f: sum(s["runs"] * s["bytes"] for s in f["steps"])),
        "one after the other": ("ns", lambda f: f["work"]),
        "side by side": ("ns", lambda f: f["path_ns"]),
        "alive at most": ("bytes", lambda f: f["memory"]["peak"]),
        "arena": ("bytes", lambda f: sum(f["memory"]["arenas"].values())),
        "weights": ("bytes", lambda f: sum(w["bytes"] for w in f["weights"])),
    }
    return [
        {"what": what, "unit": unit, "first": of(first), "second": of(second)} for what, (unit, of) in numbers.items()
    ]


def _kernels(first: Facts, second: Facts) -> list[dict[str, Any]]:
    """Return rows of kernels: pairs with equal text, then pairs with equal names, then kernels of one bundle only."""
    sides = [{name: digest_of(k["text"]) for name, k in f["kernels"].items()} for f in (first, second)]
    left = dict(sides[1])
    pairs: list[tuple[str, str, str]] = []
    rest = []
    for name, digest in sides[0].items():
        equal = [other for other, d in left.items() if d == digest]
        if equal:
            other = name if name in equal else equal[0]
            del left[other]
            pairs.append((name, other, "same"))
        else:
            rest.append(name)
    for name in rest:
        if left.pop(name, None) is not None:
            pairs.append((name, name, "changed"))
        else:
            pairs.append((name, "", "only in the first"))
    pairs += [("", name, "only in the second") for name in left]
    return [_row(first, second, *pair) for pair in pairs]


def _row(first: Facts, second: Facts, a: str, b: str, state: str) -> dict[str, Any]:
    facts = second["kernels"][b] if b else first["kernels"][a]
    times = {"first": _nanoseconds(first, a), "second": _nanoseconds(second, b)}
    return {"kernel": b or a, "before": a, "state": state, **times, "loc": facts["loc"]}


def _nanoseconds(facts: Facts, name: str) -> float:
    return sum(step["runs"] * step["ns"] for step in facts["steps"] if name and step["kernel"] == name)
