"""``aotc inspect``: the contents of a bundle."""

from __future__ import annotations

from pathlib import Path

import typer

SUMMARY = "Show what a bundle holds."
EXAMPLES = """
aotc inspect model.vmfb

aotc inspect model.vmfb --kernels

aotc inspect model.vmfb --json | python -m json.tool
"""


def command(
    bundle: Path = typer.Argument(..., help="The .vmfb file."),
    kernels: bool = typer.Option(False, "--kernels", help="Only the table of all kernels."),
    buffers: bool = typer.Option(False, "--buffers", help="Only the table of all buffers."),
    segments: bool = typer.Option(False, "--segments", help="Only the table of the file's segments."),
    everything: bool = typer.Option(False, "--all", help="The summary in full and all tables."),
    as_json: bool = typer.Option(False, "--json", help="Everything, as JSON."),
) -> None:
    """Show signatures, symbolic dims, targets, sizes, weights, memory and the slowest kernels of a bundle.

    Nothing is run: this works for bundles that this machine cannot run. Times are those of `aotc profile`, if the
    bundle has them, or else predictions for one core or a whole GPU.
    """
    if as_json:
        import json

        from aotc.vmfb.bundle import open_bundle
        from aotc.vmfb.describe import describe

        print(json.dumps(describe(open_bundle(str(bundle)), bundle.stat().st_size), indent=1))
        return
    from aotc.tools.inspect import inspect
    from aotc_cli.shared.tables import show

    found = inspect(bundle)
    wanted = (kernels, buffers, segments, everything)
    show(found.details(*wanted) if any(wanted) else found.document())
