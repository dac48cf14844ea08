"""Report on collectives: the bytes that ranks of a sharded model exchange, over which mesh axes, and the times.

Bytes and times are those of ring algorithms: a rank of a group of ``n`` sends ``2 (n - 1) / n`` of its array in an
all_reduce, ``(n - 1) / n`` in a reduce_scatter or all_to_all, and its part ``n - 1`` times in an all_gather.
Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from aotc.display.document import Block, Column, Document, Line, table
from aotc.display.places import short_location_text
from aotc.display.shown import DisplayedResult
from aotc.display.units import count_text, size_text, time_text
from aotc.ir.dims.algebra import static
from aotc.ir.loop.ir import COLLECTIVE_CALL, Buffer, ExternalCall, Kernel, walk
from aotc.ir.opset.collective import COLLECTIVES
from aotc.tools.explain.schedule import kernels_of
from aotc.tools.flow import Flow, FlowStep, flow_of
from aotc.tools.simulate.links import DEFAULT_LINK, LINKS, LinkModel, sent_by_ring
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.dtypes import size_of
from aotc.vmfb.errors import ArgumentValueError, BundleError
from aotc.vmfb.profile.model_place import model_place
from aotc.vmfb.ranks.layout import RANK_CALL, Mesh, mesh_of


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """A collective in the program of one rank.

    Attributes
    ----------
    number : int
        Its number in the total order of the program's collectives, as in messages at run time.
    op : str
        Name of the collective.
    types : tuple of str
        Types of the operands: this rank's parts.
    axes : str
        The mesh axes that its groups span, joined by ``+``; with the size of a group if groups are smaller.
    group : int
        Number of ranks that exchange data.
    bytes : int
        Bytes of the operands.
    sent : int
        Bytes that a rank sends in one execution.
    seconds : float
        Time of one execution on the link.
    within : str
        The loops and branches around it, as in a schedule.
    runs : int
        Executions in a call; all branches are assumed taken.
    guessed : bool
        True if a number of iterations is a guess.
    loc, line, scope : str
        Its location in the model: the full text, the user's line, and the layer.
    """

    number: int
    op: str
    types: tuple[str, ...]
    axes: str
    group: int
    bytes: int
    sent: int
    seconds: float
    within: str
    runs: int
    guessed: bool
    loc: str
    line: str
    scope: str


@dataclass(frozen=True, slots=True)
class CollectiveSum:
    """Sum over the collectives of a call on the same axes: executions, and bytes and seconds of a rank."""

    axes: str
    runs: int
    sent: int
    seconds: float


@dataclass(frozen=True, slots=True, repr=False)
class CollectivesReport(DisplayedResult):
    """Collectives of a call, in order.

    Attributes
    ----------
    function, target : str
        The function, and the target of its code.
    mesh : str
        The mesh axes with their sizes; empty for a model of one device.
    link : LinkModel
        The link between ranks whose times are listed.
    rows : tuple of CollectiveRow
        The collectives.
    sums : tuple of CollectiveSum
        Sums by axes; the most seconds first.
    """

    function: str
    target: str
    mesh: str
    link: LinkModel
    rows: tuple[CollectiveRow, ...]
    sums: tuple[CollectiveSum, ...]

    @property
    def sent(self) -> int:
        """Return the number of bytes that a rank sends in a call."""
        return sum(row.sent for row in self.sums)

    @property
    def seconds(self) -> float:
        """Return the seconds of all collectives of a call, one after the other."""
        return sum(row.seconds for row in self.sums)

    def document(self) -> Document:
        """Return a table of the collectives, and their sums by axes."""
        if not self.mesh:
            return Document("", (Line(f"@{self.function} is for one device, and has no collectives"),))
        blocks: list[Block] = []
        if self.rows:
            columns = [
                Column("n", True), Column("op"), Column("of", priority=3), Column("axes"), Column("sends", True),
                Column("runs", True), Column(self.link.name, True), Column("within", priority=2), Column("from"),
                Column("scope", priority=1),
            ]  # fmt: skip
            rows = [
                (str(r.number), r.op, ", ".join(r.types), r.axes, size_text(r.sent), f"{'~' * r.guessed}{r.runs:,}",
                 time_text(r.seconds), r.within, short_location_text(r.loc), r.scope)
                for r in self.rows
            ]  # fmt: skip
            own = [Column("axes"), Column("runs", True), Column("sends", True), Column(self.link.name, True)]
            sums = [(s.axes, f"{s.runs:,}", size_text(s.sent), time_text(s.seconds)) for s in self.sums]
            blocks += [table(columns, rows), table(own, sums)]
        what = f"{count_text(len(self.rows), 'collective')} of @{self.function} for {self.target}, mesh {self.mesh}"
        blocks.append(Line(f"{what}: a rank sends {size_text(self.sent)}, {time_text(self.seconds)} on {self._link()}"))
        blocks.append(Line(f"{self.link.name}: {self.link.source}"))
        return Document("", tuple(blocks))

    def _link(self) -> str:
        rate = f"{self.link.bandwidth / 1e9:g} GB/s"
        return f"{self.link.name} ({time_text(self.link.latency)} a step, {rate}) one after the other"


def explain_collectives(
    opened: OpenedBundle, function: str = "", target: str = "", link: str = DEFAULT_LINK
) -> CollectivesReport:
    """Return the report on the collectives of a bundle's function.

    Raises
    ------
    BundleError
        If it has no such function or target, or stores no kernel text.
    ArgumentValueError
        If there is no such link.
    """
    if link not in LINKS:
        raise ArgumentValueError("", "there is no such link", repr(link), " or ".join(LINKS))
    flow = flow_of(opened, function, None, target)
    entry = opened.manifest.get("mesh")
    if entry is None:
        return CollectivesReport(flow.function, flow.variant["target"], "", LINKS[link], (), ())
    mesh = mesh_of(entry)
    try:
        rows = [
            _collective_row(mesh, call, kernel, LINKS[link], _step_place(flow, step))
            for call, kernel, step in collective_steps(opened, flow)
        ]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BundleError(opened.where, f"the facts of a collective cannot be read: {error}") from error
    return CollectivesReport(
        flow.function, flow.variant["target"], str(mesh), LINKS[link], tuple(rows), tuple(_sums_by_axes(rows))
    )


def collective_steps(opened: OpenedBundle, flow: Flow) -> Iterator[tuple[Mapping[str, Any], Kernel, FlowStep]]:
    """Yield the collectives of a call: the manifest's entry of each, the kernel that it is part of, and its step.

    Raises
    ------
    BundleError
        If the bundle stores no kernel text.
    """
    calls, kernels = rank_calls(flow.variant), kernels_of(opened, flow)
    for step in flow.steps:
        if step.kernel >= 0:
            for symbol in _symbols_called_by(kernels[step.kernel]):
                if symbol in calls:
                    yield calls[symbol], kernels[step.kernel], step


def rank_calls(variant: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the manifest entries of a variant's calls of collectives, by symbol."""
    parts = variant.get("parts") or [variant]
    calls = (row for part in parts for row in part.get("custom_calls", ()) if row["name"].startswith(RANK_CALL))
    return {row["symbol"]: row for row in calls if "serial" in row["attributes"]}


def _symbols_called_by(kernel: Kernel) -> Iterator[str]:
    """Yield the symbols of the functions that a kernel calls; for a collective, the symbol of its call."""
    called = (s.function for s in walk(kernel.body) if isinstance(s, ExternalCall))
    return (name.removeprefix(COLLECTIVE_CALL) for name in called if isinstance(name, str))


class _StepPlace(NamedTuple):
    """The place of a step in its program and in the model."""

    within: str
    runs: int
    guessed: bool
    loc: str


def _step_place(flow: Flow, step: FlowStep) -> _StepPlace:
    return _StepPlace(step.within, flow.runs_of(step.within), flow.is_guessed(step.within), step.loc)


def _collective_row(
    mesh: Mesh, call: Mapping[str, Any], kernel: Kernel, link: LinkModel, place: _StepPlace
) -> CollectiveRow:
    """Compute bytes and seconds of one collective on ``link`` from its manifest entry ``call``."""
    facts, op = call["attributes"], call["name"].removeprefix(RANK_CALL)
    if op not in COLLECTIVES:
        raise ValueError(f"there is no collective {op!r}")
    operands = kernel.inputs[:-1]  # the last one is the token that orders collectives
    size = sum(map(bytes_of, operands))
    groups, pairs = facts.get("groups", ()), facts.get("pairs", ())
    count = max(map(len, groups), default=1 if pairs else mesh.size)
    sent, steps = sent_by_ring(op, size, count)
    if pairs and all(a == b for a, b in pairs):
        sent = steps = 0
    seconds = steps * link.latency + sent / link.bandwidth
    where = model_place(place.loc)
    return CollectiveRow(
        facts["serial"], op, tuple(f"{x.dtype}[{', '.join(map(str, x.shape))}]" for x in operands),
        mesh_axes_of_groups(mesh, groups, pairs), 2 if pairs else count, size, sent, seconds, *place,
        where.line or facts.get("place", ""), where.scope,
    )  # fmt: skip


def bytes_of(buffer: Buffer) -> int:
    """Return the size in bytes of a buffer of static shape."""
    return prod(map(static, buffer.shape)) * size_of(buffer.dtype)


def mesh_axes_of_groups(mesh: Mesh, groups: Sequence[Sequence[int]], pairs: Sequence[Sequence[int]] = ()) -> str:
    """Return the mesh axes that vary inside groups, or between sources and targets: ``data+model``.

    The size of a group follows if groups are smaller than these axes: ``model in groups of 2``.
    """
    every = groups or pairs or [range(mesh.size)]
    at = [mesh.coordinates(rank) for rank in range(mesh.size)]
    names = [name for name, _ in mesh.axes if any(len({at[rank][name] for rank in group}) > 1 for group in every)]
    text = "+".join(names) or "-"
    size = max(map(len, every))
    whole = prod(n for name, n in mesh.axes if name in names)
    return text if pairs or size == whole else f"{text} in groups of {size}"


def _sums_by_axes(rows: Sequence[CollectiveRow]) -> list[CollectiveSum]:
    """Sum the rows of equal axes; the most seconds first."""
    by_axes: dict[str, list[CollectiveRow]] = {}
    for row in rows:
        by_axes.setdefault(row.axes, []).append(row)
    found = [
        CollectiveSum(
            axes, sum(r.runs for r in some), sum(r.runs * r.sent for r in some), sum(r.runs * r.seconds for r in some)
        )
        for axes, some in by_axes.items()
    ]
    return sorted(found, key=lambda s: -s.seconds)
