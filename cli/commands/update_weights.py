"""``aotc update-weights``: replace the weights of a bundle, without compiling."""

from __future__ import annotations

from pathlib import Path

import typer

from aotc_cli.commands.compile import check_output

SUMMARY = "Give a bundle other weights, by their names; nothing is compiled."
EXAMPLES = """
aotc update-weights model.vmfb checkpoint.safetensors
aotc update-weights model.vmfb checkpoint.safetensors -o new.vmfb --file=new.safetensors
"""


def command(
    bundle: Path = typer.Argument(..., help="A .vmfb file that was compiled with --bind."),
    weights: Path = typer.Argument(..., help="A .safetensors file with a tensor for each weight, as params/w."),
    output: Path | None = typer.Option(None, "-o", "--output", help="The bundle to write; default: in place."),
    file: str = typer.Option(
        "", help="The .safetensors file to write them to, beside the bundle; default: where they were, else inside."
    ),
) -> None:
    """Write the bundle with these weights; its functions take the other arguments.

    Names, dtypes and shapes are compared first, and all that differs is listed. A signature does not survive.
    """
    from aotc.vmfb.bundle import open_bundle, write_file
    from aotc.vmfb.weights.own import WEIGHTS, with_weights
    from aotc.vmfb.weights.tensors import read_tensors

    written = output or bundle
    check_output(written, weights)
    opened = open_bundle(str(bundle))
    given = read_tensors(weights, copy=True)
    known = (opened.manifest.get(WEIGHTS) or {}).get("file", "")
    place = file or (str(written.with_name(known)) if known else "")
    write_file(str(written), [with_weights(opened, given, place)])
    beside = f", {place}" if place else ""
    print(f"{written}{beside}: {len(given)} weights, {sum(x.nbytes for x in given.values()):,} bytes")
