"""Base of results that display themselves: as text, and as HTML in a notebook."""

from __future__ import annotations

from aotc.display.document import Document
from aotc.display.html import render_html
from aotc.display.text import render_text


class Shown:
    """A result with a document; ``print`` displays it as the command line does, a notebook as HTML."""

    __slots__ = ()

    def document(self) -> Document:
        """Return the result as a document."""
        raise NotImplementedError

    def __str__(self) -> str:
        return render_text(self.document())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return render_html(self.document())
