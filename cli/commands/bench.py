"""``aotc bench``: latency, throughput, start-up time and memory of a bundle, compared with a second one if given."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from aotc_cli.shared.custom_calls import HELP, register_custom_calls_from
from aotc_cli.shared.device_option import PLACES_HELP, parse_places
from aotc_cli.shared.option_groups import BUNDLE_HELP, DIM_HELP, FUNCTION_HELP, INPUT_HELP, THREADS_HELP, Panel

if TYPE_CHECKING:
    from aotc.tools.bench import BenchResult

RANKS_HELP = "Start a process for each of N ranks, for a sharded bundle; also show the time of the slowest rank."
SUMMARY = "Measure latency, throughput, start-up and memory."
EXAMPLES = """
Measure start-up, the first call and later calls:

aotc bench model.vmfb

Compare two bundles:

aotc bench new.vmfb --against=old.vmfb --seconds=5

Measure batches of 8 on one core:

aotc bench model.vmfb --dim=batch=8 --threads=1

Add the time of each kernel, and its share of the processor's peak:

aotc bench model.vmfb --per-dispatch --roofline

Measure throughput with 1, 2, 4, ... concurrent callers, as JSON:

aotc bench model.vmfb --throughput --json

Measure a sharded bundle with a process for each rank:

aotc bench sharded.vmfb --ranks=2
"""


def command(
    bundle: Path = typer.Argument(..., metavar="BUNDLE", help=BUNDLE_HELP),
    function: str = typer.Option("", metavar="NAME", help=FUNCTION_HELP, show_default=False),
    against: Path | None = typer.Option(
        None, metavar="FILE.vmfb", help="A second bundle; the two are measured alternately."
    ),
    custom_calls: list[str] = typer.Option([], "--custom-calls", metavar="FILE.py", help=HELP),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON: numbers with their intervals."),
    inputs: list[str] = typer.Option([], "--input", rich_help_panel=Panel.INPUTS, metavar="VALUE", help=INPUT_HELP),
    dims: list[str] = typer.Option([], "--dim", rich_help_panel=Panel.INPUTS, metavar="NAME=SIZE", help=DIM_HELP),
    seconds: float = typer.Option(
        2.0, min=0.0, rich_help_panel=Panel.MEASUREMENT, metavar="SECONDS", help="Measuring time of each bundle."
    ),
    rounds: int = typer.Option(
        5, min=1, rich_help_panel=Panel.MEASUREMENT, metavar="N", help="Number of rounds that share this time."
    ),
    concurrency: str = typer.Option(
        "", rich_help_panel=Panel.MEASUREMENT, metavar="N,...",
        help="Measure calls per second for these numbers of concurrent callers, such as 1,4.",
    ),
    throughput: bool = typer.Option(
        False, "--throughput", rich_help_panel=Panel.MEASUREMENT,
        help="As --concurrency=1,2,4,... up to the number of usable cores.",
    ),
    per_dispatch: bool = typer.Option(
        False, "--per-dispatch", rich_help_panel=Panel.MEASUREMENT, help="Also show the time of each kernel."
    ),
    roofline: bool = typer.Option(
        False, "--roofline", rich_help_panel=Panel.MEASUREMENT,
        help="Also show the share of the processor's peak that each kernel reaches.",
    ),
    device: list[str] = typer.Option([], rich_help_panel=Panel.DEVICES, metavar="[NAME=]DEVICE", help=PLACES_HELP),
    threads: int | None = typer.Option(None, rich_help_panel=Panel.DEVICES, metavar="N", help=THREADS_HELP),
    ranks: int | None = typer.Option(
        None, min=1, rich_help_panel=Panel.DEVICES, metavar="N", help=RANKS_HELP, show_default=False
    ),
) -> None:
    """Measure a bundle: import and load in a fresh process, first call, and the latency of later calls.

    Numbers in brackets are 95 % confidence intervals, for independent calls. The ratio of two bundles is the mean of
    the ratios of all rounds.
    """
    from aotc.tools.bench import BenchSettings, measure
    from aotc_cli.commands.profile import arguments_of_profile
    from aotc_cli.shared.tables import print_document

    if ranks is not None:
        _refuse_with_ranks(custom_calls, device)
    register_custom_calls_from(custom_calls)
    callers = _caller_counts(concurrency, throughput)
    settings = BenchSettings(
        seconds, rounds, tuple(callers), per_dispatch, roofline, parse_places(device), threads, tuple(custom_calls),
        ranks,
    )  # fmt: skip
    paths = [bundle] if against is None else [bundle, against]
    found = measure(paths, lambda module: arguments_of_profile(module, function, inputs, dims)[:2], settings)
    if as_json:
        _print_json(found)
    else:
        print_document(found.document())


def _refuse_with_ranks(custom_calls: list[str], device: list[str]) -> None:
    for name, value in {"--custom-calls": custom_calls, "--device": device}.items():
        if value:
            raise typer.BadParameter("it is for a bundle of one device", param_hint=name)


def _caller_counts(text: str, throughput: bool) -> list[int]:
    """Return the numbers of concurrent callers to measure; empty without these options."""
    from aotc.vmfb.host.machine import usable_cores

    if text and not all(part.isdigit() and 0 < int(part) <= 1024 for part in text.split(",")):
        message = f"{text[:60]!r}: expected numbers from 1 to 1024, as 1,2,4"
        raise typer.BadParameter(message, param_hint="--concurrency")
    if text or not throughput:
        return [int(part) for part in text.split(",") if part]
    return [1 << n for n in range(usable_cores().bit_length())]


def _print_json(found: BenchResult) -> None:
    """Print all results as JSON; an interval is [value, low, high], with null for an infinite bound."""
    bundles = []
    for one in found.bundles:
        facts = {name: getattr(one, name) for name in one.__slots__}
        rows = [{name: getattr(row, name) for name in row.__slots__} for row in one.throughput]
        bundles.append({**facts, "throughput": rows, "dispatches": [row._asdict() for row in one.dispatches]})
    ratio = {"ratio": found.ratio} if found.ratio is not None else {}
    print(json.dumps(_json_value({"bundles": bundles, **ratio}), indent=1, allow_nan=False))


def _json_value(value: Any) -> Any:
    """Return ``value`` with infinite numbers replaced by null, which JSON can represent."""
    match value:
        case dict():
            return {key: _json_value(x) for key, x in value.items()}
        case list() | tuple():
            return [_json_value(x) for x in value]
        case float() if not isfinite(value):
            return None
    return value
