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
    TRANSFERS_HELP,
    devices_of,
    parse_bytes,
    parse_specialized,
    portable_target,
    warnings_as_sentences,
)
from aotc_cli.shared.custom_calls import HELP, register_from
from aotc_cli.shared.model_arguments import METAVAR, MODEL_HELP, read_models

if TYPE_CHECKING:
    from aotc.diagnostics import Loc
    from aotc.tools.lint import LintReport

SUMMARY = "Tell before compiling what becomes of each op."
EXAMPLES = """
aotc lint model.mlir

aotc lint model.mlir --target=cpu,cuda:sm_90

aotc lint prefill=prefill.mlir decode=decode.mlir

aotc lint model.mlir --json | python -m json.tool

aotc lint model.jax --callbacks=drop --specialize b=1,8

aotc lint model.mlir --custom-calls=my_ops.py
"""


def command(
    models: list[str] = typer.Argument(..., metavar=METAVAR, help=MODEL_HELP),
    target: str = typer.Option("cpu", help="cpu (this machine) or names from `aotc targets`, separated by commas."),
    portable: bool = typer.Option(False, "--portable", help=PORTABLE_HELP),
    opt_level: int = typer.Option(2, "-O", "--opt-level", min=0, max=3, help="As for `aotc compile`."),
    matmul_precision: str = typer.Option("model", help=PRECISION_HELP),
    quantize_weights: str = typer.Option("none", help=QUANTIZE_HELP),
    specialize: list[str] = typer.Option([], help=SPECIALIZE_HELP),
    bind: list[str] = typer.Option([], help=BIND_HELP),
    device: list[str] = typer.Option([], help=DEVICE_HELP),
    default_device: str = typer.Option("", help=DEFAULT_DEVICE_HELP),
    place: str = typer.Option("said", help=PLACE_HELP),
    max_transfers: int = typer.Option(-1, min=-1, help=TRANSFERS_HELP),
    host_fallback: bool = typer.Option(True, help=FALLBACK_HELP),
    host_target: str = typer.Option("", help=HOST_TARGET_HELP),
    memory_limit: str = typer.Option("", help=MEMORY_HELP),
    stack_limit: str = typer.Option("", help=STACK_HELP),
    shared_memory_limit: str = typer.Option("", help=SHARED_HELP),
    callbacks: str = typer.Option("refuse", help=CALLBACKS_HELP),
    custom_calls: list[str] = typer.Option([], "--custom-calls", help=HELP),
    as_json: bool = typer.Option(False, "--json", help="Every op by itself, as JSON."),
) -> None:
    """Tell what becomes of each op of a model: how often, of which dtypes, where, and by which way.

    native: a kernel in the bundle. library: a call of LAPACK, or of a function of yours. refused: it
    cannot be compiled; why, and what to do, stands below the table. waits: it reads what a refused op
    makes, and nothing can be said before that is changed. The compiler's own importer, passes and lowering
    decide; only machine code is not made. Exit code 0 if all compiles, 1 if something is refused.
    """
    from aotc.tools.lint import lint

    register_from(custom_calls)
    given = {
        "opt_level": opt_level, "specialize": parse_specialized(specialize), "callbacks": callbacks,
        "matmul_precision": matmul_precision, "quantize_weights": quantize_weights, "bind": tuple(bind),
        "devices": devices_of(device), "default_device": default_device, "place": place, "max_transfers": max_transfers,
        "host_fallback": host_fallback, "host_target": host_target,
        "memory_limit": parse_bytes(memory_limit), "stack_limit": parse_bytes(stack_limit, "--stack-limit"),
        "shared_memory_limit": parse_bytes(shared_memory_limit, "--shared-memory-limit"),
    }  # fmt: skip
    with warnings_as_sentences():
        reports = lint(read_models(models), target=portable_target(target, portable), **given)
    if as_json:
        import json

        print(json.dumps([_facts(r) for r in reports], indent=1))
    else:
        from aotc_cli.shared.tables import show

        show(reports.document())
    if not reports.compiles:
        raise typer.Exit(1)


def _facts(report: LintReport) -> dict[str, Any]:
    return {
        "target": report.target,
        "compiles": report.compiles,
        "ops": [
            {"op": r.name, "dtypes": list(r.dtypes), "status": r.status, "through": r.through, **_place(r.loc)}
            for r in report.rows
        ],
        "refusals": [
            {"op": op, "message": f.message, "hint": f.hint, "snippet": f.snippet, **_place(f.loc)}
            for op, f in report.refusals
        ],
    }


def _place(loc: Loc) -> dict[str, Any]:
    return {"path": loc.path, "line": loc.line, "column": loc.column, "jax": loc.name, "source": loc.source}
