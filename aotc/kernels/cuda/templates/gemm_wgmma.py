"""Products of matrices on Hopper's tensor cores: bf16, f16 and TF32, with an epilogue of the program's own.

A block has a warpgroup that copies and one or two that multiply. The first keeps the tensor memory accelerator busy: it
fills the stages of a ring in shared memory. The others multiply stage after stage, 64 rows each, and give it back. The
products of a tile stay in registers; the epilogue gets them one by one, and rows of 16 bytes go to memory. Blocks stay
and take one tile after the other, those of a few rows of tiles together, which share what they read in the L2 cache.

Rows of all three arrays begin at multiples of 16 bytes; their sizes may be any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from numba import cuda
from numba.cuda import types

from aotc.kernels.cuda.front_end import kernel_ir
from aotc.kernels.cuda.hopper import (
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_wait,
    barriers_made,
    products_commit,
    products_fence,
    products_wait,
    registers,
)
from aotc.kernels.cuda.ptx import SWIZZLE_BYTES, quotient, shared_base
from aotc.kernels.cuda.templates.limits import COPY_REGISTERS, PRODUCT_REGISTERS
from aotc.kernels.cuda.templates.steps import CHUNK, STAGING, extent, tile_order, zeros
from aotc.kernels.cuda.templates.wgmma_steps import load_tile, multiply, store_tile

WARPGROUP = 128


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is split.

    Attributes
    ----------
    operands : str
        ``bf16``, ``f16`` or ``tf32``: f32 whose significands are rounded to 11 bits.
    result : str
        ``bf16``, ``f16`` or ``f32``.
    cols : int
        Of a block's tile; it has 64 rows for each of its ``consumers``.
    consumers : int
        Warpgroups that multiply, 1 or 2.
    stages : int
        Of the ring.
    a_by_rows, b_by_rows : bool
        Do elements lie side by side whose index of the sum is the same: is A stored as (depth, rows), B as
        (depth, cols)? Operands of f32 may not.
    """

    operands: str
    result: str
    cols: int = 256
    consumers: int = 2
    stages: int = 4
    a_by_rows: bool = False
    b_by_rows: bool = True

    @property
    def size(self) -> int:
        """The bytes of an element of an operand."""
        return 4 if self.operands == "tf32" else 2

    @property
    def result_size(self) -> int:
        """The bytes of an element of the result."""
        return 4 if self.result == "f32" else 2

    @property
    def rows(self) -> int:
        """The rows of a tile."""
        return 64 * self.consumers

    @property
    def depth(self) -> int:
        """How many products of a sum a stage has."""
        return CHUNK // self.size

    @property
    def threads(self) -> int:
        """Of a block."""
        return WARPGROUP * (self.consumers + 1)

    @property
    def stage_bytes(self) -> int:
        """The bytes of a stage: rows of A, then of B."""
        return (self.rows + self.cols) * CHUNK

    @property
    def shared(self) -> int:
        """The bytes of shared memory: the ring, a staging area for each warp, two barriers for each stage."""
        return SWIZZLE_BYTES + self.stages * (self.stage_bytes + 16) + self.consumers * 4 * STAGING


@cache
def gemm_texts(tiles: Tiles, pointers: int, dims: int) -> tuple[str, ...]:
    """Return the IR of a product's kernel, which calls ``SIZES`` and ``EPILOGUE`` of :mod:`wgmma_steps`."""
    byte = types.CPointer(types.uint8)
    tables = (types.UniTuple(byte, 2), types.UniTuple(byte, pointers), types.UniTuple(types.int64, dims))
    return tuple(kernel_ir(_kernel(tiles), (*tables, types.int64), tiles.threads, maps=2))


def _kernel(tiles: Tiles) -> Callable[..., None]:
    """Return the kernel; what it has of ``tiles`` are constants to Numba."""
    rows, cols, depth, stages, stage = tiles.rows, tiles.cols, tiles.depth, tiles.stages, tiles.stage_bytes
    consumers, a_bytes = tiles.consumers, tiles.rows * CHUNK
    staging = stages * stage
    full = staging + consumers * 4 * STAGING
    empty = full + 8 * stages
    steps, copy, clear, store = multiply(tiles), load_tile(tiles), zeros(cols // 2), store_tile(tiles)
    give_registers, take_registers = registers("dec", COPY_REGISTERS), registers("inc", PRODUCT_REGISTERS[consumers])
    wait_all, wait_but_one = products_wait(0), products_wait(1)
    m_of, n_of, k_of = extent("rows"), extent("cols"), extent("depth")
    i32 = types.int32
    above = SWIZZLE_BYTES - 1
    place = tile_order(cuda, rows, cols)

    def gemm(maps, pointers, dims, items):
        base = i32(i32(shared_base() + above) & i32(~above))
        thread = i32(cuda.threadIdx.x)
        m, n, k = m_of(pointers, dims), n_of(pointers, dims), k_of(pointers, dims)
        down, across = quotient(i32(m + rows - 1), i32(rows)), quotient(i32(n + cols - 1), i32(cols))
        tiles_, turns = i32(down * across), quotient(i32(k + depth - 1), i32(depth))
        if thread == 0:
            for s in range(stages):
                barrier_init(i32(base + full + 8 * s), i32(1))
                barrier_init(i32(base + empty + 8 * s), i32(consumers))
            barriers_made()
        cuda.syncthreads()
        group, tile = i32(thread >> 7), i32(cuda.blockIdx.x)
        s, parity = i32(0), i32(0)
        if group == 0:
            give_registers()
            if thread == 0:
                while tile < tiles_:
                    row, column = place(tile, down, across)
                    turn = i32(0)
                    while turn < turns:
                        barrier_wait(i32(base + empty + 8 * s), i32(parity ^ 1))
                        barrier = i32(base + full + 8 * s)
                        barrier_expect(barrier, i32(stage))
                        copy(maps, i32(base + s * stage), barrier, row, column, i32(turn * depth))
                        turn, s = i32(turn + 1), i32(s + 1)
                        if s == stages:
                            s, parity = i32(0), i32(parity ^ 1)
                    tile = i32(tile + cuda.gridDim.x)
        else:
            take_registers()
            mine, warp, lane = i32(group - 1), i32((thread >> 5) & 3), i32(thread & 31)
            leads = (thread & 127) == 0
            own = i32(base + staging + (mine * 4 + warp) * STAGING)
            while tile < tiles_:
                row, column = place(tile, down, across)
                sums = clear()
                turn, before = i32(0), i32(0)
                while turn < turns:
                    barrier_wait(i32(base + full + 8 * s), parity)
                    products_fence()
                    at = i32(base + s * stage)
                    sums = steps(sums, i32(at + mine * 64 * CHUNK), i32(at + a_bytes), turn)
                    products_commit()
                    if turn > 0:
                        wait_but_one()
                        if leads:
                            barrier_arrive(i32(base + empty + 8 * before))
                    before = s
                    turn, s = i32(turn + 1), i32(s + 1)
                    if s == stages:
                        s, parity = i32(0), i32(parity ^ 1)
                wait_all()
                if turns > 0 and leads:
                    barrier_arrive(i32(base + empty + 8 * before))
                store(sums, own, lane, i32(row + mine * 64 + warp * 16), column, m, n, pointers, dims)
                tile = i32(tile + cuda.gridDim.x)

    return gemm
