"""``aotc inspect``: the contents of a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

SUMMARY = "Show what a bundle holds."
EXAMPLES = """
aotc inspect model.vmfb

aotc inspect model.vmfb --json | python -m json.tool
"""


def command(
    bundle: Path = typer.Argument(..., help="The .vmfb file."),
    as_json: bool = typer.Option(False, "--json", help="Everything, as JSON."),
) -> None:
    """Show signatures, symbolic dims, targets, kernels, every buffer, weights and segments of a bundle.

    Nothing is run: this works for bundles that this machine cannot run.
    """
    from aotc.vmfb.bundle import open_bundle
    from aotc.vmfb.describe import describe
    from aotc.vmfb.errors import bundle_errors

    facts = describe(open_bundle(str(bundle)), bundle.stat().st_size)
    if as_json:
        import json

        print(json.dumps(facts, indent=1))
    else:
        with bundle_errors(bundle, "shown"):
            _show(facts)


def _memory_lines(memory: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each function with thread-local scratch."""
    return [f"a call of {name} takes {_peak_text(row)}" for name, row in memory.items() if row["scratch"]]


def _peak_text(row: Mapping[str, Any]) -> str:
    """Return the memory of a call as text: the arena, and the scratch of each thread."""
    from aotc_cli.shared.units import size_text

    arena = "an arena that depends on shapes" if row["arena"] is None else f"{size_text(row['arena'])} of arena"
    return f"{arena} and {size_text(row['scratch'])} for each thread" if row["scratch"] else arena


def _show(facts: dict[str, Any]) -> None:
    from aotc.vmfb.arguments import Signature
    from aotc_cli.shared.tables import print_line, print_table
    from aotc_cli.shared.units import bytes_text, size_text

    print_line(f"{facts['path']}: {facts['name']}, {size_text(facts['bytes'])}, made by {facts['producer']}", 2)
    for name, entry in facts["functions"].items():
        print_line(f"  {Signature(name, entry)!r}", 4)
    if facts["symbols"]:
        print_line(f"  symbolic dims: {', '.join(facts['symbols'])}", 4)
    print_line(f"  source: {_source_text(facts['source'])}", 4)
    if facts["signed_by"]:
        print_line(f"  signed with {facts['signed_by']}; aotc verify --trusted-key checks it", 4)
    for variant in facts["variants"]:
        print()
        print_line(f"{variant['target']} (needs {' '.join(variant['features']) or 'nothing special'})", 2)
        for line in _variant_lines(variant):
            print_line(f"  {line}", 4)
        if variant["kernels"]:
            print()
            _show_kernels(variant["kernels"])
        if variant["buffers"]:
            print()
            rows = [(row["of"], row["name"], row["space"], bytes_text(row["bytes"])) for row in variant["buffers"]]
            print_table(("of", "buffer", "space", "bytes"), rows, right=("bytes",))
    print()
    rows = [(row["name"], f"{row['size']:,}", row["sha256"][:16]) for row in facts["segments"]]
    print_table(("segment", "bytes", "sha256"), rows, right=("bytes",))


def _source_text(source: dict[str, Any] | None) -> str:
    from aotc_cli.shared.units import size_text

    if source is None:
        return "none"
    weights = f", and {size_text(source['weights'])} of weights" if source["weights"] else ""
    return f"{size_text(source['bytes'])}{weights}"


def _variant_lines(variant: dict[str, Any]) -> list[str]:
    from aotc_cli.shared.units import count_text, size_text

    peak, weights = variant["arena_peak"], variant["weights"]
    arenas = [f"{name} {size_text(size)}" for name, size in variant["arenas"].items() if size is not None]
    each = f" ({', '.join(arenas)})" if arenas else ""
    lines = [f"arena peak: {'depends on shapes' if peak is None else size_text(peak)}{each}"]
    lines += _memory_lines(variant["memory"])
    if variant["memory_limit"]:
        lines.append(f"memory limit: {size_text(variant['memory_limit'])}, in which so many threads work as have room")
    if weights:
        where = f" in {weights['file']}" if "file" in weights else ""
        where += f", of which the bundle has {size_text(weights['stored'])}" if "stored" in weights else ""
        lines.append(f"weights: {size_text(weights['bytes'])}{where}")
    if variant["lapack"]:
        lines.append(f"calls LAPACK: {', '.join(variant['lapack'])}")
    if variant["custom_calls"]:
        lines.append(f"calls Python functions, given at load: {', '.join(variant['custom_calls'])}")
    for name, choices in variant["specialized"].items():
        sizes = "; ".join(", ".join(f"{dim}={size}" for dim, size in choice.items()) for choice in choices)
        lines.append(f"{name} has code of its own for {sizes}")
    for name, row in variant["prepared"].items():
        total = size_text(sum(value["bytes"] for value in row["values"]))
        lines.append(f"{name} bound to {', '.join(row['bound'])} reads {total} that is computed of these once:")
        for value in row["values"]:
            text = f"{value['dtype']}[{', '.join(map(str, value['dims']))}]"
            lines.append(f"  {text} ({size_text(value['bytes'])}) from {', '.join(value['from'])}")
        if row["as they are"]:
            lines.append(f"  and as they are: {', '.join(row['as they are'])}")
    if variant["devices"]:
        named = (f"{name}: {row['target']} ({row['place']})" for name, row in variant["devices"].items())
        lines.append(f"devices: {', '.join(named)}")
        if len({row["target"] for row in variant["devices"].values()}) > 1:
            needs = ((name, row["features"]) for name, row in variant["devices"].items())
            lines += [f"{name} needs {' '.join(features)}" for name, features in needs if features]
        for row in variant["on_host"]:
            lines.append(f"runs on the host: {row['op']} has no form for {variant['target']} ({row['loc']})")
        moved = sum(t.get("spilled", False) for t in variant["transfers"])
        limited = f", and {moved} for the memory limit" if moved else ""
        lines.append(f"{count_text(len(variant['transfers']) - moved, 'transfer')}{limited}")
        for t in variant["transfers"]:
            lines.append(f"  {t['type']}{_moved(t)} from {t['from']} to {t['to']}: {t['reason']}")
    lines += [f"{part['target']}: {count_text(part['kernels'], 'kernel')}" for part in variant["parts"]]
    kernels = count_text(len(variant["kernels"]), "kernel")
    lines.append(f"{kernels}, {count_text(variant['command_buffers'], 'command buffer')}")
    for t in variant["tiles"]:
        ratio = f"each {t['over']} items {t['times']}" if t["over"] else "each part of its items the same part"
        ratio = "each item" if t["times"] == t["over"] else ratio
        lines.append(f"  {t['kernel']} waits for tiles of {t['producer']}: for {ratio}, and a halo of {t['halo']}")
    return lines


def _moved(transfer: dict[str, Any]) -> str:
    from aotc_cli.shared.units import size_text

    size = transfer.get("bytes", "")
    return f" ({size_text(size)})" if isinstance(size, int) else f" ({size} B)" if size else ""


_RESOURCES = ("registers", "shared", "spills")
"""Registers of a thread, shared memory of a block in bytes, bytes of a thread's spilled registers."""


def _show_kernels(kernels: list[dict[str, Any]]) -> None:
    """Print the size and location of each kernel, and its GPU resources where known."""
    from aotc_cli.shared.tables import print_table

    known = _RESOURCES if any("resources" in k for k in kernels) else ()
    own = ("target",) if any("target" in k for k in kernels) else ()
    rows = [
        (
            k["name"],
            "" if k["code_bytes"] is None else f"{k['code_bytes']:,}",
            *(f"{k['resources'].get(name, 0):,}" if "resources" in k else "" for name in known),
            *(k.get(name, "") for name in own),
            k["from"],
        )
        for k in kernels
    ]
    print_table(("kernel", "bytes", *known, *own, "from"), rows, right=("bytes", *known))
