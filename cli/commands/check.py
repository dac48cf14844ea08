"""``aotc check``: compare compiled code with the reference, op by op."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from aotc_cli.shared.compile_options import QUANTIZE_HELP
from aotc_cli.shared.custom_calls import HELP, register_custom_calls_from
from aotc_cli.shared.option_groups import FUNCTION_HELP, OPT_LEVEL_HELP, SEED_HELP, Panel

RANKS_HELP = "Number of ranks of a sharded model, which run as threads; any number by default."
SUMMARY = "Compare compiled code with the reference, and find the op that differs."
EXAMPLES = """
Check a model with random values:

aotc check model.mlir

Check a model with values of your own:

aotc check model.mlir --input=@x.npy --input=2xf32=1,2

Name the pass after which the result changes:

aotc check model.mlir --bisect -O3

Compare with XLA, for batches of 8:

aotc check model.mlir --oracle=jax --dim=batch=8

Compare with tolerances of your own:

aotc check model.mlir --rtol=1e-3 --atol=1e-5

Show the error of weights quantized to 4 bits:

aotc check model.mlir --quantize-weights=int4:64

Check a sharded model, with each rank as a thread:

aotc check sharded.jaxexp --ranks=4
"""


def command(
    model: str = typer.Argument(
        ..., metavar="MODEL", help="StableHLO text or bytecode, a portable artifact, a jax.export blob; - is stdin."
    ),
    function: str = typer.Option("", metavar="NAME", help=FUNCTION_HELP, show_default=False),
    bisect: bool = typer.Option(False, "--bisect", help="Name the pass after which the result changes."),
    custom_calls: list[str] = typer.Option([], "--custom-calls", metavar="FILE.py", help=HELP),
    inputs: list[str] = typer.Option(
        [], "--input", rich_help_panel=Panel.INPUTS, metavar="VALUE",
        help="An argument, in order: SHAPExTYPE=VALUES, a scalar, @x.npy or @x.npz; default: random values.",
    ),
    seed: int = typer.Option(0, min=0, rich_help_panel=Panel.INPUTS, metavar="N", help=SEED_HELP),
    dims: list[str] = typer.Option(
        [], "--dim", rich_help_panel=Panel.INPUTS, metavar="NAME=SIZE",
        help="Size of a symbolic dim; others have their typical size, or the first one that fits.",
    ),
    oracle: str = typer.Option(
        "reference", rich_help_panel=Panel.COMPARISON, metavar="reference|jax",
        help="reference: the IR, evaluated by NumPy; jax: XLA on the CPU.",
    ),
    rtol: float | None = typer.Option(
        None, min=0.0, rich_help_panel=Panel.COMPARISON, metavar="X",
        help="Relative tolerance; default: bounds by op and dtype.",
    ),
    atol: float | None = typer.Option(
        None, min=0.0, rich_help_panel=Panel.COMPARISON, metavar="X",
        help="Absolute tolerance; default: bounds by op and dtype.",
    ),
    target: str = typer.Option(
        "cpu", rich_help_panel=Panel.TARGET, metavar="NAME", help="A CPU target that this machine can run."
    ),
    opt_level: int = typer.Option(
        2, "-O", "--opt-level", min=0, max=3, rich_help_panel=Panel.TARGET, metavar="LEVEL", help=OPT_LEVEL_HELP
    ),
    quantize_weights: str = typer.Option(
        "none", rich_help_panel=Panel.NUMBERS, metavar="none|int8|int4[:N]",
        help=f"{QUANTIZE_HELP} The report shows the error that this causes.",
    ),
    ranks: int | None = typer.Option(
        None, min=1, rich_help_panel=Panel.TARGET, metavar="N", help=RANKS_HELP, show_default=False
    ),
) -> None:
    """Compile a model, run it and the reference, and print the first op whose result differs.

    Each op is checked with the operands that the compiled code computed. Copies and integers must be equal. Other
    results must be within 4 units in the last place, or as close to the result in 64 bits as the reference is. The
    results of the whole model are compared relative to their largest element. Exit codes: 0 if all agrees; 3 if
    something differs; 1 for an error in the model or the inputs; 2 for a bug in aotc.

    All ranks of a sharded model run together, as threads of this process, up to 256. Their results are compared with
    those of the whole program on one device; single ops are not.
    """
    from aotc.frontend.mlir import is_for_several_devices
    from aotc.options import Options, weight_quantization
    from aotc.targets import resolve_targets, runs_on_this_machine
    from aotc.tools.agreement import Tolerance
    from aotc.tools.check import ORACLES, Checker, check_call
    from aotc.tools.check_model import fetch_for_check, refuse_unsupported_rank_check
    from aotc.tools.check_ranks import rank_checker
    from aotc_cli.shared.inputs import parse_sizes, parse_values
    from aotc_cli.shared.tables import print_document

    if oracle not in ORACLES:
        raise typer.BadParameter(f"{oracle!r}: expected reference or jax", param_hint="--oracle")
    if "," in target or not target.startswith("cpu"):
        raise typer.BadParameter(f"{target!r}: expected one CPU target", param_hint="--target")
    if not runs_on_this_machine(resolve_targets(target)[0]):
        raise typer.BadParameter(f"{target!r}: this machine cannot run it; see `aotc targets`", param_hint="--target")
    register_custom_calls_from(custom_calls)
    source: Any = sys.stdin.buffer.read() if model == "-" else Path(model)
    tolerance = None if rtol is None and atol is None else Tolerance(rtol or 0.0, atol or 0.0)
    options = Options(target=target, opt_level=opt_level, quantize_weights=quantize_weights)
    weight_quantization(options)
    raw = fetch_for_check(source, (), ranks)
    if is_for_several_devices(raw) or ranks is not None:
        refuse_unsupported_rank_check(bisect, raw)
        sharded = rank_checker(raw, options, function, tolerance)
        given, sizes = parse_values(inputs, sharded.arguments), parse_sizes(dims, sharded.arguments)
        report = sharded.check(given, sizes, seed, oracle, ranks)
    else:
        checker = Checker(raw, options, function, tolerance)
        given, sizes = parse_values(inputs, checker.arguments), parse_sizes(dims, checker.arguments)
        report = check_call(checker, given, sizes, seed, oracle=oracle, bisect=bisect)
    print_document(report.document())
    if not report.agrees:
        raise typer.Exit(3)
