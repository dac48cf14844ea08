"""Manifest entries of functions: arguments, results, pytrees, host programs.

A function with bound arguments has two programs: ``prepare`` runs once and computes the values that depend only on the
bound arguments; ``call`` uses these values in each call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aotc.diagnostics import warn_user
from aotc.ir.dims.algebra import Expr, static
from aotc.ir.tensor.ir import Function, TensorType
from aotc.lowering.lower import Variant
from aotc.lowering.program.emit_program import VmProgramBuilder
from aotc.vmfb.module import LoadedModule
from aotc.vmfb.ranks.layout import mesh_of, whole_shape
from aotc.vmfb.trees import mark_unused_leaves


def signature_entry(
    f: Function, devices: Mapping[str, Sequence[str]] | None = None, taken: Collection[int] = ()
) -> dict[str, Any]:
    """Return the manifest entry of a public function: arguments, results, pytrees.

    ``devices`` maps ``arguments`` and ``results`` to their devices. ``taken`` numbers the arguments whose memory is
    reused for results.
    """
    homes = devices or {}
    names = f.attrs.get("arg_names") or [v.name for v in f.body.params]
    results = f.attrs.get("result_names") or [f"result{n}" for n in range(len(f.body.results))]
    donated = f.attrs.get("donated", ())
    ranks = f.attrs.get("ranks")
    in_tree = f.attrs.get("in_tree")
    if in_tree is not None and "kept" in f.attrs:
        in_tree = mark_unused_leaves(in_tree, f.attrs["kept"])
    return {
        "arguments": [
            {
                **_value_entry(name, v.type, homes.get("arguments"), n),
                **_layout_entry(v.type, ranks, "arguments", n),
                "donated": n in taken,
                "donatable": n in donated,
            }
            for n, (name, v) in enumerate(zip(names, f.body.params, strict=True))
        ],
        "results": [
            {**_value_entry(name, v.type, homes.get("results"), n), **_layout_entry(v.type, ranks, "results", n)}
            for n, (name, v) in enumerate(zip(results, f.body.results, strict=True))
        ],
        "in_tree": in_tree,
        "out_tree": f.attrs.get("out_tree"),
        **{key: f.attrs[key] for key in ("parameters", "doc", "state", "bound", "bucket") if key in f.attrs},
    }


def _value_entry(name: str, type_: TensorType, devices: Sequence[str] | None, number: int) -> dict[str, Any]:
    """Return the manifest entry of one argument or result: name, dtype, dims, device."""
    return {
        "name": name,
        "dtype": type_.dtype,
        "dims": [str(d) if isinstance(d, Expr) else int(d) for d in type_.shape],
        **({"device": devices[number]} if devices else {}),
    }


def _layout_entry(type_: TensorType, ranks: Mapping[str, Any] | None, kind: str, number: int) -> dict[str, Any]:
    """Return the manifest fields of a sharded argument or result: the mesh axes of each dim, and the whole shape."""
    if ranks is None or not any(ranks[kind][number]):
        return {}
    layout = ranks[kind][number]
    whole = whole_shape(mesh_of(ranks["mesh"]), layout, [static(d) for d in type_.shape])
    return {"layout": [list(axes) for axes in layout], "whole": list(whole)}


def program_entry(program: VmProgramBuilder) -> dict[str, Any]:
    """Return the manifest entry of a host program."""
    return {"registers": program.registers, "code": program.code}


def binding_entries(v: Variant) -> dict[str, Any]:
    """Return the manifest entries of functions with bound arguments: their programs ``prepare`` and ``call``."""
    calls = {f.attrs["binds"]: f for f in v.halves if "binds" in f.attrs}
    entries = {}
    for prepare in (f for f in v.halves if "prepares" in f.attrs):
        call = calls[prepare.attrs["prepares"]]
        first, second = _prepared_program_entry(prepare, v), _prepared_program_entry(call, v)
        rows = zip(first["results"], prepare.attrs["sources"], prepare.attrs["values"], strict=True)
        for row, sources, value in rows:
            row["sources"], row["value"] = list(sources), value
        weights, takes = list(prepare.attrs["weights"]), list(call.attrs["takes"])
        entries[call.attrs["binds"]] = {"weights": weights, "takes": takes, "prepare": first, "call": second}
    return entries


def rename_size_symbols(entries: Sequence[Mapping[str, Any]], functions: Mapping[str, Mapping[str, Any]]) -> None:
    """Rename the symbolic sizes of ``call`` programs as in the public signatures, as lowering may rename them."""
    for entry in entries:
        for name, row in entry.get("prepared", {}).items():
            every = [*functions[name]["arguments"], *row["prepare"]["results"]]
            pairs = [*zip(row["call"]["arguments"], (every[n] for n in row["takes"]), strict=True)]
            pairs += zip(row["call"]["results"], functions[name]["results"], strict=True)
            for value, public in pairs:
                value["dims"] = public["dims"]


def _prepared_program_entry(f: Function, v: Variant) -> dict[str, Any]:
    """Return the entry of a ``prepare`` or ``call`` program, whose arguments are the shards of this rank."""
    local = replace(f, attrs={key: value for key, value in f.attrs.items() if key != "ranks"})
    signature = signature_entry(local, taken=v.taken.get(f.name, ()))
    own = {key: signature[key] for key in ("arguments", "results")}
    return {"name": f.name, **own, **program_entry(v.programs[f.name])}


def warn_of_hidden_functions(names: Iterable[str]) -> None:
    """Warn of function names that ``module.name`` cannot reach: a loaded module has such a member.

    Warns
    -----
    AotcWarning
        Once for each name.
    """
    for name in sorted({*names} & {*dir(LoadedModule), "name", "functions", "devices", "home"}):
        warn_user(f"function {name!r} has the name of a member of loaded modules; call it as module[{name!r}]")
