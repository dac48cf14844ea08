"""Read the contents of a bundle as typed values: signatures, sizes, weights, memory, kernels. No code is run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from aotc.display.document import Block, Column, Document, Line, facts_table, table
from aotc.display.places import short_location_text
from aotc.display.shown import DisplayedResult
from aotc.display.units import bytes_text, count_text, size_text, time_text
from aotc.targets import TARGETS, target_requirements
from aotc.tools.explain.collectives import explain_collectives
from aotc.tools.explain.schedule import explain_schedule
from aotc.vmfb.arguments import Signature, TensorSpec, tensor_spec_of_row
from aotc.vmfb.assumed_sizes import assumed_sizes, assumed_text
from aotc.vmfb.bundle import OpenedBundle, open_bundle
from aotc.vmfb.describe import describe_bundle
from aotc.vmfb.dtypes import size_of
from aotc.vmfb.errors import Error, bundle_errors
from aotc.vmfb.profile.model_place import model_place
from aotc.vmfb.ranks.layout import mesh_of
from aotc.vmfb.weights.own import weight_places_of

# Kernels that the summary lists, by decreasing time: with the other facts of a variant they fill half a screen.
TOP_KERNELS = 5
# Arguments of a signature that the summary lists one by one; more are counted by the parameter that they are part of.
MOST_ARGUMENTS = 8
# Details of a note, such as its transfers, that the summary lists.
SHOWN_DETAILS = 4
_ROOT = re.compile(r"[^\[.]*")  # the parameter in a name of JAX: ``params`` in ``params['w']``


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel with the total time of its runs in a call, predicted or measured, on one core or a whole GPU."""

    name: str
    loc: str
    runs: int
    seconds: float
    share: float
    bound: str
    measured: bool


@dataclass(frozen=True, slots=True)
class InspectedKernel:
    """A kernel: bytes of machine code, None where unknown, and GPU resources by name."""

    name: str
    code_bytes: int | None
    loc: str
    target: str
    resources: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class InspectedBuffer:
    """A buffer of a function or kernel; a size that depends on the call is text."""

    owner: str
    name: str
    space: str
    bytes: int | str


@dataclass(frozen=True, slots=True)
class InspectedCollectives:
    """The collectives of one op: their number, and the bytes that a rank sends in a call of each function.

    ``sent`` is None if the bundle has no debug information. Loops count as often as they run.
    """

    op: str
    count: int
    sent: int | None


@dataclass(frozen=True, slots=True)
class InspectedVariant:
    """The code of a bundle for one target.

    Attributes
    ----------
    target : str
        Name of the target.
    features : tuple of str
        Features that the processor must have.
    arena_peak : int or None
        Bytes of working memory of a call, without scratch of threads; None if they depend on sizes.
    memory : tuple of str
        A line for each memory space and each function with scratch.
    weights : int
        Bytes of constants.
    weights_file : str
        The file with the constants if the bundle does not contain them.
    weights_stored : int or None
        Bytes of compressed constants in the bundle; None if they are not compressed.
    command_buffers : int
        Number of command buffers.
    kernels : tuple of InspectedKernel
        All kernels.
    buffers : tuple of InspectedBuffer
        Buffers of functions and kernels.
    notes : tuple of str
        Further facts: devices, transfers, specializations, bound weights, libraries.
    overlaps : tuple of str
        Kernels that start on parts of an array before the kernel that writes it ends; not in the summary.
    timed : str
        The function whose kernels ``top`` lists, with the sizes assumed for its dims.
    top : tuple of KernelTime
        Kernels by decreasing time; empty if the bundle has no debug information.
    collectives : tuple of InspectedCollectives
        Collectives of a sharded model by op; ``aotc explain collectives`` lists each one.
    """

    target: str
    features: tuple[str, ...]
    arena_peak: int | None
    memory: tuple[str, ...]
    weights: int
    weights_file: str
    weights_stored: int | None
    command_buffers: int
    kernels: tuple[InspectedKernel, ...]
    buffers: tuple[InspectedBuffer, ...]
    notes: tuple[str, ...]
    overlaps: tuple[str, ...]
    timed: str
    top: tuple[KernelTime, ...]
    collectives: tuple[InspectedCollectives, ...] = ()


@dataclass(frozen=True, slots=True)
class InspectedSegment:
    """A segment of the file, with the SHA-256 of its bytes in hexadecimal digits."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, repr=False)
class Inspection(DisplayedResult):
    """The contents of a bundle; ``print`` displays a summary of one screen.

    Attributes
    ----------
    path, name, producer : str
    size : int
        Bytes of the file.
    weights : dict of str to TensorSpec
        The arguments that are weights of the bundle, by path.
    functions : dict of str to Signature
    dims : tuple of str
        Symbolic dims, whose sizes a call gives.
    source : str
        The size of the model in the bundle, ``none`` without one.
    signed_by : str
        The public key in hexadecimal digits; empty if it is not signed.
    about : dict of str to str
        Licence, provenance and other facts that the model was compiled with.
    variants : tuple of InspectedVariant
        One for each target.
    segments : tuple of InspectedSegment
    mesh : str
        The axes of the mesh of ranks with their sizes, ``data=2 x model=4``; empty for a model of one device.
    """

    path: str
    name: str
    producer: str
    size: int
    weights: Mapping[str, TensorSpec]
    functions: Mapping[str, Signature]
    dims: tuple[str, ...]
    source: str
    signed_by: str
    about: Mapping[str, str]
    variants: tuple[InspectedVariant, ...]
    segments: tuple[InspectedSegment, ...]
    mesh: str = ""

    @property
    def targets(self) -> tuple[str, ...]:
        """Return the targets that the bundle has code for."""
        return tuple(v.target for v in self.variants)

    def document(self) -> Document:
        """Return the bundle's summary as a document."""
        blocks = self._head()
        for variant in self.variants:
            blocks += _variant_summary(variant, SHOWN_DETAILS)
        return Document(self._title(), tuple(blocks))

    def details(
        self, kernels: bool = False, buffers: bool = False, segments: bool = False, everything: bool = False
    ) -> Document:
        """Return the selected tables; ``everything`` selects all tables and the full summary."""
        blocks: list[Block] = self._head() if everything else []
        for variant in self.variants:
            blocks += _variant_summary(variant, len(variant.notes)) if everything else []
            blocks += [Line(line, 2) for line in variant.overlaps] if everything else []
            if (kernels or everything) and variant.kernels:
                blocks += [Line(f"kernels for {variant.target}:"), _kernel_table(variant.kernels)]
            if (buffers or everything) and variant.buffers:
                blocks += [Line(f"buffers for {variant.target}:"), _buffer_table(variant.buffers)]
        if segments or everything:
            rows = [(s.name, f"{s.size:,}", s.sha256[:16]) for s in self.segments]
            blocks.append(table([Column("segment"), Column("bytes", right=True), Column("sha256")], rows))
        return Document(self._title() if everything else "", tuple(blocks))

    def _title(self) -> str:
        file = "" if self.path == "<bytes>" else f"{Path(self.path).name}: "
        return f"{file}{self.name}, {size_text(self.size)}"

    def _head(self) -> list[Block]:
        """Return the first table of the summary: functions, mesh, weights, dims, source, producer, facts."""
        key = f"signed with {self.signed_by}; aotc verify --trusted-key checks it" if self.signed_by else ""
        rows = [
            *(("function", signature_text(f)) for f in self.functions.values()),
            ("mesh", self.mesh),
            ("weights", arrays_text(tuple(self.weights.values())) if self.weights else ""),
            ("symbolic dims", ", ".join(map(self._dim_text, self.dims))),
            ("source", self.source),
            ("made by", self.producer),
            *self.about.items(),
        ]
        return [facts_table(rows), *([Line(key)] if key else [])]

    def _dim_text(self, dim: str) -> str:
        typical = {f.typical[dim] for f in self.functions.values() if dim in f.typical}
        return f"{dim} (typically {typical.pop()})" if typical else dim


def signature_text(signature: Signature) -> str:
    """Format a signature; many arguments are counted by their Python parameter."""
    if len(signature.inputs) <= MOST_ARGUMENTS:
        return repr(signature)
    groups: dict[str, list[TensorSpec]] = {}
    for spec in signature.inputs:
        match = _ROOT.match(spec.name)
        groups.setdefault(match[0] if match else "", []).append(spec)
    parts = []
    for root, specs in groups.items():
        if len(specs) == 1:
            parts.append(str(specs[0]))
            continue
        parts.append(f"{root}: {arrays_text(specs)}")
    results = [tensor_spec_of_row(row) for row in signature.results]
    few = ", ".join(map(str, results)) if len(results) <= MOST_ARGUMENTS else f"{len(results)} arrays"
    return f"{signature.name}({', '.join(parts)}) -> ({few})"


def arrays_text(specs: Sequence[TensorSpec]) -> str:
    """Format the number and the total bytes of arrays."""
    dims = [[d for d in s.shape if isinstance(d, int)] for s in specs]
    known = [prod(some) * size_of(s.dtype) for s, some in zip(specs, dims) if len(some) == len(s.shape)]
    least = "at least " if len(known) < len(specs) else ""
    return f"{count_text(len(specs), 'array')} of {least}{size_text(round(sum(known)))}"


def _bundled_weights(opened: OpenedBundle) -> dict[str, TensorSpec]:
    """Return the arguments that are weights of the bundle, by path."""
    if not opened.manifest.get("weights"):
        return {}
    types = weight_places_of(opened.manifest, opened.manifest["variants"][0], opened.where).types
    return {path: TensorSpec(path, dtype, tuple(shape)) for path, (dtype, shape) in types.items()}


def inspect(bundle: str | os.PathLike[str] | bytes) -> Inspection:
    """Return the contents of a bundle; nothing of it is run, and it may be for another machine.

    Parameters
    ----------
    bundle : path or bytes
        A ``.vmfb`` file, or what :func:`aotc.compile` returned.

    Returns
    -------
    Inspection
        ``print`` displays it as ``aotc inspect`` does, a notebook as HTML.

    Raises
    ------
    BundleError
        If it cannot be read.
    """
    data = bundle if isinstance(bundle, bytes) else os.fspath(bundle)
    opened = open_bundle(data)
    size = len(data) if isinstance(data, bytes) else Path(data).stat().st_size
    found = describe_bundle(opened, size)
    with bundle_errors(opened, "shown"):
        return Inspection(
            found["path"],
            found["name"],
            found["producer"],
            size,
            _bundled_weights(opened),
            {name: Signature(name, entry) for name, entry in found["functions"].items()},
            tuple(found["symbols"]),
            _source_text(found["source"]),
            found["signed_by"] or "",
            found["about"],
            tuple(_variant_summary_facts(opened, variant) for variant in found["variants"]),
            tuple(InspectedSegment(row["name"], row["size"], row["sha256"]) for row in found["segments"]),
            str(mesh_of(found["mesh"])) if "mesh" in found else "",
        )


def _variant_summary_facts(opened: OpenedBundle, variant: Mapping[str, Any]) -> InspectedVariant:
    """Convert the description of a variant to an :class:`InspectedVariant`."""
    weights = variant["weights"] or {"bytes": 0}
    timed, top = _top_kernels(opened, variant)
    return InspectedVariant(
        variant["target"],
        tuple(variant["features"]),
        variant["arena_peak"],
        tuple(_memory_lines(variant)),
        weights["bytes"],
        weights.get("file", ""),
        weights.get("stored"),
        variant["command_buffers"],
        tuple(
            InspectedKernel(k["name"], k["code_bytes"], k["from"], k.get("target", ""), k.get("resources", {}))
            for k in variant["kernels"]
        ),
        tuple(InspectedBuffer(b["of"], b["name"], b["space"], b["bytes"]) for b in variant["buffers"]),
        tuple(_variant_notes(variant)),
        tuple(_overlap_text(variant)),
        timed,
        top,
        _collectives_by_op(opened, variant),
    )


def _collectives_by_op(opened: OpenedBundle, variant: Mapping[str, Any]) -> tuple[InspectedCollectives, ...]:
    """Return the collectives by op; the bytes are None if the bundle has no text of its kernels."""
    ops = [row["op"] for row in variant.get("collectives", ())]
    try:
        reports = [explain_collectives(opened, f, variant["target"]) for f in opened.manifest["functions"] if ops]
    except Error:
        return tuple(InspectedCollectives(op, ops.count(op), None) for op in dict.fromkeys(ops))
    rows = [row for report in reports for row in report.rows]
    sent = {row.op: sum(r.runs * r.sent for r in rows if r.op == row.op) for row in rows}
    return tuple(InspectedCollectives(op, ops.count(op), sent.get(op, 0)) for op in dict.fromkeys(ops))


def _top_kernels(opened: OpenedBundle, variant: Mapping[str, Any]) -> tuple[str, tuple[KernelTime, ...]]:
    """Return the slowest kernels of ``main`` or the first function, after its name with the assumed sizes.

    Without readable kernel text there are none.
    """
    names = list(opened.manifest["functions"])
    if not names or not variant["kernels"]:
        return "", ()
    name = "main" if "main" in names else names[0]
    try:
        with bundle_errors(opened, "shown"):
            report = explain_schedule(opened, name, target=variant["target"])
    except Error:
        return "", ()
    total = sum(row.runs * row.ns for row in report.rows if row.bound != "control") or 1.0
    runs: dict[str, list[Any]] = {}
    for row in report.rows:
        if row.bound != "control":
            runs.setdefault(row.kernel, []).append(row)
    found = []
    for kernel, rows in runs.items():
        ns = sum(row.runs * row.ns for row in rows)
        count = sum(row.runs for row in rows)
        is_measured = all(row.measured is not None and not row.scaled for row in rows)
        found.append(KernelTime(kernel, rows[0].loc, count, ns / 1e9, ns / total, rows[0].bound, is_measured))
    return name + _assumed_text(opened, name), tuple(sorted(found, key=lambda k: -k.seconds))


def _assumed_text(opened: OpenedBundle, name: str) -> str:
    """Format the sizes of a function for which times are predicted: `` (b=16 assumed)``."""
    entry = opened.manifest["functions"][name]
    typical = entry.get("typical", {})
    sizes = assumed_sizes(entry["arguments"], typical)
    return f" ({assumed_text(dict(sorted(sizes.items())), typical)})" if sizes else ""


# ---------------------------------------------------------------- the summary of a variant


def _requirements_text(variant: InspectedVariant) -> str:
    """Format the processor features or the GPU that a variant needs."""
    if (target := TARGETS.get(variant.target)) is not None and target.kind == "cuda":
        return target_requirements(target)
    return " ".join(variant.features) or "no CPU features beyond the architecture's"


def _variant_summary(variant: InspectedVariant, details: int) -> list[Block]:
    """Return the blocks about a variant: facts, notes with at most ``details`` details, slowest kernels."""
    peak = "depends on shapes" if variant.arena_peak is None else size_text(variant.arena_peak)
    weights = size_text(variant.weights) if variant.weights else "none"
    weights += f" in {variant.weights_file}" if variant.weights_file else ""
    stored = variant.weights_stored
    weights += "" if stored is None else f", of which the bundle has {size_text(stored)}"
    buffers = count_text(variant.command_buffers, "command buffer")
    rows = [
        ("target", variant.target),
        ("needs", _requirements_text(variant)),
        ("arena peak", peak),
        *(("memory", line) for line in variant.memory),
        ("constants", weights),
        ("kernels", f"{count_text(len(variant.kernels), 'kernel')}, {buffers}"),
        ("collectives", ", ".join(map(_collectives_text, variant.collectives))),
    ]
    blocks: list[Block] = [facts_table(rows)]
    blocks += [
        Line(note.strip(), 4 if note.startswith(" ") else 2) for note in _shortened_notes(variant.notes, details)
    ]
    if variant.top:
        shown = variant.top[:TOP_KERNELS]
        right, kinds = Column("share", right=True), "measured" if all(k.measured for k in shown) else "predicted"
        columns = [Column("kernel"), Column(kinds, right=True), right, Column("bound", priority=2),
                   Column("from", priority=1), Column("scope", priority=1)]  # fmt: skip
        table_rows = [
            (k.name, time_text(k.seconds), f"{100 * k.share:.0f} %", k.bound, short_location_text(k.loc),
             model_place(k.loc).scope)
            for k in shown
        ]  # fmt: skip
        blocks += [Line(f"slowest kernels of {variant.timed}:"), table(columns, table_rows)]
    elif variant.kernels:
        largest = sorted(variant.kernels, key=lambda k: -(k.code_bytes or 0))
        blocks += [Line("largest kernels (times need debug information):"), _kernel_table(largest[:TOP_KERNELS])]
    return blocks


def _collectives_text(row: InspectedCollectives) -> str:
    sent = "" if row.sent is None else f" (a rank sends {size_text(row.sent)})"
    return f"{row.count} {row.op}{sent}"


def _shortened_notes(notes: Sequence[str], details: int) -> list[str]:
    """Shorten notes to at most ``details`` details each."""
    shown: list[str] = []
    count = 0
    for note in [*notes, ""]:
        if not note.startswith(" "):
            shown += [f"  and {count - details} more (--all)"] if count > details else []
            count = 0
        else:
            count += 1
        if note and count <= details:
            shown.append(note)
    return shown


def _kernel_table(kernels: Sequence[InspectedKernel]) -> Block:
    """Return a table of kernels: bytes of code, GPU resources, target, location."""
    known = RESOURCES if any(k.resources for k in kernels) else ()
    columns = [Column("kernel"), Column("bytes", right=True), *(Column(name, True, 2) for name in known),
               Column("target", priority=3), Column("from", priority=1), Column("scope", priority=1)]  # fmt: skip
    rows = [
        (
            k.name,
            "" if k.code_bytes is None else f"{k.code_bytes:,}",
            *(f"{k.resources.get(name, 0):,}" if k.resources else "" for name in known),
            k.target,
            short_location_text(k.loc),
            model_place(k.loc).scope,
        )
        for k in kernels
    ]
    return table(columns, rows)


def _buffer_table(buffers: Sequence[InspectedBuffer]) -> Block:
    columns = [Column("of"), Column("buffer"), Column("space"), Column("bytes", right=True)]
    return table(columns, [(b.owner, b.name, b.space, bytes_text(b.bytes)) for b in buffers])


RESOURCES = ("registers", "shared", "spills")
"""Registers of a thread, shared memory of a block in bytes, bytes of a thread's spilled registers."""


# ---------------------------------------------------------------- text of the description's rows


# Names that a line lists; the others are counted. A model may bind hundreds of weights.
SHOWN_NAMES = 4


def names_text(names: Sequence[str]) -> str:
    """Format the first names, and the number of the others."""
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def _memory_lines(variant: Mapping[str, Any]) -> list[str]:
    """Return a line for each memory, if there are several, and each function with thread-local scratch."""
    arenas = [f"arena of {name}: {size_text(size)}" for name, size in variant["arenas"].items() if size is not None]
    calls = [f"a call of {name} takes {_peak_text(row)}" for name, row in variant["memory"].items() if row["scratch"]]
    return arenas + calls


def _peak_text(row: Mapping[str, Any]) -> str:
    """Format the memory of a call: the arena, and the scratch of each thread."""
    arena = "an arena that depends on shapes" if row["arena"] is None else f"{size_text(row['arena'])} of arena"
    return f"{arena} and {size_text(row['scratch'])} for each thread" if row["scratch"] else arena


def _source_text(source: Mapping[str, Any] | None) -> str:
    """Format the size of the model in the bundle, or ``none``."""
    if source is None:
        return "none"
    weights = f", and {size_text(source['weights'])} of weights" if source["weights"] else ""
    return f"{size_text(source['bytes'])}{weights}"


def _variant_notes(variant: Mapping[str, Any]) -> list[str]:
    """Return lines about rare facts of a variant; the indented details of a line follow it."""
    lines = []
    if variant["memory_limit"]:
        lines.append(f"memory limit: {size_text(variant['memory_limit'])}, which bounds the number of threads")
    if variant["lapack"]:
        lines.append(f"calls LAPACK: {', '.join(variant['lapack'])}")
    if variant["custom_calls"]:
        lines.append(f"calls Python functions, given at load: {', '.join(variant['custom_calls'])}")
    for name, choices in variant["specialized"].items():
        sizes = "; ".join(", ".join(f"{dim}={size}" for dim, size in choice.items()) for choice in choices)
        lines.append(f"{name} has specialized code for {sizes}")
    for name, row in variant["prepared"].items():
        total = size_text(sum(value["bytes"] for value in row["values"]))
        lines.append(f"{name} bound to {names_text(row['bound'])} reads {total} that bind() computes once:")
        for value in row["values"]:
            text = f"{value['dtype']}[{', '.join(map(str, value['dims']))}]"
            lines.append(f"  {text} ({size_text(value['bytes'])}) from {names_text(value['from'])}")
        if row["as they are"]:
            lines.append(f"  and as they are: {names_text(row['as they are'])}")
    if variant["devices"]:
        named = (f"{name}: {row['target']} ({row['place']})" for name, row in variant["devices"].items())
        lines.append(f"devices: {', '.join(named)}")
        if len({row["target"] for row in variant["devices"].values()}) > 1:
            needs = ((name, row["features"]) for name, row in variant["devices"].items())
            lines += [f"{name} needs {' '.join(features)}" for name, features in needs if features]
        for row in variant["on_host"]:
            lines.append(f"runs on the host: {row['op']} has no kernel for {variant['target']} ({row['loc']})")
        moved = sum(t.get("spilled", False) for t in variant["transfers"])
        limited = f", and {moved} for the memory limit" if moved else ""
        lines.append(f"{count_text(len(variant['transfers']) - moved, 'transfer')}{limited}")
        for t in variant["transfers"]:
            lines.append(f"  {t['type']}{_transfer_text(t)} from {t['from']} to {t['to']}: {t['reason']}")
    lines += [f"{part['target']}: {count_text(part['kernels'], 'kernel')}" for part in variant["parts"]]
    return lines


def _overlap_text(variant: Mapping[str, Any]) -> list[str]:
    """Return a line for each kernel that starts on parts of an array before its producer ends."""
    lines = []
    for t in variant["tiles"]:
        ratio = f"each {t['over']} items {t['times']}" if t["over"] else "each part of its items the same part"
        ratio = "each item" if t["times"] == t["over"] else ratio
        lines.append(f"{t['kernel']} waits for tiles of {t['producer']}: for {ratio}, and a halo of {t['halo']}")
    return lines


def _transfer_text(transfer: Mapping[str, Any]) -> str:
    size = transfer.get("bytes", "")
    return f" ({size_text(size)})" if isinstance(size, int) else f" ({size} B)" if size else ""
