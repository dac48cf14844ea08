"""Cost records inside of bundles: the record that a bundle was compiled with (``costs``), and a later ``profile``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aotc.vmfb.bundle import OpenedBundle, write_bundle
from aotc.vmfb.errors import BundleError
from aotc.vmfb.profile.cost_record import read_record, record_text

COSTS, PROFILE = "costs", "profile"


def stored_record(opened: OpenedBundle, key: str) -> dict[str, Any]:
    """Return the cost record stored in a bundle under ``key``, ``costs`` or ``profile``; an empty dict without one.

    Raises
    ------
    BundleError
        If the record is damaged.
    """
    entry = opened.manifest.get(key)
    if entry is None:
        return {}
    try:
        return read_record(bytes(opened.verified_segment(entry["segment"])))
    except ValueError as error:
        raise BundleError(opened.where, f"the {key} of the bundle cannot be read: {error}") from None


def bundle_with_profile(opened: OpenedBundle, record: Mapping[str, Any]) -> bytes:
    """Return the bytes of an unsigned bundle with ``record`` as its profile, which replaces an existing one."""
    manifest = {key: value for key, value in opened.manifest.items() if key != "segments"}
    segments: list[tuple[str, Any]] = [
        (row["name"], opened.verified_segment(n)) for n, row in enumerate(opened.manifest["segments"])
    ]
    number = (manifest.get(PROFILE) or {"segment": len(segments)})["segment"]
    segments[number : number + 1] = [(PROFILE, record_text(record).encode())]
    data = write_bundle(None, {**manifest, PROFILE: {"segment": number}}, segments)
    assert data is not None
    return data
