"""Locations in models as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aotc.vmfb.profile.model_place import model_place


def short_place(loc: str) -> str:
    """Return ``model.py:41`` for a location with a line of the user's program; others unchanged."""
    return model_place(loc).short or loc


def first_place(places: Sequence[str]) -> str:
    """Return the first location, and the number of further ones."""
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return short_place(places[0]) + more if places else ""


def targets_text(targets: Mapping[str, str]) -> str:
    """Return the end of a summary line: the target of each device, if the model names any."""
    return "; " + ", ".join(f"{name} is {target}" for name, target in targets.items()) if targets else ""
