"""``aotc explain``: why the compiler did what it did."""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer

from aotc_cli.compiling import devices_of
from aotc_cli.custom_calls import HELP, register_from

SUMMARY = "Tell why the compiler places, schedules and stores as it does."
EXAMPLES = """
aotc explain schedule model.vmfb --picture=schedule.svg

aotc explain memory model.vmfb --dim=batch=8

aotc explain affinity model.mlir

aotc explain affinity model.mlir --picture=affinity.svg

aotc explain affinity model.mlir --json | python -m json.tool
"""


class Subject(StrEnum):
    """What is explained."""

    affinity = "affinity"
    schedule = "schedule"
    memory = "memory"


SUBJECTS = """affinity: on which device each op runs, and what is moved. schedule: what each command takes, what it waits
for and what bounds it. memory: what lies in the arena, and what makes its peak."""


def command(
    subject: Subject = typer.Argument(..., help=SUBJECTS),
    model: str = typer.Argument(
        ...,
        help="StableHLO text or bytecode, a portable artifact, a jax.export blob; - is stdin. Of a schedule or memory "
        "also a .vmfb.",
    ),
    target: str = typer.Option("cpu", help="cpu (this machine) or a name from `aotc targets`."),
    device: list[str] = typer.Option([], help="d0=cpu: a device that the model names, and its target."),
    default_device: str = typer.Option("", help="The device of what nothing places, in a model that names several."),
    place: str = typer.Option("said", help="As for `aotc compile`."),
    custom_calls: list[str] = typer.Option([], "--custom-calls", help=HELP),
    function: str = typer.Option("", help="Of a schedule or memory: which; main by default.", show_default=False),
    dims: list[str] = typer.Option([], "--dim", help="Of a schedule or memory: NAME=SIZE; others are guessed."),
    picture: Path = typer.Option(None, help="The .svg file to draw."),
    as_json: bool = typer.Option(False, "--json", help="Every row, as JSON."),
) -> None:
    """Tell why a model runs as it does: where, when, and in which memory.

    A model that names no device has no affinities. The times of a schedule are the cost model's, or what `aotc profile`
    measured; each turn of a loop is listed once.
    """
    from aotc_cli.compile import check_output

    if picture is not None:
        check_output(picture, "--picture")
    register_from(custom_calls)
    source: Any = sys.stdin.buffer.read() if model == "-" else Path(model)
    flags = {"target": target, "devices": devices_of(device), "default_device": default_device, "place": place}
    if subject is Subject.affinity:
        _affinity(source, flags, picture, as_json)
    else:
        from aotc_cli.explain_bundle import show

        show(subject.value, source, flags, function, dims, picture, as_json)


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
