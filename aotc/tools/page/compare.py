"""Compare two bundles: signatures, targets, options, figures, weights by name and digest, kernels by text and scope."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from aotc.display.document import Block, Column, Document, Line, table
from aotc.display.places import short_location_text
from aotc.display.shown import DisplayedResult
from aotc.display.units import count_text, size_text, time_text
from aotc.frontend.importer import import_raw
from aotc.ir.tensor.ir import walk
from aotc.recompile import model_of
from aotc.source.restore import restore_source
from aotc.tools.flow import chosen_function_name
from aotc.tools.inspect import signature_text
from aotc.tools.page.facts import facts_of
from aotc.vmfb.arguments import Signature, type_text
from aotc.vmfb.assumed_sizes import assumed_sizes, assumed_text, check_dims, dim_names
from aotc.vmfb.bundle import OpenedBundle, open_bundle
from aotc.vmfb.dtypes import from_numpy
from aotc.vmfb.errors import Error
from aotc.vmfb.profile.cost_record import kernel_text_digest
from aotc.vmfb.ranks.layout import layout_text, mesh_of
from aotc.vmfb.weights.own import read_own_weights, weight_places_of

SAME, CHANGED, REMOVED, ADDED = "same", "changed", "removed", "added"
# Weights that differ that the text lists; the others are counted. All differ after a step of training.
SHOWN_WEIGHTS = 10

Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DiffFact:
    """A fact that is text: a signature, the targets, an option; empty in a bundle without it."""

    name: str
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class DiffFigure:
    """A figure of both bundles; its unit is ``bytes``, ``ns`` or ``count``."""

    name: str
    unit: str
    first: float
    second: float


@dataclass(frozen=True, slots=True)
class DiffWeight:
    """A weight by its path, or a constant of the model by its number; ``state`` as for a kernel."""

    name: str
    type: str
    state: str


@dataclass(frozen=True, slots=True)
class DiffKernel:
    """A kernel of the second bundle, or of the first alone; at several places of the model it may have several rows.

    Attributes
    ----------
    kernel, before : str
        Its name in the second and in the first bundle; ``kernel`` is that of the first if the second has none.
    state : str
        ``same``: equal text. ``changed``: paired by scope and kind, or by name. ``removed``: only in the first bundle.
        ``added``: only in the second.
    first, second : float
        Nanoseconds of its runs in a call.
    loc : str
    """

    kernel: str
    before: str
    state: str
    first: float
    second: float
    loc: str


@dataclass(frozen=True, slots=True, repr=False)
class BundleDiff(DisplayedResult):
    """The differences of two bundles; ``facts`` has only what differs, ``weights`` and ``kernels`` have all rows.

    ``assumed`` has the sizes of the first bundle that were not given, as text; figures of both bundles are for them.
    """

    first: str
    second: str
    facts: tuple[DiffFact, ...]
    whole: tuple[DiffFigure, ...]
    weights: tuple[DiffWeight, ...]
    kernels: tuple[DiffKernel, ...]
    assumed: str = ""

    @property
    def equal(self) -> bool:
        """Return True if no fact, weight or kernel differs."""
        return not self.facts and {row.state for row in self.weights} | {row.state for row in self.kernels} <= {SAME}

    def document(self) -> Document:
        """Return the differing facts, the figures of both, and the weights and kernels that differ."""
        a, b = _headings_of_paths(self.first, self.second)
        blocks: list[Block] = []
        if self.facts:
            columns = [Column("differs"), Column(a), Column(b)]
            blocks.append(table(columns, [(f.name, f.first or "none", f.second or "none") for f in self.facts]))
        else:
            blocks.append(Line("signatures, targets and options are the same"))
        texts: Mapping[str, Callable[[float], str]] = {
            "bytes": lambda x: size_text(int(x)), "ns": lambda x: time_text(x / 1e9), "count": "{:,}".format,
        }  # fmt: skip
        rows = [
            (f.name, texts[f.unit](f.first), texts[f.unit](f.second), _figure_ratio(f.first, f.second))
            for f in self.whole
        ]
        if self.assumed:
            name = self.assumed.partition("=")[0]
            blocks.append(Line(f"figures for {self.assumed}; --dim {name}=... is another size"))
        right = [Column(a, right=True), Column(b, right=True), Column("ratio", right=True)]
        blocks.append(table([Column(""), *right], rows))
        blocks += _weight_blocks(self.weights)
        changed = [row for row in self.kernels if row.state != SAME]
        if changed:
            blocks.append(table(
                [Column("kernel"), Column("is"), *right, Column("from", priority=1)],
                [(k.kernel, k.state, *(time_text(ns / 1e9) if ns else "" for ns in (k.first, k.second)),
                  _figure_ratio(k.first, k.second), short_location_text(k.loc)) for k in changed],
            ))  # fmt: skip
        same = len(self.kernels) - len(changed)
        blocks.append(Line(f"{count_text(same, 'kernel')} the same, {len(changed)} not"))
        return Document("", tuple(blocks))


def _headings_of_paths(first: str, second: str) -> tuple[str, str]:
    """Return headings for two paths: the names of the files, or where these are equal with their folders."""
    a, b = Path(first), Path(second)
    if a.name != b.name:
        return a.name, b.name
    return ("first", "second") if a == b else (f"{a.parent.name}/{a.name}", f"{b.parent.name}/{b.name}")


def _weight_blocks(weights: Sequence[DiffWeight]) -> list[Block]:
    changed = [row for row in weights if row.state != SAME]
    if not weights:
        return []
    arrays = count_text(len(weights), "weight")
    if not changed:
        return [Line(f"{arrays}, all the same")]
    verdict = "all differ" if len(changed) == len(weights) else f"{len(changed)} differ"
    shown = [(row.name, row.type, row.state) for row in changed[:SHOWN_WEIGHTS]]
    blocks: list[Block] = [Line(f"{arrays}, {verdict}:")]
    blocks.append(table([Column("weight"), Column("type"), Column("is")], shown))
    more = len(changed) - len(shown)
    return [*blocks, *([Line(f"and {count_text(more, 'weight')} more (--json lists all)")] if more else [])]


def _figure_ratio(a: float, b: float) -> str:
    return f"{b / a:.2f}" if a and b else ""


@dataclass(frozen=True, slots=True)
class _Side:
    """A bundle: what to open, its bytes, its name in messages."""

    bundle: str | bytes
    data: bytes
    where: str
    opened: OpenedBundle


def _compared_bundle(bundle: str | os.PathLike[str] | bytes, where: str) -> _Side:
    source = bundle if isinstance(bundle, bytes) else os.fspath(bundle)
    opened = open_bundle(source)
    opened.where = where or opened.where
    return _Side(source, source if isinstance(source, bytes) else Path(source).read_bytes(), opened.where, opened)


def diff(
    first: str | os.PathLike[str] | bytes,
    second: str | os.PathLike[str] | bytes,
    *,
    function: str = "",
    sizes: Mapping[str, int] | None = None,
    names: tuple[str, str] = ("", ""),
) -> BundleDiff:
    """Compare two bundles.

    Parameters
    ----------
    first, second : path or bytes
        Bundles with debug information.
    function : str
        By default the only function, or ``main``.
    sizes : mapping of str to int
        Sizes of symbolic dims, for times and bytes; others have their typical size, or 16.
    names : tuple of str
        Names of the bundles in the result; by default their paths.

    Returns
    -------
    BundleDiff
        ``print`` displays it as ``aotc diff`` does.

    Raises
    ------
    BundleError
        If a bundle cannot be read, or has no text of its kernels.
    """
    sides = [_compared_bundle(bundle, name) for bundle, name in zip((first, second), names)]
    entries = [chosen_function_name(side.opened, function) for side in sides]
    entry = sides[0].opened.manifest["functions"][entries[0]]
    typical, sizes = entry.get("typical", {}), sizes or {}
    assumed = assumed_sizes(entry["arguments"], typical, sizes)
    check_dims(sizes, [row for side, name in zip(sides, entries) for row in _arguments(side, name)], "diff")
    chosen = {**sizes, **assumed}
    owns = [dim_names(_arguments(side, name)) for side, name in zip(sides, entries)]
    a, b = (
        facts_of(side.data, side.where, name, {dim: chosen[dim] for dim in own if dim in chosen})
        for side, name, own in zip(sides, entries, owns)
    )
    facts = _differing_facts(*(_texts_of(side.opened, name) for side, name in zip(sides, entries)))
    weights = compare_weights(*map(weight_digests, sides))
    figures, kernels = compare_figures(a, b), compare_kernels(a, b)
    return BundleDiff(sides[0].where, sides[1].where, facts, figures, weights, kernels, assumed_text(assumed, typical))


# ---------------------------------------------------------------- facts and figures


def _arguments(side: _Side, function: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = side.opened.manifest["functions"][function]["arguments"]
    return rows


def _texts_of(opened: OpenedBundle, function: str) -> dict[str, str]:
    """Return the facts of a bundle that are text."""
    manifest = opened.manifest
    signature = Signature(function, manifest["functions"][function])
    found = {"producer": manifest["producer"], "function": signature_text(signature)}
    found["other functions"] = ", ".join(name for name in manifest["functions"] if name != function)
    found["mesh"] = str(mesh_of(manifest["mesh"])) if "mesh" in manifest else ""
    found["targets"] = ", ".join(v["target"] for v in manifest["variants"])
    found |= {f"layout of {x.name}": layout_text(x.layout) for x in (*signature.inputs, *signature.outputs) if x.layout}
    if manifest.get("source"):
        options = restore_source(opened).options
        found |= {f"option {name}": _option_text(name, value) for name, value in options.items()}
    return found


def _option_text(name: str, value: object) -> str:
    """Return an option as text; of a tuning record, the number of choices."""
    if name == "tuning" and isinstance(value, Mapping) and "choices" in value:
        return f"{count_text(len(value['choices']), 'choice')} of aotc tune"
    return "" if value in ({}, [], ()) else str(value)


def _differing_facts(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[DiffFact, ...]:
    names = dict.fromkeys([*a, *b])
    return tuple(DiffFact(n, a.get(n, ""), b.get(n, "")) for n in names if a.get(n, "") != b.get(n, ""))


def compare_figures(first: Facts, second: Facts) -> tuple[DiffFigure, ...]:
    """Return a row for each figure."""
    numbers: Mapping[str, tuple[str, Callable[[Facts], float]]] = {
        "file": ("bytes", lambda f: f["bytes"]),
        "kernels": ("count", lambda f: len(f["kernels"])),
        "commands": ("count", lambda f: len(f["steps"])),
        "machine code": ("bytes", lambda f: sum(k["code_bytes"] for k in f["kernels"].values())),
        "bytes read and written": ("bytes", lambda f: sum(s["runs"] * s["bytes"] for s in f["steps"])),
        "time of all kernels": ("ns", lambda f: f["work"]),
        "critical path": ("ns", lambda f: f["path_ns"]),
        "peak of live values": ("bytes", lambda f: f["memory"]["peak"]),
        "arena": ("bytes", lambda f: sum(f["memory"]["arenas"].values())),
        "constants": ("bytes", lambda f: sum(w["bytes"] for w in f["weights"])),
    }
    return tuple(DiffFigure(name, unit, of(first), of(second)) for name, (unit, of) in numbers.items())


# ---------------------------------------------------------------- weights


def weight_digests(side: _Side) -> dict[str, tuple[str, bytes]]:
    """Return the type and the SHA-256 of each weight: the bundle's own by path, constants of its source by number.

    Without a source, constants in separate files have their names; those in the bundle are one entry.
    """
    found, opened = {}, side.opened
    manifest, variant = opened.manifest, opened.manifest["variants"][0]
    if manifest.get("weights"):
        arrays, _ = read_own_weights(opened, weight_places_of(manifest, variant, opened.where).types)
        found = {path: _array_digest(array) for path, array in arrays.items()}
    return found | _constant_digests(side, variant.get("constants") or {})


def _array_digest(array: np.ndarray) -> tuple[str, bytes]:
    data = np.ascontiguousarray(array)
    return type_text(from_numpy(data.dtype), data.shape), sha256(data.reshape(-1).view(np.uint8).data).digest()


def _constant_digests(side: _Side, entry: Mapping[str, Any]) -> dict[str, tuple[str, bytes]]:
    if (external := entry.get("external")) is not None:
        return {
            t["name"]: (type_text(t["dtype"], t["shape"]), t["sha256"] if isinstance(t["sha256"], bytes) else b"")
            for t in external["tensors"]
        }
    manifest = side.opened.manifest
    if manifest.get("source"):
        try:
            return _source_constants(side.bundle)
        except Error:
            pass  # the source needs an external file, or is for another version
    held = entry.get("segment", (entry.get("compressed") or {}).get("segment"))
    if held is None:
        return {}
    row = manifest["segments"][held]
    return {"constants in the bundle": (f"{row['size']:,} bytes", row["sha256"])}


def _source_constants(bundle: str | bytes) -> dict[str, tuple[str, bytes]]:
    """Return the constants of a bundle's model that have several elements, in the order of the model."""
    raw, _, options = model_of(bundle)
    found: dict[str, tuple[str, bytes]] = {}
    for function in import_raw(raw, options=options).functions.values():
        for op in walk(function.body):
            if op.name == "constant" and (value := np.asarray(op.attrs["value"])).size > 1:
                found[f"constant {len(found)}"] = _array_digest(value)
    return found


def compare_weights(
    first: Mapping[str, tuple[str, bytes]], second: Mapping[str, tuple[str, bytes]]
) -> tuple[DiffWeight, ...]:
    """Return whether each weight of either bundle was added, removed or changed, by its type and digest."""
    rows = []
    for name in dict.fromkeys([*first, *second]):
        a, b = first.get(name), second.get(name)
        state = ADDED if a is None else REMOVED if b is None else SAME if a == b else CHANGED
        kinds = dict.fromkeys(side[0] for side in (a, b) if side is not None)
        rows.append(DiffWeight(name, ", then ".join(kinds), state))
    return tuple(rows)


# ---------------------------------------------------------------- kernels


@dataclass(frozen=True, slots=True)
class _KernelUse:
    """A kernel at one place of the model: layers of equal shape share a kernel."""

    kernel: str
    loc: str
    digest: str
    ns: float

    @property
    def place(self) -> tuple[str, ...]:
        """The scope and file, without lines, and the kind, ``matmul`` of ``k3_matmul``; or nothing."""
        kind = re.sub(r"^k\d+_", "", self.kernel)
        return (re.sub(r":\d+", "", self.loc), kind) if self.loc else ()


def _kernel_uses(facts: Facts) -> list[_KernelUse]:
    """Return the uses of each kernel in a call in the order of kernels; of an unused kernel, one without time."""
    found = []
    for name, kernel in facts["kernels"].items():
        times: dict[str, float] = {}
        for step in facts["steps"]:
            if step["kernel"] == name:
                loc = step.get("loc") or kernel["loc"]
                times[loc] = times.get(loc, 0) + step["runs"] * step["ns"]
        digest = kernel_text_digest(kernel["text"])
        found += [_KernelUse(name, loc, digest, ns) for loc, ns in (times or {kernel["loc"]: 0}).items()]
    return found


_Pair = tuple[_KernelUse | None, _KernelUse | None]


def compare_kernels(first: Facts, second: Facts) -> tuple[DiffKernel, ...]:
    """Return rows of kernels at their places: pairs of equal text, then of equal scope and kind, then of equal names.

    Pairs of equal text have the same place if possible. Rows of a kernel at several places are one row if all of them
    are pairs with the same kernel.
    """
    left, right = _kernel_uses(first), _kernel_uses(second)
    pairs: list[_Pair] = []
    keys: tuple[Callable[[_KernelUse], Any], ...] = (
        lambda use: (use.digest, use.place), lambda use: (use.digest, use.kernel), lambda use: use.digest,
        lambda use: use.place, lambda use: use.kernel,
    )  # fmt: skip
    for key in keys:
        for use in list(left):
            other = next((other for other in right if key(use) and key(other) == key(use)), None)
            if other is not None:
                left.remove(use)
                right.remove(other)
                pairs.append((use, other))
    return _rows_of_pairs([*pairs, *((use, None) for use in left), *((None, use) for use in right)])


def _rows_of_pairs(pairs: Sequence[_Pair]) -> tuple[DiffKernel, ...]:
    """Return a row for each pair; one row for all pairs of two kernels that have no other pairs."""
    partners: dict[tuple[bool, str], set[str]] = {}
    for one, two in pairs:
        if one is not None:
            partners.setdefault((False, one.kernel), set()).add(two.kernel if two else "")
        if two is not None:
            partners.setdefault((True, two.kernel), set()).add(one.kernel if one else "")
    merged: dict[tuple[str, ...], list[_Pair]] = {}
    for number, (one, two) in enumerate(pairs):
        a, b = one.kernel if one else "", two.kernel if two else ""
        alone = len(partners.get((False, a), ())) <= 1 and len(partners.get((True, b), ())) <= 1
        merged.setdefault((a, b) if alone else (a, b, str(number)), []).append((one, two))
    return tuple(map(_kernel_row, merged.values()))


def _kernel_row(pairs: Sequence[_Pair]) -> DiffKernel:
    """Return the row of pairs of the same two kernels; its place is that of the first pair."""
    one, two = pairs[0]
    state = ADDED if one is None else REMOVED if two is None else SAME if one.digest == two.digest else CHANGED
    times = [sum(use.ns for use in side if use is not None) for side in zip(*pairs)]
    shown = two or one
    assert shown is not None
    return DiffKernel(shown.kernel, one.kernel if one else "", state, times[0], times[1], shown.loc)
