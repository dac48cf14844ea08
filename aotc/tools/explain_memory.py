"""What lies in a bundle's arena from when to when, and what makes its peak: rows and a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from aotc.tools.drawing import Drawing
from aotc.tools.flow import Flow, FlowStep, Place, arena_places, flow_of
from aotc.vmfb.bundle import Bundle

HEIGHT = 600  # pixels of the arena in a drawing


@dataclass(slots=True)
class MemoryRow:
    """A value in the arena, from the step that makes it to the last one that reads it; loops keep what they carry.

    Attributes
    ----------
    offset, bytes : int
    first, last : int
        Steps: a range of the call's commands.
    type : str
        As far as known.
    made_by, read_by : str
        The kernels.
    loc : str
        Where in the model what makes it comes from.
    replaced : int
        The step that writes over it, -1 if none does.
    """

    offset: int
    bytes: int
    first: int
    last: int
    type: str
    made_by: str
    loc: str
    read_by: list[str] = field(default_factory=list)
    replaced: int = -1

    @property
    def end(self) -> int:
        """Return the byte after the last."""
        return self.offset + self.bytes


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The memory of a call.

    Attributes
    ----------
    rows : tuple of MemoryRow
        In the order in which they are made.
    arena : int
        Bytes that the call takes.
    peak : int
        The most bytes of values that are alive at once; what the arena has more lies between them.
    at : int
        The step of the peak.
    scratch : int
        Bytes of each worker besides.
    """

    function: str
    target: str
    steps: int
    rows: tuple[MemoryRow, ...]
    arena: int
    peak: int
    at: int
    scratch: int
    picture: str

    @property
    def at_peak(self) -> tuple[MemoryRow, ...]:
        """Return what is alive at the peak, the largest first."""
        return tuple(sorted(_alive(self.rows, self.at), key=lambda r: -r.bytes))


def explain_memory(opened: Bundle, function: str = "", sizes: Mapping[str, int] | None = None) -> MemoryReport:
    """Tell what lies where in the arena of a bundle's function while it runs, with arguments of some sizes.

    Raises
    ------
    BundleError
        If it has no such function.
    """
    flow = flow_of(opened, function, sizes)
    rows = _rows(flow, _locs(opened, flow))
    sums = [sum(r.bytes for r in _alive(rows, t)) for t in range(len(flow.steps))]
    peak = max(sums, default=0)
    at = sums.index(peak) if sums else 0
    picture = _picture(flow, rows, peak, at)
    target, count = flow.variant["target"], len(flow.steps)
    return MemoryReport(flow.function, target, count, tuple(rows), flow.arena, peak, at, flow.scratch, picture)


def _locs(opened: Bundle, flow: Flow) -> list[str]:
    held = (opened.manifest.get("debug") or {}).get("kernels") or {}
    return [held.get(f"{flow.variant['target']}/{k['name']}", {}).get("loc", "") for k in flow.variant["kernels"]]


def _alive(rows: Iterable[MemoryRow], step: int) -> list[MemoryRow]:
    return [r for r in rows if r.first <= step <= r.last]


def _rows(flow: Flow, locs: Sequence[str]) -> list[MemoryRow]:
    rows: list[MemoryRow] = []
    current: list[MemoryRow] = []  # whose bytes hold their value
    read_at: list[tuple[int, Place]] = []
    for step in flow.steps:
        touched = list(arena_places(flow, step))
        for place, written, _ in touched:
            if not written or step.updates:
                read_at.append((step.number, place))
                for row in _over(current, place):
                    row.last = step.number
                    name = flow.name_of(step)
                    row.read_by += [] if name in row.read_by else [name]
        for place, written, type_ in touched:
            if written and not (step.updates and _over(current, place)):
                for row in _over(current, place):
                    row.replaced = step.number
                    current.remove(row)
                row = _made(flow, step, place, type_, locs)
                rows.append(row)
                current.append(row)
    for loop in flow.loops:
        _carry(rows, loop.begin, loop.end, read_at)
    return rows


def _over(rows: Iterable[MemoryRow], place: Place) -> list[MemoryRow]:
    """Return the rows that share bytes with ``place``."""
    _, begin, end = place
    return [r for r in rows if r.offset < end and begin < r.end]


def _made(flow: Flow, step: FlowStep, place: Place, type_: str, locs: Sequence[str]) -> MemoryRow:
    _, begin, end = place
    loc = locs[step.kernel] if step.kernel >= 0 else ""
    return MemoryRow(begin, end - begin, step.number, step.number, type_, flow.name_of(step), loc)


def _carry(rows: Sequence[MemoryRow], begin: int, end: int, read_at: Sequence[tuple[int, Place]]) -> None:
    """Let live to the end of a loop what its next turn reads: what it did not make, or reads before it makes it."""
    for row in rows:
        before = row.first < begin <= row.last < end and not begin <= row.replaced < end
        inside = begin <= row.first < end
        carried = inside and any(begin <= t <= row.first and _over([row], place) for t, place in read_at)
        if before or carried:
            row.last = max(row.last, end - 1)


def _picture(flow: Flow, rows: Sequence[MemoryRow], peak: int, at: int) -> str:
    """Return a drawing: steps from left to right, the arena's bytes from top to bottom."""
    title = f"@{flow.function}: arena of {flow.arena:,} B, {peak:,} B alive at step {at}"
    drawing = Drawing(title, len(flow.steps), "steps", row=HEIGHT / max(flow.arena, 1))
    for r in rows:
        kind = "critical" if r.first <= at <= r.last else "box"
        where = f"{r.bytes:,} B at {r.offset:,}, steps {r.first} to {r.last}"
        said = f"{r.type or 'a value'} of {r.made_by}, {where} {r.loc}"
        drawing.box(r.first, r.last + 1, r.offset, r.end, kind, f"{r.made_by} {r.type}", said)
    drawing.line(at + 0.5, "peak")
    return drawing.text()
