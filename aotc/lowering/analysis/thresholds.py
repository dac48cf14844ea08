"""Thresholds of the analyses: see :mod:`aotc.lowering.plans.thresholds` for the meaning of a row."""

from __future__ import annotations

from aotc.lowering.threshold import Limit, rows_in

# fmt: off
SPLAT_ELEMENTS = Limit(
    "splat_elements", 64, "elements of a constant that are compared to see if one number fills it",
    "chosen, not measured: compile time; weights are not worth a look",
)
SHORT_SCAN = Limit(
    "short_scan", 16, "elements of a scan done as windows",
    "chosen, not measured: windows are independent and unrolled; the steps of a scan depend on each other",
)
INDEX_ATOMS = Limit(
    "index_atoms", 48, "names and functions in an index expression",
    "chosen, not measured: longer ones get a name, for each transpose between two reshapes doubles their text",
)

ROWS = rows_in(globals())
