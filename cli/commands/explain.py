"""``aotc explain``: the reasons for the decisions of the compiler."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from aotc_cli.shared.compile_options import (
    COSTS_HELP,
    DEFAULT_DEVICE_HELP,
    DEVICE_HELP,
    HOST_TARGET_HELP,
    MEMORY_HELP,
    PLACE_HELP,
    SHARED_HELP,
    STACK_HELP,
    costs_of,
    devices_of,
    parse_bytes,
    warnings_as_sentences,
)
from aotc_cli.shared.custom_calls import HELP, register_from

if TYPE_CHECKING:
    from aotc.tools.explain.memory import MemoryReport
    from aotc.tools.explain.schedule import ScheduleReport
    from aotc.vmfb.bundle import OpenedBundle

SUMMARY = "Tell why the compiler fuses, places, schedules and stores as it does."
EXAMPLES = """
aotc explain schedule model.vmfb --picture=schedule.svg

aotc explain memory model.vmfb --dim=batch=8

aotc explain affinity model.mlir

aotc explain affinity model.mlir --picture=affinity.svg

aotc explain affinity model.vmfb --json | python -m json.tool

aotc explain affinity model.mlir --device d0=cpu --device d1=cuda:sm_90 --place=auto --costs=record.json

aotc explain fusion model.mlir --target=cuda:sm_90 --shared-memory-limit=4096

aotc explain fusion model.vmfb --json
"""


class Subject(StrEnum):
    """Subjects of an explanation."""

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
        help="StableHLO text or bytecode, a portable artifact, a jax.export blob, or a .vmfb; - is stdin.",
    ),
    target: str = typer.Option("", help="cpu (this machine, the default) or a name from `aotc targets`."),
    opt_level: int = typer.Option(None, "-O", "--opt-level", min=0, max=3, help="As for `aotc compile`."),
    stack_limit: str = typer.Option("", help=STACK_HELP),
    shared_memory_limit: str = typer.Option("", help=SHARED_HELP),
    memory_limit: str = typer.Option("", help=MEMORY_HELP),
    device: list[str] = typer.Option([], help=DEVICE_HELP),
    default_device: str = typer.Option("", help=DEFAULT_DEVICE_HELP),
    place: str = typer.Option("", help=PLACE_HELP),
    host_target: str = typer.Option("", help=HOST_TARGET_HELP),
    costs: Path = typer.Option(None, help=COSTS_HELP),
    custom_calls: list[str] = typer.Option([], "--custom-calls", help=HELP),
    function: str = typer.Option(
        "", help="Which; of a schedule or memory main by default, else all.", show_default=False
    ),
    dims: list[str] = typer.Option([], "--dim", help="Of a schedule or memory: NAME=SIZE; others are guessed."),
    picture: Path = typer.Option(None, help="The .svg file to draw; not of fusion."),
    as_json: bool = typer.Option(False, "--json", help="Every row, as JSON."),
) -> None:
    """Tell why a model runs as it does: in which kernels, where, when, and in which memory.

    A model that names no device has no affinities. Of fusion each kernel is shown with the lines that it is from, its
    bytes and scalar operations, the memory that it takes and how much there is, and why each neighbour was taken or
    refused. Fusion and affinities of a bundle are explained from the model in it, for its own targets and options. The
    times of a schedule are the cost model's, or what `aotc profile --save` stored; each turn of a loop is listed once.
    """
    _check_picture(picture, subject)
    if dims and subject in (Subject.affinity, Subject.fusion):
        raise typer.BadParameter(f"{subject.value} is the same for all sizes", param_hint="--dim")
    register_from(custom_calls)
    source: Any = sys.stdin.buffer.read() if model == "-" else Path(model)
    said = {
        "target": target, "opt_level": opt_level, "devices": devices_of(device), "default_device": default_device,
        "place": place, "host_target": host_target, "costs": costs_of(costs),
    }  # fmt: skip
    limits = {"--stack-limit": stack_limit, "--shared-memory-limit": shared_memory_limit}
    for option, text in {**limits, "--memory-limit": memory_limit}.items():
        said[option[2:].replace("-", "_")] = parse_bytes(text, option) if text else None
    flags = {name: value for name, value in said.items() if value not in ("", None, {})}
    with warnings_as_sentences():
        match subject:
            case Subject.affinity:
                _affinity(source, {**flags, "function": function}, picture, as_json)
            case Subject.fusion:
                _fusion(source, {**flags, "function": function}, as_json)
            case _:
                _bundle(subject, source, flags, function, dims, picture, as_json)


def _check_picture(picture: Path | None, subject: Subject) -> None:
    """Refuse a picture that cannot be written."""
    from aotc_cli.commands.compile import check_output

    if picture is None:
        return
    if subject is Subject.fusion:
        raise typer.BadParameter("fusion has no picture", param_hint="--picture")
    if picture.suffix.lower() != ".svg" and (picture.suffix or not picture.exists()):  # an existing file may be a pipe
        raise typer.BadParameter(f"{picture.name} is to be an .svg file", param_hint="--picture")
    check_output(picture, option="--picture")


def _affinity(source: Any, flags: dict[str, Any], picture: Path | None, as_json: bool) -> None:
    """Print the device of each argument, op and result of a model with its reason, and the transfers."""
    from aotc.tools.explain.affinity import explain_affinity
    from aotc.vmfb.host.files import write_atomically

    report = explain_affinity(source, **flags)
    if picture is not None:
        write_atomically(str(picture), [report.picture.encode()])
    if as_json:
        import json

        rows, moved = ([asdict(row) for row in some] for some in (report.rows, report.transfers))
        facts = {"devices": report.devices, "targets": report.targets, "transfers": moved, "rows": rows}
        print(json.dumps(facts, indent=1))
        return
    if not report.devices:
        print("the model names no device")
        return
    from aotc_cli.shared.tables import print_line, print_table
    from aotc_cli.shared.units import count_text

    several = len({r.function for r in report.rows}) > 1
    names = ("function",) if several else ()
    rows_ = [
        (*((r.function,) if several else ()), r.device, ", ".join(r.candidates), r.name, r.reason, r.loc)
        for r in report.rows
    ]
    print_table((*names, "device", "candidates", "what", "why", "from"), rows_)
    print_line(f"\n{count_text(len(report.transfers), 'transfer')}{_devices(report.targets)}", 2)


def _devices(targets: Mapping[str, str]) -> str:
    """Return the end of a summary line: the target of each device, if the model names any."""
    return "; " + ", ".join(f"{name} is {target}" for name, target in targets.items()) if targets else ""


def _fusion(source: Any, flags: dict[str, Any], as_json: bool) -> None:
    from aotc.tools.explain.fusion import explain_fusion

    report = explain_fusion(source, **flags)
    if as_json:
        import json

        print(json.dumps(asdict(report), indent=1))
        return
    from aotc_cli.shared.tables import print_line, print_table
    from aotc_cli.shared.units import count_text

    right = ("bytes in", "bytes out", "work")
    several, gpu = any(r.device for r in report.regions), any(r.threads for r in report.regions)
    rows = [
        (r.name, *((r.device,) if several else ()), r.kind, r.bytes_in, r.bytes_out, r.work,
         _memory(r.memory) or "none", *((f"{r.occupancy} %, {r.threads} threads",) if gpu else ()), _some(r.lines))
        for r in report.regions
    ]  # fmt: skip
    own = (("device",) if several else ()), (("occupancy",) if gpu else ())
    print_table(("kernel", *own[0], "kind", *right, "memory", *own[1], "from"), rows, right)
    for region in report.regions:
        print()
        print_line(f"{region.name}: {', '.join(region.ops)}", 2)
        if region.plan:
            print_line(f"  plan: {region.plan}", 4)
        for n in region.neighbours:
            verdict = "took" if n.taken else "refused"
            print_line(f"  {verdict} {', '.join(n.ops)} ({_some(n.lines)}): {n.reason}", 4)
    for row in report.rows:
        form = "read once, in parts" if row.taken else "not read in parts"
        print_line(f"\nrows of {_some(row.lines)}, {form}: {row.reason}", 2)
    print_line(f"\n{count_text(len(report.regions), 'kernel')} for {report.target}{_devices(report.devices)}", 2)


def _memory(memory: Mapping[str, tuple[int, int]]) -> str:
    return ", ".join(f"{used:,} of {limit:,} B of {name}" for name, (used, limit) in memory.items())


def _some(lines: tuple[str, ...]) -> str:
    """Return the first line, and the number of further lines."""
    return lines[0] if len(lines) == 1 else f"{lines[0]} and {len(lines) - 1} more" if lines else ""


def _bundle(
    subject: Subject, source: Any, flags: dict[str, Any], function: str, dims: list[str], picture: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Print the report on a bundle, or on the bundle that a model compiles to."""
    from aotc.tools.explain.memory import explain_memory
    from aotc.tools.explain.schedule import explain_schedule
    from aotc.tools.flow import entry_of
    from aotc.vmfb.host.files import write_atomically
    from aotc_cli.shared.inputs import parse_sizes

    opened, target = _opened(source, flags)
    name = entry_of(opened, function)
    sizes = parse_sizes(dims, opened.manifest["functions"][name]["arguments"])
    explain = explain_schedule if subject is Subject.schedule else explain_memory
    report: Any = explain(opened, name, sizes, target)
    if picture is not None:
        write_atomically(str(picture), [report.picture.encode()])
    if as_json:
        import json

        print(json.dumps({key: value for key, value in asdict(report).items() if key != "picture"}, indent=1))
    elif subject is Subject.schedule:
        _print_schedule(report)
    else:
        _print_memory(report)


def _opened(source: Any, flags: dict[str, Any]) -> tuple[OpenedBundle, str]:
    """Return the bundle from ``source``, compiled if it is a model, and the target to explain."""
    import aotc
    from aotc.tools.fetch_model import is_bundle
    from aotc.vmfb.bundle import open_bundle

    if not is_bundle(source):
        made = open_bundle(aotc.compile(source, **flags))
        made.where = str(source) if isinstance(source, Path) else "<model>"
        return made, ""
    target = flags.pop("target", "")
    if flags:
        options = ", ".join(f"--{name.replace('_', '-').replace('devices', 'device')}" for name in flags)
        raise typer.BadParameter("the bundle is compiled already: give its model", param_hint=options)
    return open_bundle(str(source) if isinstance(source, Path) else source), target


_WORKERS = {("cpu",): "on one core", ("cuda",): "on GPUs", ("cpu", "cuda"): "on one core and GPUs"}


def _print_schedule(report: ScheduleReport) -> None:
    from aotc_cli.shared.tables import print_line, print_table
    from aotc_cli.shared.units import count_text, size_text, time_text

    def shown(ns: float | None) -> str:
        return "" if ns is None else time_text(ns / 1e9)

    rows = []
    several, loops = len({r.device for r in report.rows}) > 1, any("loop" in r.within for r in report.rows)
    for r in report.rows:
        claims = "serial" if r.serial else f"{r.items} by {r.claim}"
        mark = " *" if r.critical else ""
        after = ", ".join(f"{n} by tiles, halo {r.halos[n]}" if n in r.halos else str(n) for n in r.after)
        times = (shown(r.predicted), shown(r.measured))
        known = (*times, r.bound, size_text(r.bytes), claims, after, r.loc)
        runs = (f"{'~' * r.guessed}{r.runs:,}",) if loops else ()
        rows.append((f"{r.number}{mark}", r.within, *runs, *((r.device,) if several else ()), r.kernel, *known))
    times = ("predicted", "measured")
    device = ("device",) if several else ()
    transposed = ("runs",) if loops else ()
    headings = ("step", "within", *transposed, *device, "kernel", *times, "bound", "bytes", "items", "after", "from")
    print_table(headings, rows, right=(*transposed, *times, "bytes"))
    what = f"{count_text(len(rows), 'command')} of @{report.function} for {report.target}"
    where = _WORKERS[tuple(sorted(report.kinds))]
    least = f"at least {shown(report.path)} if all that can overlaps (*)"
    print_line(f"\n{what}: {shown(report.work)} {where}, {least}{_devices(report.devices)}", 2)
    if report.measured_on:
        print_line(f"measured on {report.measured_on}", 2)
    if report.unknown:
        names = ", ".join(report.unknown)
        print_line(f"{count_text(len(report.unknown), 'measured kernel')} of other code, not counted: {names}", 2)


def _print_memory(report: MemoryReport) -> None:
    from aotc_cli.shared.tables import print_line, print_table
    from aotc_cli.shared.units import count_text, size_text

    rows = []
    for r in report.rows:
        mark = " *" if r.first <= report.at <= r.last else ""
        steps, readers = f"{r.first}-{r.last}{mark}", ", ".join(r.read_by)
        space = (r.space,) if len(report.arenas) > 1 else ()
        rows.append((steps, *space, f"{r.offset:,}", size_text(r.bytes), r.type, r.producer, readers, r.loc))
    several = ("space",) if len(report.arenas) > 1 else ()
    headings = ("steps", *several, "offset", "bytes", "value", "made by", "read by", "from")
    print_table(headings, rows, right=("offset", "bytes"))
    what = f"{count_text(len(rows), 'value')} in {report.steps} steps of @{report.function} for {report.target}"
    peak = f"{size_text(report.peak)} alive at step {report.at} (*), {_arenas(report)}"
    thread = f"scratch memory {size_text(report.scratch)} for each worker"
    print_line(f"\n{what}: {peak}; {thread}{_devices(report.devices)}", 2)
    if report.spills:
        print_line(f"{count_text(len(report.spills), 'transfer')} for the memory limit:", 2)
    for row in report.spills:
        print_line(f"  {row}", 4)


def _arenas(report: MemoryReport) -> str:
    from aotc_cli.shared.units import size_text

    if len(report.arenas) == 1:
        return f"the arena has {size_text(report.arena)}"
    return "the arenas have " + ", ".join(f"{size_text(size)} on {name}" for name, size in report.arenas.items())
