"""``aotc explain``: the reasons for the decisions of the compiler."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
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
    from aotc.tools.explain.affinity import AffinityReport
    from aotc.tools.explain.fusion import FusionReport
    from aotc.tools.explain.memory import MemoryReport
    from aotc.tools.explain.schedule import ScheduleReport
    from aotc.vmfb.bundle import OpenedBundle

    Report = AffinityReport | FusionReport | ScheduleReport | MemoryReport

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
    dims: list[str] = typer.Option([], "--dim", help="Of a schedule or memory: NAME=SIZE; others are assumed."),
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
        if subject in (Subject.affinity, Subject.fusion):
            _model(subject, source, {**flags, "function": function}, picture, as_json)
        else:
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


def _model(subject: Subject, source: Any, flags: dict[str, Any], picture: Path | None, as_json: bool) -> None:
    """Print the report on the fusion or the affinities of a model."""
    from aotc.tools.explain.affinity import explain_affinity
    from aotc.tools.explain.fusion import explain_fusion

    if subject is Subject.fusion:
        _print(explain_fusion(source, **flags), as_json)
        return
    report = explain_affinity(source, **flags)
    _draw(picture, report.picture)
    _print(report, as_json, {"transfers": [asdict(row) for row in report.transfers]})


def _draw(picture: Path | None, svg: str) -> None:
    from aotc.vmfb.host.files import write_atomically

    if picture is not None:
        write_atomically(str(picture), [svg.encode()])


def _print(report: Report, as_json: bool, more: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Print a report as text, or as JSON without its picture."""
    from aotc_cli.shared.tables import show

    if as_json:
        import json

        facts = {key: value for key, value in asdict(report).items() if key != "picture"}
        print(json.dumps({**facts, **more}, indent=1))
    else:
        show(report.document())


def _bundle(
    subject: Subject, source: Any, flags: dict[str, Any], function: str, dims: list[str], picture: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Print the report on a bundle, or on the bundle that a model compiles to."""
    from aotc.tools.explain.memory import explain_memory
    from aotc.tools.explain.schedule import explain_schedule
    from aotc.tools.flow import entry_of
    from aotc_cli.shared.inputs import chosen_sizes

    opened, target = _opened(source, flags)
    name = entry_of(opened, function)
    sizes = chosen_sizes(dims, opened.manifest["functions"][name]["arguments"])
    explain = explain_schedule if subject is Subject.schedule else explain_memory
    report: ScheduleReport | MemoryReport = explain(opened, name, sizes, target)
    _draw(picture, report.picture)
    _print(report, as_json)


def _opened(source: Any, flags: dict[str, Any]) -> tuple[OpenedBundle, str]:
    """Return the bundle from ``source``, compiled if it is a model, and the target to explain."""
    from aotc.tools.explain.explain import bundle_of
    from aotc.tools.fetch_model import is_bundle

    others = [name for name in flags if name != "target"]
    if others and is_bundle(source):
        options = ", ".join(f"--{name.replace('_', '-').replace('devices', 'device')}" for name in others)
        raise typer.BadParameter("the bundle is compiled already: give its model", param_hint=options)
    return bundle_of(source, **flags)
