"""Locations in models as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_FILE = re.compile(r"\.\w+(:\d+)+$")


def short_place(loc: str) -> str:
    """Return ``model.py:41`` for a location in a file, with its path and JAX's names before it; others unchanged."""
    loc = loc.partition(", in ")[0]
    return loc.rpartition("/")[2] if _FILE.search(loc) else loc


def first_place(places: Sequence[str]) -> str:
    """Return the first location, and the number of further ones."""
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return short_place(places[0]) + more if places else ""


def targets_text(targets: Mapping[str, str]) -> str:
    """Return the end of a summary line: the target of each device, if the model names any."""
    return "; " + ", ".join(f"{name} is {target}" for name, target in targets.items()) if targets else ""
