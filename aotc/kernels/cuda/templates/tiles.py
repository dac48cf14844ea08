"""How templates split a product of matrices: tiles of blocks, stages of a ring in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.products.tiling import Window
from aotc.kernels.cuda.templates.limits import MOST_THREADS, WARP_ROWS
from aotc.targets import TARGETS

SWIZZLE_BYTES = 1024
"""unit: bytes
why: a tile whose rows are swizzled over 128 bytes begins at a multiple of it
from: PTX ISA, tensor swizzling modes
"""
CHUNK = 128
"""unit: bytes
why: of a row of a tile in shared memory: what is swizzled at most
from: PTX ISA, tensor swizzling modes
"""
STAGING = 16 * CHUNK
"""unit: bytes
why: a warp holds 16 rows of a tile's sums, which it writes in pieces of 128 bytes
from: PTX ISA, layout of the accumulators of wgmma and mma
"""


@dataclass(frozen=True, slots=True)
class OperandSource:
    """Where an operand is from.

    Attributes
    ----------
    pointer : int
        Its number.
    coordinates : int
        How many of an array that is copied in tiles depend on the batch.
    computed : bool
        Does a function of the kernel return its elements? Otherwise it lies in memory in lines, as in shared memory.
    gathered : bool
        Does it lie in pieces of 16 bytes, and a function return the place of each?
    turned : bool
        Of one that is computed: do elements lie side by side in memory whose index of the sum is the same?
    """

    pointer: int = 0
    coordinates: int = 0
    computed: bool = False
    gathered: bool = False
    turned: bool = False


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """What all templates of products have in common.

    Attributes
    ----------
    operands : str
        ``bf16``, ``f16``, ``i8`` or ``tf32``: f32 whose significands are rounded to 11 bits.
    result : str
        ``bf16``, ``f16``, ``f32`` or ``i32``.
    stages : int
        Of the ring.
    a_by_rows, b_by_rows : bool
        Do elements lie side by side in shared memory whose index of the sum is the same, as (depth, rows) of A and
        (depth, cols) of B? Those of 8 bits may not, and f32 only for warps.
    cols : int
        Of a block's tile.
    a, b : OperandSource
        What is known of the operands in memory.
    out : int
        The number of the result's pointer.
    batched : bool
        Are there several products?
    in_lines : bool
        Are results stored in pieces of 16 bytes? Otherwise the program's own statements store each element.
    """

    operands: str
    result: str
    stages: int = 4
    a_by_rows: bool = False
    b_by_rows: bool = True
    cols: int = 256
    a: OperandSource = OperandSource()
    b: OperandSource = OperandSource(1)
    out: int = -1
    batched: bool = False
    in_lines: bool = True

    @property
    def rows(self) -> int:
        """The rows of a tile."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """The bytes of an element of an operand."""
        return {"tf32": 4, "i8": 1}.get(self.operands, 2)

    @property
    def sum(self) -> str:
        """What products are added up in."""
        return "i32" if self.operands == "i8" else "f32"

    @property
    def result_size(self) -> int:
        """The bytes of an element of the result."""
        return 2 if self.result in ("bf16", "f16") else 4

    @property
    def depth(self) -> int:
        """How many products of a sum a stage has."""
        return CHUNK // self.size

    @property
    def stage_bytes(self) -> int:
        """The bytes of a stage: rows of A, then of B."""
        return (self.rows + self.cols) * CHUNK

    @property
    def ring_bytes(self) -> int:
        """The bytes of all stages."""
        return self.stages * self.stage_bytes


@dataclass(frozen=True, slots=True)
class WarpgroupTiles(ProductTiles):
    """Of :mod:`aotc.kernels.cuda.templates.gemm_wgmma`: 64 rows for each of ``consumers``, warpgroups that multiply.

    With a ``window`` A is copied by windows: the product is a convolution.
    """

    consumers: int = 2
    window: Window | None = None

    @property
    def rows(self) -> int:
        """The rows of a tile."""
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        """Of a block: one warpgroup copies."""
        return 128 * (self.consumers + 1)

    @property
    def shared(self) -> int:
        """The bytes of shared memory: the ring, a staging area for each warp, two barriers for each stage."""
        return SWIZZLE_BYTES + self.ring_bytes + 16 * self.stages + self.consumers * 4 * STAGING

    @property
    def resident(self) -> int:
        """How many blocks a multiprocessor has at a time."""
        held = TARGETS["cuda:sm_90a"].multiprocessor
        return max(min(held.shared // (self.shared + held.reserved), MOST_THREADS // self.threads, 2), 1)


@dataclass(frozen=True, slots=True)
class WarpTiles(ProductTiles):
    """Of :mod:`aotc.kernels.cuda.templates.gemm_mma`: what each warp has, and how many there are down the tile.

    Warps of 64 rows and 64 columns read shared memory less often, and take 0.84 of the time on an H200 in tiles of
    128 x 256; but those need 148 KB of shared memory, and in smaller tiles GPUs before sm_90 have too few registers.
    """

    stages: int = 3
    cols: int = 128
    warp_rows: int = WARP_ROWS
    warp_cols: int = 64
    warps_down: int = 4

    @property
    def rows(self) -> int:
        """The rows of a tile."""
        return self.warps_down * self.warp_rows

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps_down * (self.cols // self.warp_cols)

    @property
    def shared(self) -> int:
        """The bytes of shared memory: the ring, in whose place the warps' staging areas come at the end."""
        return SWIZZLE_BYTES + max(self.ring_bytes, self.threads // 32 * STAGING)
