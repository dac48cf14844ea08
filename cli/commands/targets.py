"""``aotc targets``: list the compilation targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from aotc.targets import Target

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
    import platform

    from aotc.targets import OTHER_NAMES, TARGETS, host_target
    from aotc.vmfb.host.machine import cpu_features
    from aotc_cli.shared.tables import print_table

    best, have, machine = host_target().name, cpu_features(), platform.machine().replace("arm64", "aarch64")
    rows = []
    for target in TARGETS.values():
        missing = sorted(set(target.features) - have)
        fits = target.kind == "cpu" and target.triple.startswith(machine) and not missing
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
        lines.append((", ".join([target.name, *row["other_names"]]), note, _target_requirements(target)))
    print_table(("target", "here", "needs"), lines)


def _target_requirements(target: Target) -> str:
    """Format the processor features that a target needs, and a remark if it is untested."""
    if target.kind == "cpu":
        return " ".join(target.features)
    what = "any NVIDIA GPU from sm_80 on: PTX for its driver" if target.portable else "an NVIDIA GPU"
    return f"{what} (compiled, never run)" if target.untried else what
