"""``aotc upgrade``: recompile a bundle with the installed compiler."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter
from typing import Any

import typer

from aotc_cli.commands.compile import check_output, write_compiled
from aotc_cli.shared.compile_options import parse_specialized, parse_typical
from aotc_cli.shared.custom_calls import HELP, register_custom_calls_from
from aotc_cli.shared.option_groups import Panel
from aotc_cli.shared.progress_bar import progress_bar

SUMMARY = "Compile the model in a bundle again."
EXAMPLES = """
Compile with the installed version of aotc, to another file:

aotc upgrade old.vmfb -o new.vmfb

Replace the bundle:

aotc upgrade model.vmfb

Compile for other targets:

aotc upgrade old.vmfb -o new.vmfb --target=cpu:x86-64-v3,cpu:x86-64-v4
"""


def command(
    bundle: Path = typer.Argument(..., metavar="BUNDLE", help="A .vmfb file that was compiled without --no-source."),
    output: Path | None = typer.Option(
        None, "-o", "--output", metavar="FILE", help="The bundle to write; default: in place."
    ),
    opt_level: int | None = typer.Option(
        None, "-O", "--opt-level", min=0, max=3, metavar="LEVEL", help="As for `aotc compile`; default: unchanged."
    ),
    cache: bool = typer.Option(True, help="Reuse compiled kernels and bundles from the cache directory."),
    jobs: int = typer.Option(0, min=0, metavar="N", help="Kernels compiled at the same time; 0: one per core."),
    custom_calls: list[str] = typer.Option([], "--custom-calls", metavar="FILE.py", help=HELP),
    quiet: bool = typer.Option(False, "-q", "--quiet", help="No progress bar and no summary."),
    target: str | None = typer.Option(
        None, rich_help_panel=Panel.TARGET, metavar="NAME,...", help="As for `aotc compile`; default: unchanged."
    ),
    specialize: list[str] = typer.Option(
        [], rich_help_panel=Panel.DYNAMIC, metavar="DIM=SIZE,...", help="As for `aotc compile`; default: unchanged."
    ),
    typical: list[str] = typer.Option(
        [], rich_help_panel=Panel.DYNAMIC, metavar="DIM=SIZE", help="As for `aotc compile`; default: unchanged."
    ),
    weights: str | None = typer.Option(
        None, rich_help_panel=Panel.WEIGHTS, metavar="inline|FILE",
        help="inline, or the .safetensors file to write; default: the old name, next to the new bundle.",
    ),
    bind: list[str] = typer.Option(
        [], rich_help_panel=Panel.WEIGHTS, metavar="ARGUMENT", help="As for `aotc compile`; default: unchanged."
    ),
    debug_info: bool | None = typer.Option(
        None, rich_help_panel=Panel.DEBUG, help="As for `aotc compile`; default: unchanged."
    ),
) -> None:
    """Compile the model in a bundle with the installed version of aotc; run no code of the bundle.

    The result has the same bytes as compiling the model itself. A signature is not copied: sign the new bundle again.
    """
    import aotc

    written = output or bundle
    check_output(written)
    register_custom_calls_from(custom_calls)
    start = perf_counter()
    given = {"opt_level": opt_level, "debug_info": debug_info}
    flags: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if bind:
        flags["bind"] = tuple(bind)
    if specialize:
        flags["specialize"] = parse_specialized(specialize)
    if sizes := parse_typical(specialize, typical):
        flags["typical"] = sizes
    place = weights or external_weights_of(bundle, written)
    with progress_bar(quiet) as progress:
        data = aotc.upgrade(bundle, target=target, weights=place, cache=cache, jobs=jobs, progress=progress, **flags)
    write_compiled(written, data, start, quiet, place)


def external_weights_of(bundle: Path, written: Path) -> str:
    """Return the destination of external weights: next to the new bundle, under their old name; else ``inline``."""
    from aotc.recompile import weights_file
    from aotc.vmfb.bundle import open_bundle
    from aotc.vmfb.errors import BundleError

    name = os.path.basename(weights_file(open_bundle(str(bundle))))
    if not name:
        return "inline"
    place = written.parent / name
    in_place = written.exists() and os.path.samefile(bundle, written)
    if place.exists() and not in_place:
        hint = f"--weights with another file, or --weights=inline: {bundle} needs that one"
        raise BundleError(str(place), "the weights of the new bundle would replace this file", hint=hint)
    return str(place)
