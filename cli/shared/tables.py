"""Print documents, tables and lines, fitted to the width of the terminal or to 80 columns."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from aotc.display.document import Block, Column, Document, Line, table
from aotc.display.text import render_text

_ASCII = str.maketrans({"─": "-", "…": "~"})  # of a terminal or a file whose encoding has no others


def print_document(document: Document) -> None:
    """Print a document; on a terminal the headings of tables are bold."""
    text = render_text(document, bold=sys.stdout.isatty())
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeError:
        text = text.translate(_ASCII)
    print(text)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> None:
    """Print ``rows`` under ``headings``, with columns in ``right`` right-aligned; empty columns are omitted."""
    _print_block(table([Column(heading, heading in right) for heading in headings], rows))


def print_line(text: str, indent: int) -> None:
    """Print a line, wrapped at spaces, with later lines indented."""
    spaces = len(text) - len(text.lstrip(" "))
    _print_block(Line(text, spaces, indent - spaces))


def _print_block(block: Block) -> None:
    print_document(Document("", (block,)))
