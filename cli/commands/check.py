"""``aotc check``: compare compiled code with the reference, op by op."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from aotc_cli.shared.compile_options import QUANTIZE_HELP
from aotc_cli.shared.custom_calls import HELP, register_from

SUMMARY = "Compare compiled code with the reference, and find the op that differs."
EXAMPLES = """
aotc check model.mlir

aotc check model.mlir --input=@x.npy --input=2xf32=1,2

aotc check model.mlir --bisect -O3

aotc check model.mlir --oracle=jax --dim=batch=8

aotc check model.mlir --rtol=1e-3 --atol=1e-5

aotc check model.mlir --quantize-weights=int4:64
"""


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
    from aotc.tools.check import ORACLES, Checker, check_call
    from aotc_cli.shared.inputs import parse_sizes, parse_values
    from aotc_cli.shared.tables import show

    if oracle not in ORACLES:
        raise typer.BadParameter(f"{oracle!r}: expected reference or jax", param_hint="--oracle")
    if "," in target or not target.startswith("cpu"):
        raise typer.BadParameter(f"{target!r}: expected one CPU target", param_hint="--target")
    register_from(custom_calls)
    source: Any = sys.stdin.buffer.read() if model == "-" else Path(model)
    tolerance = None if rtol is None and atol is None else Tolerance(rtol or 0.0, atol or 0.0)
    options = Options(target=target, opt_level=opt_level, quantize_weights=quantize_weights)
    quantization(options)
    checker = Checker(fetch(source), options, function, tolerance)
    given, sizes = parse_values(inputs, checker.arguments), parse_sizes(dims, checker.arguments)
    report = check_call(checker, given, sizes, seed, oracle=oracle, bisect=bisect)
    show(report.document())
    if not report.agrees:
        raise typer.Exit(3)
