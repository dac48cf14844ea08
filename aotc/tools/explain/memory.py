"""Memory report: the lifetime of each value in the arenas of a call, and the peak; rows and a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from aotc.display.document import Block, Column, Document, Line, table
from aotc.display.places import short_location_text, targets_text
from aotc.display.shown import DisplayedResult
from aotc.display.units import count_text, size_text
from aotc.tools.drawing import Drawing
from aotc.tools.explain.communicators import CommunicatorMemory, communicator_blocks, communicators_of
from aotc.tools.flow import Flow, flow_of
from aotc.tools.live_values import MemoryRow, live_rows
from aotc.vmfb.bundle import OpenedBundle

HEIGHT = 600  # pixels: height of the arena in a drawing


@dataclass(frozen=True, slots=True, repr=False)
class MemoryReport(DisplayedResult):
    """Memory of a call.

    Attributes
    ----------
    rows : tuple of MemoryRow
        Values in the order of their creation.
    arena : int
        Bytes of all arenas of the call.
    arenas : mapping of str to int
        Bytes of the arena of each memory space.
    peak : int
        Maximum number of bytes of live values; the arena exceeds it by gaps between values.
    at : int
        Step of the peak.
    scratch : int
        Additional bytes of scratch for each worker.
    devices : mapping of str to str
        Targets by the names of devices, if the model names any.
    spills : tuple of str
        Values moved between a GPU and host memory because of a memory limit: source, destination, origin in the model.
    communicators : tuple of CommunicatorMemory
        The memory of each rank for collectives, in addition; empty for a model of one device.
    """

    function: str
    target: str
    steps: int
    rows: tuple[MemoryRow, ...]
    arena: int
    arenas: Mapping[str, int]
    peak: int
    at: int
    scratch: int
    picture: str
    devices: Mapping[str, str]
    spills: tuple[str, ...]
    communicators: tuple[CommunicatorMemory, ...] = ()

    @property
    def at_peak(self) -> tuple[MemoryRow, ...]:
        """Return the values that are live at the peak, the largest first."""
        return tuple(sorted([r for r in self.rows if r.first <= self.at <= r.last], key=lambda r: -r.bytes))

    def document(self) -> Document:
        """Return the memory report: live values over time, and their peak."""
        several = len(self.arenas) > 1
        columns = [
            Column("steps"), Column("space"), Column("offset", True, 3), Column("bytes", True), Column("value"),
            Column("made by"), Column("read by", priority=4), Column("from", priority=1),
        ]  # fmt: skip
        rows = [
            (f"{r.first}-{r.last}{' *' * (r.first <= self.at <= r.last)}", r.space if several else "", f"{r.offset:,}",
             size_text(r.bytes), r.type, r.producer, ", ".join(r.read_by), short_location_text(r.loc))
            for r in self.rows
        ]  # fmt: skip
        what = f"{count_text(len(rows), 'value')} in {self.steps} steps of @{self.function} for {self.target}"
        peak = f"{size_text(self.peak)} alive at step {self.at} (*), {self._arenas_text()}"
        thread = f"scratch memory {size_text(self.scratch)} for each worker"
        blocks: list[Block] = [table(columns, rows)]
        blocks.append(Line(f"{what}: {peak}; {thread}{targets_text(self.devices)}"))
        if self.spills:
            blocks.append(Line(f"{count_text(len(self.spills), 'transfer')} for the memory limit:"))
        spills = (Line(row, 2) for row in self.spills)
        return Document("", (*blocks, *spills, *communicator_blocks(self.communicators)))

    def _arenas_text(self) -> str:
        if len(self.arenas) == 1:
            return f"the arena has {size_text(self.arena)}"
        return "the arenas have " + ", ".join(f"{size_text(size)} on {name}" for name, size in self.arenas.items())


def explain_memory(
    opened: OpenedBundle, function: str = "", sizes: Mapping[str, int] | None = None, target: str = ""
) -> MemoryReport:
    """Return the memory report of a bundle's function; ``sizes`` are the values of symbolic dims.

    Raises
    ------
    BundleError
        If it has no such function or target.
    """
    flow = flow_of(opened, function, sizes, target)
    rows = live_rows(flow)
    sums = [live_bytes(rows, step) for step in range(len(flow.steps))]
    peak = max(sums, default=0)
    at = sums.index(peak) if sums else 0
    picture = _memory_svg(flow, rows, peak, at)
    arenas = {space.name: size for space, size in zip(flow.spaces, flow.arenas, strict=True)}
    target, count = flow.variant["target"], len(flow.steps)
    return MemoryReport(
        flow.function, target, count, tuple(rows), flow.arena, arenas, peak, at, flow.scratch, picture,
        flow.targets, _spilled_values(flow), communicators_of(opened, flow),
    )  # fmt: skip


def _spilled_values(flow: Flow) -> tuple[str, ...]:
    rows = [t for t in flow.variant.get("transfers", ()) if t.get("spilled") and t["function"] == flow.function]
    return tuple(f"{t['type']} from {t['from']} to {t['to']}, made at {t['loc']}" for t in rows)


def live_bytes(rows: Iterable[MemoryRow], step: int) -> int:
    """Return the number of bytes that the live values of a step occupy together.

    Shared bytes count once: a kernel may overwrite an operand with its result.
    """
    alive = [row for row in rows if row.first <= step <= row.last]
    total, upto, space = 0, 0, ""
    for row in sorted(alive, key=lambda r: (r.space, r.offset)):
        upto = upto if row.space == space else 0
        total += max(row.end - max(row.offset, upto), 0)
        upto, space = max(row.end, upto), row.space
    return total


def _memory_svg(flow: Flow, rows: Sequence[MemoryRow], peak: int, at: int) -> str:
    """Draw the values as SVG: steps from left to right, bytes from top to bottom, arenas below each other."""
    title = f"@{flow.function}: arena of {flow.arena:,} B, {peak:,} B alive at step {at}"
    drawing = Drawing(title, len(flow.steps), "steps", row=HEIGHT / max(flow.arena, 1), least=1)
    several = len(flow.spaces) > 1
    tops = {space.name: sum(flow.arenas[:n]) for n, space in enumerate(flow.spaces)}
    for r in rows:
        kind = "critical" if r.first <= at <= r.last else "box"
        where = f"{r.bytes:,} B at {r.offset:,}{f' of {r.space}' if several else ''}, steps {r.first} to {r.last}"
        tooltip = f"{r.type or 'a value'} of {r.producer}, {where} {r.loc}"
        label = f"{r.space}: {r.producer} {r.type}" if several else f"{r.producer} {r.type}"
        top = tops[r.space]
        drawing.box(r.first, r.last + 1, top + r.offset, top + r.end, kind, label, tooltip)
    drawing.line(at + 0.5, "peak")
    return drawing.text()
