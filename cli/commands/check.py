"""``aotc check``: compare compiled code with the reference, op by op."""

from __future__ import annotations

import sys
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from aotc_cli.shared.compile_options import QUANTIZE_HELP
from aotc_cli.shared.custom_calls import HELP, register_from

if TYPE_CHECKING:
    from aotc.tools.agreement import Mismatch
    from aotc.tools.check import Checker, CheckReport, Difference

SUMMARY = "Compare compiled code with the reference, and find the op that differs."
EXAMPLES = """
aotc check model.mlir

aotc check model.mlir --input=@x.npy --input=2xf32=1,2

aotc check model.mlir --bisect -O3

aotc check model.mlir --oracle=jax --dim=batch=8

aotc check model.mlir --rtol=1e-3 --atol=1e-5

aotc check model.mlir --quantize-weights=int4:64
"""
_SIZES = (3, 2, 4, 8, 1, 6, 16, 12, 5, 7, 32, 64)


def command(
    model: str = typer.Argument(
        ..., help="StableHLO text or bytecode, a portable artifact, a jax.export blob; - is stdin."
    ),
    function: str = typer.Option("", help="Which function; main by default.", show_default=False),
    inputs: list[str] = typer.Option(
        [], "--input", help="SHAPExTYPE=VALUES, a scalar, @x.npy or @x.npz; once per argument, in order."
    ),
    seed: int = typer.Option(0, min=0, help="For the random values of arguments without --input."),
    dims: list[str] = typer.Option([], "--dim", help="NAME=SIZE: a symbolic dim; others get the first sizes that fit."),
    opt_level: int = typer.Option(2, "-O", "--opt-level", min=0, max=3, help="As for `aotc compile`."),
    quantize_weights: str = typer.Option("none", help=f"{QUANTIZE_HELP} What that costs is told."),
    target: str = typer.Option("cpu", help="A CPU target that this machine can run."),
    bisect: bool = typer.Option(False, "--bisect", help="Name the pass after which the result changes."),
    oracle: str = typer.Option("reference", help="reference (the IR run by NumPy) or jax (XLA on the CPU)."),
    rtol: float | None = typer.Option(
        None, min=0.0, help="Relative tolerance, in place of the bounds by op and dtype."
    ),
    atol: float | None = typer.Option(None, min=0.0, help="Absolute tolerance, likewise."),
    custom_calls: list[str] = typer.Option([], "--custom-calls", help=HELP),
) -> None:
    """Compile a model, run it beside the reference, and print the first op whose result differs.

    Each op is judged on the operands that the compiled code gave it: exactly where values are only moved or
    are integers, else within 4 units in the last place, or as near to the op in 64 bits as the reference is. The
    results of the whole model are compared more loosely, relative to their largest element. Exit codes: 0 all
    agrees, 3 something differs, 1 the model or the inputs are at fault, 2 aotc is.
    """
    from aotc.frontend.mlir import fetch
    from aotc.options import Options, quantization
    from aotc.tools.agreement import Tolerance
    from aotc.tools.check import Checker

    if oracle not in ("reference", "jax"):
        raise typer.BadParameter(f"{oracle!r}: expected reference or jax", param_hint="--oracle")
    if "," in target or not target.startswith("cpu"):
        raise typer.BadParameter(f"{target!r}: expected one CPU target", param_hint="--target")
    register_from(custom_calls)
    source: Any = sys.stdin.buffer.read() if model == "-" else Path(model)
    tolerance = None if rtol is None and atol is None else Tolerance(rtol or 0.0, atol or 0.0)
    options = Options(target=target, opt_level=opt_level, quantize_weights=quantize_weights)
    quantization(options)
    checker = Checker(fetch(source), options, function, tolerance)
    arrays = _arguments(checker, inputs, dims, seed)
    report = _checked(checker, arrays, oracle, bisect)
    _show(report, oracle, bisect)
    if not report.agrees:
        raise typer.Exit(3)


def _checked(checker: Checker, arrays: list[Any], oracle: str, bisect: bool) -> CheckReport:
    from aotc.ir.opset.control import AssertionFailed
    from aotc.ir.semantics.run import OperandError
    from aotc.vmfb.errors import CallError

    try:
        return checker.check(arrays, oracle, bisect)
    except (OperandError, AssertionFailed) as error:
        raise CallError("", f"the arguments do not fit: {error}", hint="--input and --dim say what they are") from None


# Combinations of sizes to try for a model that reports invalid sizes only by refusing them.
MOST_TRIES = 20000


def _arguments(checker: Checker, inputs: list[str], dims: list[str], seed: int) -> list[Any]:
    from aotc.driver.assemble import signature
    from aotc.vmfb.errors import CallError
    from aotc_cli.shared.inputs import make_values, parse_sizes, parse_values

    rows = signature(checker.function)["arguments"]
    given = parse_values(inputs, rows)
    sizes = parse_sizes(dims, rows)
    if len(given) == len(rows):
        return given
    for tried in islice(_choices(checker, sizes), MOST_TRIES):
        try:
            arrays = [*given, *make_values(rows[len(given) :], tried, True, seed)]
        except (CallError, ValueError):
            continue
        if not tried or checker.fits(arrays):
            shown = ", ".join(f"{name}={size}" for name, size in sorted(tried.items()))
            rest = " after those that are given" if given else ""
            print(f"random arguments{rest}, seed {seed}{': ' + shown if shown else ''}")
            return arrays
    raise CallError("", "no sizes were found that fit the model's dims", hint="give them: --dim=NAME=SIZE, or --input")


def _choices(checker: Checker, sizes: dict[str, int]) -> Any:
    """Yield sizes for the remaining symbols, simple ones first."""
    names = [n for n in checker.symbols() if n not in sizes]
    for numbers in product(_SIZES, repeat=len(names)):
        yield {**sizes, **dict(zip(names, numbers))}


def _show(report: CheckReport, oracle: str, bisect: bool) -> None:
    what = {"reference": "the reference", "jax": "XLA"}[oracle]
    for name, error in zip(report.names, report.rounding):
        if error is not None:
            share = f"{error.relative:.2g} of {what}'s root mean square"
            print(f"{name}: rounded weights put it off by {share}, {error.largest:.3g} at most of {error.size:.3g}")
    what = "the reference on rounded weights" if report.rounding else what
    for name, mismatch in zip(report.names, report.results):
        print(f"{name}: " + ("agrees with " + what if mismatch is None else f"differs from {what}: {_text(mismatch)}"))
    for name, mismatch in zip(report.names, report.reference):
        if mismatch is not None:
            print(f"{name}: the reference itself differs from XLA: {_text(mismatch)}")
    if report.difference is not None:
        print("\n".join(_lines(report.difference)))
    elif report.agrees:
        print("each op agrees with the reference on the operands that it was given")
    else:
        print("no op differs from the reference, alone or at the end of a part of the program")
    if bisect and not report.agrees:
        print(_verdict(report))


def _lines(d: Difference) -> list[str]:
    lines = ["", f"{d.loc}: {d.op} : {d.type} is the first op that differs"]
    if d.loc.traced_by:
        lines.append(f"  traced by: {d.loc.traced_by}")
    lines += [f"  inside of: {place}" for place in d.within]
    lines.append(f"  {_text(d.mismatch)}")
    if not d.alone:
        lines.append("  alone it is right: it differs only where it is compiled together with the ops before it")
    if d.kernels:
        lines.append(f"  kernels it went into: {', '.join(d.kernels)}")
    return lines


def _text(m: Mismatch) -> str:
    if not m.index and m.units == float("inf") and m.largest == float("inf") and "[" in m.ours:
        return f"found {m.ours}, expected {m.expected}"
    worst = f"at {list(m.index)} {m.ours}, expected {m.expected} ({m.units:.3g} ulp, error {m.largest:.3g})"
    return f"{m.count:,} of {m.size:,} elements, the worst {worst}"


def _verdict(report: CheckReport) -> str:
    if report.changed_by:
        return f"pass {report.changed_by} changes the result: the IR before it is right and the IR after it is not"
    return "no pass changes the result beyond rounding: the kernels made of the final IR, or their order, are at fault"
