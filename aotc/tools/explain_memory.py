"""What lies in the arenas of a bundle from when to when, and what makes their peak: rows and a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from aotc.tools.drawing import Drawing
from aotc.tools.flow import Flow, FlowSpan, FlowStep, Place, arena_places, flow_of
from aotc.vmfb.bundle import OpenedBundle

HEIGHT = 600  # pixels of the arena in a drawing


@dataclass(slots=True)
class MemoryRow:
    """A value in an arena, from the step that makes it to the last one that reads it; loops keep what they carry.

    Attributes
    ----------
    space : str
        Whose memory the arena is in: the model's name of a GPU, or ``cpu`` or ``cuda``.
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

    space: str
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
    arenas : mapping of str to int
        Of which in each space.
    peak : int
        The most bytes of values that are alive at once; what the arena has more lies between them.
    at : int
        The step of the peak.
    scratch : int
        Bytes of each worker besides.
    devices : mapping of str to str
        Targets by the names of devices, if the model has any.
    spills : tuple of str
        What is moved between a GPU and the process's memory for the sake of a limit: from where, to where, made where.
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

    @property
    def at_peak(self) -> tuple[MemoryRow, ...]:
        """Return what is alive at the peak, the largest first."""
        return tuple(sorted(_alive(self.rows, self.at), key=lambda r: -r.bytes))


def explain_memory(
    opened: OpenedBundle, function: str = "", sizes: Mapping[str, int] | None = None, target: str = ""
) -> MemoryReport:
    """Tell what lies where in the arenas of a bundle's function while it runs, with arguments of some sizes.

    Raises
    ------
    BundleError
        If it has no such function or target.
    """
    flow = flow_of(opened, function, sizes, target)
    rows = _rows(flow, _locs(opened, flow))
    sums = [sum(r.bytes for r in _alive(rows, t)) for t in range(len(flow.steps))]
    peak = max(sums, default=0)
    at = sums.index(peak) if sums else 0
    picture = _picture(flow, rows, peak, at)
    arenas = {space.name: size for space, size in zip(flow.spaces, flow.arenas, strict=True)}
    target, count = flow.variant["target"], len(flow.steps)
    return MemoryReport(
        flow.function, target, count, tuple(rows), flow.arena, arenas, peak, at, flow.scratch, picture,
        flow.targets, _spills(flow),
    )  # fmt: skip


def _spills(flow: Flow) -> tuple[str, ...]:
    rows = [t for t in flow.variant.get("transfers", ()) if t.get("spilled") and t["function"] == flow.function]
    return tuple(f"{t['type']} from {t['from']} to {t['to']}, made at {t['loc']}" for t in rows)


def _locs(opened: OpenedBundle, flow: Flow) -> list[str]:
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
                for row in _over(flow, current, place):
                    row.last = step.number
                    name = flow.name_of(step)
                    row.read_by += [] if name in row.read_by else [name]
        for place, written, type_ in touched:
            if written and not (step.updates and _over(flow, current, place)):
                for row in _over(flow, current, place):
                    row.replaced = step.number
                    current.remove(row)
                row = _made(flow, step, place, type_, locs)
                rows.append(row)
                current.append(row)
    for loop in flow.loops:
        _carry(flow, rows, loop, read_at)
    return rows


def _over(flow: Flow, rows: Iterable[MemoryRow], place: Place) -> list[MemoryRow]:
    """Return the rows that share bytes with ``place``."""
    slot, begin, end = place
    space = flow.spaces[flow.slots.home(slot)].name
    return [r for r in rows if r.space == space and r.offset < end and begin < r.end]


def _made(flow: Flow, step: FlowStep, place: Place, type_: str, locs: Sequence[str]) -> MemoryRow:
    slot, begin, end = place
    space = flow.spaces[flow.slots.home(slot)].name
    loc = locs[step.kernel] if step.kernel >= 0 else ""
    return MemoryRow(space, begin, end - begin, step.number, step.number, type_, flow.name_of(step), loc)


def _carry(flow: Flow, rows: Sequence[MemoryRow], loop: FlowSpan, read_at: Sequence[tuple[int, Place]]) -> None:
    """Let live to the end of a loop what its next turn reads: what it did not make, or reads before it makes it."""
    begin, end = loop.begin, loop.end
    for row in rows:
        before = row.first < begin <= row.last < end and not begin <= row.replaced < end
        inside = begin <= row.first < end
        carried = inside and any(begin <= t <= row.first and _over(flow, [row], place) for t, place in read_at)
        if before or carried:
            row.last = max(row.last, end - 1)


def _picture(flow: Flow, rows: Sequence[MemoryRow], peak: int, at: int) -> str:
    """Return a drawing: steps from left to right, the bytes of each arena from top to bottom, one below the other."""
    title = f"@{flow.function}: arena of {flow.arena:,} B, {peak:,} B alive at step {at}"
    drawing = Drawing(title, len(flow.steps), "steps", row=HEIGHT / max(flow.arena, 1), least=1)
    several = len(flow.spaces) > 1
    tops = {space.name: sum(flow.arenas[:n]) for n, space in enumerate(flow.spaces)}
    for r in rows:
        kind = "critical" if r.first <= at <= r.last else "box"
        where = f"{r.bytes:,} B at {r.offset:,}{f' of {r.space}' if several else ''}, steps {r.first} to {r.last}"
        said = f"{r.type or 'a value'} of {r.made_by}, {where} {r.loc}"
        label = f"{r.space}: {r.made_by} {r.type}" if several else f"{r.made_by} {r.type}"
        top = tops[r.space]
        drawing.box(r.first, r.last + 1, top + r.offset, top + r.end, kind, label, said)
    drawing.line(at + 0.5, "peak")
    return drawing.text()
