"""Padding of arrays in a GPU's shared memory, so that elements a few apart are in different banks."""

from __future__ import annotations

from aotc.ir.dims.algebra import Dim
from aotc.lowering.analysis.thresholds import BANKS


def bank_padded_index(place: Dim) -> Dim:
    """Return the index of an element in shared memory: a gap follows every ``BANKS`` elements."""
    return place + place // BANKS
