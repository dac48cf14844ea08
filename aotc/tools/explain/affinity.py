"""Placement report: the device of each op of a model and the reason for it, as rows and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

from aotc.diagnostics import size_text
from aotc.display.document import Column, Document, Line, table
from aotc.display.places import short_location_text, targets_text
from aotc.display.shown import DisplayedResult
from aotc.display.units import count_text
from aotc.guard import guard
from aotc.ir.opset import CONTROL_FLOW, SOURCES
from aotc.ir.tensor.ir import Function, Module, Op, Region, Value, walk
from aotc.lowering.cost_model.op_time import size_in_bytes
from aotc.lowering.passes.assign_devices import assign_devices
from aotc.lowering.passes.isolate_devices import isolate_devices
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.tools.fetch_model import check_function, fetch_model

LANE, LINE, MARGIN, HEAD = 300, 18, 20, 30  # pixels of the picture
NAMES = 4  # op kinds that a box lists


@dataclass(frozen=True, slots=True)
class AffinityRow:
    """An argument, an op, a transfer or a result: its name, device, reason and location.

    ``candidates`` are the devices from which the deciding placement rule chose: all devices for a constant, one device
    for a transfer or a result.
    """

    function: str
    name: str
    device: str
    reason: str
    loc: str
    source: str = ""
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class AffinityReport(DisplayedResult):
    """Placement of a model's ops on devices.

    Attributes
    ----------
    devices : tuple of str
        Names of the devices.
    targets : mapping of str to str
        Target of each device.
    rows : tuple of AffinityRow
        Arguments, ops, transfers and results of each function.
    picture : str
        The placement as SVG.
    """

    devices: tuple[str, ...]
    targets: Mapping[str, str]
    rows: tuple[AffinityRow, ...]
    picture: str

    @property
    def transfers(self) -> tuple[AffinityRow, ...]:
        """Return the rows of transfers, from ``source`` to ``device``."""
        return tuple(row for row in self.rows if row.source)

    def document(self) -> Document:
        """Return the placement report: a table of ops with devices and reasons, and the transfers."""
        if not self.devices:
            return Document("", (Line("the model names no device"),))
        several = len({r.function for r in self.rows}) > 1
        columns = [Column("function"), Column("device"), Column("candidates", priority=2), Column("what"),
                   Column("why"), Column("from", priority=1)]  # fmt: skip
        places = [short_location_text(r.loc) for r in self.rows]
        rows = [
            (r.function if several else "", r.device, ", ".join(r.candidates), r.name, r.reason, place)
            for r, place in zip(self.rows, places)
        ]
        summary = f"{count_text(len(self.transfers), 'transfer')}{targets_text(self.targets)}"
        return Document("", (table(columns, rows), Line(summary)))


def explain_affinity(
    model: Any, *example_args: Any, kwargs: Mapping[str, Any] | None = None, options: Options | None = None,
    function: str = "", **flags: Any,
) -> AffinityReport:  # fmt: skip
    """Return the placement report of ``model``. The arguments are those of ``aotc.compile``, or a bundle.

    ``function`` selects one public function; by default all are included. The model of a bundle is placed with the
    options of its compilation.

    Raises
    ------
    CompileError
        If the model cannot be read, or an op has no device.
    ArgumentValueError
        If the model has no such function.
    BundleError
        If a bundle is damaged, or has no source.
    """
    module, target, chosen = fetch_model(model, example_args, kwargs, options, flags)
    check_function(function, module)
    stages: dict[str, Module] = {}
    last = replace(chosen, stop_after=isolate_devices.__name__.replace("_", "-"))
    run_passes(module, last, lambda _, step, after: stages.update({step.run.__name__: after}))
    with guard("while explaining affinities", chosen, module):
        solved, isolated = stages[assign_devices.__name__], stages[isolate_devices.__name__]
        names = [n for n, f in solved.functions.items() if "devices" in f.attrs and function in ("", n)]
        devices = tuple(dict.fromkeys(d for n in names for d in solved.functions[n].attrs["devices"]["known"]))
        targets = {name: target.for_device(name).name for name in devices}
        rows = tuple(row for n in names for row in _placement_rows(solved.functions[n]))
        return AffinityReport(devices, targets, rows, _placement_svg([isolated.functions[n] for n in names], devices))


def _placement_rows(function: Function) -> Iterable[AffinityRow]:
    """Yield the rows of a function: arguments, placed ops, results."""
    homes, reasons = function.attrs["devices"], function.attrs["reasons"]
    names = function.attrs.get("arg_names") or [v.name for v in function.body.params]
    among = function.attrs["candidates"]
    for name, device, reason, found in zip(names, homes["arguments"], reasons["arguments"], among, strict=True):
        yield AffinityRow(function.name, name, device, reason, "", candidates=tuple(found))
    for op in walk(function.body):
        if "device" in op.attrs and op.name not in CONTROL_FLOW:
            free = "free: a constant is on each device that reads it" if op.name in SOURCES else ""
            name = _transfer_label(op, op.operands[0]) if op.name == "transfer" else op.name
            reason = op.attrs.get("reason", free)
            loc = op.loc.traced_by or str(op.loc)
            chosen = op.attrs["device"]
            found = op.attrs.get("candidates") or (homes["known"] if op.name in SOURCES else [chosen])
            yield AffinityRow(function.name, name, chosen, reason, loc, op.attrs.get("source", ""), tuple(found))
    for name, device, reason in zip(_result_names_of(function), homes["results"], reasons["results"], strict=True):
        yield AffinityRow(function.name, name, device, reason, "", candidates=(device,))


def _result_names_of(function: Function) -> list[str]:
    return function.attrs.get("result_names") or [f"result{n}" for n in range(len(function.body.results))]


def _transfer_label(op: Op, v: Value) -> str:
    """Return the label of a transfer: the name of ``v``, its type and its size."""
    return f"transfer {v} ({v.type}, {size_text(size_in_bytes(v))})"


@dataclass
class _PlacementPicture:
    """SVG drawing of a placement: a lane per device from left to right, the program from top to bottom.

    ``names`` maps the parameters of regions to the values of ``assign_devices`` around them.
    """

    devices: Sequence[str]
    names: dict[Value, Value] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    y: int = MARGIN

    def text(self, x: float, content: str, kind: str = "", y: float = 0.0) -> None:
        """Draw a line of text."""
        class_attribute = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{x:g}" y="{(y or self.y) + 13:g}"{class_attribute}>{escape(content)}</text>')

    def lane(self, device: str) -> int:
        """Return the left edge of a device's lane."""
        return MARGIN + LANE * self.devices.index(device)

    def function(self, function: Function) -> None:
        """Draw one function, with its arguments at the top and its results at the bottom of their lanes."""
        self.text(MARGIN, f"@{function.name}", "title")
        self.y += HEAD
        body, homes = function.body, function.attrs["devices"]
        for device in self.devices:
            self.text(self.lane(device) + 8, device, "device")
        self.y += LINE
        self._in_lanes(homes["arguments"], [f"{v}: {v.type}" for v in body.params])
        self.y += LINE
        self.region(body)
        results = zip(_result_names_of(function), body.results, strict=True)
        self._in_lanes(homes["results"], [f"{name}: {self._name(v)}" for name, v in results])
        self.y += HEAD

    def _in_lanes(self, homes: Sequence[str], texts: Sequence[str]) -> None:
        """Draw several texts at the same height, each in the lane of its device (``homes``)."""
        for device in self.devices:
            own = [text for text, home in zip(texts, homes, strict=True) if home == device]
            for n, text in enumerate(own):
                self.text(self.lane(device) + 8, text, "", self.y + LINE * n)
        self.y += LINE * max(map(list(homes).count, self.devices), default=0)

    def _name(self, v: Value) -> Value:
        return self.names.get(v, v)

    def region(self, region: Region) -> None:
        """Draw the ops of a region from top to bottom."""
        for op in region.ops:
            if op.name == "on":
                self.names.update(zip(op.results, op.regions[0].results, strict=True))
                self.box(op)
            elif op.name == "transfer":
                self.arrow(op)
            elif op.name in CONTROL_FLOW:
                self.frame(op)

    def box(self, op: Op) -> None:
        """Draw a sequence of ops on one device without transfers in between."""
        kinds = Counter(i.name for i in walk(op.regions[0]) if i.name not in SOURCES)
        if not kinds:
            return
        names = ", ".join(f"{count} {name}" if count > 1 else name for name, count in kinds.most_common(NAMES))
        x, width = self.lane(op.attrs["device"]) + 6, LANE - 12
        self.parts.append(f'<rect x="{x}" y="{self.y}" width="{width}" height="{2 * LINE + 6}" rx="6" class="box"/>')
        self.text(x + 8, names + (", ..." if len(kinds) > NAMES else ""))
        self.text(x + 8, ", ".join(f"{self._name(v)}: {v.type}" for v in op.results)[:40], "small", self.y + LINE)
        self.y += 2 * LINE + 14

    def arrow(self, op: Op) -> None:
        """Draw a transfer."""
        begin, end = (self.lane(op.attrs[key]) + LANE / 2 for key in ("source", "device"))
        y = self.y + LINE + 4
        self.parts.append(f'<line x1="{begin:g}" y1="{y}" x2="{end:g}" y2="{y}" class="arrow" marker-end="url(#tip)"/>')
        what = _transfer_label(op, self._name(op.operands[0])).removeprefix("transfer ")
        self.text(min(begin, end) + 8, f"{what}: {op.attrs['reason']}", "small", y - 22)
        self.y += 2 * LINE + 4

    def frame(self, op: Op) -> None:
        """Draw a loop or branch over several devices."""
        top = self.y
        self.text(MARGIN - 8, f"{op.name} {op.loc.traced_by or op.loc}", "small")
        self.y += LINE
        for region in op.regions:
            self.region(region)
        place = f'x="{MARGIN - 12}" y="{top}" width="{LANE * len(self.devices) + 24}" height="{self.y - top + 4}"'
        self.parts.append(f'<rect {place} class="frame"/>')
        self.y += LINE


_STYLE = """text { font: 12px sans-serif; fill: #222 } .title { font-size: 16px } .device { font-weight: bold }
.small { font-size: 11px; fill: #555 } .box { fill: #e8eef4; stroke: #7a93ac }
.frame { fill: none; stroke: #999; stroke-dasharray: 4 3 } .arrow { stroke: #b3442e; stroke-width: 2 }"""
_TIP = """<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0L8 4L0 8z" fill="#b3442e"/></marker>"""


def _placement_svg(functions: Iterable[Function], devices: Sequence[str]) -> str:
    """Return a picture of the ops of each device and of the transfers, as SVG."""
    picture = _PlacementPicture(devices)
    for function in functions:
        picture.function(function)
    width, height = 2 * MARGIN + LANE * max(len(devices), 1), picture.y + MARGIN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    parts = [head, f"<style>{_STYLE}</style>", f"<defs>{_TIP}</defs>", *picture.parts, "</svg>", ""]
    return "\n".join(parts)
