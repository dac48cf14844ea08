"""Features of the bundle format that a bundle has, read from its manifest, its commands and its source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from aotc.source.restore import restore_source
from aotc.vmfb.abi import Case, WhileNode
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.commands import all_nodes, decode_commands

DTYPES = ("bf16", "c64", "f16", "f32", "f8E4M3FN", "i1", "i32", "i4")
TARGETS = (
    "cpu:aarch64", "cpu:aarch64-sve512", "cpu:x86-64-amx", "cpu:x86-64-v2", "cpu:x86-64-v3",
    "cuda:compute_80", "cuda:sm_80", "cuda:sm_90a",
)  # fmt: skip
OPS = (
    "all_gather", "all_reduce", "case", "collective_permute", "custom_call", "dot_general", "fft", "sort",
    "while",
)  # fmt: skip
OPTIONS = ("bind", "memory_limit", "quantize_weights", "specialize", "state")

EXPECTED = {
    *(f"dtype {name}" for name in DTYPES),
    *(f"target {name}" for name in TARGETS),
    *(f"option {name}" for name in OPTIONS),
    *(f"op {name}" for name in OPS),
    "bound weights", "branch of commands", "buffers", "compressed constants", "computed sizes", "constants",
    "constants in a file", "cubin", "custom call in Python", "custom call in the library", "debug information",
    "devices", "donated argument", "imports", "kernel resources", "launch", "loop in a kernel", "loop of commands",
    "mix of targets", "own weights", "own weights in a file", "parameter names", "prepared", "ptx", "pytrees",
    "several functions", "several variants", "signature", "source", "source with weights", "spaces", "specialized",
    "state", "symbols", "transfers", "two symbols",
}  # fmt: skip
"""Features that the golden bundles have together; rows are added, never removed, before version 1.0 of the format."""


def features_of(opened: OpenedBundle) -> set[str]:
    """Return the features of a bundle."""
    manifest = opened.manifest
    found = {feature for feature, holds in _of_manifest(opened, manifest) if holds}
    for variant in manifest["variants"]:
        found |= {f"target {name}" for name in _targets(variant)}
        found |= {feature for feature, holds in _of_variant(variant) if holds}
        found |= set(_of_commands(opened, variant))
    for function in manifest["functions"].values():
        found |= {f"dtype {value['dtype']}" for value in (*function["arguments"], *function["results"])}
    if manifest.get("source"):
        model = restore_source(opened)
        found |= {f"op {name}" for name in OPS if name.encode() in model.code}
        options = model.options
        defaults = (None, "none", "inline", 0, [], {}, ())
        found |= {f"option {name}" for name, value in options.items() if value not in defaults}
    return found


def _of_manifest(opened: OpenedBundle, manifest: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    functions = manifest["functions"].values()
    weights, source = manifest.get("weights") or {}, manifest.get("source") or {}
    yield "several functions", len(functions) > 1
    yield "several variants", len(manifest["variants"]) > 1
    yield "symbols", manifest["symbols"]
    yield "two symbols", len(manifest["symbols"]) > 1
    yield (
        "computed sizes",
        any(isinstance(d, str) and not d.isidentifier() for f in functions for r in f["results"] for d in r["dims"]),
    )
    yield "signature", opened.signature
    yield "debug information", (manifest.get("debug") or {}).get("kernels")
    yield "buffers", (manifest.get("debug") or {}).get("buffers")
    yield "own weights", "segment" in weights
    yield "own weights in a file", "file" in weights
    yield "source", source
    yield "source with weights", source.get("weights") is not None
    yield "bound weights", any(f.get("bound") for f in functions)
    yield "state", any(f.get("state") for f in functions)
    yield "pytrees", any(f.get("in_tree") and f.get("out_tree") for f in functions)
    yield "parameter names", any(f.get("parameters") for f in functions)
    yield "donated argument", any(a["donated"] for f in functions for a in f["arguments"])


def _targets(variant: dict[str, Any]) -> set[str]:
    return {row["target"] for row in (variant, *variant.get("parts", ()))}


def _of_variant(variant: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    parts = (variant, *variant.get("parts", ()))
    constants, kernels = variant.get("constants") or {}, variant["kernels"]
    yield "constants", "segment" in constants
    yield "compressed constants", "compressed" in constants
    yield "constants in a file", "external" in constants
    yield "specialized", variant.get("specialized")
    yield "prepared", variant.get("prepared")
    yield "devices", variant.get("devices")
    yield "transfers", variant.get("transfers")
    yield "mix of targets", variant["kind"] == "mix"
    yield "spaces", variant.get("spaces")
    yield "cubin", any("cubin" in part for part in parts)
    yield "ptx", any("ptx" in part for part in parts)
    yield "imports", any(part.get("imports") for part in parts)
    yield "custom call in Python", any(part.get("custom_calls") for part in parts)
    in_python = sum(len(part.get("custom_calls", ())) for part in parts)
    yield "custom call in the library", sum("custom_call" in k["name"] for k in kernels) > in_python
    yield "launch", any("launch" in k for k in kernels)
    yield "kernel resources", any("resources" in k for k in kernels)
    yield "loop in a kernel", any("_loop" in k["name"] for k in kernels)


def _of_commands(opened: OpenedBundle, variant: dict[str, Any]) -> Iterator[str]:
    for row in variant["command_buffers"]:
        words = np.frombuffer(opened.segment(row["code"]), "<i8").tolist()
        for node in all_nodes(decode_commands(words)):
            if isinstance(node, WhileNode):
                yield "loop of commands"
            if isinstance(node, Case):
                yield "branch of commands"
