"""Tables and lines: fitted to the width of a terminal, unformatted elsewhere."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence

_GAP = 2  # columns that rich draws between two cells: a space and a line of spaces
_LEAST = 8  # minimum width of a column whose words are broken


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> None:
    """Print ``rows`` under ``headings``, with columns in ``right`` right-aligned; empty columns are left out."""
    columns = [cells for cells in zip(headings, *rows) if any(cells[1:]) or not rows]
    justify = ["right" if heading in right else "left" for heading, *_ in columns]
    if not (sys.stdout.isatty() and _draw(columns, justify)):
        flush = [str.rjust if side == "right" else str.ljust for side in justify]
        widths = [max(map(len, cells)) for cells in columns]
        for line in zip(*columns):
            print("  ".join(put(text, width) for put, text, width in zip(flush, line, widths)).rstrip())


def _draw(columns: Sequence[Sequence[str]], justify: Sequence[str]) -> bool:
    """Draw a table that fits the terminal; return False, with nothing drawn, if the terminal is too narrow."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, emoji=False)
    numbers = [n for n, side in enumerate(justify) if side == "right"]
    widths = column_widths(columns, console.width - _GAP * (len(columns) - 1), numbers)
    if not widths:
        return False
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for (heading, *_), width, side in zip(columns, widths, justify):
        table.add_column(heading, width=width, justify=side, overflow="fold")
    for row in list(zip(*columns))[1:]:
        table.add_row(*row)
    console.print(table)
    return True


def print_line(text: str, indent: int) -> None:
    """Print a line; a narrow terminal gets it wrapped at spaces, with later lines indented.

    A line with a word that does not fit, such as a long path, is printed unwrapped.
    """
    width = shutil.get_terminal_size().columns
    if sys.stdout.isatty() and all(len(word) + indent <= width for word in text.split()):
        text = textwrap.fill(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)
    print(text)


def column_widths(columns: Sequence[Sequence[str]], room: int, whole: Collection[int] = ()) -> list[int]:
    """Return the widths of columns that fit ``room`` together; empty if words would have to be broken too much.

    The widest column shrinks first, down to its longest word; columns in ``whole`` do not shrink until the last step.
    If that is not enough, words of other columns are broken, unless one is longer than half of ``room``: such a name
    should stay in one piece.
    """
    widths = [max(map(len, cells)) for cells in columns]
    words = [max((len(word) for cell in cells for word in cell.split()), default=0) for cells in columns]
    few = [width if n in whole else min(word, _LEAST) for n, (width, word) in enumerate(zip(widths, words))]
    steps = [[width if n in whole else word for n, (width, word) in enumerate(zip(widths, words))]]
    steps += [few] if 2 * max(words, default=0) <= room else []
    for least in (*steps, [min(pair) for pair in zip(steps[-1], words)]):
        while sum(widths) > room and any(width > low for width, low in zip(widths, least)):
            widest = max((n for n, width in enumerate(widths) if width > least[n]), key=widths.__getitem__)
            widths[widest] -= 1
    return widths if sum(widths) <= room else []
