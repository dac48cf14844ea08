"""``aotc update-weights``: replace the weights of a bundle, without compiling."""

from __future__ import annotations

from pathlib import Path

import typer

from aotc_cli.commands.compile import check_output

SUMMARY = "Replace the weights of a bundle, by name, without compiling."
EXAMPLES = """
Replace the weights in place:

aotc update-weights model.vmfb checkpoint.safetensors

Write a new bundle, with its weights in a file of their own:

aotc update-weights model.vmfb checkpoint.safetensors -o new.vmfb --file=new.safetensors
"""


def command(
    bundle: Path = typer.Argument(..., metavar="BUNDLE", help="A .vmfb file that was compiled with --bind."),
    weights: Path = typer.Argument(
        ..., metavar="FILE", help="A .safetensors file with a tensor for each weight, such as params/w."
    ),
    output: Path | None = typer.Option(
        None, "-o", "--output", metavar="FILE", help="The bundle to write; default: in place."
    ),
    file: str = typer.Option(
        "", metavar="FILE",
        help="The .safetensors file to write, next to the bundle; default: as before, a file or in the bundle.",
    ),
) -> None:
    """Replace the weights of a bundle; its functions then need only the other arguments.

    Names, dtypes and shapes must match; all differences are listed. A signature is not copied: sign the bundle again.
    """
    from aotc.vmfb.bundle import open_bundle, write_bundle_file
    from aotc.vmfb.weights.own import WEIGHTS, bundle_with_weights, refuse_unbound_bundle
    from aotc.vmfb.weights.tensors import read_tensors

    written = output or bundle
    check_output(written, weights)
    opened = open_bundle(str(bundle))
    refuse_unbound_bundle(opened)
    given = read_tensors(weights, copy=True)
    known = (opened.manifest.get(WEIGHTS) or {}).get("file", "")
    place = file or (str(written.with_name(known)) if known else "")
    write_bundle_file(str(written), [bundle_with_weights(opened, given, place)])
    beside = f", {place}" if place else ""
    print(f"{written}{beside}: {len(given)} weights, {sum(x.nbytes for x in given.values()):,} bytes")
