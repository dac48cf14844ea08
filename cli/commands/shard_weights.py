"""``aotc shard-weights``: cut a checkpoint into the parts of ranks."""

from __future__ import annotations

from pathlib import Path

import typer

SUMMARY = "Cut a checkpoint into one file for each set of parts that ranks of a sharded model read."
EXAMPLES = """
Cut a checkpoint of one file, or of several that an index lists:

aotc shard-weights model.vmfb checkpoint.safetensors -o shards/

aotc shard-weights model.vmfb model.safetensors.index.json -o shards/
"""


def command(
    bundle: Path = typer.Argument(..., metavar="BUNDLE", help="A .vmfb file that was compiled with a mesh and --bind."),
    checkpoint: Path = typer.Argument(
        ..., metavar="CHECKPOINT",
        help="A .safetensors file of whole arrays, such as params/w, or the .safetensors.index.json of several.",
    ),
    output: Path = typer.Option(..., "-o", "--output", metavar="FOLDER", help="The folder to write; made if missing."),
) -> None:
    """Write the parts as safetensors files, and shards.json with their ranks and digests. JAX is not needed.

    Ranks with the same parts share a file, named by its place in the mesh. aotc.load(bundle, weights=FOLDER) maps the
    file of its rank alone. Memory is bounded: no array is read as a whole.
    """
    from aotc.vmfb.weights.shards import shard_weights

    for row in shard_weights(bundle, checkpoint, output):
        ranks = ", ".join(map(str, row.ranks))
        print(f"{output / row.file}: {row.bytes:,} bytes, for rank{'s' * (len(row.ranks) > 1)} {ranks}")
