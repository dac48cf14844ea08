"""Options that several suites share, and the choice of cases by ``--only``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import timing

Only = Annotated[str, typer.Option(metavar="PATTERN", help="Cases whose name contains this text or pattern.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of each engine.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds; in each one every engine takes a sample.")]
Seconds = Annotated[float, typer.Option(help="Duration of a sample.")]
Target = Annotated[str, typer.Option(help="Target of aotc.")]
Against = Annotated[str, typer.Option(metavar="LIST", help="Engines to compare with, separated by commas.")]
CompileTo = Annotated[Path | None, typer.Option("--compile", metavar="DIR", help="Only write bundles; needs no GPU.")]
Bundles = Annotated[Path | None, typer.Option(metavar="DIR", help="Use the bundles that --compile wrote.")]


def select(names: Iterable[str], only: str, smallest: str = "") -> list[str]:
    """Return the names that match ``only``, a text or a pattern; in smoke mode only the smallest.

    Parameters
    ----------
    names : iterable of str
        All names.
    only : str
        Text or pattern; empty for all names.
    smallest : str
        The case for smoke mode; the first one by default.

    Raises
    ------
    SystemExit
        If no name matches.
    """
    names = list(names)
    chosen = [name for name in names if only in name or re.search(only, name)]
    if not chosen:
        raise SystemExit(f"--only {only}: no case matches; expected a part of {', '.join(map(repr, names[:40]))}")
    if timing.SMOKE:
        return [smallest if smallest in chosen else chosen[0]]
    return chosen
