"""Generate an HTML page: facts and drawing code in one file that loads nothing from the network."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from aotc.display.units import count_text, size_text
from aotc.tools.page.facts import facts_of
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.host.files import write_atomically

HERE = Path(__file__).parent
LIBRARY, LICENCE = HERE / "cytoscape.min.js", HERE / "cytoscape.LICENSE"
SCRIPTS = ("basics.js", "tree.js", "layers.js", "graph.js", "charts.js", "page.js")  # the last one starts the page


# Pixels: the height of the page in a notebook.
NOTEBOOK_HEIGHT = 700


@dataclass(frozen=True, slots=True, repr=False)
class BundleReport:
    """A page about a bundle; a notebook displays it, :meth:`save` writes it.

    Attributes
    ----------
    path : str
        The bundle.
    kernels : int
    assumed : mapping of str to int
        Sizes of symbolic dims that were not given.
    typical : tuple of str
        The assumed sizes that the bundle records as typical.
    html : str
        The page, which loads nothing from the network.
    """

    path: str
    kernels: int
    assumed: Mapping[str, int]
    typical: tuple[str, ...]
    html: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file.

        Raises
        ------
        OSError
            If it cannot be written; an existing file is then unchanged.
        """
        write_atomically(os.fspath(path), [self.html.encode()])

    def __str__(self) -> str:
        return f"{count_text(self.kernels, 'kernel')}, {size_text(len(self.html.encode()))}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        frame = f"width='100%' height='{NOTEBOOK_HEIGHT}' style='border:0'"
        return f"<iframe {frame} srcdoc=\"{escape(self.html)}\"></iframe>"


def report(
    bundle: str | os.PathLike[str] | bytes,
    *,
    function: str = "",
    sizes: Mapping[str, int] | None = None,
    name: str = "",
) -> BundleReport:
    """Return a page about a bundle: kernels and their ops, loops, assembly, times; schedule, memory, weights.

    Parameters
    ----------
    bundle : path or bytes
        With debug information.
    function : str
        By default the only function, or ``main``.
    sizes : mapping of str to int
        Sizes of symbolic dims; others have their typical size, or 16.
    name : str
        The bundle's name on the page; by default its path.

    Returns
    -------
    BundleReport

    Raises
    ------
    BundleError
        If it cannot be read, has no such function, or no text of its kernels.
    """
    if not isinstance(bundle, bytes):
        open_bundle(bundle)  # its errors name the file
    data = bundle if isinstance(bundle, bytes) else Path(bundle).read_bytes()
    where = name or ("<bytes>" if isinstance(bundle, bytes) else os.fspath(bundle))
    facts = facts_of(data, where, function, sizes)
    assumed = {dim: facts["sizes"][dim] for dim in facts["assumed"]}
    return BundleReport(where, len(facts["kernels"]), assumed, tuple(facts["typical"]), page_of(facts))


def page_of(facts: Mapping[str, Any]) -> str:
    """Return the HTML page that shows ``facts``."""
    # Escape the data so that it cannot end the script element.
    data = json.dumps(facts).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    parts = {
        "TITLE": escape(f"{facts['name']}: {facts['target']}"),
        "LICENCE": escape(LICENCE.read_text()),
        "LIBRARY": LIBRARY.read_text(),
        "STYLE": (HERE / "page.css").read_text(),
        "DRAW": "".join((HERE / name).read_text() for name in SCRIPTS),
        "DATA": data,
    }
    text = (HERE / "page.html").read_text()
    pieces = text.split("@@")
    return "".join(parts[piece] if n % 2 else piece for n, piece in enumerate(pieces))
