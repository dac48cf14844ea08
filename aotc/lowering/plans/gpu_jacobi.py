"""Which eigenvectors and singular vectors a block of a GPU's threads finds by Jacobi's method, and where they lie."""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.loop.ir import WARP
from aotc.ir.opset.linalg_lapack import JACOBI_ROUTINES, SVDS
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.thresholds import BANKS
from aotc.lowering.plans.thresholds import BLOCK_FACTOR
from aotc.lowering.threshold import BlockSize, Limit
from aotc.vmfb.abi import GPU_ALIGNMENT
from aotc.vmfb.dtypes import size_of

# Bytes of a bank of a GPU's shared memory: neighbours of so many bytes are in different banks. NVIDIA's documentation.
BANK_BYTES = 4
# Threads that turn a pair of columns by Jacobi's method, at least: with fewer, a warp for 16 columns of f32 would have
# nothing to do for some of its threads.
LEAST_LANES = 4
JACOBI_LANE_BYTES = BlockSize(
    128,
    "bytes of a column, at most, that a thread holds in registers while it rotates a pair of columns",
    "64 of its registers, for two columns; with fewer threads per pair, the angle is computed fewer times and sums "
    "across threads are shorter",
)


@dataclass(frozen=True, slots=True)
class TurnedColumns:
    """Columns in shared memory, of which groups of lanes turn pairs.

    Attributes
    ----------
    given, rows : int
        Columns, and rows of each.
    size : int
        Bytes of an element.
    more : int
        Further rows, which are turned but not multiplied.
    """

    given: int
    rows: int
    size: int
    more: int = 0

    @property
    def pairs(self) -> int:
        """Groups of lanes, which take two columns at a time."""
        return max(-(-self.given // 2), 1)

    @property
    def count(self) -> int:
        """Columns in memory, the last of which may be 0."""
        return 2 * self.pairs

    @property
    def lanes(self) -> int:
        """Threads of a group, a power of two."""
        lanes = LEAST_LANES
        while lanes < WARP and self._is_much(lanes):
            lanes *= 2
        return lanes

    def _is_much(self, lanes: int) -> bool:
        return self.rows * self.size > lanes * JACOBI_LANE_BYTES.value

    @property
    def warps(self) -> int:
        """Warps of the block."""
        return -(-self.pairs * self.lanes // WARP)

    @property
    def vector(self) -> int:
        """Elements that a thread loads at once."""
        return max(GPU_ALIGNMENT // self.size, 1)

    def padded(self, rows: int) -> int:
        """Return a number of rows of which each lane has as many, whole vectors of them."""
        step = self.vector * self.lanes
        return -(-rows // step) * step

    @property
    def pitch(self) -> int:
        """Elements from a column to the next: those of neighbouring groups are in other banks, if they are short."""
        rows = self.padded(self.rows) + self.padded(self.more)
        short = self.vector * self.lanes
        return rows + short * (short * self.size < BANKS * BANK_BYTES and rows // short % 2 == 0)

    @property
    def in_registers(self) -> bool:
        """Has a thread registers for its part of the columns of a group?"""
        return not self._is_much(self.lanes)

    @property
    def bytes(self) -> int:
        """Bytes of all columns."""
        return self.count * self.pitch * self.size


JACOBI_BYTES = Limit(
    94 << 10,
    "bytes of shared memory, at most, for the columns that one GPU block rotates, with their vectors",
    "the shared memory of a block on every GPU in the table of targets, without what is not for columns",
)


def turned_in_block(op: Op) -> bool:
    """Has a block of threads room for the columns of a matrix, and for its vectors, so that it does a routine's work?

    Of a singular value decomposition the columns are those of the matrix or of its adjoint, whichever has fewer.
    """
    routine = op.attrs["routine"]
    if routine not in JACOBI_ROUTINES:
        return False
    *_, columns, rows = op.operands[0].type.shape
    if not (isinstance(columns, int) and isinstance(rows, int)):
        return False
    few, many = min(columns, rows), max(columns, rows)
    full = routine in SVDS and op.attrs["options"]["mode"] == "A"
    held = TurnedColumns(few, many, size_of(op.operands[0].type.dtype), few if routine in SVDS else 0)
    return few > 0 and JACOBI_BYTES.holds(held.bytes) and BLOCK_FACTOR.holds(many * (many if full else few))
