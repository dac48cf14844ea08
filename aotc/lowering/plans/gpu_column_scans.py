"""Plan prefix scans along columns that a GPU computes in one pass, with a block for a few adjacent columns."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from aotc.ir.dims.algebra import is_static, static
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.prefix_scans import Scan
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.threshold import BlockSize, Limit
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class ColumnScanPlan(RegionPlan):
    """Plan in which a block scans ``width`` columns, each by ``groups`` threads with ``each`` elements at a time."""

    width: int
    groups: int
    each: int

    @property
    def shared_buffer_shape(self) -> tuple[int, int, int]:
        """Return the shape of the shared buffer for the threads' last results, of this chunk and the previous one."""
        return 2, self.groups, self.width


SHORT_COLUMN = Limit(
    128,
    "elements of a column, at most, that one GPU thread scans alone",
    "as many as eight threads hold in registers, 16 of f32 each",
)
COLUMN_SCAN_BLOCKS = Limit(
    127,
    "blocks of adjacent columns, at most, that are too few for a scan in one pass",
    "one block for each multiprocessor",
)
COLUMN_SCAN_BYTES = BlockSize(
    64,
    "bytes of adjacent columns that one GPU block scans",
    "two whole sectors; 4096 columns of f32 make two blocks per multiprocessor",
)
COLUMN_SCAN_EACH = BlockSize(
    64,
    "bytes of a column that one GPU thread scans in registers",
    "sixteen loads of f32 in flight together",
)
COLUMN_SCAN_THREADS = BlockSize(
    512,
    "threads, at most, of a GPU block that scans adjacent columns",
    "two blocks per multiprocessor: one loads while the other stores",
)


def plan_column_scan(op: Op, scan: Scan) -> ColumnScanPlan | None:
    """Return the blocks of a scan along columns, or None if one pass does not pay.

    It does not if columns are short, if sizes are symbolic, or if there are too few columns for all multiprocessors.
    """
    if not is_static(op.operands[0].type.shape):
        return None
    shape = [static(d) for d in op.operands[0].type.shape]
    n, lead, tail = shape[scan.dim], prod(shape[: scan.dim]), prod(shape[scan.dim + 1 :])
    size = sum(size_of(v.type.dtype) for v in op.results)
    width = max(COLUMN_SCAN_BYTES.value // size, 1)
    if tail < width or SHORT_COLUMN.holds(n) or COLUMN_SCAN_BLOCKS.holds(lead * -(-tail // width)):
        return None
    each = max(COLUMN_SCAN_EACH.value // size, 1)
    return ColumnScanPlan(width, min(COLUMN_SCAN_THREADS.value // width, -(-n // each)), each)
