"""``aotc diff``: compare two bundles."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer

from aotc_cli.shared.custom_calls import HELP, register_custom_calls_from
from aotc_cli.shared.option_groups import DIM_HELP, FUNCTION_HELP

SUMMARY = "Compare two bundles: signature, options, weights, kernels, time."
EXAMPLES = """
Compare two bundles:

aotc diff old.vmfb new.vmfb

Compare a bundle with a model, as JSON:

aotc diff model.vmfb model.mlir --json
"""


def command(
    first: Path = typer.Argument(..., metavar="BUNDLE", help="A .vmfb file with debug information, or a model."),
    second: Path = typer.Argument(..., metavar="BUNDLE", help="The bundle or model to compare with."),
    function: str = typer.Option("", metavar="NAME", help=FUNCTION_HELP, show_default=False),
    dims: list[str] = typer.Option([], "--dim", metavar="NAME=SIZE", help=DIM_HELP),
    custom_calls: list[str] = typer.Option([], "--custom-calls", metavar="FILE.py", help=HELP),
    as_json: bool = typer.Option(False, "--json", help="Print every row, as JSON."),
) -> None:
    """Compare two bundles: signatures, targets and options that differ, sizes and times, weights, kernels.

    Weights are compared by name and digest. Kernels of equal text are the same, whatever their names; others are paired
    by their place in the model and their kind, or by name. Times are predicted, or those that `aotc profile --save`
    stored in a bundle.
    """
    from aotc.tools.page.compare import diff
    from aotc.vmfb.bundle import open_bundle
    from aotc_cli.commands.profile import compiled_bundle_of_model
    from aotc_cli.shared.inputs import parse_sizes
    from aotc_cli.shared.tables import print_document

    register_custom_calls_from(custom_calls)
    sources = [str(path) if (data := compiled_bundle_of_model(path)) is None else data for path in (first, second)]
    functions = open_bundle(sources[0]).manifest["functions"]
    arguments = [row for entry in functions.values() for row in entry["arguments"]]
    found = diff(*sources, function=function, sizes=parse_sizes(dims, arguments), names=(str(first), str(second)))
    if as_json:
        print(json.dumps(asdict(found), indent=1))
    else:
        print_document(found.document())
