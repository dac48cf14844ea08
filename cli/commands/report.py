"""``aotc report``: write an HTML page about a bundle or a model."""

from __future__ import annotations

from pathlib import Path

import typer

from aotc_cli.shared.custom_calls import HELP, register_custom_calls_from
from aotc_cli.shared.option_groups import DEBUG_BUNDLE_HELP, DIM_HELP, FUNCTION_HELP

SUMMARY = "Write an HTML page about a bundle: graph, kernels, schedule, memory."
EXAMPLES = """
Write a report about a bundle:

aotc report model.vmfb -o report.html

Write a report about a model, for batches of 8:

aotc report model.mlir -o report.html --dim=batch=8

Measure first, then write the report:

aotc profile model.vmfb --save; aotc report model.vmfb -o report.html
"""


def command(
    model: Path = typer.Argument(..., metavar="MODEL", help=DEBUG_BUNDLE_HELP),
    output: Path = typer.Option(..., "-o", "--output", metavar="FILE", help="The .html file to write."),
    function: str = typer.Option("", metavar="NAME", help=FUNCTION_HELP, show_default=False),
    dims: list[str] = typer.Option([], "--dim", metavar="NAME=SIZE", help=DIM_HELP),
    custom_calls: list[str] = typer.Option([], "--custom-calls", metavar="FILE.py", help=HELP),
) -> None:
    """Write one HTML file that needs no network: time by layer, graph, schedule, memory, roofline, sizes.

    For each kernel it shows time, fused ops, lines of the model, StableHLO, loops, assembly, and why its neighbours
    were not fused. Times are those that `aotc profile --save` stored in the bundle, or else predicted.
    """
    from aotc.tools.page.build import report
    from aotc.vmfb.bundle import open_bundle
    from aotc_cli.commands.compile import check_output
    from aotc_cli.commands.profile import compiled_bundle_of_model
    from aotc_cli.shared.inputs import parse_sizes, print_assumed

    check_output(output, model)
    register_custom_calls_from(custom_calls)
    source = str(model) if (data := compiled_bundle_of_model(model)) is None else data
    functions = open_bundle(source).manifest["functions"]
    arguments = [row for entry in functions.values() for row in entry["arguments"]]
    found = report(source, function=function, sizes=parse_sizes(dims, arguments), name=str(model))
    found.save(output)
    print_assumed(found.assumed, found.typical)
    print(f"{output}: {found}")
