"""``aotc inspect``: the contents of a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from aotc.vmfb.bundle import OpenedBundle

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
    from aotc.vmfb.errors import bundle_errors

    facts = describe(open_bundle(str(bundle)), bundle.stat().st_size)
    if as_json:
        import json

        print(json.dumps(facts, indent=1))
    else:
        with bundle_errors(bundle, "shown"):
            _show(facts)


def describe(opened: OpenedBundle, size: int) -> dict[str, Any]:
    """Return the facts about a bundle as JSON data.

    Raises
    ------
    BundleError
        If its functions, programs or command buffers are invalid.
    """
    from aotc.vmfb.errors import bundle_errors
    from aotc.vmfb.verify.program import check_functions

    with bundle_errors(opened, "shown"):
        check_functions(opened)
        return _facts(opened, size)


def _facts(opened: OpenedBundle, size: int) -> dict[str, Any]:
    manifest = opened.manifest
    segments = [{**row, "sha256": row["sha256"].hex()} for row in manifest["segments"]]
    return {
        "path": opened.where,
        "bytes": size,
        "name": manifest["name"],
        "producer": manifest["producer"],
        "functions": manifest["functions"],
        "symbols": manifest["symbols"],
        "variants": [_variant(opened, variant) for variant in manifest["variants"]],
        "segments": segments,
        "debug_info": bool(manifest.get("debug")),
        "source": _source(opened, manifest.get("source")),
        "signed_by": opened.signature[0].hex() if opened.signature else None,
    }


def _source(opened: OpenedBundle, entry: dict[str, Any] | None) -> dict[str, Any] | None:
    if not entry:
        return None
    weights = entry["weights"]
    stored = 0 if weights is None else opened.segment(weights).nbytes
    return {"bytes": opened.segment(entry["segment"]).nbytes, "whole": entry["bytes"], "weights": stored}


def _variant(opened: OpenedBundle, variant: dict[str, Any]) -> dict[str, Any]:
    parts = variant.get("parts") or [{**variant, "count": len(variant["kernels"])}]
    sizes = [size for part in parts for size in _code_sizes(opened, part, len(variant["kernels"]))]
    places = (opened.manifest.get("debug") or {}).get("kernels") or {}
    kernels = [
        {
            "code_bytes": kernel.get("image", (0, size))[1],
            "from": places.get(f"{variant['target']}/{kernel['name']}", {}).get("loc", ""),
            **kernel,
        }
        for size, kernel in zip(sizes, variant["kernels"])
    ]
    return {
        "target": variant["target"],
        "kind": variant["kind"],
        "features": variant["features"],
        "kernels": kernels,
        "command_buffers": len(variant["command_buffers"]),
        "tiles": _tiles(opened, variant),
        "parts": [{"target": part["target"], "kernels": part["count"]} for part in variant.get("parts", ())],
        "specialized": variant.get("specialized", {}),
        "prepared": _prepared(opened, variant),
        "devices": _devices(opened, variant),
        "on_host": variant.get("on_host", []),
        "transfers": variant.get("transfers", []),
        "arena_peak": variant.get("arena_peak"),
        "arenas": {row["device"] or "host memory": row["arena"] for row in variant.get("spaces", ())},
        "memory_limit": variant.get("memory_limit", 0),
        "memory": _memory(opened, variant),
        "buffers": _buffers(opened, variant),
        "weights": _weights(opened, variant.get("constants")),
        "lapack": [name for part in parts for name in (part.get("imports") or {}).get("lapack", [])],
        "custom_calls": sorted({row["name"] for part in parts for row in part.get("custom_calls", [])}),
    }


def _prepared(opened: OpenedBundle, variant: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the names of bound arguments of each function, and the values precomputed from them."""
    from math import prod

    from aotc.vmfb.dtypes import size_of

    found = {}
    for name, row in variant.get("prepared", {}).items():
        arguments = opened.manifest["functions"][name]["arguments"]
        names = [value["name"] or f"argument {n}" for n, value in enumerate(arguments)]
        values = [
            {
                "dtype": value["dtype"],
                "dims": value["dims"],
                "bytes": prod(value["dims"]) * size_of(value["dtype"]),
                "from": [names[n] for n in value.get("sources", ())],
            }
            for value in row["prepare"]["results"]
        ]
        kept = [names[n] for n in row["takes"] if n in row["weights"]]
        found[name] = {"bound": [names[n] for n in row["weights"]], "as they are": kept, "values": values}
    return found


def _tiles(opened: OpenedBundle, variant: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tile dependencies of commands.

    Per ``over`` items a command waits for ``times`` items of its producer, and ``halo`` more. If ``over`` is 0, it
    waits for the same fraction of the producer's items.
    """
    from aotc.vmfb.abi import Command
    from aotc.vmfb.commands import all_graphs
    from aotc.vmfb.verify.buffers import load_buffers

    names = [kernel["name"] for kernel in variant["kernels"]]
    rows = []
    for buffer, nodes in enumerate(load_buffers(opened, variant).nodes):
        for number, graph in enumerate(all_graphs(nodes)):
            commands = [c for c in graph.commands if isinstance(c, Command)] if graph.tiled else []
            for n, command in enumerate(commands):
                for t in command.tiles:
                    row = {"buffer": buffer, "graph": number, "command": n, "kernel": names[command.kernel]}
                    row |= {"after": t.producer, "producer": names[commands[t.producer].kernel]}
                    rows.append({**row, "times": t.times, "over": t.over, "halo": t.halo})
    return rows


def _devices(opened: OpenedBundle, variant: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the target, required features and default place of each device of a variant."""
    from aotc.vmfb.device import bind_devices, implied_places

    places = bind_devices(opened, variant, None) or implied_places(variant, 0)
    return {name: {**row, "place": places[name]} for name, row in variant.get("targets", {}).items()}


def _buffers(opened: OpenedBundle, variant: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all buffers of a variant: those of its functions, then the own arrays of its kernels."""
    import json

    from aotc.vmfb.errors import BundleError

    text = (opened.manifest.get("debug") or {}).get("buffers", "{}")
    try:
        found = json.loads(text).get(variant["target"], {})
        rows = [
            {"of": name, "name": n, "space": space, "bytes": size, "offset": at, "first": first, "last": last}
            for name, buffers in found.get("functions", {}).items()
            for n, space, size, at, first, last in buffers
        ]
        for kernel, buffers in found.get("kernels", {}).items():
            for name, space, kind, size in buffers:
                rows.append({"of": kernel, "name": f"{name}: {kind}", "space": space, "bytes": size})
    except (ValueError, TypeError, AttributeError) as error:
        raise BundleError(opened.where, f"what it says of its buffers cannot be read: {error}") from None
    return rows


def _memory(opened: OpenedBundle, variant: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the memory of a call of each function."""
    from aotc.vmfb.errors import BundleError
    from aotc.vmfb.verify.schema import NONE, problems

    memory = variant.get("memory", {})
    for problem in problems(memory, {str: {"arena": (int, NONE), "scratch": int}}, "memory"):
        raise BundleError(opened.where, problem)
    return memory


def _memory_lines(memory: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each function with thread-local scratch."""
    return [f"a call of {name} takes {_peak_text(row)}" for name, row in memory.items() if row["scratch"]]


def _peak_text(row: Mapping[str, Any]) -> str:
    """Return the memory of a call as text: the arena, and the scratch of each thread."""
    from aotc_cli.shared.units import size_text

    arena = "an arena that depends on shapes" if row["arena"] is None else f"{size_text(row['arena'])} of arena"
    return f"{arena} and {size_text(row['scratch'])} for each thread" if row["scratch"] else arena


def _code_sizes(opened: OpenedBundle, part: dict[str, Any], kernels: int) -> list[int | None]:
    """Return the code size of each kernel in bytes, or None where the part does not store it.

    Raises
    ------
    BundleError
        If the part lists more kernels than the variant has.
    """
    from aotc.tools.native_code import kernel_ranges
    from aotc.vmfb.errors import BundleError

    library, count = part.get("library"), part["count"]
    if count > kernels:
        raise BundleError(opened.where, f"a part of target {part['target']} has {count} kernels", f"at most {kernels}")
    ranges = kernel_ranges(opened.segment(library), count) if library is not None and count else []
    return [end - first for first, end in ranges] or [None] * count


def _weights(opened: OpenedBundle, entry: dict[str, Any] | None) -> dict[str, Any] | None:
    if not entry:
        return None
    external = entry.get("external")
    if external:
        return {"bytes": external["size"], "file": external["file"], "tensors": len(external["tensors"])}
    return {"bytes": opened.segment(entry["segment"]).nbytes, "segment": entry["segment"]}


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
