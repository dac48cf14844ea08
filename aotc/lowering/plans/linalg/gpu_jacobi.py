"""Decide which eigenvalue and singular value problems one GPU block solves by Jacobi's method; lay out its memory.

One-sided Jacobi (Hestenes 1958) rotates pairs of columns until all are orthogonal. The columns are in shared memory; a
group of lanes of a warp rotates one pair.
"""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.loop.ir import WARP
from aotc.ir.opset.linalg_lapack import JACOBI_ROUTINES, SVDS
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.thresholds import BANKS
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.plans.thresholds import BLOCK_FACTOR
from aotc.lowering.threshold import BlockSize, Limit
from aotc.vmfb.abi import GPU_ALIGNMENT
from aotc.vmfb.dtypes import size_of

# Width in bytes of a bank of a GPU's shared memory: adjacent words of this size are in different banks (NVIDIA's
# documentation).
BANK_BYTES = 4


@dataclass(frozen=True, slots=True)
class RotatedColumns(RegionPlan):
    """Layout of columns in shared memory; a group of lanes rotates a pair of columns.

    Attributes
    ----------
    given, rows : int
        The number of columns, and the rows of each.
    size : int
        The bytes of an element.
    more : int
        Further rows of a column that are rotated but are not part of inner products: they accumulate the rotations.
    lanes : int
        The threads of a group, a power of two.
    in_registers : bool
        Does a thread hold its part of the two columns of its group in registers?
    """

    given: int
    rows: int
    size: int
    more: int
    lanes: int
    in_registers: bool

    @property
    def pairs(self) -> int:
        """Return the number of groups of lanes, one for each pair of columns."""
        return max(-(-self.given // 2), 1)

    @property
    def padded_count(self) -> int:
        """Return the number of columns in memory: ``given`` rounded up to even, padded with zeros."""
        return 2 * self.pairs

    @property
    def warps(self) -> int:
        """Return the warps of the block."""
        return -(-self.pairs * self.lanes // WARP)

    @property
    def vector_width(self) -> int:
        """Return the number of elements that a thread loads at once."""
        return max(GPU_ALIGNMENT // self.size, 1)

    def padded_rows(self, rows: int) -> int:
        """Return ``rows`` rounded up so that all lanes of a group have the same number of whole vectors."""
        step = self.vector_width * self.lanes
        return -(-rows // step) * step

    @property
    def pitch(self) -> int:
        """Return the stride between columns, in elements.

        Short columns are padded to an odd number of steps, so that neighbouring groups access different banks.
        """
        rows = self.padded_rows(self.rows) + self.padded_rows(self.more)
        short = self.vector_width * self.lanes
        return rows + short * (short * self.size < BANKS * BANK_BYTES and rows // short % 2 == 0)

    @property
    def shared_memory_bytes(self) -> int:
        """Return the bytes of all columns."""
        return self.padded_count * self.pitch * self.size


# Threads that rotate one pair of columns, at least: with fewer, some threads of a warp would be idle for 16 columns.
LEAST_LANES = 4
JACOBI_LANE_BYTES = BlockSize(
    128,
    "bytes of a column, at most, that a thread holds in registers while it rotates a pair of columns",
    "64 of its registers, for two columns; with fewer threads per pair, the angle is computed fewer times and sums "
    "across threads are shorter",
)


def jacobi_layout(given: int, rows: int, size: int, more: int) -> RotatedColumns:
    """Choose the threads per column pair of a Jacobi iteration, so that columns fit in registers."""
    lanes = LEAST_LANES
    while lanes < WARP and rows * size > lanes * JACOBI_LANE_BYTES.value:
        lanes *= 2
    return RotatedColumns(given, rows, size, more, lanes, rows * size <= lanes * JACOBI_LANE_BYTES.value)


JACOBI_BYTES = Limit(
    94 << 10,
    "bytes of shared memory, at most, for the columns that one GPU block rotates, with their vectors",
    "the shared memory of a block on every GPU in the table of targets, without what is not for columns",
)


def fits_jacobi_block(op: Op) -> bool:
    """Return True if one GPU block solves the LAPACK routine ``op``: the columns and vectors fit in shared memory.

    The columns of a singular value decomposition are those of the matrix or of its adjoint, whichever has fewer.
    """
    routine = op.attrs["routine"]
    if routine not in JACOBI_ROUTINES:
        return False
    *_, columns, rows = op.operands[0].type.shape
    if not (isinstance(columns, int) and isinstance(rows, int)):
        return False
    few, many = min(columns, rows), max(columns, rows)
    full = routine in SVDS and op.attrs["options"]["mode"] == "A"
    plan = jacobi_layout(few, many, size_of(op.operands[0].type.dtype), few if routine in SVDS else 0)
    return (
        few > 0 and JACOBI_BYTES.holds(plan.shared_memory_bytes) and BLOCK_FACTOR.holds(many * (many if full else few))
    )
