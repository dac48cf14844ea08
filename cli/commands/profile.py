"""``aotc profile``: measure each kernel of a bundle, and print the times of kernels, layers or lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer

from aotc.vmfb.profile.model_place import PLACES
from aotc_cli.shared.custom_calls import HELP, register_custom_calls_from
from aotc_cli.shared.device_option import PLACES_HELP, parse_places
from aotc_cli.shared.option_groups import DEBUG_BUNDLE_HELP, DIM_HELP, FUNCTION_HELP, INPUT_HELP, THREADS_HELP, Panel

if TYPE_CHECKING:
    from aotc.vmfb.gang.gang import Gang
    from aotc.vmfb.module import LoadedModule
    from aotc.vmfb.profile.recording import CallRecording

SUMMARY = "Measure each kernel: which layer is slow?"
EXAMPLES = """
Show the slowest kernels:

aotc profile model.vmfb

Sum the times by layer, two levels deep:

aotc profile model.vmfb --by=scope --depth=2

Store the times in the bundle, for reports:

aotc profile model.vmfb --save

Write a trace for ui.perfetto.dev:

aotc profile model.vmfb --input=@x.npy -o trace.json

Compile the model again with the measured times:

aotc profile model.vmfb --dim=batch=8 --apply -o tuned.vmfb

Show how long ranks compute, exchange data and wait, and write a trace:

aotc profile sharded.vmfb --ranks=2 -o trace.json
"""

RANKS_HELP = "Start a process for each of N ranks, for a sharded bundle; show the times of all ranks."


def command(
    model: Path = typer.Argument(..., metavar="MODEL", help=DEBUG_BUNDLE_HELP),
    function: str = typer.Option("", metavar="NAME", help=FUNCTION_HELP, show_default=False),
    custom_calls: list[str] = typer.Option([], "--custom-calls", metavar="FILE.py", help=HELP),
    quiet: bool = typer.Option(False, "-q", "--quiet", help="Print no table."),
    inputs: list[str] = typer.Option([], "--input", rich_help_panel=Panel.INPUTS, metavar="VALUE", help=INPUT_HELP),
    dims: list[str] = typer.Option([], "--dim", rich_help_panel=Panel.INPUTS, metavar="NAME=SIZE", help=DIM_HELP),
    by: str = typer.Option(
        "kernel", rich_help_panel=Panel.RESULTS, metavar="kernel|scope|line", help="The unit of a row; see above."
    ),
    depth: int = typer.Option(
        0, min=0, rich_help_panel=Panel.RESULTS, metavar="N", help="With --by=scope: levels of the scope; 0: all."
    ),
    output: Path = typer.Option(
        None, "-o", "--output", rich_help_panel=Panel.RESULTS, metavar="FILE",
        help="A .json trace to write, for Perfetto and --costs; or, with --save or --apply, a bundle.",
    ),
    save: bool = typer.Option(
        False, "--save", rich_help_panel=Panel.RESULTS,
        help="Store the times in the bundle, for explain, report and --costs.",
    ),
    apply: bool = typer.Option(
        False, "--apply", rich_help_panel=Panel.RESULTS,
        help="Compile the bundle's model again with these times, to --output or in place.",
    ),
    calls: int = typer.Option(
        3, min=1, rich_help_panel=Panel.MEASUREMENT, metavar="N", help="Calls in the trace, after a warm-up call."
    ),
    repeat: int = typer.Option(
        7, min=1, rich_help_panel=Panel.MEASUREMENT, metavar="N", help="Rounds of each kernel; the fastest counts."
    ),
    device: list[str] = typer.Option([], rich_help_panel=Panel.DEVICES, metavar="[NAME=]DEVICE", help=PLACES_HELP),
    threads: int | None = typer.Option(None, rich_help_panel=Panel.DEVICES, metavar="N", help=THREADS_HELP),
    ranks: int | None = typer.Option(
        None, min=1, rich_help_panel=Panel.DEVICES, metavar="N", help=RANKS_HELP, show_default=False
    ),
) -> None:
    """Time each kernel of a function by itself, on one core or on the whole GPU.

    A row is a kernel with its sizes, or the sum of a scope or of a source line. A scope is a layer: the names of Flax,
    Equinox, Keras or jax.named_scope, without JAX's transformations; for Flax NNX the class names.

    The bundle is changed only with --save or --apply; it must then be signed again. `aotc explain schedule` and `aotc
    report` show stored times, `aotc compile --costs` uses them. A .json trace also has every kernel launch of some
    calls: start, threads and rate.

    With --ranks, whole calls of a sharded bundle are recorded instead, one process a rank. A row is a rank: the time in
    which kernels run, and for its collectives the exchange of data (transfer) and the waiting for other ranks. A second
    table shows each collective, and the rank that others wait for. A .json trace has a process for each rank.
    """
    import aotc
    from aotc.tools.profile import profile_result_of_record
    from aotc_cli.commands.compile import check_output
    from aotc_cli.shared.tables import print_document

    register_custom_calls_from(custom_calls)
    if output is not None:
        check_output(output)
    if by not in ("kernel", *PLACES):
        raise typer.BadParameter(f"{by!r}: expected kernel, scope or line", param_hint="--by")
    if depth and by != "scope":
        raise typer.BadParameter("it needs --by=scope", param_hint="--depth")
    if ranks is not None:
        alone = {
            "--custom-calls": custom_calls, "--by": by != "kernel", "--depth": depth, "--save": save, "--apply": apply,
            "--device": device,
        }  # fmt: skip
        _refuse_with_ranks([option for option, value in alone.items() if value], output)
        _profile_ranks(model, ranks, threads, function, inputs, calls, output, quiet)
        return
    data = compiled_bundle_of_model(model)
    written = output or (model if data is None and (save or apply) else None)
    is_json = written is not None and written.suffix == ".json"
    if save or apply:
        _check_bundle_output(model, written, "--apply" if apply else "--save")
    source: Any = str(model) if data is None else data
    if apply:
        _require_source(source)
    module = aotc.load(source, devices=parse_places(device), threads=1, copy=True)
    name, values, sizes = arguments_of_profile(module, function, inputs, dims)
    traced: list[dict[str, Any]] = []
    if is_json:
        several = aotc.load(source, devices=parse_places(device), threads=threads, copy=True)
        traced = _trace_calls(several, source, name, values, sizes, calls)
    record = module.profile(name, *values, repeat=repeat)
    if not quiet:
        print_document(profile_result_of_record(record).document(by, depth))
    if apply:
        _recompile_with_profile(model, written, source, record, quiet)
    elif written is not None:
        _write_profile(written, source, traced if is_json else None, record)


def _refuse_with_ranks(alone: list[str], output: Path | None) -> None:
    """Refuse options that are for a bundle of one device, and an output that is not a trace."""
    if alone:
        raise typer.BadParameter("it is for a bundle of one device", param_hint=alone[0])
    if output is not None and output.suffix != ".json":
        raise typer.BadParameter("with --ranks it is a .json trace", param_hint="--output")


def _profile_ranks(
    model: Path, ranks: int, threads: int | None, function: str, inputs: list[str], calls: int, output: Path | None,
    quiet: bool,
) -> None:  # fmt: skip
    """Record calls of all ranks of a sharded bundle; print the times, and write the trace."""
    import aotc
    from aotc.tools.profile_ranks import profile_ranks
    from aotc_cli.shared.tables import print_document

    data = compiled_bundle_of_model(model)
    with aotc.gang(model if data is None else data, ranks=ranks, threads=threads) as module:
        name, values, _ = arguments_of_profile(module, function, inputs, [])
        found = profile_ranks(module, name, values, calls)
    if not quiet:
        print_document(found.document())
    if output is not None:
        found.save(output)


def _write_profile(written: Path, source: Any, traced: list[dict[str, Any]] | None, record: Mapping[str, Any]) -> None:
    """Write a record with a trace as JSON, or a copy of the bundle ``source`` with the record."""
    from aotc.vmfb.bundle import open_bundle, write_bundle_file
    from aotc.vmfb.host.files import write_atomically
    from aotc.vmfb.profile.perfetto import events_text
    from aotc.vmfb.profile.stored_records import bundle_with_profile

    if traced is None:
        write_bundle_file(str(written), [bundle_with_profile(open_bundle(source, copy=True), record)])
    else:
        write_atomically(str(written), [events_text(traced, record).encode()])


def _check_bundle_output(model: Path, written: Path | None, option: str) -> None:
    """Refuse an output that is not a bundle, or a bundle that cannot be replaced, before anything is measured."""
    from aotc_cli.commands.compile import check_output

    if written is None or written.suffix == ".json":
        raise typer.BadParameter(f"with {option} it is a bundle", param_hint="--output")
    if written is model:
        check_output(model)


def _require_source(source: Any) -> None:
    """Refuse a bundle without its source before anything is measured."""
    from aotc.source.restore import restore_source
    from aotc.vmfb.bundle import open_bundle

    restore_source(open_bundle(source))


def _recompile_with_profile(
    model: Path, written: Path | None, source: Any, record: Mapping[str, Any], quiet: bool
) -> None:
    """Recompile the source of a bundle with the measured costs in ``record``."""
    import aotc
    from aotc_cli.commands.compile import write_compiled
    from aotc_cli.commands.upgrade import external_weights_of

    assert written is not None
    start, weights = perf_counter(), external_weights_of(model, written)
    write_compiled(written, aotc.upgrade(source, costs=record, weights=weights), start, quiet)


def compiled_bundle_of_model(model: Path) -> bytes | None:
    """Compile a model to a bundle; return None if ``model`` is a bundle already."""
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


def arguments_of_profile(
    module: LoadedModule | Gang, function: str, inputs: list[str], dims: list[str]
) -> tuple[str, list[Any], dict[str, int]]:
    """Return the function name, its arguments (the inputs, then random values), and the sizes of its dims."""
    from aotc.vmfb.api.choose_function import choose_function
    from aotc_cli.shared.inputs import make_values, parse_values, sizes_with_notice

    name = choose_function(module.functions, function, module.name)
    signature = module.functions[name].signature
    values = parse_values(inputs, signature.arguments)
    sizes = sizes_with_notice(dims, signature, values)
    values += make_values(signature.arguments[len(values) :], sizes, random=True, seed=0)
    return name, values, sizes


def _trace_calls(
    module: LoadedModule, source: Any, name: str, values: list[Any], sizes: Mapping[str, int], calls: int
) -> list[dict[str, Any]]:
    """Return trace events of some calls; on a GPU of a single call, with one kernel launch at a time."""
    from aotc.vmfb.errors import CallError
    from aotc.vmfb.profile.perfetto import trace_events
    from aotc.vmfb.profile.stepped import stepped_dispatches

    module.invoke(name, *values)
    try:
        recording = module.profile()
    except CallError:
        dispatches = stepped_dispatches(module.get_function(name), values)
        return trace_events(dispatches, (), f"{module.name} on {module.home}")
    assert not isinstance(recording, dict)
    with recording:
        for number in range(calls):
            with recording.span(f"@{name}, call {number}"):
                module.invoke(name, *values)
    events = trace_events(recording.dispatches, recording.spans, module.name)
    return events + _memory_events(module, source, name, sizes, recording)


def _memory_events(
    module: LoadedModule, source: Any, name: str, sizes: Mapping[str, int], recording: CallRecording
) -> list[dict[str, Any]]:
    """Return counter events of the arena's live bytes; empty without the compiler, which computes them."""
    from aotc.vmfb.bundle import open_bundle

    try:
        from aotc.tools.memory_track import memory_track
    except ImportError:
        return []
    calls = [span for span in recording.spans if span.name.startswith("@")]
    target = module.stats()["target"]
    return memory_track(open_bundle(source), name, sizes, target, recording.dispatches, calls)
