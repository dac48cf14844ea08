"""Debug information about the kernels of a bundle, for profilers and tracers."""

from __future__ import annotations

from typing import Any, NamedTuple

from aotc.vmfb.bundle import OpenedBundle


class DebugText(NamedTuple):
    """Debug information of a kernel: ``loc`` is a line of the model, ``target`` its target if there are several."""

    name: str
    text: str
    loc: str
    ops: int
    target: str


def kernel_texts(bundle: OpenedBundle, variant: dict[str, Any]) -> list[DebugText] | None:
    """Return the debug information of each kernel, or None if the bundle has none."""
    held = (bundle.manifest.get("debug") or {}).get("kernels")
    if held is None:
        return None
    rows = [(k, held[f"{variant['target']}/{k['name']}"]) for k in variant["kernels"]]
    return [DebugText(k["name"], row["text"], row["loc"], row.get("ops", 0), k.get("target", "")) for k, row in rows]


def origin(bundle: OpenedBundle) -> dict[str, str]:
    """Return compiler and program digest of a bundle, which needs debug information."""
    manifest = bundle.manifest
    return {"producer": manifest["producer"], "program": manifest["debug"].get("program", "")}
