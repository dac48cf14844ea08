"""Thresholds that several analyses, or stages behind them, read."""

from __future__ import annotations

from aotc.lowering.threshold import Limit

# Frames of Python's stack: lowering recurses over the ops of a region, and fusion bounds how many of them depend on
# each other.
REGION_FRAMES = 20_000
# Words of shared memory: threads of a warp that touch different words at this distance wait for each other. All of
# NVIDIA's GPUs.
BANKS = 32

SPLAT_ELEMENTS = Limit(
    64,
    "elements of a constant that are compared to see if one number fills it",
    "compile time; weights are not worth a look",
)
