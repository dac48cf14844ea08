"""How templates split a product of matrices: tiles of blocks, stages of a ring in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aotc.ir.loop.forms.tiling import ELEMENT_BYTES, Window
from aotc.ir.loop.ir import WARP
from aotc.kernels.cuda.templates.gemm.epilogue_layout import ONE_BY_ONE, ResultPieces
from aotc.targets import TARGETS
from aotc.vmfb.dtypes import size_of

# Alignment, in bytes, of a tile in shared memory whose rows have the 128-byte swizzle. PTX ISA, tensor swizzling modes.
SWIZZLE_BYTES = 1024
# Bytes of a row of a tile in shared memory: the widest swizzle. PTX ISA, tensor swizzling modes.
CHUNK = 128
# Bytes of a warp's staging area in shared memory: the 16 rows of accumulators that a warp has, 128 bytes of each at a
# time. PTX ISA, layout of the accumulators of wgmma and mma.
STAGING = 16 * CHUNK
# Rows of accumulators that a warp stages at a time: with 128 bytes of each they fill its staging area (STAGING).
ROWS = 16


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
    in_pieces : bool
        Of one that is computed: does a function return all elements of a piece of 16 bytes?
    turned : bool
        Of one that is computed: do elements lie side by side in memory whose index of the sum is the same?
    """

    pointer: int = 0
    coordinates: int = 0
    computed: bool = False
    gathered: bool = False
    in_pieces: bool = False
    turned: bool = False


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """What all templates of products have in common.

    Attributes
    ----------
    operands : str
        ``bf16``, ``f16``, ``i8``, ``f64``, a pair as ``e4m3.e5m2``, or ``tf32``: f32 rounded to 11 bits.
    stages : int
        Of the ring.
    a_by_rows, b_by_rows : bool
        Do elements lie side by side in shared memory whose index of the sum is the same, as (depth, rows) of A and
        (depth, cols) of B? Those of 8 bits may not, and of f32 both only for warps.
    cols : int
        Of a block's tile.
    a, b : OperandSource
        What is known of the operands in memory.
    batched : bool
        Are there several products?
    pieces : ResultPieces
        In which results are stored.
    turned : bool
        Are columns of the result rows to the instructions?
    """

    operands: str
    stages: int = 4
    a_by_rows: bool = False
    b_by_rows: bool = True
    cols: int = 256
    a: OperandSource = OperandSource()
    b: OperandSource = OperandSource(1)
    batched: bool = False
    pieces: ResultPieces = ONE_BY_ONE
    turned: bool = False

    @property
    def rows(self) -> int:
        """The rows of a tile."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """The bytes of an element of an operand."""
        return ELEMENT_BYTES[self.operands]

    @property
    def sum(self) -> str:
        """What products are added up in."""
        return {"i8": "i32", "f64": "f64"}.get(self.operands, "f32")

    @property
    def staged(self) -> int:
        """How many columns of sums a warp puts down at a time."""
        return CHUNK // size_of(self.sum)

    @property
    def steps(self) -> int:
        """How many pieces of those a lane stores, one after the other."""
        return ROWS * self.staged // (WARP * self.pieces.width)

    @property
    def depth(self) -> int:
        """How many products of a sum a stage has."""
        return CHUNK // self.size

    def turn(self, line: Any, by_rows: bool) -> Any:
        """Return what the number of a piece of 16 bytes is changed by (xor) in a line of a stage."""
        return line & 7

    @property
    def stage_bytes(self) -> int:
        """The bytes of a stage: rows of A, then of B."""
        return (self.rows + self.cols) * CHUNK

    @property
    def ring_bytes(self) -> int:
        """The bytes of all stages."""
        return self.stages * self.stage_bytes


# Registers of a consumer thread if two warpgroups multiply. With the COPY_REGISTERS of the producer they must fit the
# 65,536 registers of a multiprocessor. With 240 the two consumers wait for ever for registers. Measured on an H200.
PRODUCT_REGISTERS = 232
# Registers of a consumer thread if one warpgroup multiplies tiles of at most WIDE_COLUMNS. Its tiles are smaller, and
# with this number two blocks fit a multiprocessor.
PRODUCT_REGISTERS_OF_ONE = 160
# Registers of a consumer thread besides accumulators: descriptors, addresses and sizes. The remaining ones may hold
# operands that the epilogue loads ahead. The linker's log: none is spilled.
STEP_REGISTERS = 56
# Chunks (16 rows of 32 columns of accumulators) whose epilogue operands are loaded ahead, at most. More would not
# arrive sooner, and each iteration moves their values from register to register. On an H200 an iteration takes 800 to
# 1,600 cycles, a load from L2 500.
MOST_AHEAD = 2
# Threads of persistent blocks on a multiprocessor. A block with one consumer warpgroup has 160 or 40 registers a
# thread, so that two such blocks fit the registers of a multiprocessor.
MOST_THREADS = 512
# Columns of a tile of one consumer warpgroup up to which its accumulators fit PRODUCT_REGISTERS_OF_ONE. The linker's
# log: 72 bytes spilled with 256 columns.
WIDE_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class WarpgroupTiles(ProductTiles):
    """Of :mod:`aotc.kernels.cuda.templates.gemm.wgmma`: 64 rows for each of ``consumers``, warpgroups that multiply.

    If these work ``in_turn``, each has tiles of its own, of ``parts`` times 64 rows. With a ``window`` A is copied by
    windows: the product is a convolution. If it is turned, the 64 are columns, and there are ``high`` rows.
    """

    consumers: int = 2
    parts: int = 1
    in_turn: bool = False
    window: Window | None = None
    high: int = 0

    @property
    def rows(self) -> int:
        """The rows of a tile."""
        return self.high if self.turned else 64 * (self.parts if self.in_turn else self.consumers)

    @property
    def width(self) -> int:
        """How many sums of each of its 64 rows an instruction adds to: the columns of a tile, or its rows."""
        return self.high if self.turned else self.cols

    @property
    def in_registers(self) -> bool:
        """Do warps load the operand of those 64 from shared memory, since f32 lies there by rows?"""
        return self.size == 4 and (self.b_by_rows if self.turned else self.a_by_rows)

    @property
    def registers(self) -> int:
        """Of a thread that multiplies."""
        return PRODUCT_REGISTERS if self.consumers == 2 or self.width > WIDE_COLUMNS else PRODUCT_REGISTERS_OF_ONE

    @property
    def ahead(self) -> int:
        """How many times 32 columns of a warp's 16 rows have what their epilogue reads loaded before the products."""
        chunks = self.parts * max(self.width // self.staged, 1)
        bits = sum(8 * size_of(dtype) * count for dtype, count in self.pieces.held) * self.steps
        left = self.registers - self.parts * self.width // 2 - STEP_REGISTERS * (2 if self.in_registers else 1)
        return min(max(32 * left // max(bits, 1), 1), chunks, MOST_AHEAD)

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


# Rows of a warp's part of a tile; the part has 64 columns. Its accumulators and operands take two thirds of a thread's
# registers. Measured on an H200; see WarpTiles.
WARP_ROWS = 32


@dataclass(frozen=True, slots=True)
class WarpTiles(ProductTiles):
    """Of :mod:`aotc.kernels.cuda.templates.gemm.mma`: what each warp has, and how many there are down the tile.

    Warps of 64 rows and 64 columns read shared memory less often, and take 0.84 of the time on an H200 in tiles of
    128 x 256; but those need 148 KB of shared memory, and in smaller tiles GPUs before sm_90 have too few registers.

    Attributes
    ----------
    warp_rows, warp_cols, warps_down : int
        Of a warp's part; how many of these are below each other.
    terms : int
        Of f64: how many an instruction multiplies. Those of 8 or 16 are of 16 rows, and want Hopper or later.
    """

    stages: int = 3
    cols: int = 128
    warp_rows: int = WARP_ROWS
    warp_cols: int = 64
    warps_down: int = 4
    terms: int = 4

    @property
    def rows(self) -> int:
        """The rows of a tile."""
        return self.warps_down * self.warp_rows

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps_down * (self.cols // self.warp_cols)

    def turn(self, line: Any, by_rows: bool) -> Any:
        """Return what pieces are changed by: elements of 4 bytes by rows, and of 8, are read one by one, or in pairs.

        Lanes that read together then meet no bank twice: 4 neighbours in each of 4 lines (of 8 bytes: of every other
        line), or, of 8 bytes by terms, 4 pieces in each of 2 lines.
        """
        if self.size == 8:
            return line & 6 if by_rows else (line & 1) << 2
        return (line & 3) << 1 if self.size == 4 and by_rows else line & 7

    @property
    def shared(self) -> int:
        """The bytes of shared memory: the ring, in whose place the warps' staging areas come at the end."""
        return SWIZZLE_BYTES + max(self.ring_bytes, self.threads // 32 * STAGING)
