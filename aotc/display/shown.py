"""Base class of results that display themselves: as text, and as escaped HTML in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from html import escape

from aotc.display.document import Block, Document, Line, Table
from aotc.display.text import render_text


class DisplayedResult(ABC):
    """A result with a document; ``print`` displays the text of the command line, a notebook the HTML."""

    __slots__ = ()

    @abstractmethod
    def document(self) -> Document:
        """Return the result as a document."""

    def __str__(self) -> str:
        return render_text(self.document())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return render_html(self.document())


def render_html(document: Document) -> str:
    """Render a document as HTML elements without style sheets."""
    title = f"<p><b>{escape(document.title)}</b></p>" if document.title else ""
    return f"<div>{title}{''.join(map(_html_block, document.blocks))}</div>"


def _html_block(block: Block) -> str:
    if isinstance(block, Table):
        return _html_table(block)
    if isinstance(block, Line):
        text = escape(block.text.strip()).replace("\n", "<br>")
        return f"<div style='margin-left:{block.indent}ch'>{text}</div>" if text else ""
    return f"<pre>{escape(block.text)}</pre>" if block.text.strip() else ""


def _html_table(table: Table) -> str:
    """Render a table as HTML, without columns that are empty in every row."""
    used = [n for n in range(len(table.columns)) if any(row[n] for row in table.rows) or not table.rows]
    align = ["right" if table.columns[n].right else "left" for n in used]
    headings = [table.columns[n].heading for n in used]
    head = "".join(f"<th style='text-align:{a}'>{escape(h)}</th>" for a, h in zip(align, headings))
    rows = (
        "".join(f"<td style='text-align:{a}'>{escape(row[n])}</td>" for a, n in zip(align, used)) for row in table.rows
    )
    top = f"<thead><tr>{head}</tr></thead>" if any(headings) else ""
    return f"<table>{top}<tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"
