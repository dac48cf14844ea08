"""Thresholds that several analyses, or later stages, read."""

from __future__ import annotations

from aotc.lowering.threshold import Limit

# Frames of Python's stack for lowering one region, which recurses over its chains of dependent ops. Fusion bounds the
# length of these chains.
REGION_FRAMES = 20_000
# Banks of a GPU's shared memory, each one 4-byte word wide: threads of a warp that touch different words at a multiple
# of this distance conflict and wait for each other. True of all NVIDIA GPUs.
BANKS = 32

SPLAT_ELEMENTS = Limit(
    64,
    "elements of a constant, at most, that are compared to find out whether one number fills it",
    "bounds the compile time; weights are too large for this test to be worthwhile",
)
