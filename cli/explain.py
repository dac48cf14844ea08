"""``aotc explain``: why the compiler did what it did."""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from aotc_cli.compiling import SHARED_HELP, STACK_HELP, devices_of
from aotc_cli.custom_calls import HELP, register_from

if TYPE_CHECKING:
    from aotc.tools.explain_memory import MemoryReport
    from aotc.tools.explain_schedule import ScheduleReport
    from aotc.vmfb.bundle import Bundle

SUMMARY = "Tell why the compiler fuses, places, schedules and stores as it does."
EXAMPLES = """
aotc explain schedule model.vmfb --picture=schedule.svg

aotc explain memory model.vmfb --dim=batch=8

aotc explain affinity model.mlir

aotc explain affinity model.mlir --picture=affinity.svg

aotc explain affinity model.mlir --json | python -m json.tool

aotc explain fusion model.mlir --target=cuda:sm_90 --shared-memory-limit=4096

aotc explain fusion model.vmfb --json
"""


class Subject(StrEnum):
    """What is explained."""

    affinity = "affinity"
    fusion = "fusion"
    schedule = "schedule"
    memory = "memory"


SUBJECTS = """affinity: on which device each op runs, and what is moved. fusion: which ops are one kernel. schedule:
what each command takes, what it waits for and what bounds it. memory: what lies in the arena, and what makes its
peak."""


def command(
    subject: Subject = typer.Argument(..., help=SUBJECTS),
    model: str = typer.Argument(
        ...,
        help="StableHLO text or bytecode, a portable artifact, a jax.export blob; - is stdin. Of fusion, a schedule or "
        "memory also a .vmfb.",
    ),
    target: str = typer.Option("", help="cpu (this machine, the default) or a name from `aotc targets`."),
    opt_level: int = typer.Option(None, "-O", "--opt-level", min=0, max=3, help="As for `aotc compile`."),
    stack_limit: str = typer.Option("", help=STACK_HELP),
    shared_memory_limit: str = typer.Option("", help=SHARED_HELP),
    device: list[str] = typer.Option([], help="d0=cpu: a device that the model names, and its target."),
    default_device: str = typer.Option("", help="The device of what nothing places, in a model that names several."),
    place: str = typer.Option("said", help="As for `aotc compile`."),
    custom_calls: list[str] = typer.Option([], "--custom-calls", help=HELP),
    function: str = typer.Option("", help="Of a schedule or memory: which; main by default.", show_default=False),
    dims: list[str] = typer.Option([], "--dim", help="Of a schedule or memory: NAME=SIZE; others are guessed."),
    picture: Path = typer.Option(None, help="The .svg file to draw; not of fusion."),
    as_json: bool = typer.Option(False, "--json", help="Every row, as JSON."),
) -> None:
    """Tell why a model runs as it does: in which kernels, where, when, and in which memory.

    A model that names no device has no affinities. Of fusion each kernel is shown with the lines that it is from, its
    bytes and scalar operations, the memory that it takes and how much there is, and why each neighbour was taken or
    refused; a bundle's is explained from the model in it, for its own target and options. The times of a schedule are
    the cost model's, or what `aotc profile` measured; each turn of a loop is listed once.
    """
    from aotc_cli.compile import check_output

    if picture is not None and subject is Subject.fusion:
        raise typer.BadParameter("fusion has no picture", param_hint="--picture")
    if picture is not None:
        check_output(picture, "--picture")
    register_from(custom_calls)
    source: Any = sys.stdin.buffer.read() if model == "-" else Path(model)
    said = {
        "target": target, "opt_level": opt_level, "stack_limit": stack_limit,
        "shared_memory_limit": shared_memory_limit, "devices": devices_of(device), "default_device": default_device,
        "place": "" if place == "said" else place,
    }  # fmt: skip
    flags = {name: value for name, value in said.items() if value not in ("", None, {})}
    match subject:
        case Subject.affinity:
            _affinity(source, flags, picture, as_json)
        case Subject.fusion:
            _fusion(source, flags, as_json)
        case _:
            _bundle(subject, source, flags, function, dims, picture, as_json)


def _affinity(source: Any, flags: dict[str, Any], picture: Path | None, as_json: bool) -> None:
    """Tell on which device each argument and op of a model is, why, and what is moved between devices."""
    from aotc.tools.explain_affinity import explain_affinity
    from aotc.vmfb.files import write_whole

    report = explain_affinity(source, **flags)
    if picture is not None:
        write_whole(str(picture), [report.picture.encode()])
    if as_json:
        import json

        print(json.dumps({"devices": report.devices, "rows": [asdict(row) for row in report.rows]}, indent=1))
        return
    if not report.devices:
        print("the model names no device")
        return
    from aotc_cli.sizes import count_text
    from aotc_cli.tables import print_table

    rows = [(r.device, r.name, r.reason, r.loc) for r in report.rows]
    print_table(("device", "what", "why", "from"), rows)
    print(f"\n{count_text(len(report.transfers), 'transfer')}")


def _fusion(source: Any, flags: dict[str, Any], as_json: bool) -> None:
    from aotc.tools.explain_fusion import explain_fusion

    report = explain_fusion(source, **flags)
    if as_json:
        import json

        print(json.dumps(asdict(report), indent=1))
        return
    from aotc_cli.sizes import count_text
    from aotc_cli.tables import print_line, print_table

    right = ("bytes in", "bytes out", "work")
    rows = [
        (r.name, r.kind, r.bytes_in, r.bytes_out, r.work, _memory(r.memory) or "none", _some(r.lines))
        for r in report.regions
    ]
    print_table(("kernel", "kind", *right, "memory", "from"), rows, right)
    for region in report.regions:
        print()
        print_line(f"{region.name}: {', '.join(region.ops)}", 2)
        for n in region.neighbours:
            verdict = "took" if n.taken else "refused"
            print_line(f"  {verdict} {', '.join(n.ops)} ({_some(n.lines)}): {n.reason}", 4)
    print(f"\n{count_text(len(report.regions), 'kernel')} for {report.target}")


def _memory(memory: Any) -> str:
    return ", ".join(f"{used:,} of {limit:,} B of {name}" for name, (used, limit) in memory.items())


def _some(lines: tuple[str, ...]) -> str:
    """Return the first of the lines, and how many more there are."""
    return lines[0] if len(lines) == 1 else f"{lines[0]} and {len(lines) - 1} more" if lines else ""


def _bundle(
    subject: Subject, source: Any, flags: dict[str, Any], function: str, dims: list[str], picture: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Print the report on a bundle, or on what a model compiles to."""
    from aotc.tools.explain_memory import explain_memory
    from aotc.tools.explain_schedule import explain_schedule
    from aotc.vmfb.files import write_whole

    opened, sizes = _opened(source, flags), _sizes_of(dims)
    report: Any = (explain_schedule if subject is Subject.schedule else explain_memory)(opened, function, sizes)
    if picture is not None:
        write_whole(str(picture), [report.picture.encode()])
    if as_json:
        import json

        print(json.dumps({key: value for key, value in asdict(report).items() if key != "picture"}, indent=1))
    elif subject is Subject.schedule:
        _print_schedule(report)
    else:
        _print_memory(report)


def _opened(source: Any, flags: dict[str, Any]) -> Bundle:
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


def _sizes_of(texts: list[str]) -> dict[str, int]:
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
        known = (*times, r.bound, size_text(r.bytes), claims, after, r.loc)
        rows.append((f"{r.number}{mark}", r.within, r.kernel, *known))
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
