"""``aotc profile``: measure each kernel of a bundle, print the times, and store them for the compiler."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer

from aotc_cli.shared.custom_calls import HELP, register_from
from aotc_cli.shared.device_option import PLACES_HELP, parse_places

if TYPE_CHECKING:
    from aotc.vmfb.module import LoadedModule
    from aotc.vmfb.profile.recording import CallRecording

SUMMARY = "Measure each kernel, and compile again with what was measured."
EXAMPLES = """
aotc profile model.vmfb

aotc profile model.vmfb --input=@x.npy -o trace.json     (open it in ui.perfetto.dev)

aotc compile model.mlir -o model.vmfb --costs=trace.json

aotc profile model.vmfb --dim=batch=8 --apply -o tuned.vmfb
"""


def command(
    model: Path = typer.Argument(..., help="A .vmfb file with debug information, or a model, which is compiled."),
    function: str = typer.Option("", help="Which function; main by default.", show_default=False),
    inputs: list[str] = typer.Option([], "--input", help="As for `aotc run`; random values otherwise."),
    dims: list[str] = typer.Option([], "--dim", help="NAME=SIZE: a symbolic dim of the random values."),
    device: list[str] = typer.Option([], help=PLACES_HELP),
    threads: int | None = typer.Option(None, help="Threads of the calls in the trace; all usable cores by default."),
    calls: int = typer.Option(3, min=1, help="Calls in the trace, after one that is not."),
    repeat: int = typer.Option(7, min=1, help="Rounds for each kernel alone, of which the quickest counts."),
    output: Path = typer.Option(
        None, "-o", "--output",
        help="A .json file, for Perfetto and for --costs, or a bundle to hold the record; default: this one.",
    ),
    apply: bool = typer.Option(
        False, "--apply", help="Compile the source of the bundle again with the record, to --output or in place."
    ),
    custom_calls: list[str] = typer.Option([], "--custom-calls", help=HELP),
    quiet: bool = typer.Option(False, "-q", "--quiet", help="No table."),
) -> None:  # fmt: skip
    """Run a function, and each of its kernels again and again, alone on one core, or on the whole GPU.

    The record has a row for each kernel and its sizes; `aotc explain schedule` shows it, `aotc compile --costs` goes by
    it. As .json it also has every dispatch of some calls: when, on which threads, how fast, of how much that a core can
    do at most. A record of another model is refused. A signature does not survive: sign the bundle again.
    """
    import aotc
    from aotc.vmfb.bundle import open_bundle, write_file
    from aotc.vmfb.host.files import write_atomically
    from aotc.vmfb.profile.perfetto import events_text
    from aotc.vmfb.profile.stored_records import with_profile
    from aotc_cli.commands.compile import check_output

    register_from(custom_calls)
    if output is not None:
        check_output(output)
    data = compiled(model)
    written = output or (model if data is None else None)
    is_json = written is not None and written.suffix == ".json"
    if apply and (is_json or written is None):
        raise typer.BadParameter("with --apply it is a bundle", param_hint="--output")
    if written is model:
        check_output(model)
    source: Any = str(model) if data is None else data
    if apply:
        _need_source(source)
    traced: list[dict[str, Any]] = []
    module = aotc.load(source, devices=parse_places(device), threads=1, copy=True)
    name, values = bound_values(module, function, inputs, dims)
    if is_json:
        several = aotc.load(source, devices=parse_places(device), threads=threads, copy=True)
        traced = _traced(several, source, name, values, _sizes(several, name, dims), calls)
    record = module.profile(name, *values, repeat=repeat)
    if not quiet:
        _print(record)
    if apply:
        _apply(model, written, source, record, quiet)
    elif is_json:
        write_atomically(str(written), [events_text(traced, record).encode()])
    elif written is not None:
        write_file(str(written), [with_profile(open_bundle(source, copy=True), record)])


def _need_source(source: Any) -> None:
    """Refuse a bundle without its source before anything is measured."""
    from aotc.source.restore import restore
    from aotc.vmfb.bundle import open_bundle

    restore(open_bundle(source))


def _apply(model: Path, written: Path | None, source: Any, record: Mapping[str, Any], quiet: bool) -> None:
    """Recompile the source of a bundle with a record."""
    import aotc
    from aotc_cli.commands.compile import write_compiled
    from aotc_cli.commands.upgrade import external_weights_of

    assert written is not None
    start, weights = perf_counter(), external_weights_of(model, written)
    write_compiled(written, aotc.upgrade(source, costs=record, weights=weights), start, quiet)


def compiled(model: Path) -> bytes | None:
    """Return the bundle that a model compiles to, or None if ``model`` is a bundle."""
    import aotc
    from aotc.vmfb.bundle import MAGIC
    from aotc_cli.shared.compile_options import warnings_as_sentences

    try:
        with model.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return None
    except OSError:
        return None  # loading it reports the error
    if model.suffix == ".vmfb":
        return None
    with warnings_as_sentences():
        return aotc.compile(model)


def bound_values(module: LoadedModule, function: str, inputs: list[str], dims: list[str]) -> tuple[str, list[Any]]:
    """Return the name of a function of a module, and values for its arguments: first the inputs, then random ones."""
    from aotc_cli.shared.inputs import make_values, parse_sizes, parse_values

    name = function or (next(iter(module.functions)) if len(module.functions) == 1 else "main")
    arguments = module.functions[name].signature.arguments if name in module.functions else []
    values = parse_values(inputs, arguments)
    values += make_values(arguments[len(values) :], parse_sizes(dims, arguments), random=True, seed=0)
    return name, values


def _sizes(module: LoadedModule, name: str, dims: list[str]) -> dict[str, int]:
    from aotc_cli.shared.inputs import parse_sizes

    return dict(parse_sizes(dims, module.functions[name].signature.arguments))


def _traced(
    module: LoadedModule, source: Any, name: str, values: list[Any], sizes: Mapping[str, int], calls: int
) -> list[dict[str, Any]]:
    """Return the trace events of some calls; on a GPU of a single call, one dispatch at a time."""
    from aotc.vmfb.errors import CallError
    from aotc.vmfb.profile.perfetto import trace_events
    from aotc.vmfb.profile.stepped import stepped

    module.invoke(name, *values)
    try:
        recording = module.profile()
    except CallError:
        return trace_events(stepped(module.loaded(name), values), (), f"{module.name} on {module.home}")
    assert not isinstance(recording, dict)
    with recording:
        for number in range(calls):
            with recording.span(f"@{name}, call {number}"):
                module.invoke(name, *values)
    events = trace_events(recording.dispatches, recording.spans, module.name)
    return events + _memory(module, source, name, sizes, recording)


def _memory(
    module: LoadedModule, source: Any, name: str, sizes: Mapping[str, int], recording: CallRecording
) -> list[dict[str, Any]]:
    """Return counter events of the live bytes of the arena; empty without the compiler, which computes them."""
    from aotc.vmfb.bundle import open_bundle

    try:
        from aotc.tools.memory_track import memory_track
    except ImportError:
        return []
    calls = [span for span in recording.spans if span.name.startswith("@")]
    target = module.stats()["target"]
    return memory_track(open_bundle(source), name, sizes, target, recording.dispatches, calls)


def _print(record: Mapping[str, Any]) -> None:
    """Print the kernels by decreasing total time."""
    from aotc.vmfb.profile.roofline import roof_of
    from aotc_cli.shared.tables import print_line, print_table
    from aotc_cli.shared.units import count_text, size_text, time_text

    times = [(row, next(iter(row["ns"].values()))) for row in record["kernels"]]
    total = sum(ns * row["runs"] for row, ns in times)
    rows = []
    for row, ns in sorted(times, key=lambda pair: -pair[1] * pair[0]["runs"]):
        share = f"{100 * ns * row['runs'] / total:.1f} %"
        sizes = ", ".join(f"{name}={n}" for name, n in row["sizes"].items())
        flops = row.get("flops", 0)
        least = roof_of(row["bytes"]).nanoseconds(flops, row["bytes"]) if "cpu" in row["ns"] else None
        roof = "" if least is None else f"{100 * least / ns:.0f} %"
        rates = f"{flops / ns:.1f}" if flops else "", f"{row['bytes'] / ns:.1f}", roof
        times_ = (f"{row['runs']}", time_text(ns / 1e9), share)
        rows.append((row["name"], sizes, *times_, size_text(row["bytes"]), *rates, row["loc"]))
    headings = ("kernel", "sizes", "runs", "time", "share", "bytes", "GFLOP/s", "GB/s", "roof", "from")
    print_table(headings, rows, right=headings[2:-1])
    from aotc.tools.explain.schedule import measured_on

    what = f"{count_text(len(rows), 'kernel')} of @{record['function']}"
    core = "one core of " if "cpu" in record["target"] else ""
    print_line(f"\n{what}: {time_text(total / 1e9)} on {core}{measured_on(record, record['target'])}", 2)
