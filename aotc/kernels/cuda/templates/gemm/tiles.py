"""Tile shapes of the matmul templates: tiles of blocks, and stages of a ring buffer in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aotc.ir.loop.forms.tiling import ELEMENT_BYTES, Window
from aotc.ir.loop.ir import WARP
from aotc.kernels.cuda.templates.fragments import DOUBLE_BYTES, LINE_BYTES, QUAD, SWIZZLE_LINES, WORD_BYTES
from aotc.kernels.cuda.templates.gemm.epilogue_layout import ONE_BY_ONE, ResultPieces
from aotc.kernels.cuda.templates.threads import BARRIER_BYTES, WARP_TILE, WARPGROUP, WARPGROUP_TILE, WARPGROUP_WARPS
from aotc.targets import TARGETS
from aotc.vmfb.dtypes import size_of

# Alignment, in bytes, of a tile in shared memory whose rows have the 128-byte swizzle. PTX ISA, tensor swizzling modes.
SWIZZLE_BYTES = 1024
# Bytes of a row of a tile in shared memory: the widest swizzle. PTX ISA, tensor swizzling modes.
CHUNK = LINE_BYTES
# Bytes of a warp's staging area in shared memory: the 16 rows of accumulators that a warp has, 128 bytes of each at a
# time. PTX ISA, layout of the accumulators of wgmma and mma.
STAGING = WARP_TILE * CHUNK
# Rows of accumulators that a warp stages at a time: with 128 bytes of each they fill its staging area (STAGING).
ROWS = WARP_TILE
# Bits of a register, and of a byte.
WORD_BITS, BYTE_BITS = 32, 8


@dataclass(frozen=True, slots=True)
class OperandSource:
    """How a template loads an operand.

    Attributes
    ----------
    pointer : int
        Index of the operand among the kernel's pointers.
    coordinates : int
        For an operand that a tensor map copies: how many of its coordinates depend on the batch.
    computed : bool
        True if a device function of the kernel returns its elements; otherwise it is a strided array in memory.
    gathered : bool
        True if it has contiguous pieces of 16 bytes whose offsets a device function returns.
    in_pieces : bool
        For a computed operand: true if a device function returns all elements of a 16-byte piece.
    transposed : bool
        For a computed operand: true if elements with the same index of the contraction are contiguous in memory.
    """

    pointer: int = 0
    coordinates: int = 0
    computed: bool = False
    gathered: bool = False
    in_pieces: bool = False
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """Parameters that all matmul templates have in common.

    Attributes
    ----------
    operands : str
        ``bf16``, ``f16``, ``i8``, ``f64``, a pair such as ``e4m3.e5m2``, or ``tf32``: f32 rounded to 11 bits.
    stages : int
        Stages of the ring buffer.
    a_by_rows, b_by_rows : bool
        True if elements with the same index of the contraction are contiguous in shared memory: A as (depth, rows), B
        as (depth, cols). Not possible for 8-bit operands; for f32 both only in warp tiles.
    cols : int
        Columns of a block's tile.
    a, b : OperandSource
        How the operands are loaded.
    batched : bool
        True if there are several matmuls.
    pieces : ResultPieces
        How results are stored.
    transposed : bool
        True if the operands are swapped: columns of the result are rows to the instructions.
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
    transposed: bool = False

    @property
    def rows(self) -> int:
        """Return the rows of a tile."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """Return the bytes of an element of an operand."""
        return ELEMENT_BYTES[self.operands]

    @property
    def sum(self) -> str:
        """Return the dtype of the accumulators."""
        return {"i8": "i32", "f64": "f64"}.get(self.operands, "f32")

    @property
    def staged(self) -> int:
        """Return the columns of accumulators that a warp stages at a time (a chunk)."""
        return CHUNK // size_of(self.sum)

    @property
    def steps(self) -> int:
        """Return the number of 16-byte pieces that each lane stores per chunk of columns."""
        return ROWS * self.staged // (WARP * self.pieces.width)

    @property
    def depth(self) -> int:
        """Return the terms of the contraction in a stage."""
        return CHUNK // self.size

    def swizzle(self, line: Any, by_rows: bool) -> Any:
        """Return the number that is xored to the index of a 16-byte piece in a line of a stage (swizzle)."""
        return line & SWIZZLE_LINES - 1

    @property
    def stage_bytes(self) -> int:
        """Return the size of a stage in bytes: rows of A, then of B."""
        return (self.rows + self.cols) * CHUNK

    @property
    def ring_bytes(self) -> int:
        """Return the size of the ring buffer, all stages, in bytes."""
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
    """Tiles of :mod:`aotc.kernels.cuda.templates.gemm.wgmma`: 64 rows per consumer warpgroup.

    With ``in_turn`` the consumers alternate between tiles, and each computes a whole tile of ``parts`` times 64 rows.
    With a ``window`` the matmul is a convolution, whose input A is copied by im2col tensor maps. With swapped operands
    (``transposed``) a consumer has 64 columns, and a tile has ``high`` rows.
    """

    consumers: int = 2
    parts: int = 1
    in_turn: bool = False
    window: Window | None = None
    high: int = 0

    @property
    def rows(self) -> int:
        """Return the number of rows of a tile."""
        return self.high if self.transposed else WARPGROUP_TILE * (self.parts if self.in_turn else self.consumers)

    @property
    def width(self) -> int:
        """Return the n of the wgmma instruction: the columns of a tile, or its rows if operands are swapped."""
        return self.high if self.transposed else self.cols

    @property
    def in_registers(self) -> bool:
        """Return True if warps load the first operand to registers: f32 that is contiguous along its rows."""
        return self.operands == "tf32" and (self.b_by_rows if self.transposed else self.a_by_rows)

    @property
    def registers(self) -> int:
        """Return the number of registers of a consumer thread."""
        return PRODUCT_REGISTERS if self.consumers == 2 or self.width > WIDE_COLUMNS else PRODUCT_REGISTERS_OF_ONE

    @property
    def ahead(self) -> int:
        """Return the number of chunks whose epilogue operands are loaded before the matmul of a tile.

        A chunk has 16 rows of ``staged`` columns. The number is what fits the registers besides the accumulators, from
        1 to :data:`MOST_AHEAD`.
        """
        chunks = self.parts * max(self.width // self.staged, 1)
        bits = sum(BYTE_BITS * size_of(dtype) * count for dtype, count in self.pieces.held) * self.steps
        left = self.registers - self.parts * self.width // 2 - STEP_REGISTERS * (2 if self.in_registers else 1)
        return min(max(WORD_BITS * left // max(bits, 1), 1), chunks, MOST_AHEAD)

    @property
    def threads(self) -> int:
        """Return the number of threads per block, including the warpgroup that copies (the producer)."""
        return WARPGROUP * (self.consumers + 1)

    @property
    def shared(self) -> int:
        """Return the bytes of shared memory: ring buffer, staging area of each warp, barriers of stages."""
        barriers = 2 * BARRIER_BYTES * self.stages
        return SWIZZLE_BYTES + self.ring_bytes + barriers + self.consumers * WARPGROUP_WARPS * STAGING

    @property
    def resident(self) -> int:
        """Return the number of blocks that a multiprocessor runs at the same time."""
        held = TARGETS["cuda:sm_90a"].multiprocessor
        return max(min(held.shared // (self.shared + held.reserved), MOST_THREADS // self.threads, 2), 1)


# Rows of a warp's part of a tile; the part has 64 columns. Its accumulators and operands take two thirds of a thread's
# registers. Measured on an H200; see WarpTiles.
WARP_ROWS = 32


@dataclass(frozen=True, slots=True)
class WarpTiles(ProductTiles):
    """Tiles of :mod:`aotc.kernels.cuda.templates.gemm.mma`: the part of each warp, and the warps down a tile.

    Warps of 64 rows and 64 columns read shared memory less often: on an H200 they take 0.84 of the time, in tiles of
    128 x 256. Those tiles need 148 KB of shared memory, and in smaller ones GPUs before sm_90 have too few registers.

    Attributes
    ----------
    warp_rows, warp_cols, warps_down : int
        Rows and columns of a warp's part, and how many parts are below each other.
    terms : int
        For f64: the terms that one instruction multiplies. Instructions of 8 or 16 have 16 rows and need Hopper or
        later.
    """

    stages: int = 3
    cols: int = 128
    warp_rows: int = WARP_ROWS
    warp_cols: int = 64
    warps_down: int = 4
    terms: int = 4

    @property
    def rows(self) -> int:
        """Return the number of rows of a tile."""
        return self.warps_down * self.warp_rows

    @property
    def threads(self) -> int:
        """Return the number of threads per block."""
        return WARP * self.warps_down * (self.cols // self.warp_cols)

    def swizzle(self, line: Any, by_rows: bool) -> Any:
        """Return the swizzle of a line, such that lanes that read at the same time access different banks.

        Two layouts are read in single elements or pairs: 4-byte elements that are contiguous along rows, and 8-byte
        elements. For them, lanes read 4 neighbours in each of 4 lines (of 8-byte elements: of every other line), or, of
        8-byte elements that are contiguous along the contraction, 4 pieces in each of 2 lines.
        """
        if self.size == DOUBLE_BYTES:
            return line & SWIZZLE_LINES - 2 if by_rows else (line & 1) << 2
        return (line & QUAD - 1) << 1 if self.size == WORD_BYTES and by_rows else line & SWIZZLE_LINES - 1

    @property
    def shared(self) -> int:
        """Return the bytes of shared memory: the ring buffer, which the epilogue's staging areas reuse."""
        return SWIZZLE_BYTES + max(self.ring_bytes, self.threads // WARP * STAGING)
