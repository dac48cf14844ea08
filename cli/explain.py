"""``aotc explain``: why the compiler did what it did."""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer

from aotc_cli.compiling import SHARED_HELP, STACK_HELP, devices_of
from aotc_cli.custom_calls import HELP, register_from

SUMMARY = "Tell why the compiler places ops as it does, and why it makes them one kernel or two."
EXAMPLES = """
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


def command(
    subject: Subject = typer.Argument(
        ..., help="affinity: on which device each op runs, and what is moved. fusion: which ops are one kernel."
    ),
    model: str = typer.Argument(
        ..., help="StableHLO text or bytecode, a portable artifact, a jax.export blob; - is stdin; for fusion a bundle."
    ),
    target: str = typer.Option("", help="cpu (this machine, the default) or a name from `aotc targets`."),
    opt_level: int = typer.Option(None, "-O", "--opt-level", min=0, max=3, help="As for `aotc compile`; of fusion."),
    stack_limit: int = typer.Option(None, min=0, help=STACK_HELP),
    shared_memory_limit: int = typer.Option(None, min=0, help=SHARED_HELP),
    device: list[str] = typer.Option([], help="d0=cpu: a device that the model names, and its target."),
    default_device: str = typer.Option("", help="The device of what nothing places, in a model that names several."),
    place: str = typer.Option("said", help="As for `aotc compile`."),
    custom_calls: list[str] = typer.Option([], "--custom-calls", help=HELP),
    picture: Path = typer.Option(None, help="The .svg file to draw: a lane for each device, arrows for transfers."),
    as_json: bool = typer.Option(False, "--json", help="Every row, as JSON."),
) -> None:
    """Tell why a model is compiled as it is.

    affinity: on which device each argument and op is, why, and what is moved between devices; a model that names no
    device has no rows. fusion: each kernel with the lines that it is from, its bytes and scalar operations, the memory
    that it takes and how much there is, and why each neighbour was taken or refused. A bundle is explained from the
    model in it, for its own target and options.
    """
    register_from(custom_calls)
    source: Any = sys.stdin.buffer.read() if model == "-" else Path(model)
    flags: dict[str, Any] = {"devices": devices_of(device), "default_device": default_device, "place": place}
    if subject is Subject.fusion:
        if picture is not None:
            raise typer.BadParameter("only affinities have a picture", param_hint="--picture")
        given = {
            "target": target or None, "opt_level": opt_level, "stack_limit": stack_limit,
            "shared_memory_limit": shared_memory_limit,
        }  # fmt: skip
        set_ = {name: value for name, value in flags.items() if value not in ({}, "", "said")}
        _fusion(source, {**set_, **{n: v for n, v in given.items() if v is not None}}, as_json)
        return
    _affinity(source, {**flags, "target": target or "cpu"}, picture, as_json)


def _affinity(source: Any, flags: dict[str, Any], picture: Path | None, as_json: bool) -> None:
    from aotc.tools.explain_affinity import explain_affinity
    from aotc.vmfb.files import write_whole
    from aotc_cli.compile import check_output

    if picture is not None:
        check_output(picture, "--picture")
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
