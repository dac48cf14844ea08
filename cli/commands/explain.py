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
    parse_bytes,
    parse_devices,
    read_cost_record,
    warnings_as_sentences,
)
from aotc_cli.shared.custom_calls import HELP, register_custom_calls_from
from aotc_cli.shared.option_groups import OPT_LEVEL_HELP, Panel

if TYPE_CHECKING:
    from aotc.tools.explain.affinity import AffinityReport
    from aotc.tools.explain.collectives import CollectivesReport
    from aotc.tools.explain.fusion import FusionReport
    from aotc.tools.explain.memory import MemoryReport
    from aotc.tools.explain.schedule import ScheduleReport
    from aotc.tools.explain.step import StepReport
    from aotc.vmfb.bundle import OpenedBundle

    Report = AffinityReport | FusionReport | ScheduleReport | MemoryReport | CollectivesReport | StepReport

SUMMARY = "Explain fusion, placement, schedule and memory of a model."
EXAMPLES = """
Show which ops are fused, and why others are not:

aotc explain fusion model.mlir --target=cuda:sm_90 --shared-memory-limit=4096

Draw the schedule of a call:

aotc explain schedule model.vmfb --picture=schedule.svg

List the buffers at the peak of memory, for batches of 8:

aotc explain memory model.vmfb --dim=batch=8

Show the device of each op, in text, as a picture or as JSON:

aotc explain affinity model.mlir

aotc explain affinity model.mlir --picture=affinity.svg

aotc explain affinity model.vmfb --json | python -m json.tool

Place ops on a CPU and a GPU by measured costs:

aotc explain affinity model.mlir --device d0=cpu --device d1=cuda:sm_90 --place=auto --costs=record.json

List what the ranks of a sharded model send, with times for InfiniBand:

aotc explain collectives sharded.vmfb --link=ib

Simulate a call of a sharded model on hosts with 8 GPUs, without GPUs here:

aotc explain step sharded.vmfb --between=ethernet --ranks-per-host=8
"""


class Subject(StrEnum):
    """Subjects of an explanation."""

    affinity = "affinity"
    fusion = "fusion"
    schedule = "schedule"
    memory = "memory"
    collectives = "collectives"
    step = "step"


class LinkName(StrEnum):
    """Links between ranks whose times are known."""

    nvlink = "nvlink"
    pcie = "pcie"
    ib = "ib"
    ethernet = "ethernet"
    loopback = "loopback"


class HostLinkName(StrEnum):
    """Links between hosts for a simulated step."""

    ib = "ib"
    ethernet = "ethernet"


TARGET = "cpu (this machine, the default), or a name from `aotc targets`."
SUBJECTS = """affinity: the device of each op, and the transfers. fusion: the ops of each kernel. schedule: time,
dependencies and bottleneck of each command. memory: the buffers of a call, and its peak. collectives:
what the ranks of a sharded model send to each other. step: a simulated call of a sharded model on a cluster."""
_PICTURES = (Subject.affinity, Subject.schedule, Subject.memory)
_SIZES = (Subject.schedule, Subject.memory)


def command(
    subject: Subject = typer.Argument(..., metavar="SUBJECT", help=SUBJECTS),
    model: str = typer.Argument(
        ..., metavar="MODEL",
        help="StableHLO text or bytecode, a portable artifact, a jax.export blob, or a .vmfb; - is stdin.",
    ),
    opt_level: int = typer.Option(None, "-O", "--opt-level", min=0, max=3, metavar="LEVEL", help=OPT_LEVEL_HELP),
    custom_calls: list[str] = typer.Option([], "--custom-calls", metavar="FILE.py", help=HELP),
    function: str = typer.Option(
        "", metavar="NAME", show_default=False,
        help="The function; default: all for fusion and affinity, else main.",
    ),
    dims: list[str] = typer.Option(
        [], "--dim", rich_help_panel=Panel.INPUTS, metavar="NAME=SIZE",
        help="For schedule and memory: size of a symbolic dim; others are assumed, and printed.",
    ),
    picture: Path = typer.Option(
        None, rich_help_panel=Panel.RESULTS, metavar="FILE.svg",
        help="Draw an .svg file; not for fusion, collectives or step.",
    ),
    link: LinkName = typer.Option(
        LinkName.nvlink, rich_help_panel=Panel.INPUTS, metavar="LINK",
        help="For collectives: the link that times are for: nvlink, pcie, ib, ethernet or loopback. For step: the link "
        "inside a host, nvlink or pcie.",
    ),
    between: HostLinkName = typer.Option(
        HostLinkName.ib, rich_help_panel=Panel.INPUTS, metavar="LINK",
        help="For step: the link between hosts, ib or ethernet.",
    ),
    ranks_per_host: int = typer.Option(
        8, rich_help_panel=Panel.INPUTS, min=1, metavar="N", help="For step: ranks of a host, in the order of ranks.",
    ),
    as_json: bool = typer.Option(False, "--json", rich_help_panel=Panel.RESULTS, help="Print every row, as JSON."),
    target: str = typer.Option("", rich_help_panel=Panel.TARGET, metavar="NAME", help=TARGET),
    host_target: str = typer.Option("", rich_help_panel=Panel.TARGET, metavar="NAME", help=HOST_TARGET_HELP),
    device: list[str] = typer.Option([], rich_help_panel=Panel.DEVICES, metavar="DEVICE=TARGET", help=DEVICE_HELP),
    default_device: str = typer.Option("", rich_help_panel=Panel.DEVICES, metavar="DEVICE", help=DEFAULT_DEVICE_HELP),
    place: str = typer.Option("", rich_help_panel=Panel.DEVICES, metavar="said|auto", help=PLACE_HELP),
    costs: Path = typer.Option(None, rich_help_panel=Panel.DEVICES, metavar="FILE", help=COSTS_HELP),
    memory_limit: str = typer.Option("", rich_help_panel=Panel.LIMITS, metavar="BYTES", help=MEMORY_HELP),
    stack_limit: str = typer.Option("", rich_help_panel=Panel.LIMITS, metavar="BYTES", help=STACK_HELP),
    shared_memory_limit: str = typer.Option("", rich_help_panel=Panel.LIMITS, metavar="BYTES", help=SHARED_HELP),
) -> None:
    """Explain how a model runs: its kernels, devices, schedule and memory.

    affinity is empty for models that name no device. fusion shows each kernel with its source lines, bytes, scalar
    operations and memory, and why each neighbour was fused or not. For a bundle, fusion and affinity compile the model
    in it, for its targets and options. Times of a schedule are predicted, or those that `aotc profile --save` stored;
    each iteration of a loop is listed once.
    """
    _check_picture(picture, subject)
    if dims and subject not in _SIZES:
        raise typer.BadParameter(f"{subject.value} is the same for all sizes", param_hint="--dim")
    register_custom_calls_from(custom_calls)
    source: Any = sys.stdin.buffer.read() if model == "-" else Path(model)
    stated = {
        "target": target, "opt_level": opt_level, "devices": parse_devices(device), "default_device": default_device,
        "place": place, "host_target": host_target, "costs": read_cost_record(costs),
    }  # fmt: skip
    limits = {"--stack-limit": stack_limit, "--shared-memory-limit": shared_memory_limit}
    for option, text in {**limits, "--memory-limit": memory_limit}.items():
        stated[option[2:].replace("-", "_")] = parse_bytes(text, option) if text else None
    flags = {name: value for name, value in stated.items() if value not in ("", None, {})}
    with warnings_as_sentences():
        if subject in (Subject.affinity, Subject.fusion):
            _explain_model(subject, source, {**flags, "function": function}, picture, as_json)
        elif subject is Subject.collectives:
            _explain_collectives(source, flags, function, link, as_json)
        elif subject is Subject.step:
            _explain_step(source, flags, function, (link.value, between.value, ranks_per_host), as_json)
        else:
            _explain_bundle(subject, source, flags, function, dims, picture, as_json)


def _check_picture(picture: Path | None, subject: Subject) -> None:
    """Refuse a picture that cannot be written."""
    from aotc_cli.commands.compile import check_output

    if picture is None:
        return
    if subject not in _PICTURES:
        raise typer.BadParameter(f"there is no picture of {subject.value}", param_hint="--picture")
    if picture.suffix.lower() != ".svg" and (picture.suffix or not picture.exists()):  # an existing file may be a pipe
        raise typer.BadParameter(f"{picture.name} must be an .svg file", param_hint="--picture")
    check_output(picture, option="--picture")


def _explain_model(subject: Subject, source: Any, flags: dict[str, Any], picture: Path | None, as_json: bool) -> None:
    """Print the fusion or placement report of a model."""
    from aotc.tools.explain.affinity import explain_affinity
    from aotc.tools.explain.fusion import explain_fusion

    if subject is Subject.fusion:
        _print_report(explain_fusion(source, **flags), as_json)
        return
    report = explain_affinity(source, **flags)
    if picture is not None and not report.devices:
        raise typer.BadParameter("the model names no device", param_hint="--picture")
    _write_picture(picture, report.picture)
    _print_report(report, as_json, {"transfers": [asdict(row) for row in report.transfers]})


def _write_picture(picture: Path | None, svg: str) -> None:
    from aotc.vmfb.host.files import write_atomically

    if picture is not None:
        write_atomically(str(picture), [svg.encode()])


def _print_report(report: Report, as_json: bool, more: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Print a report as text, or as JSON without its picture."""
    from aotc_cli.shared.tables import print_document

    if as_json:
        import json

        facts = {key: value for key, value in asdict(report).items() if key != "picture"}
        print(json.dumps({**facts, **more}, indent=1))
    else:
        print_document(report.document())


def _explain_bundle(
    subject: Subject, source: Any, flags: dict[str, Any], function: str, dims: list[str], picture: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Print the report about a bundle; a model is compiled to a bundle first."""
    from aotc.tools.explain.memory import explain_memory
    from aotc.tools.explain.schedule import explain_schedule
    from aotc.tools.flow import chosen_function_name
    from aotc.vmfb.arguments import Signature
    from aotc_cli.shared.inputs import sizes_with_notice

    opened, target = _opened_bundle(source, flags)
    name = chosen_function_name(opened, function)
    sizes = sizes_with_notice(dims, Signature(name, opened.manifest["functions"][name]))
    explain = explain_schedule if subject is Subject.schedule else explain_memory
    report: ScheduleReport | MemoryReport = explain(opened, name, sizes, target)
    _write_picture(picture, report.picture)
    _print_report(report, as_json)


def _explain_collectives(
    source: bytes | Path, flags: dict[str, Any], function: str, link: LinkName, as_json: bool
) -> None:
    """Print the report about collectives of a bundle; a model is compiled to a bundle first."""
    from aotc.tools.explain.collectives import explain_collectives

    opened, target = _opened_bundle(source, flags)
    _print_report(explain_collectives(opened, function, target, link.value), as_json)


def _explain_step(
    source: bytes | Path, flags: dict[str, Any], function: str, cluster: tuple[str, str, int], as_json: bool
) -> None:
    """Print the report about a simulated call on a cluster: links inside and between hosts, ranks of a host."""
    from aotc.tools.explain.step import explain_step
    from aotc.tools.simulate.cluster import cluster_of

    chosen = cluster_of(*cluster)
    opened, target = _opened_bundle(source, flags)
    _print_report(explain_step(opened, chosen, function, target), as_json)


def _opened_bundle(source: Any, flags: dict[str, Any]) -> tuple[OpenedBundle, str]:
    """Open a bundle, or compile a model to one; return it with the target to explain."""
    from aotc.tools.explain.explain import bundle_of
    from aotc.tools.fetch_model import is_bundle

    others = [name for name in flags if name != "target"]
    if others and is_bundle(source):
        options = ", ".join(f"--{name.replace('_', '-').replace('devices', 'device')}" for name in others)
        raise typer.BadParameter("the bundle is compiled already: give its model", param_hint=options)
    return bundle_of(source, **flags)
