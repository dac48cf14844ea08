"""``aotc bench``: latency, throughput, start-up time and memory of a bundle, compared with a second one if given."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from aotc_cli.shared.custom_calls import HELP, register_from
from aotc_cli.shared.device_option import PLACES_HELP, parse_places

if TYPE_CHECKING:
    from aotc.tools.bench import BenchResult

SUMMARY = "Measure latency, throughput, start-up and memory."
EXAMPLES = """
aotc bench model.vmfb

aotc bench new.vmfb --against=old.vmfb --seconds=5

aotc bench model.vmfb --dim=batch=8 --threads=1

aotc bench model.vmfb --per-dispatch --roofline

aotc bench model.vmfb --throughput --json
"""


def command(
    bundle: Path = typer.Argument(..., help="The .vmfb file."),
    against: Path | None = typer.Option(None, help="A second bundle, measured in turn with the first."),
    function: str = typer.Option("", help="Which function; main by default.", show_default=False),
    inputs: list[str] = typer.Option([], "--input", help="As for `aotc run`; random values otherwise."),
    dims: list[str] = typer.Option([], "--dim", help="NAME=SIZE: a symbolic dim of the random values."),
    device: list[str] = typer.Option([], help=PLACES_HELP),
    threads: int | None = typer.Option(None, help="Threads to compute with; all usable cores by default."),
    custom_calls: list[str] = typer.Option([], "--custom-calls", help=HELP),
    seconds: float = typer.Option(2.0, min=0.0, help="How long to measure each bundle."),
    rounds: int = typer.Option(5, min=1, help="In how many turns."),
    concurrency: str = typer.Option("", help="Numbers of callers, as 1,4: calls a second of so many at a time."),
    throughput: bool = typer.Option(False, "--throughput", help="As --concurrency=1,2,4... up to the usable cores."),
    per_dispatch: bool = typer.Option(False, "--per-dispatch", help="Also what each kernel takes while calls run."),
    roofline: bool = typer.Option(False, "--roofline", help="Also of how much that the cores can do at most."),
    as_json: bool = typer.Option(False, "--json", help="Everything, as JSON: numbers with their intervals."),
) -> None:
    """Measure a bundle: import and load in a fresh process, first call, and the latency of later calls.

    Numbers in brackets are an interval in which the number lies with 95 % certainty, as far as calls do not depend on
    each other. Of two bundles the ratio is that of each round, and its interval that of their mean.
    """
    from aotc.tools.bench import BenchSettings, measure
    from aotc_cli.commands.profile import bound_values
    from aotc_cli.shared.tables import show

    register_from(custom_calls)
    callers = _callers(concurrency, throughput)
    settings = BenchSettings(
        seconds, rounds, tuple(callers), per_dispatch, roofline, parse_places(device), threads, tuple(custom_calls)
    )
    paths = [bundle] if against is None else [bundle, against]
    found = measure(paths, lambda module: bound_values(module, function, inputs, dims)[:2], settings)
    if as_json:
        _print_json(found)
    else:
        show(found.document())


def _callers(text: str, throughput: bool) -> list[int]:
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
    print(json.dumps(_plain({"bundles": bundles, **ratio}), indent=1, allow_nan=False))


def _plain(value: Any) -> Any:
    """Return ``value`` with infinite numbers replaced by null, which JSON can represent."""
    match value:
        case dict():
            return {key: _plain(x) for key, x in value.items()}
        case list() | tuple():
            return [_plain(x) for x in value]
        case float() if not isfinite(value):
            return None
    return value
