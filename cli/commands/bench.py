"""``aotc bench``: latency, throughput, start-up time and memory of a bundle, compared with a second one if given."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer

from aotc_cli.shared.custom_calls import HELP, register_from
from aotc_cli.shared.device_option import PLACES_HELP, parse_places

if TYPE_CHECKING:
    from aotc.vmfb.profile.latency import Interval, KernelTimes

SUMMARY = "Measure latency, throughput, start-up and memory."
EXAMPLES = """
aotc bench model.vmfb

aotc bench new.vmfb --against=old.vmfb --seconds=5

aotc bench model.vmfb --dim=batch=8 --threads=1

aotc bench model.vmfb --per-dispatch --roofline

aotc bench model.vmfb --throughput --json
"""
_COLD = """
import json, resource, runpy, sys, time
devices = json.loads(sys.argv[2])
start = time.perf_counter()
import aotc
for path in sys.argv[3:]:
    runpy.run_path(path)
module = aotc.load(sys.argv[1], devices=devices)
print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass
class Measured:
    """Measurements of a bundle, in seconds and bytes; ``call`` runs one call."""

    file: str
    call: Callable[[], Any]
    module: Any
    import_and_load: float
    memory_after_load: int
    first_call: float
    times: list[list[float]] = field(default_factory=list)  # by round
    latency: dict[str, Interval] = field(default_factory=dict)
    throughput: list[dict[str, Any]] = field(default_factory=list)
    dispatches: list[KernelTimes] = field(default_factory=list)


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
    register_from(custom_calls)
    callers = _callers(concurrency, throughput)
    prepare = partial(_prepare, function=function, inputs=inputs, dims=dims, device=device, threads=threads)
    found = [prepare(path, custom_calls=custom_calls) for path in ([bundle] if against is None else [bundle, against])]
    _measure(found, seconds, rounds, callers)
    if per_dispatch or roofline:
        for one in found:
            _record(one, seconds / rounds)
    _print_json(found) if as_json else _print(found, per_dispatch, roofline)


def _callers(text: str, throughput: bool) -> list[int]:
    """Return the numbers of concurrent callers to measure; empty without these options."""
    from aotc.vmfb.host.machine import usable_cores

    if text and not all(part.isdigit() and 0 < int(part) <= 1024 for part in text.split(",")):
        message = f"{text[:60]!r}: expected numbers from 1 to 1024, as 1,2,4"
        raise typer.BadParameter(message, param_hint="--concurrency")
    if text or not throughput:
        return [int(part) for part in text.split(",") if part]
    return [1 << n for n in range(usable_cores().bit_length())]


def _prepare(
    path: Path, function: str, inputs: list[str], dims: list[str], device: list[str], threads: int | None,
    custom_calls: list[str],
) -> Measured:  # fmt: skip
    """Load a bundle, bind its arguments, and measure its start-up and first call."""
    import aotc
    from aotc_cli.commands.profile import bound_values

    module = aotc.load(str(path), devices=parse_places(device), threads=threads)
    name, values = bound_values(module, function, inputs, dims)
    begin = perf_counter()
    module.invoke(name, *values)
    first = perf_counter() - begin
    cold, memory = _cold(path, device, custom_calls)
    return Measured(path.name, lambda: module.invoke(name, *values), module, cold, int(memory), first)


def _measure(found: Sequence[Measured], seconds: float, rounds: int, callers: Sequence[int]) -> None:
    """Measure the bundles in alternating rounds, with one caller and then with each number of ``callers``."""
    from aotc.vmfb.profile.latency import average, latencies, quantile, together

    for _ in range(rounds):
        for one in found:
            one.times.append(latencies(one.call, seconds / rounds))
    for one in found:
        every = [t for some in one.times for t in some]
        one.latency = {label: quantile(every, share) for label, share in _SHARES.items()}
    for count in callers:
        made = [[together(one.call, count, seconds / rounds) for one in found] for _ in range(rounds)]
        for one, results in zip(found, zip(*made)):
            every = [t for _, times in results for t in times]
            at = {label: quantile(every, share) for label, share in _SHARES.items()}
            rate = average([rate for rate, _ in results])
            one.throughput.append({"callers": count, "calls_per_second": rate, "latency": at})


def _record(one: Measured, seconds: float) -> None:
    """Record the dispatches of some calls."""
    from aotc.vmfb.profile.latency import by_kernel, latencies

    with one.module.profile() as recording:
        calls = len(latencies(one.call, min(seconds, 0.5)))
    if not recording.lost:
        one.dispatches = by_kernel(recording.dispatches, calls)


def _cold(path: Path, device: list[str], custom_calls: list[str]) -> tuple[float, float]:
    """Return the median of three imports of aotc with ``path`` loaded, in fresh processes: seconds, and peak bytes."""
    from aotc.vmfb.host.children import python_command

    found = []
    script = python_command(_COLD, str(path), json.dumps(parse_places(device)), *custom_calls)
    for _ in range(3):
        done = subprocess.run(script, capture_output=True, text=True, check=True)
        seconds, size = done.stdout.split()
        found.append((float(seconds), float(size)))
    return sorted(found)[1]


# ---------------------------------------------------------------- for people and programs


def _ratio(found: Sequence[Measured]) -> Interval:
    """Return the duration of the first bundle's calls relative to the second's."""
    from aotc.vmfb.profile.latency import average, quantile

    middle = [[quantile(times, 0.5).value for times in one.times] for one in found]
    return average([a / b for a, b in zip(*middle)])


def _print(found: Sequence[Measured], per_dispatch: bool, roofline: bool) -> None:
    from aotc_cli.shared.tables import print_line, print_table
    from aotc_cli.shared.units import size_text, time_text

    def shown(x: Interval) -> str:
        return f"{time_text(x.value)} [{time_text(x.low)}, {time_text(x.high)}]"

    rows: list[tuple[str, list[str]]] = [
        ("import and load", [time_text(one.import_and_load) for one in found]),
        ("memory after load", [size_text(one.memory_after_load) for one in found]),
        ("first call", [time_text(one.first_call) for one in found]),
    ]
    rows += [(label, [shown(one.latency[label]) for one in found]) for label in _SHARES]
    rows.append(("calls", [f"{sum(map(len, one.times)):,}" for one in found]))
    for n, row in enumerate(found[0].throughput):
        rates = [one.throughput[n]["calls_per_second"] for one in found]
        label = f"{row['callers']} caller{'s' * (row['callers'] > 1)}, calls/s"
        rows.append((label, [_rate_text(rate) for rate in rates]))
        rows.append(("  p99", [shown(one.throughput[n]["latency"]["p99"]) for one in found]))
    names = [one.file for one in found]
    print_table(("", *names), [(label, *values) for label, values in rows], right=names)
    if len(found) == 2:
        x = _ratio(found)
        often = f" [{x.low:.2f}, {x.high:.2f}]" if len(found[0].times) > 1 else ""
        print_line(f"{names[0]} takes {x.value:.2f}{often} times as long as {names[1]}", 2)
    for one in found:
        if per_dispatch or roofline:
            _print_dispatches(one, roofline)


def _rate_text(x: Interval) -> str:
    return f"{x.value:,.0f}" + (f" [{max(x.low, 0):,.0f}, {x.high:,.0f}]" if x.high != float("inf") else "")


def _print_dispatches(one: Measured, roofline: bool) -> None:
    from aotc.vmfb.profile.roofline import roof_of
    from aotc_cli.shared.tables import print_line, print_table
    from aotc_cli.shared.units import time_text

    print()
    if not one.dispatches:
        print_line(f"{one.file}: more dispatches than are recorded; try --seconds=0.1", 2)
        return
    rows = []
    for d in one.dispatches:
        roof = (f"{100 * d.roofline:.0f} %",) if roofline else ()
        sizes = ", ".join(f"{name}={n}" for name, n in d.sizes.items())
        times = f"{d.runs:.4g}", time_text(d.ns.value / 1e9), f"{100 * d.share:.1f} %", f"{d.threads:.1f}"
        rows.append((d.kernel, sizes, *times, f"{d.gflops:.1f}", f"{d.gbs:.1f}", *roof, d.loc))
    right = ("runs", "p50", "share", "threads", "GFLOP/s", "GB/s", *(("roof",) if roofline else ()))
    print_table(("kernel", "sizes", *right, "from"), rows, right)
    if roofline:
        roof_ = roof_of(max(d.bytes for d in one.dispatches))
        text = f"a core does {roof_.flops:.0f} GFLOP/s of f32 at most, copies of as many bytes {roof_.bytes:.0f} GB/s"
        share = sum(d.share * d.roofline for d in one.dispatches)
        print_line(f"{one.file}: {100 * share:.0f} % of the roofline of the threads at work; {text}", 2)


def _print_json(found: Sequence[Measured]) -> None:
    """Print all results as JSON; an interval is [value, low, high], with null for an infinite bound."""
    bundles: list[Mapping[str, Any]] = []
    for one in found:
        facts = {key: value for key, value in vars(one).items() if key not in ("call", "module", "times", "dispatches")}
        rows = [row._asdict() for row in one.dispatches]
        bundles.append({**facts, "calls": sum(map(len, one.times)), "dispatches": rows})
    ratio = {"ratio": _ratio(found)} if len(found) == 2 else {}
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
