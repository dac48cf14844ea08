"""``aotc targets``: list the compilation targets."""

from __future__ import annotations

from typing import Any

import typer

SUMMARY = "List the targets, and which of them this machine can run."
EXAMPLES = """
List all targets:

aotc targets

Compile for two of them:

aotc compile model.mlir -o model.vmfb --target=cpu:x86-64-v3,cpu:x86-64-v4
"""


def command(as_json: bool = typer.Option(False, "--json", help="Print the list as JSON.")) -> None:
    """List the names for --target: processor, required features, and whether this machine has them."""
    import json

    from aotc.targets import OTHER_NAMES, TARGETS, host_target, runs_on_this_machine, target_requirements
    from aotc_cli.shared.tables import print_table

    best = host_target().name
    rows: list[dict[str, Any]] = []
    for target in TARGETS.values():
        fits = runs_on_this_machine(target)
        rows.append(
            {
                "name": target.name,
                "other_names": [other for other, name in OTHER_NAMES.items() if name == target.name],
                "features": list(target.features),
                "runs_here": fits,
                "host": target.name == best,
                "untried": target.untried,
            }
        )
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    lines = []
    for target, row in zip(TARGETS.values(), rows):
        note = "the default here" if row["host"] else "runs here" if row["runs_here"] else ""
        lines.append((", ".join([target.name, *row["other_names"]]), note, target_requirements(target)))
    print_table(("target", "here", "needs"), lines)
