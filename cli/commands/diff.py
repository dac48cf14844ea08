"""``aotc diff``: compare two bundles."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from aotc_cli.commands.report import facts_about
from aotc_cli.shared.custom_calls import HELP, register_from

SUMMARY = "Compare two bundles: kernels, arena, weights, time."
EXAMPLES = """
aotc diff old.vmfb new.vmfb

aotc diff model.vmfb model.mlir --json
"""


def command(
    first: Path = typer.Argument(..., help="A .vmfb file with debug information, or a model."),
    second: Path = typer.Argument(..., help="Another one."),
    function: str = typer.Option("", help="Which function; main by default.", show_default=False),
    dims: list[str] = typer.Option([], "--dim", help="NAME=SIZE; others are guessed."),
    custom_calls: list[str] = typer.Option([], "--custom-calls", help=HELP),
    as_json: bool = typer.Option(False, "--json", help="Every row, as JSON."),
) -> None:
    """Compare two bundles: what the whole takes, and which kernels are the same, have changed, or are in one alone.

    Kernels of equal text are the same, whatever their names; of one name and other text they have changed. Times are
    the cost model's, or those that `aotc profile` left in a bundle.
    """
    from aotc.tools.page.compare import compare

    register_from(custom_calls)
    found = compare(*(facts_about(path, function, dims) for path in (first, second)))
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _print(found, first.name, second.name)


def _print(found: Mapping[str, Any], first: str, second: str) -> None:
    from aotc_cli.shared.tables import print_line, print_table
    from aotc_cli.shared.units import count_text, size_text, time_text

    shown = {"bytes": size_text, "ns": lambda ns: time_text(ns / 1e9), "count": "{:,}".format}
    rows: list[Sequence[str]] = []
    for row in found["whole"]:
        a, b = (shown[row["unit"]](row[side]) for side in ("first", "second"))
        rows.append((row["what"], a, b, _ratio(row["first"], row["second"])))
    print_table(("", first, second, "ratio"), rows, (first, second, "ratio"))
    changed = [row for row in found["kernels"] if row["state"] != "same"]
    print()
    if changed:
        table = [
            (row["kernel"], row["state"], *(time_text(ns / 1e9) if ns else "" for ns in (row["first"], row["second"])),
             _ratio(row["first"], row["second"]), row["loc"])
            for row in changed
        ]  # fmt: skip
        print_table(("kernel", "is", first, second, "ratio", "from"), table, (first, second, "ratio"))
    same = len(found["kernels"]) - len(changed)
    print_line(f"{count_text(same, 'kernel')} the same, {len(changed)} not", 2)


def _ratio(a: float, b: float) -> str:
    return f"{b / a:.2f}" if a and b else ""
