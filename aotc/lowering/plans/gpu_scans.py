"""Plan prefix scans on a GPU: rows or columns by blocks of threads, or one scan by each thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aotc.ir.dims.algebra import product
from aotc.ir.loop.ir import Buffer
from aotc.ir.loop.scratch import shared_bytes_of_buffers
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.prefix_scans import Scan, scan_of
from aotc.lowering.analysis.thresholds import BANKS
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.cpu_scan import ChunkScanPlan, plan_chunks
from aotc.lowering.plans.gpu_column_scans import ColumnScanPlan, plan_column_scan
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.threshold import BlockSize
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class RowScanPlan(RegionPlan):
    """Plan in which a block of ``threads`` threads scans a row; each thread scans ``each`` neighbours at a time."""

    threads: int
    each: int

    @property
    def shared_buffer_shapes(self) -> tuple[tuple[int], ...]:
        """Return the shapes of the shared buffers: the elements, the last results of threads twice, the total."""
        size = self.threads * self.each
        return (size + size // BANKS,), (self.threads,), (self.threads,), (1,)


def plan_gpu_scan(b: RegionBuilder) -> RowScanPlan | ColumnScanPlan | ChunkScanPlan:
    """Choose a prefix scan by thread blocks where it fits shared memory, else one thread per scan."""
    op = b.region_root_op("reduce_window")
    scan = scan_of(op)
    assert scan is not None
    columns = plan_column_scan(op, scan)
    if columns is not None and _shared_buffer_bytes(op, [columns.shared_buffer_shape]) <= b.target.shared:
        return columns
    rows = _plan_block_row_scan(b, op, scan) if product(b.shape[scan.dim + 1 :]) == 1 else None
    return rows or plan_chunks(op, lanes=1)


GPU_SCAN_THREADS = BlockSize(
    256,
    "threads of a GPU block that scans a row",
    "eight blocks per multiprocessor hide each other's barriers",
)
GPU_SCAN_BYTES = BlockSize(
    32,
    "bytes of adjacent elements that one thread scans serially",
    "eight f32: fewer steps than the scan across the block that follows",
)


def _plan_block_row_scan(b: RegionBuilder, op: Op, scan: Scan) -> RowScanPlan | None:
    """Return the plan of a block per row, or None if shared memory has no room for two threads.

    A short row has fewer threads. A single thread would scan in chunks, without shared memory.
    """
    n, threads = b.shape[scan.dim], GPU_SCAN_THREADS.value
    each = max(GPU_SCAN_BYTES.value // sum(size_of(v.type.dtype) for v in op.results), 1)
    while isinstance(n, int) and threads > BANKS and threads * each >= 2 * n:
        threads //= 2
    while threads > 1:
        plan = RowScanPlan(threads, each)
        if _shared_buffer_bytes(op, plan.shared_buffer_shapes) <= b.target.shared:
            return plan
        threads //= 2
    return None


def _shared_buffer_bytes(op: Op, shapes: Iterable[tuple[int, ...]]) -> int:
    """Return the bytes of shared buffers of ``shapes``, of each shape one per result."""
    return shared_bytes_of_buffers(Buffer("x", v.type.dtype, shape, "shared") for shape in shapes for v in op.results)
