"""``aotc run``: run one function of a bundle."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer

from aotc.vmfb.api.choose_function import choose_function
from aotc_cli.shared.custom_calls import HELP, register_custom_calls_from
from aotc_cli.shared.device_option import PLACES_HELP, parse_places
from aotc_cli.shared.option_groups import BUNDLE_HELP, FUNCTION_HELP, KEY_HELP, SEED_HELP, THREADS_HELP, Panel

if TYPE_CHECKING:
    from aotc_cli.shared.whole_arrays import Runnable

INPUTS = "An argument, in order: SHAPExTYPE=VALUES, a scalar, or a file: @x.npy, .npz, .json, .safetensors, .bin."
OUTPUTS = (
    "Destination of a result, in order: @y.npy, .bin; @y.npz, .json, .safetensors (all remaining results); "
    "+y.npy (append); - (print)."
)
WATCH_HELP = "Run one kernel at a time; name the first that computes NaN or infinity, and exit with 3."
KEPT_HELP = "Write the bundle, the inputs and the command to this folder, if the call fails or crashes."
TRACE_HELP = "Write the operands and results of each kernel to this folder, as .npz."
FULL_HELP = "Print all results in IREE's form, as in pipes and files; terminals show NumPy's form by default."
UNTRUSTED_HELP = "Run no machine code of the bundle: compile the model in it again (needs aotc[compile])."
LIMIT_HELP = "As --full, with at most N elements of each result; default: 1024."
FULL_ELEMENTS = 1024  # of a result in IREE's form, as iree-run-module prints
RANKS_HELP = "Start a process for each of N ranks, for a sharded bundle; --input takes whole arrays."
SUMMARY = "Run a function of a bundle."
EXAMPLES = """
Call the main function, and print its results:

aotc run model.vmfb --input=2x3xf32=1,2,3,4,5,6

Read the argument from a file, and write the result to another:

aotc run model.vmfb --input=@x.npy --output=@y.npy

Compare the result with an expected one:

aotc run model.vmfb --input=@x.npy --expected_output=@y.npy --rtol=1e-3

Time calls with random values, for batches of 8:

aotc run model.vmfb --random --dim=batch=8 --threads=2 --repeat=10

Choose the device of each name in the model:

aotc run model.vmfb --random --device d0=cpu:0 --device d1=cuda:0

Find the first kernel that computes NaN or infinity:

aotc run model.vmfb --input=@x.npy --nan-watch

Write the operands and results of each kernel to a folder:

aotc run model.vmfb --input=@x.npy --trace-dispatch-tensors=trace

Start a process for each rank of a sharded bundle, and pass whole arrays:

aotc run sharded.vmfb --ranks=2 --input=@x.npy
"""


def command(
    bundle: Path = typer.Argument(..., metavar="BUNDLE", help=BUNDLE_HELP),
    function: str = typer.Option("", metavar="NAME", help=FUNCTION_HELP, show_default=False),
    repeat: int = typer.Option(1, min=1, metavar="N", help="Number of calls; of several, the median time is printed."),
    custom_calls: list[str] = typer.Option([], "--custom-calls", metavar="FILE.py", help=HELP),
    inputs: list[str] = typer.Option([], "--input", rich_help_panel=Panel.INPUTS, metavar="VALUE", help=INPUTS),
    random: bool = typer.Option(
        False, rich_help_panel=Panel.INPUTS, help="Random values for the arguments without --input."
    ),
    zeros: bool = typer.Option(False, rich_help_panel=Panel.INPUTS, help="Zeros for the arguments without --input."),
    seed: int = typer.Option(0, min=0, rich_help_panel=Panel.INPUTS, metavar="N", help=SEED_HELP),
    dims: list[str] = typer.Option(
        [], "--dim", rich_help_panel=Panel.INPUTS, metavar="NAME=SIZE",
        help="Size of a symbolic dim, for --random and --zeros.",
    ),
    outputs: list[str] = typer.Option([], "--output", rich_help_panel=Panel.RESULTS, metavar="@FILE|-", help=OUTPUTS),
    full: bool = typer.Option(False, "--full", rich_help_panel=Panel.RESULTS, help=FULL_HELP),
    limit: int | None = typer.Option(
        None, "--output_max_element_count", rich_help_panel=Panel.RESULTS, metavar="N", help=LIMIT_HELP
    ),
    expected: list[str] = typer.Option(
        [], "--expected_output", rich_help_panel=Panel.COMPARISON, metavar="VALUE",
        help="Expected result, written as for --input; (ignored) skips a result.",
    ),
    rtol: float | None = typer.Option(
        None, min=0.0, rich_help_panel=Panel.COMPARISON, metavar="X", help="Relative tolerance; default: by dtype."
    ),
    atol: float | None = typer.Option(
        None, min=0.0, rich_help_panel=Panel.COMPARISON, metavar="X", help="Absolute tolerance; default: by dtype."
    ),
    device: list[str] = typer.Option([], rich_help_panel=Panel.DEVICES, metavar="[NAME=]DEVICE", help=PLACES_HELP),
    threads: int | None = typer.Option(None, rich_help_panel=Panel.DEVICES, metavar="N", help=THREADS_HELP),
    ranks: int | None = typer.Option(
        None, min=1, rich_help_panel=Panel.DEVICES, metavar="N", help=RANKS_HELP, show_default=False
    ),
    untrusted: bool = typer.Option(False, "--untrusted", rich_help_panel=Panel.TRUST, help=UNTRUSTED_HELP),
    trusted_keys: list[str] = typer.Option(
        [], "--trusted-key", rich_help_panel=Panel.TRUST, metavar="FILE.pub", help=KEY_HELP
    ),
    trace: str = typer.Option(
        "", "--trace-dispatch-tensors", rich_help_panel=Panel.DEBUG, metavar="FOLDER", help=TRACE_HELP
    ),
    nan_watch: bool = typer.Option(False, "--nan-watch", rich_help_panel=Panel.DEBUG, help=WATCH_HELP),
    reproducer: Path = typer.Option(None, rich_help_panel=Panel.DEBUG, metavar="FOLDER", help=KEPT_HELP),
) -> None:
    """Run a function of a bundle, print or save its results, compare them.

    Values are written as for iree-run-module. A .npy file stores bf16, f8 and other types without a NumPy name as
    unsigned integers of the same bits, and i4 and i2 as int8.

    A sharded bundle runs on all ranks of its mesh: on processes of this host with --ranks, or on those that a launcher
    has started, as torchrun --nproc-per-node 2 -m aotc run sharded.vmfb or mpirun -n 2 aotc run sharded.vmfb. Inputs
    and results are whole arrays; rank 0 prints and writes them.
    """
    from aotc_cli.shared.array_files import require_folder_of
    from aotc_cli.shared.finite_watch import reproducer_on_failure, watched_call
    from aotc_cli.shared.inputs import make_values, parse_sizes, parse_values, sizes_with_notice
    from aotc_cli.shared.whole_arrays import open_bundle_or_gang

    if random and zeros:
        raise typer.BadParameter("--random and --zeros exclude each other")
    register_custom_calls_from(custom_calls)
    alone = {
        "--trace-dispatch-tensors": trace, "--nan-watch": nan_watch, "--reproducer": reproducer,
        "--custom-calls": custom_calls, "--device": device,
    }  # fmt: skip
    trust: dict[str, Any] = {"untrusted": untrusted, "trusted_keys": trusted_keys or None}
    module = open_bundle_or_gang(
        bundle, ranks, parse_places(device), [n for n, value in alone.items() if value], threads, trust
    )
    name = choose_function(module.functions, function, module.name)
    signature = module.functions[name].signature
    places = _output_destinations(outputs, signature.results)
    if trace:
        require_folder_of(trace, "--trace-dispatch-tensors")
    values = parse_values(inputs, signature.arguments)
    parse_sizes(dims, signature.arguments)  # refuses dims that the function lacks, also where they are not needed
    if random or zeros:
        rest, sizes = signature.arguments[len(values) :], sizes_with_notice(dims, signature, values)
        values += make_values(rest, sizes, random, seed)
    with reproducer_on_failure(reproducer, bundle, name, values, threads):
        called = watched_call(module.module, name, values) if nan_watch else None
        results, odd = called or (_call_function(module, name, values, repeat, trace), False)
    if not module.shows:
        return
    _show_results(results, signature.results, places, _element_limit(full or bool(outputs), limit))
    if expected:
        _compare_with_expected(results, signature.results, expected, rtol, atol)
    if odd:
        raise typer.Exit(3)


def _element_limit(full: bool, limit: int | None) -> int | None:
    """Return the number of elements to print in IREE's form, or None for NumPy's form."""
    if limit is not None:
        return limit
    return FULL_ELEMENTS if full or not sys.stdout.isatty() else None


def _compare_with_expected(
    results: list[Any], named: list[dict[str, Any]], expected: list[str], rtol: float | None, atol: float | None
) -> None:
    """Parse the expected values and compare the results with them; print the largest errors."""
    from aotc_cli.shared.inputs import parse_values
    from aotc_cli.shared.outputs import check_results

    wanted = [None if text == "(ignored)" else text for text in expected]
    given = [t for t in wanted if t is not None]
    rows = iter(parse_values(given, _requested_results(named, wanted), "--expected_output"))
    errors = check_results(results, [None if t is None else next(rows) for t in wanted], rtol, atol)
    for number, error in enumerate(errors):
        if error is not None:
            print(f"result[{number}]: {error}")
    print("[SUCCESS] all function outputs matched their expected values.")


def _requested_results(results: list[dict[str, Any]], wanted: list[str | None]) -> list[dict[str, Any]]:
    return [r for i, r in enumerate(results) if i >= len(wanted) or wanted[i] is not None]


def _call_function(module: Runnable, name: str, values: list[Any], repeat: int, trace: str) -> list[Any]:
    """Call a function ``repeat`` times and return the last results; print the median time of several calls."""
    seconds = []
    results: list[Any] = []
    keywords = {"trace": trace} if trace else {}
    for _ in range(repeat):
        start = perf_counter()
        results = module.invoke(name, *values, **keywords)
        seconds.append(perf_counter() - start)
    if repeat > 1 and module.shows:
        from aotc_cli.shared.units import time_text

        print(f"{repeat} calls, median {time_text(sorted(seconds)[repeat // 2])}", file=sys.stderr)
    return results


def _output_destinations(outputs: list[str], results: list[dict[str, Any]]) -> list[tuple[str, bool, list[int]]]:
    """Parse the ``--output`` options: destination file, append flag and result numbers of each.

    ``-`` is text on stdout, and an empty string discards the result. If the last file can hold several arrays, it
    receives all remaining results.
    """
    from aotc_cli.shared.array_files import check_output, holds_several

    if len(outputs) > len(results):
        raise typer.BadParameter(f"{len(outputs)} for {len(results)} results", param_hint="--output")
    places: list[tuple[str, bool, list[int]]] = []
    for number, where in enumerate(outputs or ["-"] * len(results)):
        if where in ("@", "+"):
            raise typer.BadParameter("@ and + need a file name", param_hint="--output")
        path, numbers = where[1:] if where[:1] in ("@", "+") else where, [number]
        if path not in ("", "-") and holds_several(path) and number == len(outputs) - 1:
            numbers = list(range(number, len(results)))
        if path not in ("", "-"):
            check_output(path, where[:1] == "+", [results[n] for n in numbers])
        places.append((path, where[:1] == "+", numbers))
    return places


def _show_results(
    results: list[Any], named: list[dict[str, Any]], places: list[tuple[str, bool, list[int]]], limit: int | None
) -> None:
    """Write results to files, or print them as text with at most ``limit`` elements."""
    from aotc.display.text import display_width
    from aotc_cli.shared.array_files import WRITERS, suffix_of, write_arrays
    from aotc_cli.shared.inputs import save_array
    from aotc_cli.shared.outputs import array_text, elided_text

    for path, append, numbers in places:
        if path == "-":
            number, array = numbers[0], results[numbers[0]]
            if limit is None:
                name = named[number].get("name") or f"result[{number}]"
                print(f"{name}: {elided_text(array, display_width())}")
            else:
                print(f"result[{number}]: {array_text(array, limit)}")
        elif suffix_of(path) in WRITERS:
            write_arrays(path, {named[n].get("name") or f"result[{n}]": results[n] for n in numbers})
        elif path:
            save_array(path, results[numbers[0]], append)
