"""Render a document as text of a given width: columns fold at spaces, then within names; others are omitted."""

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
    """Return the width of the terminal in columns, or 80 if the output is a pipe or a file."""
    return shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns


def render_text(document: Document, width: int = 0, bold: bool = False) -> str:
    """Render a document as text.

    Parameters
    ----------
    document : Document
        The document.
    width : int
        Columns of a line; 0 means the width of the terminal.
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
    """Wrap a block of text, which may contain line ends, to lines of ``width`` columns."""
    out = []
    for text in line.text.split("\n"):
        first, more = " " * line.indent, " " * (line.indent + line.hang)
        folded = fold_text(text.strip(), max(width - len(more), NARROW), len(more) - len(first))
        out += [(more if n else first) + part for n, part in enumerate(folded)]
    return out


def fold_text(text: str, width: int, first: int = 0) -> list[str]:
    """Fold ``text`` at spaces to lines of ``width`` characters; the first line may have ``first`` more.

    Longer words are folded after separators such as ``/`` and ``_``, but not elsewhere.
    """
    lines, room = [""], width + first
    for word in text.split(" "):
        glue = " " if lines[-1] else ""
        if len(lines[-1]) + len(glue) + len(word) <= room:
            lines[-1] += glue + word
            continue
        for n, piece in enumerate(_foldable_parts(word, width)):
            glue = " " if lines[-1] and not n else ""
            if lines[-1] and len(lines[-1]) + len(glue) + len(piece) > room:
                lines.append("")
                room, glue = width, ""
            lines[-1] += glue + piece
    return lines


def _foldable_parts(word: str, width: int) -> list[str]:
    """Split a word at the places where it may be folded to lines of ``width`` columns."""
    if len(word) <= width:
        return [word]
    parts = [p for p in _PATH.findall(word) if p]
    return [p for part in parts for p in ([part] if len(part) <= width else _PIECE.findall(part)) if p]


def _table_lines(table: Table, width: int, bold: bool) -> list[str]:
    """Render a table as lines: headings, a rule, the rows, and a note about omitted columns."""
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
    """Render a row as the lines of its tallest cell."""
    folded = [[elide_text(part, w) for part in fold_text(cell, w)] for cell, w in zip(cells, widths)]
    height = max(map(len, folded))
    lines = []
    for n in range(height):
        parts = (part[n] if n < len(part) else "" for part in folded)
        padded = [p.rjust(w) if c.right else p.ljust(w) for p, c, w in zip(parts, columns, widths)]
        lines.append((" " * GAP).join(padded).rstrip())
    return lines


def elide_text(text: str, width: int) -> str:
    """Replace the middle of ``text`` by an ellipsis if it is longer than ``width``."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def table_layout(
    columns: Sequence[Column], cells: Sequence[Sequence[str]], width: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of the columns that fit ``width``, and the width of each.

    Long columns fold at spaces, and columns of low priority are omitted. If that does not suffice, all columns are
    displayed and fold at spaces; then within names, down to 16 characters. Then the column with the highest priority
    number is omitted, and so on. Then names fold down to 8 characters; then numbers fold, and long names are elided.
    """
    minor = sorted((n for n, c in enumerate(columns) if c.priority >= MINOR), key=lambda n: columns[n].priority)
    for count in range(len(minor), -1, -1):
        kept = [n for n in range(len(columns)) if n not in minor[count:]]
        if found := _fitted_column_widths(columns, cells, kept, width, _least_width_of_short_columns):
            return tuple(kept), found
    kept = list(range(len(columns)))
    while True:
        for least in (_least_width_at_spaces, _least_width_in_names):
            if found := _fitted_column_widths(columns, cells, kept, width, least):
                return tuple(kept), found
        most = max((columns[n].priority for n in kept), default=0)
        if not most or len(kept) == 1:
            break
        kept.remove(max(n for n in kept if columns[n].priority == most))
    for least in (_least_width_of_short_names, _least_width_elided):
        if found := _fitted_column_widths(columns, cells, kept, width, least):
            return tuple(kept), found
    return tuple(kept), tuple(_least_width_elided(columns[n], cells[n]) for n in kept)


def _fitted_column_widths(
    columns: Sequence[Column], cells: Sequence[Sequence[str]], kept: Sequence[int], width: int, least_of: Least
) -> tuple[int, ...]:
    """Return widths of the columns ``kept`` that fit ``width`` in total; the widest columns shrink first.

    The result is empty if the columns do not fit at their least widths (``least_of``).
    """
    widths = [max(map(len, (columns[n].heading, *cells[n]))) for n in kept]
    least = [min(w, least_of(columns[n], cells[n])) for n, w in zip(kept, widths)]
    room = width - GAP * (len(kept) - 1)
    if sum(least) > room:
        return ()
    while sum(widths) > room:
        widest = max((n for n, w in enumerate(widths) if w > least[n]), key=widths.__getitem__)
        widths[widest] -= 1
    return tuple(widths)


def _least_width_of_short_columns(column: Column, cells: Sequence[str]) -> int:
    whole = max(map(len, (column.heading, *cells)))
    return whole if whole <= SHORT else max(SHORT, _least_width_at_spaces(column, cells))


def _least_width_at_spaces(column: Column, cells: Sequence[str]) -> int:
    return _longest_cell_part(column, cells, str.split)


def _least_width_in_names(column: Column, cells: Sequence[str]) -> int:
    return max(FOLDED, _longest_cell_part(column, cells, _PIECE.findall))


def _least_width_of_short_names(column: Column, cells: Sequence[str]) -> int:
    return max(NARROW, _longest_cell_part(column, cells, _PIECE.findall))


def _least_width_elided(column: Column, cells: Sequence[str]) -> int:
    parts = [len(part) for cell in cells for word in cell.split() for part in _PIECE.findall(word)]
    return max(NARROW, min(max(parts, default=0), LONGEST_PIECE))


def _longest_cell_part(column: Column, cells: Sequence[str], split: Callable[[str], Sequence[str]]) -> int:
    """Return the length of the longest part of a heading and its cells; cells of right-aligned columns are one part."""
    heading = max(map(len, column.heading.split()), default=0)
    if column.right:
        return max(heading, *map(len, cells), 0)
    return max(heading, *(len(part) for cell in cells for word in cell.split() for part in split(word)), 0)
