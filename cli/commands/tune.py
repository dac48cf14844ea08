"""``aotc tune``: search compiler decisions that make a bundle faster on this machine."""

from __future__ import annotations

from pathlib import Path

import typer

from aotc_cli.shared.custom_calls import HELP, register_custom_calls_from
from aotc_cli.shared.device_option import PLACES_HELP, parse_places
from aotc_cli.shared.option_groups import DIM_HELP, FUNCTION_HELP, INPUT_HELP, THREADS_HELP, Panel
from aotc_cli.shared.progress_bar import step_status

SUMMARY = "Search compiler decisions that make a bundle faster."
EXAMPLES = """
Search for a minute, and write the faster bundle:

aotc tune model.vmfb -o tuned.vmfb

Tune for the arguments and sizes of your service, for ten minutes:

aotc tune model.vmfb -o tuned.vmfb --input=@x.npy --dim=batch=8 --budget=600

Also write the record, and compile another version of the model with it:

aotc tune model.vmfb -o tuned.vmfb --record=tuning.json

aotc compile model2.mlir -o model2.vmfb --tuning=tuning.json
"""


def command(
    bundle: Path = typer.Argument(..., metavar="BUNDLE", help="A .vmfb file that was compiled without --no-source."),
    output: Path = typer.Option(..., "-o", "--output", metavar="FILE", help="The bundle to write."),
    record: Path | None = typer.Option(
        None, metavar="FILE.json", help="Also write the choices, for `aotc compile --tuning`."
    ),
    budget: float = typer.Option(60.0, min=1, metavar="SECONDS", help="Time of the search."),
    function: str = typer.Option("", metavar="NAME", help=FUNCTION_HELP, show_default=False),
    custom_calls: list[str] = typer.Option([], "--custom-calls", metavar="FILE.py", help=HELP),
    quiet: bool = typer.Option(False, "-q", "--quiet", help="Print no progress and no summary."),
    inputs: list[str] = typer.Option([], "--input", rich_help_panel=Panel.INPUTS, metavar="VALUE", help=INPUT_HELP),
    dims: list[str] = typer.Option([], "--dim", rich_help_panel=Panel.INPUTS, metavar="NAME=SIZE", help=DIM_HELP),
    weights: str | None = typer.Option(
        None, rich_help_panel=Panel.WEIGHTS, metavar="inline|FILE",
        help="inline, or the .safetensors file to write; default: the old name, next to the new bundle.",
    ),
    device: list[str] = typer.Option([], rich_help_panel=Panel.DEVICES, metavar="DEVICE", help=PLACES_HELP),
    threads: int | None = typer.Option(None, rich_help_panel=Panel.DEVICES, metavar="N", help=THREADS_HELP),
) -> None:
    """Search compiler decisions that make a function of a bundle faster on this machine, and compile it with them.

    A candidate reverses one decision of the compiler, or halves or doubles a block size. Its results are compared with
    XLA's, and its calls are timed in turns with those of the best bundle so far. The new bundle runs on the same
    machines as the old one; it must be signed again.
    """
    import aotc
    from aotc.lowering.tuning import tuning_record_text
    from aotc.vmfb.host.files import write_atomically
    from aotc_cli.commands.compile import check_output, warn_of_unreachable_weights
    from aotc_cli.commands.profile import arguments_of_profile
    from aotc_cli.commands.upgrade import external_weights_of
    from aotc_cli.shared.tables import print_document

    check_output(output)
    if record is not None:
        check_output(record, option="--record")
    register_custom_calls_from(custom_calls)
    devices = parse_places(device)
    if isinstance(devices, dict):
        raise typer.BadParameter("tune a bundle for one device", param_hint="--device")
    place = weights or external_weights_of(bundle, output)
    loaded = aotc.load(str(bundle), devices=devices, threads=1, copy=True)
    name, values, sizes = arguments_of_profile(loaded, function, inputs, dims)
    with step_status(quiet) as progress:
        tuned = aotc.tune(
            bundle, function=name, inputs=values, sizes=sizes, budget=budget, devices=devices, threads=threads,
            weights=place, progress=progress,
        )  # fmt: skip
    tuned.bundle.save(output)
    warn_of_unreachable_weights(tuned.bundle, place, output)
    if record is not None:
        write_atomically(str(record), [tuning_record_text(tuned.record).encode()])
    if not quiet:
        print_document(tuned.document())
