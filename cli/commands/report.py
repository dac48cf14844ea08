"""``aotc report``: write an HTML page about a bundle or a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from aotc_cli.shared.custom_calls import HELP, register_from

SUMMARY = "Write a page about a bundle: its graph, kernels, schedule, memory."
EXAMPLES = """
Write a report about a bundle:

aotc report model.vmfb -o report.html

Write a report about a model, for batches of 8:

aotc report model.mlir -o report.html --dim=batch=8

Measure first, then write the report:

aotc profile model.vmfb --save; aotc report model.vmfb -o report.html
"""


def command(
    model: Path = typer.Argument(..., help="A .vmfb file with debug information, or a model, which is compiled."),
    output: Path = typer.Option(..., "-o", "--output", metavar="FILE", help="The .html file to write."),
    function: str = typer.Option("", metavar="NAME", help="The function; main by default.", show_default=False),
    dims: list[str] = typer.Option([], "--dim", metavar="NAME=SIZE", help="Size of a dim; others are assumed."),
    custom_calls: list[str] = typer.Option([], "--custom-calls", help=HELP),
) -> None:
    """Write one HTML file that needs no network: time by layer, graph, schedule, memory, roofline, sizes.

    For each kernel it shows time, fused ops, lines of the model, StableHLO, loops, assembly, and why its neighbours
    were not fused. Times are those that `aotc profile --save` stored in the bundle, or else predicted.
    """
    from aotc.vmfb.host.files import write_atomically
    from aotc_cli.commands.compile import check_output
    from aotc_cli.shared.inputs import print_assumed
    from aotc_cli.shared.units import count_text, size_text

    check_output(output, model)
    register_from(custom_calls)
    facts = facts_about(model, function, dims)
    from aotc.tools.page.build import page_of

    data = page_of(facts).encode()
    write_atomically(str(output), [data])
    print_assumed({dim: facts["sizes"][dim] for dim in facts["assumed"]})
    print(f"{output}: {count_text(len(facts['kernels']), 'kernel')}, {size_text(len(data))}")


def facts_about(model: Path, function: str, dims: list[str]) -> dict[str, Any]:
    """Return the facts about a function of a bundle, or of the bundle that a model compiles to."""
    from aotc.tools.flow import entry_of
    from aotc.tools.page.facts import facts_of
    from aotc.vmfb.bundle import open_bundle
    from aotc_cli.commands.profile import compiled
    from aotc_cli.shared.inputs import parse_sizes

    data = compiled(model)
    opened = open_bundle(str(model) if data is None else data)
    name = entry_of(opened, function)
    sizes = parse_sizes(dims, opened.manifest["functions"][name]["arguments"])
    return facts_of(model.read_bytes() if data is None else data, str(model), name, sizes)
