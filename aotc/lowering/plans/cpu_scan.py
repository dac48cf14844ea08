"""Plan prefix scans by one worker: chunk by chunk, for several neighbouring scans at a time."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.prefix_scans import scan_of
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.plans.thresholds import SCAN_LANES
from aotc.lowering.threshold import BlockSize


@dataclass(frozen=True, slots=True)
class ChunkScanPlan(RegionPlan):
    """Plan of a prefix scan in chunks: each is scanned separately, and combined with the total of earlier chunks.

    Attributes
    ----------
    lanes : int
        The largest number of neighbouring scans in a grid item.
    chunk : int
        Elements of a chunk.
    """

    lanes: int
    chunk: int


def plan_cpu_scan(b: RegionBuilder) -> ChunkScanPlan:
    """Return the plan of a scan of neighbouring rows or columns in vector lanes."""
    return plan_chunks(b.region_root_op("reduce_window"), SCAN_LANES.value)


SCAN_CHUNK = BlockSize(
    256,
    "elements per chunk of a scan of unknown length",
    "the square root of 65536; a scan of known length uses the square root of its own",
)


def plan_chunks(op: Op, lanes: int) -> ChunkScanPlan:
    """Choose the chunks of a prefix scan of ``lanes`` neighbours: about the square root of its length."""
    scan = scan_of(op)
    assert scan is not None
    n = op.results[0].type.shape[scan.dim]
    return ChunkScanPlan(lanes, isqrt(n) + 1 if isinstance(n, int) else SCAN_CHUNK.value)
