"""``aotc explain schedule`` and ``memory``: what a bundle's commands take, and what its arena holds, as tables."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from aotc.tools.explain_memory import MemoryReport
    from aotc.tools.explain_schedule import ScheduleReport
    from aotc.vmfb.bundle import Bundle


def show(
    subject: str, source: Any, flags: dict[str, Any], function: str, dims: list[str], picture: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Print the report on a bundle, or on what a model compiles to."""
    from aotc.tools.explain_memory import explain_memory
    from aotc.tools.explain_schedule import explain_schedule
    from aotc.vmfb.files import write_whole

    opened, sizes = open_or_compile(source, flags), sizes_of(dims)
    report: Any = (explain_schedule if subject == "schedule" else explain_memory)(opened, function, sizes)
    if picture is not None:
        write_whole(str(picture), [report.picture.encode()])
    if as_json:
        import json

        print(json.dumps({key: value for key, value in asdict(report).items() if key != "picture"}, indent=1))
    elif subject == "schedule":
        _print_schedule(report)
    else:
        _print_memory(report)


def open_or_compile(source: Any, flags: dict[str, Any]) -> Bundle:
    """Return the bundle that ``source`` is, or that it compiles to."""
    import aotc
    from aotc.vmfb.bundle import MAGIC, open_bundle

    if isinstance(source, Path):
        try:
            with open(source, "rb") as f:
                head = f.read(len(MAGIC))
        except OSError:
            head = b""  # the compiler says what is wrong
    else:
        head = source[: len(MAGIC)]
    if head == MAGIC:
        return open_bundle(str(source) if isinstance(source, Path) else source)
    return open_bundle(aotc.compile(source, **flags))


def sizes_of(texts: list[str]) -> dict[str, int]:
    """Return ``{"batch": 8}`` for ``batch=8``."""
    found = {}
    for text in texts:
        name, _, size = text.partition("=")
        if not name or not (size.isascii() and size.isdigit() and len(size) < 20):
            raise typer.BadParameter(f"{text[:60]!r}: expected NAME=SIZE", param_hint="--dim")
        found[name] = int(size)
    return found


def _print_schedule(report: ScheduleReport) -> None:
    from aotc_cli.sizes import count_text, size_text, time_text
    from aotc_cli.tables import print_line, print_table

    def shown(ns: float | None) -> str:
        return "" if ns is None else time_text(ns / 1e9)

    rows = []
    for r in report.rows:
        claims = "serial" if r.serial else f"{r.items} by {r.claim}"
        after, mark = ", ".join(map(str, r.after)), " *" if r.critical else ""
        times = (shown(r.predicted), shown(r.measured))
        rows.append((f"{r.number}{mark}", r.within, r.kernel, *times, r.bound, size_text(r.bytes), claims, after, r.loc))
    headings = ("step", "within", "kernel", "predicted", "measured", "bound", "bytes", "items", "after", "from")
    print_table(headings, rows, right=("predicted", "measured", "bytes"))
    what = f"{count_text(len(rows), 'command')} of @{report.function} for {report.target}"
    print_line(f"\n{what}: {shown(report.work)} on one core, at least {shown(report.path)} on many (*)", 2)
    if report.measured_on:
        print_line(f"measured on {report.measured_on}", 2)
    if report.unknown:
        names = ", ".join(report.unknown)
        print_line(f"{count_text(len(report.unknown), 'measured kernel')} of other code, not counted: {names}", 2)


def _print_memory(report: MemoryReport) -> None:
    from aotc_cli.sizes import count_text, size_text
    from aotc_cli.tables import print_line, print_table

    rows = []
    for r in report.rows:
        mark = " *" if r.first <= report.at <= r.last else ""
        steps, readers = f"{r.first}-{r.last}{mark}", ", ".join(r.read_by)
        rows.append((steps, f"{r.offset:,}", size_text(r.bytes), r.type, r.made_by, readers, r.loc))
    headings = ("steps", "offset", "bytes", "value", "made by", "read by", "from")
    print_table(headings, rows, right=("offset", "bytes"))
    what = f"{count_text(len(rows), 'value')} in {report.steps} steps of @{report.function} for {report.target}"
    peak = f"{size_text(report.peak)} alive at step {report.at} (*), the arena has {size_text(report.arena)}"
    print_line(f"\n{what}: {peak}; scratch memory {size_text(report.scratch)} for each worker", 2)
