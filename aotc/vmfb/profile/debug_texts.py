"""Debug information of a bundle for profilers and tracers: texts and source locations of kernels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from aotc.vmfb.abi import Node
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.commands import all_commands
from aotc.vmfb.errors import BundleError


class DebugText(NamedTuple):
    """Debug information of a kernel: name, text of the loop IR, source location, operations, target.

    ``loc`` is a line of the model, ``target`` is set only if there are several targets.
    """

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


def command_locs(bundle: OpenedBundle, variant: dict[str, Any], number: int, nodes: Sequence[Node]) -> dict[int, str]:
    """Return the source location of each command of buffer ``number``, by the position of the command's first word.

    Commands with the location of their kernel are left out.

    Raises
    ------
    BundleError
        If the bundle's locations cannot be read.
    """
    text = (bundle.manifest.get("debug") or {}).get("places", "{}")
    try:
        found = json.loads(text).get(variant["target"]) or {"locs": [], "buffers": []}
        row = found["buffers"][number] if number < len(found["buffers"]) else []
        words = sorted(command.at for command in all_commands(nodes)) if row else []
        return {at: str(found["locs"][n]) for at, n in zip(words, row) if n >= 0}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise BundleError(bundle.where, f"the locations of its commands cannot be read: {error}") from None


def bundle_origin(bundle: OpenedBundle) -> dict[str, str]:
    """Return the compiler version and the program digest of a bundle, which must have debug information."""
    manifest = bundle.manifest
    return {"producer": manifest["producer"], "program": manifest["debug"].get("program", "")}
