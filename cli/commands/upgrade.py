"""``aotc upgrade``: recompile a bundle with the installed compiler."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter
from typing import Any

import typer

from aotc_cli.commands.compile import check_output, write_compiled
from aotc_cli.shared.compile_options import parse_specialized
from aotc_cli.shared.custom_calls import HELP, register_from
from aotc_cli.shared.progress_bar import progress_bar

SUMMARY = "Compile the source of a bundle again."
EXAMPLES = """
aotc upgrade old.vmfb -o new.vmfb

aotc upgrade model.vmfb

aotc upgrade old.vmfb -o new.vmfb --target=cpu:x86-64-v3,cpu:x86-64-v4
"""


def command(
    bundle: Path = typer.Argument(..., help="A .vmfb file that was compiled without --no-source."),
    output: Path | None = typer.Option(None, "-o", "--output", help="The bundle to write; default: in place."),
    target: str | None = typer.Option(None, help="As `aotc compile` takes it; default: the bundle's targets."),
    opt_level: int | None = typer.Option(None, "-O", "--opt-level", min=0, max=3, help="Default: as it was compiled."),
    bind: list[str] = typer.Option([], help="As for `aotc compile`; default: as it was compiled."),
    specialize: list[str] = typer.Option([], help="b=1,8, in place of the sizes that it was compiled for."),
    weights: str | None = typer.Option(
        None, help="inline, or the .safetensors file to write; default: a file of the old name beside the new bundle."
    ),
    debug_info: bool | None = typer.Option(None, help="Default: as it was compiled."),
    cache: bool = typer.Option(True, help="Reuse compiled kernels and bundles from the cache directory."),
    jobs: int = typer.Option(0, min=0, help="Kernels compiled at the same time; 0 is one per core."),
    custom_calls: list[str] = typer.Option([], "--custom-calls", help=HELP),
    quiet: bool = typer.Option(False, "-q", "--quiet", help="No progress bar and no summary."),
) -> None:
    """Compile the source of a bundle with the compiler that is installed, as it was compiled; run nothing of it.

    The bytes are those that compiling the model itself gives. A signature does not survive: sign the new bundle again.
    """
    import aotc

    written = output or bundle
    check_output(written)
    register_from(custom_calls)
    start = perf_counter()
    given = {"opt_level": opt_level, "debug_info": debug_info}
    flags: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if bind:
        flags["bind"] = tuple(bind)
    if specialize:
        flags["specialize"] = parse_specialized(specialize)
    place = weights or external_weights_of(bundle, written)
    with progress_bar(quiet) as progress:
        data = aotc.upgrade(bundle, target=target, weights=place, cache=cache, jobs=jobs, progress=progress, **flags)
    write_compiled(written, data, start, quiet)


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
