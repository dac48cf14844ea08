"""``aotc bench``: latency, start-up and memory of a bundle, beside a second one if given."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import typer

from aotc_cli.custom_calls import HELP, register_from
from aotc_cli.words.places import PLACES_HELP, parse_places

SUMMARY = "Measure latency, start-up and memory."
EXAMPLES = """
aotc bench model.vmfb

aotc bench new.vmfb --against=old.vmfb --seconds=5

aotc bench model.vmfb --dim=batch=8 --threads=1
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
) -> None:
    """Measure a bundle: import and load in a fresh process, first call, and the latency of later calls."""
    from aotc_cli.sizes import size_text, time_text
    from aotc_cli.tables import print_table

    register_from(custom_calls)
    paths = [bundle] if against is None else [bundle, against]
    calls = [_prepare(path, function, inputs, dims, device, threads) for path in paths]
    times: list[list[float]] = [[] for _ in paths]
    for _ in range(rounds):
        for call, found in zip(calls, times):
            found += _measure(call[0], seconds / rounds)
    cold = [_cold(path, device, custom_calls) for path in paths]
    rows: list[tuple[str, list[str]]] = [
        ("import and load", [time_text(c[0]) for c in cold]),
        ("memory after load", [size_text(int(c[1])) for c in cold]),
        ("load, warm", [time_text(c[1]) for c in calls]),
        ("first call", [time_text(c[2]) for c in calls]),
    ]
    for label, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        rows.append((label, [time_text(sorted(t)[int(share * (len(t) - 1))]) for t in times]))
    rows.append(("calls", [f"{len(t):,}" for t in times]))
    names = [path.name for path in paths]
    print_table(("", *names), [(label, *values) for label, values in rows], right=names)
    if against is not None:
        middle = [sorted(t)[len(t) // 2] for t in times]
        print(f"{bundle.name} takes {middle[0] / middle[1]:.2f} times as long as {against.name}")


def _prepare(
    path: Path, function: str, inputs: list[str], dims: list[str], device: list[str], threads: int | None
) -> tuple[Callable[[], Any], float, float]:
    """Return a call with its values bound, the time to load, and the time of the first call."""
    import aotc
    from aotc_cli.inputs import make_values, parse_sizes, parse_values

    load = partial(aotc.load, str(path), devices=parse_places(device), threads=threads)
    first = load()  # imports what loading needs, and keeps the kernels loaded
    start = perf_counter()
    module = load()
    loaded = perf_counter()
    del first
    name = function or (next(iter(module.functions)) if len(module.functions) == 1 else "main")
    arguments = module.functions[name].signature.arguments if name in module.functions else []
    values = parse_values(inputs, arguments)
    values += make_values(arguments[len(values) :], parse_sizes(dims, arguments), random=True, seed=0)
    begin = perf_counter()
    module.invoke(name, *values)
    return lambda: module.invoke(name, *values), loaded - start, perf_counter() - begin


def _measure(call: Callable[[], Any], seconds: float) -> list[float]:
    found: list[float] = []
    end = perf_counter() + seconds
    while not found or perf_counter() < end:
        start = perf_counter()
        call()
        found.append(perf_counter() - start)
    return found


def _cold(path: Path, device: list[str], custom_calls: list[str]) -> tuple[float, float]:
    """Return seconds and bytes of importing aotc and loading ``path`` in a fresh process; the median of three."""
    from aotc.vmfb.process.children import python_command

    found = []
    script = python_command(_COLD, str(path), json.dumps(parse_places(device)), *custom_calls)
    for _ in range(3):
        done = subprocess.run(script, capture_output=True, text=True, check=True)
        seconds, size = done.stdout.split()
        found.append((float(seconds), float(size)))
    return sorted(found)[1]
