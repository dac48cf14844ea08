"""Schedule report: predicted and measured times of a bundle's commands, and the critical path; rows and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from aotc.display.document import Column, Document, Line, table
from aotc.display.places import short_location_text, targets_text
from aotc.display.shown import DisplayedResult
from aotc.display.units import count_text, size_text, time_text
from aotc.ir.loop.ir import Kernel
from aotc.ir.loop.parser import parse_kernel
from aotc.lowering.cost_model.model import Cost, Costs
from aotc.lowering.cost_model.op_time import move_nanoseconds
from aotc.lowering.program.list_schedule import critical_paths
from aotc.targets import TARGETS, Target, common_cpu_target, host_target
from aotc.tools.drawing import Drawing
from aotc.tools.flow import Flow, FlowStep, flow_of
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.errors import BundleError
from aotc.vmfb.profile.stored_records import COSTS, PROFILE, stored_record


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """A command: its kernel, its time in nanoseconds on one core or a whole GPU, and its earliest start.

    Attributes
    ----------
    device : str
        The model's name of its GPU, or ``cpu`` or ``cuda``; for a copy between two devices, ``cpu to d1``.
    number, graph, within, after
        See :class:`aotc.tools.flow.FlowStep`.
    runs : int
        Executions per call: the iterations of enclosing loops, with all branches assumed taken.
    guessed : bool
        True if any of these iteration counts is a guess.
    sizes : mapping
        Values of the kernel's dims.
    items, claim : int
        Items of its grid, and the number of items that a worker claims at once.
    serial : bool
        True if a single thread runs the graph of the command.
    predicted : float
    measured : float or None
    scaled : bool
        True if the kernel was measured at other sizes only: ``measured`` is then scaled to the sizes of this call.
    bound : str
        The dominant part of the prediction: ``compute``, ``memory`` or ``overhead``. It is ``control`` for a loop or
        branch that is a command; its prediction is that of the rows inside.
    begin : float
        Earliest start in nanoseconds after the start of its graph, limited by dependencies alone.
    critical : bool
        True if it is on the critical path of its graph.
    halos : mapping
        For each command among ``after`` with a tile dependency: the number of items by which it must be ahead of this
        command.
    """

    number: int
    graph: int
    within: str
    device: str
    kernel: str
    loc: str
    sizes: Mapping[str, int]
    items: int
    claim: int
    serial: bool
    predicted: float
    measured: float | None
    scaled: bool
    bound: str
    bytes: int
    after: tuple[int, ...]
    begin: float
    critical: bool
    halos: Mapping[int, int]
    runs: int
    guessed: bool

    @property
    def ns(self) -> float:
        """Return the measured time in nanoseconds, or else the predicted time."""
        return self.predicted if self.measured is None else self.measured


Command = TypeVar("Command", FlowStep, ScheduleRow)


_WORKERS = {("cpu",): "on one core", ("cuda",): "on GPUs", ("cpu", "cuda"): "on one core and GPUs"}


@dataclass(frozen=True, slots=True, repr=False)
class ScheduleReport(DisplayedResult):
    """Commands of a call in order, with their times; commands in loops are listed once, with ``runs``.

    Attributes
    ----------
    kinds : tuple of str
        Kinds of the devices: ``cpu``, ``cuda``.
    work : float
        Total nanoseconds of all executions, each on one core or a whole GPU.
    path : float
        Nanoseconds of the critical paths of all graphs, times their executions.
    unknown : tuple of str
        Measured kernels that the bundle does not contain; they are ignored.
    measured_on : str
        The measured processor and GPUs, or an empty string.
    devices : mapping of str to str
        Targets by the names of devices, if the model names any.
    """

    function: str
    target: str
    kinds: tuple[str, ...]
    rows: tuple[ScheduleRow, ...]
    work: float
    path: float
    unknown: tuple[str, ...]
    measured_on: str
    picture: str
    devices: Mapping[str, str]

    def document(self) -> Document:
        """Return the schedule report: commands with times, and the total."""
        several, loops = len({r.device for r in self.rows}) > 1, any("loop" in r.within for r in self.rows)
        columns = [
            Column("step"), Column("within", priority=2), Column("runs", True), Column("device"), Column("kernel"),
            Column("predicted", True), Column("measured", True), Column("bound", priority=4), Column("bytes", True, 5),
            Column("items", priority=6), Column("after", priority=3), Column("from", priority=1),
        ]  # fmt: skip
        rows = [
            (f"{r.number}{' *' * r.critical}", r.within, f"{'~' * r.guessed}{r.runs:,}" if loops else "",
             r.device if several else "", r.kernel, _nanoseconds_text(r.predicted),
             f"{'~' * r.scaled}{_nanoseconds_text(r.measured)}",
             r.bound, size_text(r.bytes), "serial" if r.serial else f"{r.items} by {r.claim}", _after_text(r),
             short_location_text(r.loc))
            for r in self.rows
        ]  # fmt: skip
        what = f"{count_text(len(rows), 'command')} of @{self.function} for {self.target}"
        least = f"critical path (*) {_nanoseconds_text(self.path)}"
        where = _WORKERS[tuple(sorted(self.kinds))]
        lines = [f"{what}: {_nanoseconds_text(self.work)} {where}, {least}{targets_text(self.devices)}"]
        lines += [f"measured on {self.measured_on}{_scaled_text(self.rows)}"] if self.measured_on else []
        if self.unknown:
            names = ", ".join(self.unknown)
            lines.append(f"{count_text(len(self.unknown), 'measured kernel')} of other code, not counted: {names}")
        return Document("", (table(columns, rows), *map(Line, lines)))


def _scaled_text(rows: Sequence[ScheduleRow]) -> str:
    """Return what the sign ``~`` before a measured time means, if the report has such times."""
    return "; ~: measured at other sizes, and scaled to these" if any(r.scaled for r in rows) else ""


def _nanoseconds_text(ns: float | None) -> str:
    return "" if ns is None else time_text(ns / 1e9)


def _after_text(row: ScheduleRow) -> str:
    return ", ".join(f"{n} by tiles, halo {row.halos[n]}" if n in row.halos else str(n) for n in row.after)


def explain_schedule(
    opened: OpenedBundle, function: str = "", sizes: Mapping[str, int] | None = None, target: str = ""
) -> ScheduleReport:
    """Return the schedule report of a bundle's function; measured times are those of its profile, or else its costs.

    Raises
    ------
    BundleError
        If it has no such function or target, or stores no kernel text.
    """
    flow = flow_of(opened, function, sizes, target)
    kernels = kernels_of(opened, flow)
    record = stored_record(opened, PROFILE) or stored_record(opened, COSTS)
    costs = costs_of_spaces(flow, record)
    rows: list[ScheduleRow] = []
    times = _step_times(flow, kernels, costs)
    for graph in _graphs_of_steps(flow.steps):
        rows += _schedule_rows(graph, flow, kernels, costs, times)
    rows.sort(key=lambda row: row.number)
    inside = {n for step in flow.steps if step.control for n in range(step.number + 1, step.end)}
    outer = [row for row in rows if row.number not in inside]
    work = sum(r.runs * r.ns for r in outer)
    path = sum(max(r.runs * (r.begin + r.ns) for r in some) for some in _graphs_of_steps(outer))
    unknown = tuple(costs[0].unmatched_measurements(kernels))
    kinds = tuple(dict.fromkeys(c.target.kind for c in costs))
    machine = measured_on(record, flow.variant["target"]) if record else ""
    return ScheduleReport(
        flow.function, flow.variant["target"], kinds, tuple(rows), work, path, unknown, machine,
        _schedule_svg(flow.function, outer), flow.targets,
    )  # fmt: skip


def costs_of_spaces(flow: Flow, record: Mapping[str, Any] | None) -> list[Costs]:
    """Return the costs on the target of each memory space; ``record`` has measured ones."""
    own = {k["name"]: target_with_caches(k["target"]) for k in flow.variant["kernels"] if "target" in k}
    return [Costs(target_with_caches(space.target), record, own) for space in flow.spaces]


def measured_on(record: Mapping[str, Any], target: str) -> str:
    """Return the machines of a cost record: the processor if ``target`` has CPU code, and the GPU."""
    machine = record.get("machine", {})
    found = [machine.get("cpu", "") if "cpu" in target else "", machine.get("gpu", "")]
    return " and ".join(filter(None, map(str, found)))


def target_with_caches(name: str) -> Target:
    """Return the target by name, with this machine's cache sizes if it is the host."""
    if "+" in name:
        return common_cpu_target(map(target_with_caches, name.split("+")))
    return own if name.startswith("cpu") and (own := host_target()).name == name else TARGETS[name]


def kernels_of(opened: OpenedBundle, flow: Flow) -> list[Kernel]:
    """Parse the kernels of a bundle's variant from their text.

    Raises
    ------
    BundleError
        If the bundle has no such text, or it cannot be parsed.
    """
    held = (opened.manifest.get("debug") or {}).get("kernels")
    if held is None:
        raise BundleError(opened.where, "the bundle contains no kernel text", hint="compile it with debug information")
    entries = [held[f"{flow.variant['target']}/{k['name']}"] for k in flow.variant["kernels"]]
    try:
        return [parse_kernel(row["text"]) for row in entries]
    except ValueError as error:
        hint = "compile the model with this version of aotc"
        raise BundleError(opened.where, f"the text of a kernel cannot be read: {error}", hint=hint) from error


def _graphs_of_steps(steps: Sequence[Command]) -> list[list[Command]]:
    """Group the commands by their graph, in order."""
    graphs: dict[int, list[Command]] = {}
    for step in steps:
        graphs.setdefault(step.graph, []).append(step)
    return list(graphs.values())


def _step_times(flow: Flow, kernels: Sequence[Kernel], costs: Sequence[Costs]) -> list[float]:
    """Return the nanoseconds of each step on one core or GPU; a loop command includes all iterations."""
    times = [0.0] * len(flow.steps)
    for step in reversed(flow.steps):
        if step.control:
            times[step.number] = _time_inside_control(flow, step, times)
        elif step.kernel < 0:
            _, begin, end = step.reads[0]
            times[step.number] = copy_nanoseconds(costs, flow.memories_of_step(step), end - begin)
        else:
            times[step.number] = costs[flow.memories_of_step(step)[-1]].of(kernels[step.kernel], step.sizes).ns
    return times


def _time_inside_control(flow: Flow, control: FlowStep, times: Sequence[float]) -> float:
    """Return the nanoseconds inside a loop or branch command: all iterations, or the longest side."""
    prefix = f"{control.within} > " if control.within else ""
    steps = flow.steps[control.number + 1 : control.end]
    held = [s for s in steps if not any(s.number in range(o.number + 1, o.end) for o in steps if o.control)]

    def total(some: Sequence[FlowStep], prefix: str) -> float:
        """Return the time of the steps ``some``, whose ``within`` begins with ``prefix``, by the next nesting level."""
        found = 0.0
        parts: dict[str, list[FlowStep]] = {}
        for step in some:
            part = f"{step.within} > "[len(prefix) :].partition(" > ")[0]
            if part:
                parts.setdefault(part, []).append(step)
            else:
                found += times[step.number]
        arms: dict[str, float] = {}
        for part, inner in parts.items():
            ns = total(inner, f"{prefix}{part} > ")
            if part.startswith("loop"):
                found += flow.iterations_of(part) * ns
            else:
                name = part.partition(".")[0]
                arms[name] = max(arms.get(name, 0.0), ns)
        return found + sum(arms.values())

    return total(held, prefix)


def _schedule_rows(
    steps: Sequence[FlowStep], flow: Flow, kernels: Sequence[Kernel], costs: Sequence[Costs],
    all_times: Sequence[float],
) -> list[ScheduleRow]:  # fmt: skip
    """Return the rows of one graph, with earliest starts and critical path.

    ``costs`` holds the costs of each memory's target, ``all_times`` the nanoseconds of all steps.
    """
    place = {step.number: n for n, step in enumerate(steps)}
    before = [[place[n] for n in step.after] for step in steps]
    times = [all_times[step.number] for step in steps]
    lags = {pair: times[pair[0]] * share for pair, share in _tile_dependency_shares(steps).items()}
    begins = [0.0] * len(steps)
    for n, some in enumerate(before):
        begins[n] = max((begins[p] + lags.get((p, n), times[p]) for p in some), default=0.0)
    ends = critical_paths(before, times, lags)
    longest = max(ends, default=0.0)
    rows = []
    for n, step in enumerate(steps):
        critical = begins[n] + ends[n] >= longest * (1 - 1e-9)
        way = flow.memories_of_step(step)
        copied = step.reads[0][2] - step.reads[0][1] if step.reads else 0
        cost = None if step.kernel < 0 else costs[way[-1]].of(kernels[step.kernel], step.sizes)
        bound = "control" if step.control else "memory"
        known = (times[n], None, False, bound, 2 * copied) if cost is None else _cost_facts(cost)
        rows.append(ScheduleRow(
            step.number, step.graph, step.within, _device_of_step(flow, step), flow.name_of(step),
            step.loc, step.sizes, step.items, step.claim, step.serial, *known,
            step.after, begins[n], critical, {t.producer: t.halo for t in step.tiles},
            flow.runs_of(step.within), flow.is_guessed(step.within),
        ))  # fmt: skip
    return rows


def _tile_dependency_shares(steps: Sequence[FlowStep]) -> dict[tuple[int, int], float]:
    """Map each tile dependency to the fraction of the producer's items that the consumer's first claim needs."""
    first = steps[0].number
    found = {}
    for n, step in enumerate(steps):
        for t in step.tiles:
            of = max(steps[t.producer - first].items, 1)
            found[t.producer - first, n] = t.required_items(step.claim, step.items, of) / of
    return found


def copy_nanoseconds(costs: Sequence[Costs], way: tuple[int, int], size: int) -> float:
    """Return the nanoseconds of a copy of ``size`` bytes from memory ``way[0]`` to memory ``way[1]``."""
    if way[0] == way[1]:
        return costs[way[0]].copy_nanoseconds(size)
    return move_nanoseconds(size, costs[way[0]].target.kind, costs[way[1]].target.kind)


def _device_of_step(flow: Flow, step: FlowStep) -> str:
    """Return the device of a step: names of memories, or its kernel's target where CPU devices have several."""
    own = flow.variant["kernels"][step.kernel].get("target") if step.kernel >= 0 else ""
    return own or " to ".join(dict.fromkeys(flow.spaces[n].name for n in flow.memories_of_step(step)))


def _cost_facts(cost: Cost) -> tuple[float, float | None, bool, str, int]:
    p = cost.predicted
    return p.ns, cost.measured, cost.scaled, p.bound, p.bytes


# ---------------------------------------------------------------- the picture

_UNITS = (("us", 1e3), ("ms", 1e6), ("s", 1e9))  # nanoseconds per unit


def _schedule_svg(function: str, rows: Sequence[ScheduleRow]) -> str:
    """Draw the commands over time as SVG, at their earliest start, in as many lanes as needed."""
    total = sum(max(r.begin + r.ns for r in some) for some in _graphs_of_steps(rows))
    unit, scale = next((u, n) for u, n in _UNITS if total < 1000 * n or n == _UNITS[-1][1])
    title = f"@{function}: commands as soon as they can begin, {total / scale:.4g} {unit}"
    drawing = Drawing(title, total, unit, scale)
    start = 0.0
    for some in _graphs_of_steps(rows):
        lanes: list[float] = []
        for row in sorted(some, key=lambda r: (r.begin, not r.critical, r.number)):
            lane = next((n for n, end in enumerate(lanes) if end <= row.begin + 1e-9), len(lanes))
            lanes[lane : lane + 1] = [row.begin + row.ns]
            kind = "critical" if row.critical else "box"
            tooltip = f"{row.number}: {row.kernel} on {row.device}, {row.ns / 1e3:.2f} us, {row.bound} {row.loc}"
            tooltip += f", runs {row.runs:,} times" if row.runs != 1 else ""
            tooltip += "".join(f", by tiles of {n}, halo {halo}" for n, halo in row.halos.items())
            drawing.box(start + row.begin, start + row.begin + row.ns, lane, lane + 1, kind, f"{row.kernel}", tooltip)
        start += max(lanes, default=0.0)
    return drawing.text()
