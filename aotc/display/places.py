"""Text of locations in models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aotc.vmfb.profile.model_place import model_place


def short_location_text(loc: str) -> str:
    """Shorten a location with a line of the user's program to ``model.py:41``; return others unchanged."""
    return model_place(loc).short or loc


def first_location_text(places: Sequence[str]) -> str:
    """Return the first location as text, followed by the number of further locations."""
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return short_location_text(places[0]) + more if places else ""


def targets_text(targets: Mapping[str, str]) -> str:
    """Return the end of a summary line with the target of each device; empty if the model names no device."""
    return "; " + ", ".join(f"{name} is {target}" for name, target in targets.items()) if targets else ""
