"""Which scans along columns a GPU does in one pass, a block of threads for a few neighbouring columns."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from aotc.ir.dims.algebra import is_static, static
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.prefix_scans import Scan
from aotc.lowering.plans.gpu_algorithms import (
    COLUMN_SCAN_BLOCKS,
    COLUMN_SCAN_BYTES,
    COLUMN_SCAN_EACH,
    COLUMN_SCAN_THREADS,
    SHORT_COLUMN,
)
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class ColumnBlocks:
    """How a block scans: ``width`` columns, in each ``groups`` threads one behind the other, of ``each`` elements."""

    width: int
    groups: int
    each: int


def column_blocks(op: Op, scan: Scan) -> ColumnBlocks | None:
    """Return how blocks scan along columns, or None: they are short, unknown, or too few for all multiprocessors."""
    if not is_static(op.operands[0].type.shape):
        return None
    shape = [static(d) for d in op.operands[0].type.shape]
    n, lead, tail = shape[scan.dim], prod(shape[: scan.dim]), prod(shape[scan.dim + 1 :])
    size = sum(size_of(v.type.dtype) for v in op.results)
    width = max(COLUMN_SCAN_BYTES.value // size, 1)
    if tail < width or SHORT_COLUMN.holds(n) or COLUMN_SCAN_BLOCKS.holds(lead * -(-tail // width)):
        return None
    each = max(COLUMN_SCAN_EACH.value // size, 1)
    return ColumnBlocks(width, min(COLUMN_SCAN_THREADS.value // width, -(-n // each)), each)
