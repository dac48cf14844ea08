"""Facts for the page of a bundle, collected from ``aotc explain`` and the measured record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any

from aotc.diagnostics import CompileError
from aotc.frontend.artifact import numbered_model
from aotc.frontend.importer import import_raw
from aotc.ir.tensor.ir import walk
from aotc.lowering.cost_model.machines import Machine, machine_of
from aotc.lowering.cost_model.model import location_name
from aotc.recompile import model_of
from aotc.targets import TARGETS, host_target
from aotc.tools.explain.fusion import explain_fusion
from aotc.tools.explain.memory import explain_memory, live_bytes
from aotc.tools.explain.schedule import explain_schedule
from aotc.tools.flow import chosen_function_name
from aotc.tools.page.layers import Names, layer_paths, numbered_scopes, repeated_layers
from aotc.vmfb.assumed_sizes import assumed_sizes
from aotc.vmfb.bundle import OpenedBundle, open_bundle
from aotc.vmfb.errors import BundleError, CallError
from aotc.vmfb.native_code import disassemble_machine_code, kernel_ranges
from aotc.vmfb.profile.model_place import model_place
from aotc.vmfb.profile.trace import declared_flops
from aotc.vmfb.ranks.layout import mesh_of

# Sizes that the picker offers, relative to the assumed size: a single sample to a large batch.
_FACTORS = (1 / 16, 1 / 4, 4, 16)
_OF_REGIONS = ("kind", "ops", "lines", "text_lines", "neighbours", "bytes_in", "bytes_out", "work", "memory")


def facts_of(data: bytes, where: str, function: str = "", sizes: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return the facts about a function of the bundle ``data``, loaded from ``where``, as JSON data.

    Raises
    ------
    BundleError
        If the bundle has no such function, or no kernel text.
    """
    opened = open_bundle(data)
    opened.where = where
    name = chosen_function_name(opened, function)
    repeats = _repeated_layers_of(data, opened, name)
    own = _facts_of_sizes(opened, name, sizes or {}, repeats)
    variant = next(v for v in opened.manifest["variants"] if v["target"] == own["target"])
    kernels = _kernel_facts(opened, variant)
    source = _add_reasons(data, opened, kernels)
    return {
        "name": opened.manifest["name"], "function": name, "mesh": _mesh_text(opened),
        "producer": opened.manifest["producer"], "path": where, "bytes": len(data), "kernels": kernels,
        "source": source, "weights": _constant_facts(opened, variant),
        "segments": _segment_facts(opened), "roof": _roofline_of_target(own["target"]), **own,
        "choices": _facts_of_other_sizes(opened, name, own["sizes"], repeats) if own["sizes"] and not sizes else [],
    }  # fmt: skip


def _mesh_text(opened: OpenedBundle) -> str:
    """Return the mesh of a sharded model as text; empty for a model of one device."""
    return f"mesh {mesh_of(opened.manifest['mesh'])}" if "mesh" in opened.manifest else ""


def _repeated_layers_of(data: bytes, opened: OpenedBundle, function: str) -> Mapping[Names, int]:
    """Return the layers that share a scope, read from the source of the bundle if it has one."""
    if not opened.manifest.get("source"):
        return {}
    raw, _, options = model_of(data)
    try:
        functions = import_raw(raw, options=options).functions
    except CompileError:
        return {}
    ops = walk(functions[function].body) if function in functions else ()
    return repeated_layers((model_place(location_name(op.loc)).scope, op.name) for op in ops)


def _facts_of_sizes(
    opened: OpenedBundle, function: str, sizes: Mapping[str, int], repeats: Mapping[Names, int]
) -> dict[str, Any]:
    """Return the facts of a call that depend on its sizes."""
    texts = _kernel_texts_by_target(opened)
    entry = opened.manifest["functions"][function]
    typical = entry.get("typical", {})
    every = assumed_sizes(entry["arguments"], typical)
    assumed = [dim for dim in sorted(every) if dim not in sizes]
    schedule = explain_schedule(opened, function, sizes)
    memory = explain_memory(opened, function, sizes)
    machine = _machine_of_target(schedule.target)
    steps: list[dict[str, Any]] = []
    for row in schedule.rows:
        known = texts.get(f"{schedule.target}/{row.kernel}")
        flops = declared_flops(known["text"], row.sizes) if known else 0
        place = model_place(row.loc)
        own = {
            "scope": place.scope, "place": place.short, "flops": flops, "ns": row.ns, "copy": not known,
            "level": machine.levels.index(machine.level_of(row.bytes)),
        }  # fmt: skip
        steps.append({**asdict(row), **own})
    scopes = numbered_scopes([(step["scope"], step["loc"]) for step in steps], repeats)
    layers = layer_paths(scopes)
    for step, scope in zip(steps, scopes, strict=True):
        step["layer"] = layers[scope]
    return {
        "sizes": {dim: sizes.get(dim, size) for dim, size in sorted(every.items())},
        "assumed": assumed, "typical": [dim for dim in assumed if dim in typical],
        "target": schedule.target, "measured_on": schedule.measured_on, "work": schedule.work,
        "path_ns": schedule.path, "steps": steps,
        "memory": {"peak": memory.peak, "at": memory.at, "steps": memory.steps, "arenas": dict(memory.arenas),
                   "rows": [asdict(row) for row in memory.rows],
                   "alive": [live_bytes(memory.rows, step) for step in range(memory.steps)]},
    }  # fmt: skip


def _facts_of_other_sizes(
    opened: OpenedBundle, function: str, assumed: Mapping[str, int], repeats: Mapping[Names, int]
) -> list[dict[str, Any]]:
    """Return the facts of calls of other sizes, for the size picker: all symbolic sizes scaled alike."""
    found = []
    for factor in _FACTORS:
        sizes = {dim: max(1, round(size * factor)) for dim, size in assumed.items()}
        try:
            found.append(_facts_of_sizes(opened, function, sizes, repeats))
        except CallError:  # the model refuses these sizes
            continue
    return found


def _kernel_texts_by_target(opened: OpenedBundle) -> Mapping[str, Any]:
    """Return the text and location of each kernel, by its target and name."""
    held: Mapping[str, Any] | None = (opened.manifest.get("debug") or {}).get("kernels")
    if held is None:
        raise BundleError(opened.where, "the bundle contains no kernel text", hint="compile it with debug information")
    return held


def _kernel_facts(opened: OpenedBundle, variant: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the text, assembly and location of each kernel of a variant."""
    held = _kernel_texts_by_target(opened)
    part = next((p for p in variant.get("parts", ()) if "library" in p), variant)
    rows = variant["kernels"]
    native = rows[: part.get("count")] if part.get("library") is not None else []
    data = opened.verified_segment(part["library"]) if native else memoryview(b"")
    ranges = kernel_ranges(data, len(native)) if native else []
    found = {}
    for number, row in enumerate(rows):
        entry = held[f"{variant['target']}/{row['name']}"]
        at = ranges[number] if number < len(ranges) else None
        code = _kernel_assembly_text(data, at) if at else ""
        facts = {"code_bytes": at[1] - at[0] if at else 0, "text": entry["text"], "asm": code, "loc": entry["loc"]}
        found[row["name"]] = {**facts, "ops": [], "lines": [], "text_lines": [], "neighbours": [], "kind": ""}
    return found


def _kernel_assembly_text(data: Any, at: tuple[int, int]) -> str:
    try:
        text = disassemble_machine_code(data, *at)
    except BundleError as error:  # objdump is not installed
        return str(error)
    return "\n".join(line for line in text.splitlines()[6:] if line)


def _add_reasons(data: bytes, opened: OpenedBundle, kernels: Mapping[str, dict[str, Any]]) -> list[list[str]]:
    """Add ops, source lines and fusion reasons to the kernels, if the bundle contains its source.

    Return the lines of StableHLO, each with the line of the user's program; each kernel has the lines of its ops.
    """
    if not opened.manifest.get("source"):
        return []
    raw, targets, options = model_of(data)
    text, places, numbered = numbered_model(raw)
    source = [[line, place] for line, place in zip(text, places, strict=True)]
    try:
        report = explain_fusion((numbered, targets, options))
    except (BundleError, CompileError):
        return source
    for region in report.regions:
        if region.name in kernels:
            facts = asdict(region)
            kernels[region.name] |= {key: facts[key] for key in _OF_REGIONS}
    return source


def _constant_facts(opened: OpenedBundle, variant: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the constants of a variant, the largest first; constants inside the bundle are one entry."""
    held = variant.get("constants") or {}
    if (external := held.get("external")) is not None:
        rows = [{"name": t["name"], "bytes": t["size"]} for t in external["tensors"]]
        return sorted(rows, key=lambda row: -row["bytes"])
    if (small := held.get("compressed")) is not None:
        return [{"name": "constants in the bundle, compressed", "bytes": small["size"]}]
    if held.get("segment") is None:
        return []
    return [{"name": "constants in the bundle", "bytes": opened.segment(held["segment"]).nbytes}]


def _segment_facts(opened: OpenedBundle) -> list[dict[str, Any]]:
    return [
        {"name": row["name"], "bytes": opened.segment(n).nbytes} for n, row in enumerate(opened.manifest["segments"])
    ]


def _machine_of_target(target: str) -> Machine:
    name = target.split("+")[0]
    own = host_target()
    return machine_of(own if own.name == name else TARGETS[name])


def _roofline_of_target(target: str) -> dict[str, Any]:
    """Return the peak operations per nanosecond in the cost model, and the levels of memory, for a core or a GPU.

    A level has a name, a size in bytes and a rate in bytes per nanosecond; None is unlimited.
    """
    machine = _machine_of_target(target)
    levels = [
        {"name": level.name, "size": _finite(level.size), "rate": _finite(level.rate)} for level in machine.levels
    ]
    return {"flops": machine.tile, "levels": levels}


def _finite(number: float) -> float | None:
    return number if isfinite(number) else None
