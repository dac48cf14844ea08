"""``aotc inspect``: the contents of a bundle."""

from __future__ import annotations

from pathlib import Path

import typer

from aotc_cli.shared.option_groups import BUNDLE_HELP

SUMMARY = "Show the contents of a bundle."
EXAMPLES = """
Show a summary:

aotc inspect model.vmfb

List all kernels:

aotc inspect model.vmfb --kernels

Print everything as JSON:

aotc inspect model.vmfb --json | python -m json.tool
"""


def command(
    bundle: Path = typer.Argument(..., metavar="BUNDLE", help=BUNDLE_HELP),
    kernels: bool = typer.Option(False, "--kernels", help="Show only the table of kernels."),
    buffers: bool = typer.Option(False, "--buffers", help="Show only the table of buffers."),
    segments: bool = typer.Option(False, "--segments", help="Show only the table of the file's segments."),
    everything: bool = typer.Option(False, "--all", help="Show the whole summary and all tables."),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON."),
) -> None:
    """Show signatures, symbolic dims, targets, sizes, weights, memory and the slowest kernels of a bundle.

    Nothing is run, so bundles for other machines can be inspected. Times are those that `aotc profile --save` stored,
    or else predictions for one core or a whole GPU.
    """
    if as_json:
        import json

        from aotc.vmfb.bundle import open_bundle
        from aotc.vmfb.describe import describe_bundle

        print(json.dumps(describe_bundle(open_bundle(str(bundle)), bundle.stat().st_size), indent=1))
        return
    from aotc.tools.inspect import inspect
    from aotc_cli.shared.tables import print_document

    found = inspect(bundle)
    wanted = (kernels, buffers, segments, everything)
    print_document(found.details(*wanted) if any(wanted) else found.document())
