"""Tables for people: drawn by rich on a terminal, plain columns elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print ``rows`` under ``headings``."""
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(*headings, box=box.SIMPLE_HEAD)
        for row in rows:
            table.add_row(*row)
        Console(highlight=False, markup=False).print(table)
        return
    widths = [max(len(line[n]) for line in (headings, *rows)) for n in range(len(headings))]
    for line in (headings, *rows):
        print("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip())
