"""Plan Cholesky factorisations and triangular solves on a GPU: a block of threads per matrix, or one thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aotc.ir.loop.ir import WARP, Buffer
from aotc.ir.loop.scratch import shared_bytes_of_buffers
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.linalg.triangles import (
    CholeskyPlan,
    PieceSolvePlan,
    plan_right_hand_sides_per_item,
    solved_sizes,
)
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.threshold import BlockSize, Limit
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class TriangleBlock(RegionPlan):
    """Part of a plan: a block of threads processes a triangular matrix by panels.

    Attributes
    ----------
    threads : int
        Threads of the block.
    panel : int
        Rows of a panel; a thread has one column of it in registers.
    side : int
        Rows and columns of the tile that a thread updates at a time.
    """

    threads: int
    panel: int
    side: int

    def shared_buffers(self, dtype: str) -> tuple[Buffer, Buffer]:
        """Return the buffers in shared memory for a panel's diagonal block and the inverses of its diagonal."""
        diagonal = Buffer("diagonal", dtype, (self.panel, self.panel), "shared")
        return diagonal, Buffer("inverse", dtype, (self.panel,), "shared")


@dataclass(frozen=True, slots=True)
class BlockCholeskyPlan(RegionPlan):
    """Plan in which a block factors a matrix.

    Attributes
    ----------
    block : TriangleBlock
    mirror : int
        Edge of the tiles in which the block's warps transpose the matrix.
    """

    block: TriangleBlock
    mirror: int

    @property
    def transposing_tile_shape(self) -> tuple[int, int, int]:
        """Return the shape of the shared tiles that transpose the triangle, padded against bank conflicts."""
        return self.block.threads // WARP, self.mirror, self.mirror + 1


@dataclass(frozen=True, slots=True)
class BlockSolvePlan(RegionPlan):
    """Plan in which a block solves for ``columns`` right-hand sides of a matrix."""

    block: TriangleBlock
    columns: int


THREAD_TRIANGLE = Limit(
    12,
    "rows of a triangular matrix that one GPU thread factors or solves; a block takes larger ones",
    "half of a warp would be idle, and many small matrices fill the GPU",
)
MIRROR_BYTES = BlockSize(
    64,
    "bytes of a row of the tiles in which a GPU's warps transpose a matrix",
    "two whole sectors; the tiles of 16 warps fit the 48 KiB of shared memory that every GPU has",
)


def plan_gpu_cholesky(b: RegionBuilder) -> BlockCholeskyPlan | CholeskyPlan:
    """Choose a thread block or one thread per matrix for a GPU Cholesky factorization."""
    dtype = b.outputs[0].dtype
    if not THREAD_TRIANGLE.holds(b.outputs[0].shape[-1]):
        mirror = max(MIRROR_BYTES.value // size_of(dtype), WARP // 4)  # more elements than a warp has threads
        plan = BlockCholeskyPlan(_triangle_block_of_dtype(dtype), mirror)
        failed, tiles = (
            Buffer("failed", "i1", (1,), "shared"),
            Buffer("held", dtype, plan.transposing_tile_shape, "shared"),
        )
        if _buffers_fit_shared_memory(b, [*plan.block.shared_buffers(dtype), failed, tiles]):
            return plan
    return CholeskyPlan(None)


SOLVED_COLUMNS = BlockSize(32, "right-hand sides per GPU block of a triangular solve", "the width of a warp")


def plan_gpu_solve(b: RegionBuilder) -> BlockSolvePlan | PieceSolvePlan:
    """Choose a thread block or one thread per matrix for a GPU triangular solve."""
    dtype, (left, n, _) = b.outputs[0].dtype, solved_sizes(b)
    if not THREAD_TRIANGLE.holds(n):
        plan = BlockSolvePlan(_triangle_block_of_dtype(dtype), SOLVED_COLUMNS.value)
        unknowns = Buffer("found", dtype, (plan.block.panel, plan.columns), "shared")
        if _buffers_fit_shared_memory(b, [*plan.block.shared_buffers(dtype), unknowns]):
            return plan
    return plan_right_hand_sides_per_item(left)


TRIANGLE_THREADS = BlockSize(
    512,
    "threads of the GPU block that factors a matrix or solves a triangular system",
    "four warps for each scheduler of a multiprocessor",
)
PANEL_BYTES = BlockSize(
    128,
    "bytes of a panel column, which one GPU thread keeps in registers",
    "32 f32 in registers, and a warp covers the rows of the diagonal block",
)
TRIANGLE_TILE = BlockSize(
    4,
    "rows and columns of the tile that a GPU thread updates with a panel at a time",
    "16 multiply-adds for eight loads, at best two vector loads",
)


def _triangle_block_of_dtype(dtype: str) -> TriangleBlock:
    side = TRIANGLE_TILE.value // (1 if size_of(dtype) <= 8 else 2)  # sums are in registers
    return TriangleBlock(TRIANGLE_THREADS.value, max(PANEL_BYTES.value // size_of(dtype), 1), side)


def _buffers_fit_shared_memory(b: RegionBuilder, buffers: Sequence[Buffer]) -> bool:
    return shared_bytes_of_buffers(buffers) <= b.target.shared
