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

SUMMARY = "Tell why the compiler places ops as it does."
EXAMPLES = """
aotc explain affinity model.mlir

aotc explain affinity model.mlir --picture=affinity.svg

aotc explain affinity model.mlir --json | python -m json.tool
"""


class Subject(StrEnum):
    """What is explained."""

    affinity = "affinity"


def command(
    subject: Subject = typer.Argument(..., help="affinity: on which device each op runs, and what is moved."),
    model: str = typer.Argument(
        ..., help="StableHLO text or bytecode, a portable artifact, a jax.export blob; - is stdin."
    ),
    target: str = typer.Option("cpu", help="cpu (this machine) or a name from `aotc targets`."),
    device: list[str] = typer.Option([], help="d0=cpu: a device that the model names, and its target."),
    default_device: str = typer.Option("", help="The device of what nothing places, in a model that names several."),
    place: str = typer.Option("said", help="As for `aotc compile`."),
    custom_calls: list[str] = typer.Option([], "--custom-calls", help=HELP),
    picture: Path = typer.Option(None, help="The .svg file to draw: a lane for each device, arrows for transfers."),
    as_json: bool = typer.Option(False, "--json", help="Every row, as JSON."),
) -> None:
    """Tell on which device each argument and op of a model is, why, and what is moved between devices.

    A model that names no device has no rows.
    """
    from aotc.tools.explain_affinity import explain_affinity
    from aotc.vmfb.files import write_whole
    from aotc_cli.compile import check_output

    if picture is not None:
        check_output(picture, "--picture")
    register_from(custom_calls)
    source: Any = sys.stdin.buffer.read() if model == "-" else Path(model)
    flags = {"target": target, "devices": devices_of(device), "default_device": default_device, "place": place}
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
