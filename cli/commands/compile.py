"""``aotc compile``: compile a model to a bundle."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer

from aotc_cli.shared.compile_options import (
    ABOUT_HELP,
    BIND_HELP,
    CALLBACKS_HELP,
    COMPILER_HELP,
    COSTS_HELP,
    DEFAULT_DEVICE_HELP,
    DEVICE_HELP,
    FALLBACK_HELP,
    HOST_TARGET_HELP,
    KERNEL_HELP,
    MEMORY_HELP,
    MESH_HELP,
    PLACE_HELP,
    PORTABLE_HELP,
    PRECISION_HELP,
    QUANTIZE_HELP,
    REPRODUCER_HELP,
    SHARED_HELP,
    SPECIALIZE_HELP,
    STACK_HELP,
    STATE_HELP,
    TARGET_HELP,
    TRANSFERS_HELP,
    TUNING_HELP,
    TYPICAL_HELP,
    complete_targets,
    parse_about,
    parse_bytes,
    parse_devices,
    parse_mesh,
    parse_specialized,
    parse_typical,
    portable_target,
    read_cost_record,
    read_tuning_option,
    replaced_kernels,
    warnings_as_sentences,
)
from aotc_cli.shared.custom_calls import HELP, register_custom_calls_from
from aotc_cli.shared.model_arguments import METAVAR, MODEL_HELP, read_models
from aotc_cli.shared.option_groups import Panel
from aotc_cli.shared.progress_bar import progress_bar

if TYPE_CHECKING:
    from aotc.bundle import Bundle
    from aotc.options import Options
    from aotc.targets import Target

SUMMARY = "Compile a model to a bundle."
ASSIGN = "assign-devices"
ANNOTATE_HELP = "Print the IR with the device of each op, and why; see `aotc explain`."
EXAMPLES = """
Compile for this machine:

aotc compile model.mlir -o model.vmfb

Compile for all CPUs; each machine uses the best code that it can run:

aotc compile model.jax -o model.vmfb --portable

Compile for two kinds of CPU, or for a GPU:

aotc compile model.jax -o model.vmfb --target=cpu:x86-64-v3,cpu:x86-64-v4

aotc compile model.jax -o model.vmfb --target=cuda:sm_90

Also compile kernels for batch 1 and 8:

aotc compile model.jax -o model.vmfb --specialize b=1,8

Compile for batches from 1 to 64, most of them of 8:

aotc compile model.jax -o model.vmfb --specialize b=1:8:64

State the licence and the version of the model:

aotc compile model.jax -o model.vmfb --about license=MIT --about version=3

Prepare the weights once, and keep a cache between calls:

aotc compile model.jax -o model.vmfb --bind=params --state=result[0]=cache

Compile a sharded model for 8 ranks, and name the axes of its mesh:

aotc compile sharded.jax -o model.vmfb --mesh data=2,model=4

Put several models into one bundle:

aotc compile prefill=prefill.mlir decode=decode.mlir -o model.vmfb

Print the time of each pass:

aotc compile model.mlir -o model.vmfb -O3 --timings

Write and verify the IR after each pass:

aotc compile model.mlir -o model.vmfb --dump-ir=ir --verify-each

Print the IR after fusion:

aotc compile model.mlir -o - --stop-after=fuse

Replace a kernel by a function of your own:

aotc compile model.mlir -o model.vmfb --kernel k3_row=my_kernel.py
"""


def command(
    context: typer.Context,
    models: list[str] = typer.Argument(..., metavar=METAVAR, help=MODEL_HELP),
    output: Path = typer.Option(..., "-o", "--output", metavar="FILE", help="The bundle to write."),
    opt_level: int = typer.Option(
        2, "-O", "--opt-level", min=0, max=3, metavar="LEVEL",
        help="0: one op per kernel; 1: fuse elementwise ops; 2: all optimizations; 3: fuse more aggressively.",
    ),
    jobs: int = typer.Option(0, min=0, metavar="N", help="Kernels compiled at the same time; 0: one per core."),
    cache: bool = typer.Option(True, help="Reuse compiled kernels and bundles from the cache directory."),
    custom_calls: list[str] = typer.Option([], "--custom-calls", metavar="FILE.py", help=HELP),
    callbacks: str = typer.Option("refuse", metavar="refuse|drop", help=CALLBACKS_HELP),
    about: list[str] = typer.Option([], metavar="KEY=TEXT", help=ABOUT_HELP),
    quiet: bool = typer.Option(False, "-q", "--quiet", help="No progress bar and no summary."),
    target: str = typer.Option(
        "cpu", rich_help_panel=Panel.TARGET, metavar="NAME,...",
        help=TARGET_HELP, autocompletion=complete_targets,
    ),
    portable: bool = typer.Option(False, "--portable", rich_help_panel=Panel.TARGET, help=PORTABLE_HELP),
    host_fallback: bool = typer.Option(True, rich_help_panel=Panel.TARGET, help=FALLBACK_HELP),
    host_target: str = typer.Option(
        "", rich_help_panel=Panel.TARGET, metavar="NAME", help=HOST_TARGET_HELP, autocompletion=complete_targets
    ),
    matmul_precision: str = typer.Option(
        "model", rich_help_panel=Panel.NUMBERS, metavar="model|bf16|bf16x3|highest", help=PRECISION_HELP
    ),
    quantize_weights: str = typer.Option(
        "none", rich_help_panel=Panel.NUMBERS, metavar="none|int8|int4[:N]", help=QUANTIZE_HELP
    ),
    specialize: list[str] = typer.Option(
        [], rich_help_panel=Panel.DYNAMIC, metavar="DIM=SIZE,...", help=SPECIALIZE_HELP
    ),
    typical: list[str] = typer.Option([], rich_help_panel=Panel.DYNAMIC, metavar="DIM=SIZE", help=TYPICAL_HELP),
    weights: str = typer.Option(
        "inline", rich_help_panel=Panel.WEIGHTS, metavar="inline|FILE",
        help="inline, or a .safetensors file to write the constants to.",
    ),
    bind: list[str] = typer.Option([], rich_help_panel=Panel.WEIGHTS, metavar="ARGUMENT", help=BIND_HELP),
    state: list[str] = typer.Option([], rich_help_panel=Panel.WEIGHTS, metavar="[RESULT=]ARGUMENT", help=STATE_HELP),
    mesh: str = typer.Option("", rich_help_panel=Panel.DEVICES, metavar="AXIS=SIZE,...", help=MESH_HELP),
    device: list[str] = typer.Option([], rich_help_panel=Panel.DEVICES, metavar="DEVICE=TARGET", help=DEVICE_HELP),
    default_device: str = typer.Option("", rich_help_panel=Panel.DEVICES, metavar="DEVICE", help=DEFAULT_DEVICE_HELP),
    place: str = typer.Option("said", rich_help_panel=Panel.DEVICES, metavar="said|auto", help=PLACE_HELP),
    costs: Path = typer.Option(None, rich_help_panel=Panel.DEVICES, metavar="FILE", help=COSTS_HELP),
    tuning: Path = typer.Option(None, rich_help_panel=Panel.DEVICES, metavar="FILE", help=TUNING_HELP),
    max_transfers: int = typer.Option(-1, rich_help_panel=Panel.DEVICES, min=-1, metavar="N", help=TRANSFERS_HELP),
    annotate_affinities: bool = typer.Option(
        False, "--annotate-affinities", rich_help_panel=Panel.DEVICES, help=ANNOTATE_HELP
    ),
    memory_limit: str = typer.Option("", rich_help_panel=Panel.LIMITS, metavar="BYTES", help=MEMORY_HELP),
    stack_limit: str = typer.Option("", rich_help_panel=Panel.LIMITS, metavar="BYTES", help=STACK_HELP),
    shared_memory_limit: str = typer.Option("", rich_help_panel=Panel.LIMITS, metavar="BYTES", help=SHARED_HELP),
    debug_info: bool = typer.Option(
        True, rich_help_panel=Panel.DEBUG, help="Store source locations and kernel text in the bundle."
    ),
    keep_source: bool = typer.Option(
        True, "--source/--no-source", rich_help_panel=Panel.DEBUG,
        help="Store the model in the bundle, for `aotc upgrade` and reports.",
    ),
    timings: bool = typer.Option(False, "--timings", rich_help_panel=Panel.DEBUG, help="Print the time of every pass."),
    dump_ir: str = typer.Option(
        "", rich_help_panel=Panel.DEBUG, metavar="FOLDER", help="Write the IR after every pass to this folder."
    ),
    print_after: str = typer.Option(
        "", rich_help_panel=Panel.DEBUG, metavar="PASS", help="Print the IR after this pass."
    ),
    stop_after: str = typer.Option(
        "", rich_help_panel=Panel.DEBUG, metavar="PASS",
        help="Stop after this pass; write its IR to --output (- prints it).",
    ),
    verify_each: bool = typer.Option(
        False, "--verify-each", rich_help_panel=Panel.DEBUG, help="Verify the IR after every pass and stage."
    ),
    bisect: int = typer.Option(
        -1, rich_help_panel=Panel.DEBUG, min=-1, metavar="N",
        help="Run only the first N optional passes; -1: all of them.",
    ),
    kernel: list[str] = typer.Option([], rich_help_panel=Panel.DEBUG, metavar="KERNEL=FILE.py", help=KERNEL_HELP),
    kernel_compiler: str = typer.Option(
        "direct", rich_help_panel=Panel.DEBUG, metavar="direct|numba", help=COMPILER_HELP
    ),
    reproducer: str = typer.Option("", rich_help_panel=Panel.DEBUG, metavar="FILE.zip", help=REPRODUCER_HELP),
) -> None:
    """Compile a model, or several by name, to a bundle that runs without JAX, Numba or a compiler."""
    from aotc.options import Options

    options = Options(
        target=portable_target(target, portable), opt_level=opt_level, matmul_precision=matmul_precision,
        quantize_weights=quantize_weights, weights=weights, specialize=parse_specialized(specialize),
        typical=parse_typical(specialize, typical), bind=tuple(bind), state=tuple(state), debug_info=debug_info,
        source=keep_source, cache=cache, jobs=jobs, dump_ir=dump_ir, reproducer=reproducer,
        print_after=_pass_to_print_after(print_after, annotate_affinities), stop_after=stop_after,
        verify_each=verify_each, bisect=bisect, timings=timings, devices=parse_devices(device),
        default_device=default_device, place=place, max_transfers=max_transfers, callbacks=callbacks,
        host_fallback=host_fallback, host_target=host_target,
        memory_limit=parse_bytes(memory_limit, "--memory-limit"),
        stack_limit=parse_bytes(stack_limit, "--stack-limit"),
        shared_memory_limit=parse_bytes(shared_memory_limit, "--shared-memory-limit"),
        costs=read_cost_record(costs), tuning=read_tuning_option(tuning),
        kernel_compiler=kernel_compiler,
        replace=replaced_kernels(kernel),
        about=parse_about(about),
    )
    chosen = options, _command_line_options(context)
    _compile_or_print_ir(models, output, chosen, parse_mesh(mesh), custom_calls, quiet)


def _pass_to_print_after(print_after: str, annotate: bool) -> str:
    """Return the pass after which to print the IR."""
    if annotate and print_after not in ("", ASSIGN):
        message = f"it prints the IR after {ASSIGN}: leave out --print-after={print_after}"
        raise typer.BadParameter(message, param_hint="--annotate-affinities")
    return ASSIGN if annotate else print_after


def _compile_or_print_ir(
    models: list[str], output: Path, chosen: tuple[Options, list[str]], mesh: Mapping[str, int],
    custom_calls: list[str], quiet: bool,
) -> None:  # fmt: skip
    """Write the bundle, or print the IR after the last pass that runs.

    ``chosen`` contains the options, and the names of those on the command line: a reproducer may supply the others.
    """
    from aotc.source import reader_process, reproducer
    from aotc.vmfb.host.files import write_atomically

    options = chosen[0]
    if str(output) == "-" and not options.stop_after:
        raise typer.BadParameter("- is for the text of --stop-after; a bundle needs a file", param_hint="--output")
    source = read_models(models)
    reader_process.prepare_reader_for_model(source)  # the child imports MLIR while this process imports the compiler
    for read in source.values() if isinstance(source, dict) else [source]:
        check_output(output, read if isinstance(read, Path) else "")
    register_custom_calls_from(custom_calls)
    targets: tuple[Target, ...] = ()
    kept = reproducer.read_reproducer(str(source)) if isinstance(source, Path) else None
    if kept:
        from aotc.recompile import model_of_reproducer

        source, targets, options = model_of_reproducer(kept, {name: getattr(options, name) for name in chosen[1]})
    if mesh:
        from aotc.pipeline import model_on_mesh

        source = model_on_mesh(options, source, mesh)
    with warnings_as_sentences():
        if options.stop_after:
            text = _ir_after_stop(source, options, targets)
            print(text) if str(output) == "-" else write_atomically(str(output), [text.encode()])
        else:
            _write_bundle(source, output, (options, targets), quiet)


def _write_bundle(source: Any, output: Path, chosen: tuple[Options, tuple[Target, ...]], quiet: bool) -> None:
    """Compile the model to a file, with a progress bar and a summary unless ``quiet``.

    ``chosen`` contains the options, and the targets of a reproducer, if any, which replace those of the options.
    """
    from dataclasses import replace

    import aotc
    from aotc.driver import bundle_cache
    from aotc.progress import begin_stage, timed_stages

    start = perf_counter()
    options, targets = chosen
    if isinstance(source, Path) and (data := bundle_cache.cached_bundle(source, options)) is not None:
        write_compiled(output, aotc.Bundle(data), start, quiet, options.weights)
        return
    with timed_stages(options.timings):
        hidden = quiet or bool(options.print_after)  # a bar would interrupt the lines of the IR
        with progress_bar(hidden, options.target.count(",") + 1) as progress:
            watched = replace(options, progress=progress)
            if targets:
                from aotc.pipeline import compile_for

                data = compile_for(targets, watched, source)
            else:
                data = aotc.compile(source, options=watched)
        begin_stage(replace(options, progress=None), "writing the file")
        write_compiled(output, data, start, quiet, options.weights)


def _command_line_options(context: typer.Context) -> list[str]:
    """Return the option fields that the command line sets."""
    from dataclasses import fields

    from aotc.options import Options

    others = {
        "portable": "target", "keep_source": "source", "device": "devices", "annotate_affinities": "print_after",
        "kernel": "replace",
    }  # fmt: skip
    source = lambda name: getattr(context.get_parameter_source(name), "name", "")
    names = {others.get(name, name) for name in context.params if source(name) == "COMMANDLINE"}
    return [f.name for f in fields(Options) if f.name in names]


def write_compiled(output: Path, data: Bundle, start: float, quiet: bool, weights: str = "inline") -> None:
    """Write a bundle whose compilation began at ``start``, and print a summary unless ``quiet``.

    Warn if the bundle cannot find its file ``weights``.
    """
    data.save(output)
    warn_of_unreachable_weights(data, weights, output)
    if not quiet:
        place = sys.stderr if _is_stdout(output) else sys.stdout
        for line in (
            *_host_fallback_notes(data),
            _compile_summary(output, data, perf_counter() - start),
            *_least_processor_lines(data),
            *_source_weights_lines(data),
        ):
            print(line, file=place)


def warn_of_unreachable_weights(data: Bundle, weights: str, output: Path) -> None:
    """Print a warning if the bundle in ``output`` cannot find its file ``weights``."""
    from aotc.driver.weights import unreachable_weights_note

    if note := unreachable_weights_note(data, weights, output):
        print(f"warning: {note}", file=sys.stderr)


def _host_fallback_notes(data: bytes) -> list[str]:
    """Return a line for each kind of op that runs on the host because the GPU has no kernel for it."""
    from aotc.vmfb.bundle import open_bundle

    rows = [(v["target"], row) for v in open_bundle(data).manifest["variants"] for row in v.get("on_host", ())]
    kinds = Counter((target, row["op"]) for target, row in rows)
    first = {(target, row["op"]): row["loc"] for target, row in reversed(rows)}
    return [
        f"note: runs on the host: {op} has no kernel for {target} ({first[target, op]}{_further_count_text(count - 1)})"
        for (target, op), count in kinds.items()
    ]


def _further_count_text(count: int) -> str:
    return f" and {count} more" if count else ""


def _is_stdout(output: Path) -> bool:
    """Return True if ``output`` is standard output, which must then receive only the bundle."""
    try:
        return os.path.samestat(output.stat(), os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError):
        return False


def check_output(output: Path, source: Path | str = "", option: str = "-o") -> None:
    """Refuse an output that cannot be written, or that is the input file, before any work is done."""
    from aotc.driver.output_path import check_output_path

    check_output_path(output, source, option)


def _ir_after_stop(source: Any, options: Options, targets: tuple[Target, ...]) -> str:
    """Return the text of the IR after the pass ``options.stop_after``."""
    from aotc.frontend.importer import import_raw
    from aotc.frontend.several_models import fetch_any
    from aotc.ir.tensor.text import print_module
    from aotc.lowering.placement.host_only import imply_host
    from aotc.pipeline import checked_options, run_passes
    from aotc.targets import resolve_targets, variant_targets

    chosen = checked_options(options, whole=False)
    targets = targets or variant_targets(resolve_targets(chosen.target), chosen.devices)
    module = import_raw(fetch_any(source, sizes=chosen.specialize), options=chosen)
    module, _, chosen = imply_host(module, targets[0], targets, chosen)
    return print_module(run_passes(module, chosen))


def _compile_summary(output: Path, data: bytes, seconds: float) -> str:
    """Return the line about a written bundle: size, duration, kernels, memory, transfers."""
    from aotc.vmfb.bundle import open_bundle
    from aotc_cli.shared.units import count_text, size_text, time_text, working_memory

    variants = open_bundle(data).manifest["variants"]
    kernels = sum(len(v["kernels"]) for v in variants)
    placed = [v for v in variants if v.get("devices")][:1]  # equal in all variants
    facts = [size_text(len(data)), count_text(kernels, "kernel")]
    facts += [f"on {' and '.join(v['devices'])} with {_transfer_counts(v['transfers'])}" for v in placed]
    facts += [f"{v['target']} with {_transfer_counts(v['transfers'])}" for v in variants if v.get("implied")]
    return f"{output}: {', '.join([*facts, working_memory(variants), time_text(seconds)])}"


# The first processors that run a target's code. The CPU features of each target are in `aotc targets`.
_PROCESSORS = {
    "cpu:x86-64-v2": "Intel Nehalem, AMD Bulldozer",
    "cpu:x86-64-v3": "Intel Haswell, AMD Zen",
    "cpu:x86-64-v3-vnni": "Intel Alder Lake, AMD Zen 5",
    "cpu:x86-64-v4": "Intel Skylake-X, AMD Zen 4",
    "cpu:x86-64-v4-vnni": "Intel Cascade Lake, AMD Zen 4",
    "cpu:x86-64-v4-bf16": "Intel Cooper Lake, AMD Zen 4",
    "cpu:x86-64-amx": "Intel Sapphire Rapids",
}


def _least_processor_lines(data: bytes) -> list[str]:
    """Return lines about the GPUs of a bundle, and its minimum processor unless it has code for all CPUs."""
    from aotc.targets import PORTABLE, TARGETS, resolve_targets, target_requirements
    from aotc.vmfb.bundle import open_bundle

    names = [v["target"] for v in open_bundle(data).manifest["variants"] if v["target"] in TARGETS]
    gpus = [f"runs on {n}: {target_requirements(TARGETS[n])}" for n in names if TARGETS[n].kind == "cuda"]
    cpus = sorted((n for n in names if TARGETS[n].kind == "cpu"), key=lambda n: len(TARGETS[n].features))
    if not cpus or {t.name for t in resolve_targets(PORTABLE)} <= set(cpus):
        return gpus
    least = cpus[0]
    text = f"{_PROCESSORS[least]} or later" if least in _PROCESSORS else f"needs {' '.join(TARGETS[least].features)}"
    return [f"runs on {least}: {text}", *gpus, "--portable compiles for other machines too"]


# Bytes of weights in the source from which the summary names them.
LARGE_SOURCE_BYTES = 1 << 20


def _source_weights_lines(data: bytes) -> list[str]:
    """Return a line if the source stores many weights a second time, because the program has them in another form."""
    from aotc.vmfb.bundle import open_bundle
    from aotc_cli.shared.units import size_text

    manifest = open_bundle(data).manifest
    number = (manifest.get("source") or {}).get("weights")
    size = 0 if number is None else manifest["segments"][number]["size"]
    if size < LARGE_SOURCE_BYTES:
        return []
    return [f"{size_text(size)} of it are the model's own weights, for `aotc upgrade`; --no-source leaves them out"]


def _transfer_counts(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the number of transfers, and the number of those caused by the memory limit."""
    from aotc_cli.shared.units import count_text

    spilled = sum(t.get("spilled", False) for t in rows)
    more = f" and {spilled} for the memory limit" if spilled else ""
    return f"{count_text(len(rows) - spilled, 'transfer')}{more}"
