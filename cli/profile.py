"""``aotc profile``: what each kernel of a bundle takes, for people, for the compiler, and kept in the bundle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import typer

from aotc_cli.custom_calls import HELP, register_from
from aotc_cli.words.places import PLACES_HELP, parse_places

SUMMARY = "Measure each kernel, and compile again with what was measured."
EXAMPLES = """
aotc profile model.vmfb

aotc profile model.vmfb --input=@x.npy -o record.json

aotc compile model.mlir -o model.vmfb --costs=record.json

aotc profile model.vmfb --dim=batch=8 --apply -o tuned.vmfb
"""


def command(
    bundle: Path = typer.Argument(..., help="The .vmfb file, compiled with debug information."),
    function: str = typer.Option("", help="Which function; main by default.", show_default=False),
    inputs: list[str] = typer.Option([], "--input", help="As for `aotc run`; random values otherwise."),
    dims: list[str] = typer.Option([], "--dim", help="NAME=SIZE: a symbolic dim of the random values."),
    device: list[str] = typer.Option([], help=PLACES_HELP),
    repeat: int = typer.Option(7, min=1, help="Rounds for each kernel, of which the quickest counts."),
    output: Path = typer.Option(
        None, "-o", "--output", help="Where the record goes: a .json file, or a bundle to hold it; default: this one."
    ),
    apply: bool = typer.Option(
        False, "--apply", help="Compile the source of the bundle again with the record, to --output or in place."
    ),
    custom_calls: list[str] = typer.Option([], "--custom-calls", help=HELP),
    quiet: bool = typer.Option(False, "-q", "--quiet", help="No table."),
) -> None:
    """Run a function once and each of its kernels again and again, alone on one core, or on the whole GPU.

    The record has a row for each kernel and its sizes; `aotc explain schedule` shows it, `aotc compile --costs` goes by
    it. A record of another model is refused. A signature does not survive: sign the bundle again.
    """
    import aotc
    from aotc.vmfb.bundle import open_bundle, write_file
    from aotc.vmfb.costs.record import record_text
    from aotc.vmfb.costs.stored import with_profile
    from aotc.vmfb.files import write_whole
    from aotc_cli.compile import check_output, write_made

    written = output or bundle
    is_json = written.suffix == ".json"
    if apply and is_json:
        raise typer.BadParameter("with --apply it is a bundle", param_hint="--output")
    check_output(written)
    if apply:
        from aotc.source.restore import restore

        restore(open_bundle(str(bundle)))  # without a source nothing need be measured
    register_from(custom_calls)
    record = _measured(bundle, function, inputs, dims, device, repeat)
    if not quiet:
        _print(record)
    if apply:
        from aotc_cli.upgrade import weights_beside

        start, place = perf_counter(), weights_beside(bundle, written)
        write_made(written, aotc.upgrade(bundle, costs=record, weights=place), start, quiet)
    elif is_json:
        write_whole(str(written), [record_text(record).encode()])
    else:
        write_file(str(written), [with_profile(open_bundle(str(bundle), copy=True), record)])


def _measured(
    bundle: Path, function: str, inputs: list[str], dims: list[str], device: list[str], repeat: int
) -> dict[str, Any]:
    import aotc
    from aotc_cli.inputs import make_values, parse_sizes, parse_values

    module = aotc.load(str(bundle), devices=parse_places(device), threads=1, copy=True)
    name = function or (next(iter(module.functions)) if len(module.functions) == 1 else "main")
    arguments = module.functions[name].signature.arguments if name in module.functions else []
    values = parse_values(inputs, arguments)
    values += make_values(arguments[len(values) :], parse_sizes(dims, arguments), random=True, seed=0)
    return module.profile(name, *values, repeat=repeat)


def _print(record: Mapping[str, Any]) -> None:
    """Print the kernels, the dearest first."""
    from aotc_cli.sizes import count_text, size_text, time_text
    from aotc_cli.tables import print_line, print_table

    times = [(row, next(iter(row["ns"].values()))) for row in record["kernels"]]
    total = sum(ns * row["runs"] for row, ns in times)
    rows = []
    for row, ns in sorted(times, key=lambda pair: -pair[1] * pair[0]["runs"]):
        share = f"{100 * ns * row['runs'] / total:.1f} %"
        sizes = ", ".join(f"{name}={n}" for name, n in row["sizes"].items())
        rate = f"{row['bytes'] / ns:.1f} B/ns"
        times_ = (f"{row['runs']}", time_text(ns / 1e9), share)
        rows.append((row["name"], sizes, *times_, size_text(row["bytes"]), rate, row["loc"]))
    headings = ("kernel", "sizes", "runs", "time", "share", "bytes", "rate", "from")
    print_table(headings, rows, right=("runs", "time", "share", "bytes", "rate"))
    from aotc.tools.explain_schedule import measured_on

    what = f"{count_text(len(rows), 'kernel')} of @{record['function']}"
    core = "one core of " if "cpu" in record["target"] else ""
    print_line(f"\n{what}: {time_text(total / 1e9)} on {core}{measured_on(record, record['target'])}", 2)
