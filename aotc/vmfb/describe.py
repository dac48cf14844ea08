"""The contents of a bundle, as data: what ``aotc inspect`` prints."""

from __future__ import annotations

import json
from math import prod
from typing import Any

from aotc.vmfb.abi import Command
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.commands import all_graphs
from aotc.vmfb.device import bind_devices, default_mixed_devices
from aotc.vmfb.dtypes import size_of
from aotc.vmfb.errors import BundleError, bundle_errors
from aotc.vmfb.native_code import kernel_ranges
from aotc.vmfb.profile.model_place import model_place
from aotc.vmfb.ranks.layout import RANK_CALL
from aotc.vmfb.verify.buffers import load_command_buffers
from aotc.vmfb.verify.program import check_functions
from aotc.vmfb.verify.schema import NONE, problems


def describe_bundle(opened: OpenedBundle, size: int) -> dict[str, Any]:
    """Return the contents of a bundle as JSON data; ``size`` is the size of the file in bytes.

    Raises
    ------
    BundleError
        If its functions, programs or command buffers are invalid.
    """
    with bundle_errors(opened, "shown"):
        check_functions(opened)
        return _bundle_facts(opened, size)


def _bundle_facts(opened: OpenedBundle, size: int) -> dict[str, Any]:
    """Describe the bundle as a whole: versions, functions, signature of the file, source and weights."""
    manifest = opened.manifest
    segments = [{**row, "sha256": row["sha256"].hex()} for row in manifest["segments"]]
    return {
        "path": opened.where,
        "bytes": size,
        "name": manifest["name"],
        "producer": manifest["producer"],
        "about": manifest.get("about", {}),
        "functions": manifest["functions"],
        **({"mesh": manifest["mesh"]} if "mesh" in manifest else {}),
        "symbols": manifest["symbols"],
        "variants": [_variant_facts(opened, variant) for variant in manifest["variants"]],
        "segments": segments,
        "debug_info": bool(manifest.get("debug")),
        "source": _source_facts(opened, manifest.get("source")),
        "signed_by": opened.signature[0].hex() if opened.signature else None,
    }


def _source_facts(opened: OpenedBundle, entry: dict[str, Any] | None) -> dict[str, Any] | None:
    if not entry:
        return None
    weights = entry["weights"]
    stored = 0 if weights is None else opened.segment(weights).nbytes
    return {"bytes": opened.segment(entry["segment"]).nbytes, "whole": entry["bytes"], "weights": stored}


def _variant_facts(opened: OpenedBundle, variant: dict[str, Any]) -> dict[str, Any]:
    """Describe one variant: target, kernels with their code sizes, devices, memory, custom calls."""
    parts = variant.get("parts") or [{**variant, "count": len(variant["kernels"])}]
    sizes = [size for part in parts for size in _code_sizes(opened, part, len(variant["kernels"]))]
    calls = [row["name"] for part in parts for row in part.get("custom_calls", [])]
    places = (opened.manifest.get("debug") or {}).get("kernels") or {}
    kernels = []
    for size, kernel in zip(sizes, variant["kernels"]):
        loc = places.get(f"{variant['target']}/{kernel['name']}", {}).get("loc", "")
        place, code = model_place(loc), kernel.get("image", (0, size))[1]
        kernels.append({"code_bytes": code, "from": loc, "line": place.line, "scope": place.scope, **kernel})
    return {
        "target": variant["target"],
        "kind": variant["kind"],
        "features": variant["features"],
        "kernels": kernels,
        "command_buffers": len(variant["command_buffers"]),
        "tiles": _tile_dependencies(opened, variant),
        "parts": [{"target": part["target"], "kernels": part["count"]} for part in variant.get("parts", ())],
        "specialized": variant.get("specialized", {}),
        "prepared": _prepared_values(opened, variant),
        "devices": _device_facts(opened, variant),
        "on_host": variant.get("on_host", []),
        "transfers": variant.get("transfers", []),
        "arena_peak": variant.get("arena_peak"),
        "arenas": {row["device"] or "host memory": row["arena"] for row in variant.get("spaces", ())},
        "memory_limit": variant.get("memory_limit", 0),
        "memory": _memory_facts(opened, variant),
        "buffers": _buffer_facts(opened, variant),
        "weights": _weight_facts(opened, variant.get("constants")),
        "lapack": [name for part in parts for name in (part.get("imports") or {}).get("lapack", [])],
        "custom_calls": sorted({name for name in calls if not name.startswith(RANK_CALL)}),
        **({"collectives": _collectives_by_serial(parts)} if "mesh" in opened.manifest else {}),
    }


def _collectives_by_serial(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Describe the collectives of a variant, each with its op and source location, in order of serial number."""
    rows = [row for part in parts for row in part.get("custom_calls", []) if row["name"].startswith(RANK_CALL)]
    found = [{**row["attributes"], "op": row["name"].removeprefix(RANK_CALL)} for row in rows]
    return sorted((row for row in found if "serial" in row), key=lambda row: row["serial"])


def _prepared_values(opened: OpenedBundle, variant: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Describe the bound arguments of each function, and the values that are computed from them once."""
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


def _tile_dependencies(opened: OpenedBundle, variant: dict[str, Any]) -> list[dict[str, Any]]:
    """Describe the tile dependences of all commands, one row each.

    Per ``over`` items a command waits for ``times`` items of its producer, and ``halo`` more. If ``over`` is 0, it
    waits for the same fraction of the producer's items.
    """
    names = [kernel["name"] for kernel in variant["kernels"]]
    rows = []
    for buffer, nodes in enumerate(load_command_buffers(opened, variant).nodes):
        for number, graph in enumerate(all_graphs(nodes)):
            commands = [c for c in graph.commands if isinstance(c, Command)] if graph.tiled else []
            for n, command in enumerate(commands):
                for t in command.tiles:
                    row = {"buffer": buffer, "graph": number, "command": n, "kernel": names[command.kernel]}
                    row |= {"after": t.producer, "producer": names[commands[t.producer].kernel]}
                    rows.append({**row, "times": t.times, "over": t.over, "halo": t.halo})
    return rows


def _device_facts(opened: OpenedBundle, variant: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return target, required CPU features and default device (``place``) for each device that the model names."""
    places = bind_devices(opened, variant, None) or default_mixed_devices(variant, 0)
    return {name: {**row, "place": places[name]} for name, row in variant.get("targets", {}).items()}


def _buffer_facts(opened: OpenedBundle, variant: dict[str, Any]) -> list[dict[str, Any]]:
    """Describe the buffers of a variant: those in each function's arena, then the local arrays of each kernel."""
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


def _memory_facts(opened: OpenedBundle, variant: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the bytes of arena and scratch memory that a call of each function needs."""
    memory = variant.get("memory", {})
    for problem in problems(memory, {str: {"arena": (int, NONE), "scratch": int}}, "memory"):
        raise BundleError(opened.where, problem)
    return memory


def _code_sizes(opened: OpenedBundle, part: dict[str, Any], kernels: int) -> list[int | None]:
    """Return the code size of each kernel in bytes; None for kernels whose code has no address range in the bundle.

    Raises
    ------
    BundleError
        If the part lists more kernels than the variant has.
    """
    library, count = part.get("library"), part["count"]
    if count > kernels:
        raise BundleError(opened.where, f"a part of target {part['target']} has {count} kernels", f"at most {kernels}")
    ranges = kernel_ranges(opened.segment(library), count) if library is not None and count else []
    return [end - first for first, end in ranges] or [None] * count


def _weight_facts(opened: OpenedBundle, entry: dict[str, Any] | None) -> dict[str, Any] | None:
    if not entry:
        return None
    external = entry.get("external")
    if external:
        return {"bytes": external["size"], "file": external["file"], "tensors": len(external["tensors"])}
    if small := entry.get("compressed"):
        stored = opened.segment(small["segment"]).nbytes
        return {"bytes": small["size"], "segment": small["segment"], "stored": stored}
    return {"bytes": opened.segment(entry["segment"]).nbytes, "segment": entry["segment"]}
