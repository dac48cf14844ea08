"""Where the ops of a model run, and why: as rows, and as a picture with a lane for each device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from aotc.diagnostics import size_text
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.guard import guard
from aotc.ir.opset import CONTROL_FLOW, SOURCES
from aotc.ir.tensor_ir import Function, Module, Op, Region, walk
from aotc.lowering.analysis.cost_devices import size_in_bytes
from aotc.lowering.passes.assign_devices import assign_devices
from aotc.lowering.passes.isolate_devices import isolate_devices
from aotc.options import Options
from aotc.pipeline import checked_options, run_passes

LANE, LINE, MARGIN, HEAD = 300, 18, 20, 30  # pixels of the picture
NAMES = 4  # kinds of ops that a box names


@dataclass(frozen=True, slots=True)
class AffinityRow:
    """An argument, an op or a transfer: what it is called, where it is, why, and where the model says it."""

    function: str
    name: str
    device: str
    reason: str
    loc: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class AffinityReport:
    """The solution for a model: its devices, a row for each argument, op and transfer, and the picture."""

    devices: tuple[str, ...]
    rows: tuple[AffinityRow, ...]
    picture: str

    @property
    def transfers(self) -> tuple[AffinityRow, ...]:
        """Return the rows of transfers, from ``source`` to ``device``."""
        return tuple(row for row in self.rows if row.source)


def explain_affinity(
    model: Any, *example_args: Any, kwargs: Mapping[str, Any] | None = None, options: Options | None = None,
    **flags: Any,
) -> AffinityReport:  # fmt: skip
    """Tell on which device each op of ``model`` runs; the arguments are those of ``aotc.compile``.

    Raises
    ------
    CompileError
        If the model cannot be read, or nothing says where an op runs.
    """
    chosen = checked_options(options, {**flags, "stop_after": isolate_devices.__name__.replace("_", "-")}, whole=False)
    module = import_raw(fetch(model, example_args, kwargs or {}), options=chosen)
    stages: dict[str, Module] = {}
    run_passes(module, chosen, lambda _, step, after: stages.update({step.run.__name__: after}))
    with guard("while explaining affinities", chosen, module):
        solved, isolated = stages[assign_devices.__name__], stages[isolate_devices.__name__]
        functions = [f for f in solved.functions.values() if "devices" in f.attrs]
        devices = tuple(dict.fromkeys(name for f in functions for name in f.attrs["devices"]["known"]))
        rows = tuple(row for f in functions for row in _rows(f))
        return AffinityReport(devices, rows, _picture(isolated, devices))


def _rows(function: Function) -> Iterable[AffinityRow]:
    names = function.attrs.get("arg_names") or [v.name for v in function.body.params]
    homes, reasons = function.attrs["devices"], function.attrs["reasons"]
    for name, device, reason in zip(names, homes["arguments"], reasons["arguments"], strict=True):
        yield AffinityRow(function.name, name, device, reason, "")
    for op in walk(function.body):
        if "device" in op.attrs and op.name not in CONTROL_FLOW:
            free = "free: a constant is on each device that reads it" if op.name in SOURCES else ""
            name = _moved(op) if op.name == "transfer" else op.name
            reason = op.attrs.get("reason", free)
            loc = op.loc.traced_by or str(op.loc)
            yield AffinityRow(function.name, name, op.attrs["device"], reason, loc, op.attrs.get("source", ""))


def _moved(op: Op) -> str:
    v = op.operands[0]
    return f"transfer {v} ({v.type}, {size_text(size_in_bytes(v))})"


@dataclass
class _Picture:
    """SVG under construction: lanes from left to right, the program from top to bottom."""

    devices: Sequence[str]
    parts: list[str] = field(default_factory=list)
    y: int = MARGIN

    def text(self, x: float, content: str, kind: str = "", y: float = 0.0) -> None:
        """Write a line."""
        said = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{x:g}" y="{(y or self.y) + 13:g}"{said}>{escape(content)}</text>')

    def lane(self, device: str) -> int:
        """Return the left edge of a device's lane."""
        return MARGIN + LANE * self.devices.index(device)

    def function(self, function: Function) -> None:
        """Draw one function, with its arguments at the top."""
        self.text(MARGIN, f"@{function.name}", "title")
        self.y += HEAD
        top = self.y
        homes = function.attrs["devices"]["arguments"]
        for device in self.devices:
            names = [f"{v}: {v.type}" for v, home in zip(function.body.params, homes) if home == device]
            self.text(self.lane(device) + 8, device, "device", top)
            for n, name in enumerate(names, start=1):
                self.text(self.lane(device) + 8, name, "", top + LINE * n)
        self.y += LINE * (2 + max(map(homes.count, self.devices), default=0))
        self.region(function.body)
        results = ", ".join(f"{v} on {d}" for v, d in zip(function.body.results, function.attrs["devices"]["results"]))
        self.text(MARGIN + 8, f"gives {results}")
        self.y += HEAD

    def region(self, region: Region) -> None:
        """Draw the ops of a region one below the other."""
        for op in region.ops:
            if op.name == "on":
                self.box(op)
            elif op.name == "transfer":
                self.arrow(op)
            elif op.name in CONTROL_FLOW:
                self.frame(op)

    def box(self, op: Op) -> None:
        """Draw what runs on one device without a transfer in between."""
        kinds = Counter(i.name for i in walk(op.regions[0]) if i.name not in SOURCES)
        if not kinds:
            return
        names = ", ".join(f"{count} {name}" if count > 1 else name for name, count in kinds.most_common(NAMES))
        x, width = self.lane(op.attrs["device"]) + 6, LANE - 12
        self.parts.append(f'<rect x="{x}" y="{self.y}" width="{width}" height="{2 * LINE + 6}" rx="6" class="box"/>')
        self.text(x + 8, names + (", ..." if len(kinds) > NAMES else ""))
        self.text(x + 8, ", ".join(str(v.type) for v in op.results)[:40], "small", self.y + LINE)
        self.y += 2 * LINE + 14

    def arrow(self, op: Op) -> None:
        """Draw a transfer."""
        begin, end = (self.lane(op.attrs[key]) + LANE / 2 for key in ("source", "device"))
        y = self.y + LINE + 4
        self.parts.append(f'<line x1="{begin:g}" y1="{y}" x2="{end:g}" y2="{y}" class="arrow" marker-end="url(#tip)"/>')
        self.text(min(begin, end) + 8, f"{_moved(op).removeprefix('transfer ')}: {op.attrs['reason']}", "small", y - 22)
        self.y += 2 * LINE + 4

    def frame(self, op: Op) -> None:
        """Draw a loop or a branch over several devices."""
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


def _picture(module: Module, devices: Sequence[str]) -> str:
    """Return a drawing of what runs on each device, and what moves, as SVG."""
    picture = _Picture(devices)
    for function in module.functions.values():
        if "devices" in function.attrs:
            picture.function(function)
    width, height = 2 * MARGIN + LANE * max(len(devices), 1), picture.y + MARGIN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    parts = [head, f"<style>{_STYLE}</style>", f"<defs>{_TIP}</defs>", *picture.parts, "</svg>", ""]
    return "\n".join(parts)
