"""Generate an HTML page: facts and drawing code in one file that loads nothing from the network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIBRARY, LICENCE = HERE / "cytoscape.min.js", HERE / "cytoscape.LICENSE"
SCRIPTS = ("basics.js", "layers.js", "graph.js", "charts.js", "page.js")  # the last one starts the page


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
