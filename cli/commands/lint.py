"""``aotc lint``: predict the treatment of each op of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from aotc_cli.shared.compile_options import (
    BIND_HELP,
    CALLBACKS_HELP,
    DEFAULT_DEVICE_HELP,
    DEVICE_HELP,
    FALLBACK_HELP,
    HOST_TARGET_HELP,
    MEMORY_HELP,
    PLACE_HELP,
    PORTABLE_HELP,
    PRECISION_HELP,
    QUANTIZE_HELP,
    SHARED_HELP,
    SPECIALIZE_HELP,
    STACK_HELP,
    TARGET_HELP,
    TRANSFERS_HELP,
    TYPICAL_HELP,
    parse_bytes,
    parse_devices,
    parse_specialized,
    parse_typical,
    portable_target,
    warnings_as_sentences,
)
from aotc_cli.shared.custom_calls import HELP, register_custom_calls_from
from aotc_cli.shared.model_arguments import METAVAR, MODEL_HELP, read_models
from aotc_cli.shared.option_groups import OPT_LEVEL_HELP, Panel

if TYPE_CHECKING:
    from aotc.diagnostics import Loc
    from aotc.tools.lint import LintReport

SUMMARY = "Show how each op of a model would be compiled."
EXAMPLES = """
List the ops of a model, and those that cannot be compiled:

aotc lint model.mlir

Compare a CPU and a GPU:

aotc lint model.mlir --target=cpu,cuda:sm_90

Check several models of one bundle:

aotc lint prefill=prefill.mlir decode=decode.mlir

Print every op as JSON:

aotc lint model.mlir --json | python -m json.tool

Leave out Python callbacks, and add code for batch 1 and 8:

aotc lint model.jax --callbacks=drop --specialize b=1,8

Use custom calls of your own:

aotc lint model.mlir --custom-calls=my_ops.py
"""


def command(
    models: list[str] = typer.Argument(..., metavar=METAVAR, help=MODEL_HELP),
    opt_level: int = typer.Option(2, "-O", "--opt-level", min=0, max=3, metavar="LEVEL", help=OPT_LEVEL_HELP),
    callbacks: str = typer.Option("refuse", metavar="refuse|drop", help=CALLBACKS_HELP),
    custom_calls: list[str] = typer.Option([], "--custom-calls", metavar="FILE.py", help=HELP),
    as_json: bool = typer.Option(False, "--json", help="Print every op, as JSON."),
    target: str = typer.Option("cpu", rich_help_panel=Panel.TARGET, metavar="NAME,...", help=TARGET_HELP),
    portable: bool = typer.Option(False, "--portable", rich_help_panel=Panel.TARGET, help=PORTABLE_HELP),
    host_fallback: bool = typer.Option(True, rich_help_panel=Panel.TARGET, help=FALLBACK_HELP),
    host_target: str = typer.Option("", rich_help_panel=Panel.TARGET, metavar="NAME", help=HOST_TARGET_HELP),
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
    bind: list[str] = typer.Option([], rich_help_panel=Panel.WEIGHTS, metavar="ARGUMENT", help=BIND_HELP),
    device: list[str] = typer.Option([], rich_help_panel=Panel.DEVICES, metavar="DEVICE=TARGET", help=DEVICE_HELP),
    default_device: str = typer.Option("", rich_help_panel=Panel.DEVICES, metavar="DEVICE", help=DEFAULT_DEVICE_HELP),
    place: str = typer.Option("said", rich_help_panel=Panel.DEVICES, metavar="said|auto", help=PLACE_HELP),
    max_transfers: int = typer.Option(-1, rich_help_panel=Panel.DEVICES, min=-1, metavar="N", help=TRANSFERS_HELP),
    memory_limit: str = typer.Option("", rich_help_panel=Panel.LIMITS, metavar="BYTES", help=MEMORY_HELP),
    stack_limit: str = typer.Option("", rich_help_panel=Panel.LIMITS, metavar="BYTES", help=STACK_HELP),
    shared_memory_limit: str = typer.Option("", rich_help_panel=Panel.LIMITS, metavar="BYTES", help=SHARED_HELP),
) -> None:
    """Show how each op of a model would be compiled: count, dtypes, device and method.

    native: a kernel in the bundle. library: a call of LAPACK, or of a custom call of yours. refused: the op cannot be
    compiled; the reason and a remedy follow the table. waits: the op reads the result of a refused op. The compiler's
    own importer, passes and lowering decide; only machine code is not generated. Exit codes: 0 if the model compiles; 1
    if an op is refused.
    """
    from aotc.tools.lint import lint

    register_custom_calls_from(custom_calls)
    given = {
        "opt_level": opt_level, "specialize": parse_specialized(specialize),
        "typical": parse_typical(specialize, typical), "callbacks": callbacks,
        "matmul_precision": matmul_precision, "quantize_weights": quantize_weights, "bind": tuple(bind),
        "devices": parse_devices(device), "default_device": default_device, "place": place,
        "max_transfers": max_transfers, "host_fallback": host_fallback, "host_target": host_target,
        "memory_limit": parse_bytes(memory_limit), "stack_limit": parse_bytes(stack_limit, "--stack-limit"),
        "shared_memory_limit": parse_bytes(shared_memory_limit, "--shared-memory-limit"),
    }  # fmt: skip
    with warnings_as_sentences():
        reports = lint(read_models(models), target=portable_target(target, portable), **given)
    if as_json:
        import json

        print(json.dumps([_lint_facts(r) for r in reports], indent=1))
    else:
        from aotc_cli.shared.tables import print_document

        print_document(reports.document())
    if not reports.compiles:
        raise typer.Exit(1)


def _lint_facts(report: LintReport) -> dict[str, Any]:
    """Return a report as data for JSON."""
    return {
        "target": report.target,
        "compiles": report.compiles,
        "ops": [
            {"op": r.name, "dtypes": list(r.dtypes), "status": r.status, "through": r.through, **_place_of_op(r.loc)}
            for r in report.rows
        ],
        "refusals": [
            {"op": op, "message": f.message, "hint": f.hint, "snippet": f.snippet, **_place_of_op(f.loc)}
            for op, f in report.refusals
        ],
    }


def _place_of_op(loc: Loc) -> dict[str, Any]:
    return {"path": loc.path, "line": loc.line, "column": loc.column, "jax": loc.name, "source": loc.source}
