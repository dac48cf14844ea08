"""Document model of displayed results: a title and blocks, which are tables, lines and preformatted text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes
    ----------
    heading : str
        The table has no heading line if all its headings are empty.
    right : bool
        Align right and never fold: for numbers with their unit.
    priority : int
        0: always displayed. In a table that is too wide, the column with the highest priority is omitted first.
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
    """A line of text, wrapped to the width; ``indent`` spaces precede it, ``hang`` more precede its continuation."""

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
    """A displayed result: a title, which may be empty, and blocks."""

    title: str
    blocks: tuple[Block, ...]


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table with these columns and rows of text."""
    return Table(tuple(columns), tuple(map(tuple, rows)))


def facts_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and values, without headings; rows with an empty value are omitted."""
    return table((Column(""), Column("")), (row for row in rows if row[1]))
