"""Render a document as text of a given width: columns fold at spaces, then within names; others are left out."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence

from aotc.display.document import Block, Column, Document, Line, Table

# Columns of a pipe or file, whose width is unknown; COLUMNS in the environment sets another.
PIPE_COLUMNS = 80
# Minimum width of columns that fold within names while optional columns remain, and after these are left out: lines of
# fewer characters are harder to read than a table without its least important column.
FOLDED, NARROW = 16, 8
# A column of at most SHORT characters stays on one line if leaving out a minor column makes room; minor columns have a
# priority number of at least MINOR. A table in which each row takes two lines is harder to read.
SHORT, MINOR = 24, 3
# Length of a name without separators that is displayed whole if columns could otherwise not fit.
LONGEST_PIECE = 12
GAP = 2  # spaces between two columns

Least = Callable[[Column, Sequence[str]], int]  # the width below which a column does not shrink
# A name is folded after the separators of paths and lists, or where that does not suffice after those within names.
_PATH = re.compile(r"[^/,;|\]]*[/,;|\]]*")
_PIECE = re.compile(r"[^/_.,:;=|@\]-]*[/_.,:;=|@\]-]*")


def display_width() -> int:
    """Return the columns of the terminal, or 80 if the output is a pipe or a file."""
    return shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns


def render_text(document: Document, width: int = 0, bold: bool = False) -> str:
    """Return a document as text.

    Parameters
    ----------
    document : Document
    width : int
        Columns of a line; 0: those of the terminal.
    bold : bool
        Print headings of tables in bold, by escape sequences.
    """
    width = width or display_width()
    lines = _wrapped_line(Line(document.title), width) if document.title else []
    last: Block | None = None
    for block in document.blocks:
        if isinstance(block, Table):
            more = _table_lines(block, width, bold)
        else:
            more = _wrapped_line(block, width) if isinstance(block, Line) else block.text.split("\n")
        if more:  # a table follows the line that names it
            lines += [""] if isinstance(last, Table) else []
            lines += more
            last = block
    return "\n".join(line.rstrip() for line in lines)


def _wrapped_line(line: Line, width: int) -> list[str]:
    """Return the lines of a block of text, which may contain line ends."""
    out = []
    for text in line.text.split("\n"):
        first, more = " " * line.indent, " " * (line.indent + line.hang)
        folded = fold_text(text.strip(), max(width - len(more), NARROW), len(more) - len(first))
        out += [(more if n else first) + part for n, part in enumerate(folded)]
    return out


def fold_text(text: str, width: int, first: int = 0) -> list[str]:
    """Return ``text`` in lines of ``width`` characters, the first one of ``first`` more, folded at spaces.

    Words that are longer are folded after separators such as ``/`` and ``_``; parts without any stay whole.
    """
    lines, room = [""], width + first
    for word in text.split(" "):
        glue = " " if lines[-1] else ""
        if len(lines[-1]) + len(glue) + len(word) <= room:
            lines[-1] += glue + word
            continue
        for n, piece in enumerate(_pieces(word, width)):
            glue = " " if lines[-1] and not n else ""
            if lines[-1] and len(lines[-1]) + len(glue) + len(piece) > room:
                lines.append("")
                room, glue = width, ""
            lines[-1] += glue + piece
    return lines


def _pieces(word: str, width: int) -> list[str]:
    """Return the parts of a word between which it may be folded into lines of ``width``."""
    if len(word) <= width:
        return [word]
    parts = [p for p in _PATH.findall(word) if p]
    return [p for part in parts for p in ([part] if len(part) <= width else _PIECE.findall(part)) if p]


def _table_lines(table: Table, width: int, bold: bool) -> list[str]:
    number = range(len(table.columns))
    used = [n for n in number if any(row[n] for row in table.rows) or not table.rows]
    if not table.rows and not any(table.columns[n].heading for n in used):
        return []
    columns = [table.columns[n] for n in used]
    cells = [[row[n] for row in table.rows] for n in used]
    kept, widths = table_layout(columns, cells, width)
    lines = _row_lines([columns[n].heading for n in kept], [columns[n] for n in kept], widths)
    if any(columns[n].heading for n in kept):
        rule = "  ".join("─" * w for w in widths)
        lines = [*(f"\x1b[1m{line}\x1b[0m" if bold else line for line in lines), rule]
    else:
        lines = []
    for row in range(len(table.rows)):
        lines += _row_lines([cells[n][row] for n in kept], [columns[n] for n in kept], widths)
    if omitted := [c.heading for n, c in enumerate(columns) if n not in kept]:
        lines += _wrapped_line(Line(f"(columns for a wider terminal: {', '.join(omitted)})"), width)
    return lines


def _row_lines(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> list[str]:
    """Return the lines of a row, as many as its tallest cell has."""
    folded = [[elide_text(part, w) for part in fold_text(cell, w)] for cell, w in zip(cells, widths)]
    height = max(map(len, folded))
    lines = []
    for n in range(height):
        parts = (part[n] if n < len(part) else "" for part in folded)
        padded = [p.rjust(w) if c.right else p.ljust(w) for p, c, w in zip(parts, columns, widths)]
        lines.append((" " * GAP).join(padded).rstrip())
    return lines


def elide_text(text: str, width: int) -> str:
    """Return ``text`` without its middle if it is longer than ``width``."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def table_layout(
    columns: Sequence[Column], cells: Sequence[Sequence[str]], width: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of the columns to display in ``width``, and the width of each.

    Long columns fold at spaces, and minor columns are left out. If that does not suffice, all columns are displayed and
    fold at spaces; then within names, down to 16 characters; then the column with the highest priority number is left
    out, and so on; then names fold down to 8 characters; then numbers fold, and the middle
    of long names is left out.
    """
    minor = sorted((n for n, c in enumerate(columns) if c.priority >= MINOR), key=lambda n: columns[n].priority)
    for count in range(len(minor), -1, -1):
        kept = [n for n in range(len(columns)) if n not in minor[count:]]
        if found := _fitted_column_widths(columns, cells, kept, width, _least_short):
            return tuple(kept), found
    kept = list(range(len(columns)))
    while True:
        for least in (_least_at_spaces, _least_folded):
            if found := _fitted_column_widths(columns, cells, kept, width, least):
                return tuple(kept), found
        most = max((columns[n].priority for n in kept), default=0)
        if not most or len(kept) == 1:
            break
        kept.remove(max(n for n in kept if columns[n].priority == most))
    for least in (_least_narrow, _least_elided):
        if found := _fitted_column_widths(columns, cells, kept, width, least):
            return tuple(kept), found
    return tuple(kept), tuple(_least_elided(columns[n], cells[n]) for n in kept)


def _fitted_column_widths(
    columns: Sequence[Column], cells: Sequence[Sequence[str]], kept: Sequence[int], width: int, least_of: Least
) -> tuple[int, ...]:
    """Return widths of the columns ``kept`` that fit, the widest shrunk first; empty if their least widths do not."""
    widths = [max(map(len, (columns[n].heading, *cells[n]))) for n in kept]
    least = [min(w, least_of(columns[n], cells[n])) for n, w in zip(kept, widths)]
    room = width - GAP * (len(kept) - 1)
    if sum(least) > room:
        return ()
    while sum(widths) > room:
        widest = max((n for n, w in enumerate(widths) if w > least[n]), key=widths.__getitem__)
        widths[widest] -= 1
    return tuple(widths)


def _least_short(column: Column, cells: Sequence[str]) -> int:
    whole = max(map(len, (column.heading, *cells)))
    return whole if whole <= SHORT else max(SHORT, _least_at_spaces(column, cells))


def _least_at_spaces(column: Column, cells: Sequence[str]) -> int:
    return _longest_cell_part(column, cells, str.split)


def _least_folded(column: Column, cells: Sequence[str]) -> int:
    return max(FOLDED, _longest_cell_part(column, cells, _PIECE.findall))


def _least_narrow(column: Column, cells: Sequence[str]) -> int:
    return max(NARROW, _longest_cell_part(column, cells, _PIECE.findall))


def _least_elided(column: Column, cells: Sequence[str]) -> int:
    parts = [len(part) for cell in cells for word in cell.split() for part in _PIECE.findall(word)]
    return max(NARROW, min(max(parts, default=0), LONGEST_PIECE))


def _longest_cell_part(column: Column, cells: Sequence[str], split: Callable[[str], Sequence[str]]) -> int:
    """Return the length of the longest part of a heading and its cells; cells of right-aligned columns are one part."""
    heading = max(map(len, column.heading.split()), default=0)
    if column.right:
        return max(heading, *map(len, cells), 0)
    return max(heading, *(len(part) for cell in cells for word in cell.split() for part in split(word)), 0)
