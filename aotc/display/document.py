"""Values for displayed results: a document is a title and blocks, which are tables, lines and preformatted text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes
    ----------
    heading : str
        A table whose headings are all empty has no heading line.
    right : bool
        Align right and never fold: for numbers with their unit.
    priority : int
        0: always displayed. Where a table is too wide, the column with the highest priority number is left out first.
    """

    heading: str
    right: bool = False
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under columns. Columns without any text are not displayed."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Line:
    """A line, wrapped to the width; ``indent`` spaces precede it, and ``hang`` more its continuation."""

    text: str
    indent: int = 0
    hang: int = 4


@dataclass(frozen=True, slots=True)
class Preformatted:
    """Lines that are displayed unwrapped, such as source with a caret."""

    text: str


Block = Table | Line | Preformatted


@dataclass(frozen=True, slots=True)
class Document:
    """A title, empty for none, and blocks."""

    title: str
    blocks: tuple[Block, ...]


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of any rows."""
    return Table(tuple(columns), tuple(map(tuple, rows)))


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and values, without headings; rows with an empty value are left out."""
    return table((Column(""), Column("")), (row for row in rows if row[1]))
