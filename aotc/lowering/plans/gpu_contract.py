"""Plan a matmul or a convolution on a GPU: tensor cores, blocks of threads, or one thread per element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, product
from aotc.ir.loop.forms.matmul import read_product
from aotc.ir.loop.forms.tiling import FP8, Tiling
from aotc.ir.loop.ir import Kernel
from aotc.lowering.analysis.contractions import contraction_of, sum_dtype
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.tensor_core_loops import tensor_core_loops
from aotc.lowering.plans.contract_loops import DepthwisePlan, ElementLoopsPlan, plan_contract_loops
from aotc.lowering.plans.gpu_conv import im2col_window_of, sum_dtype_of
from aotc.lowering.plans.gpu_matmul_tiles import best_tiling, is_for_tensor_cores
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.threshold import Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class TensorCorePlan(RegionPlan):
    """Plan of tiles on tensor cores, computed by a code template.

    Attributes
    ----------
    dtype : str
        The dtype of the sums.
    tiling : Tiling
        The tiling of the kernel.
    """

    dtype: str
    tiling: Tiling


@dataclass(frozen=True, slots=True)
class SharedTilePlan(RegionPlan):
    """Plan in which a block of threads computes a tile of the result from slices of both operands in shared memory.

    Small tiles have deep slices: such a matmul has few blocks, so each needs many loads in flight.

    Attributes
    ----------
    rows, cols : int
        The tile of a block of threads.
    thread_rows, thread_cols : int
        The part of one thread.
    depth : int
        Terms of a slice.
    """

    rows: int
    cols: int
    thread_rows: int
    thread_cols: int
    depth: int

    @property
    def elements(self) -> int:
        """Return the number of elements in shared memory: accumulators and a padded slice of each operand."""
        return self.rows * self.cols + self.depth * (self.rows + self.cols + 2 * SLICE_PAD)

    @property
    def threads(self) -> int:
        """Return the threads of a block."""
        return (self.rows // self.thread_rows) * (self.cols // self.thread_cols)


def plan_gpu_contract(b: RegionBuilder) -> TensorCorePlan | SharedTilePlan | DepthwisePlan | ElementLoopsPlan:
    """Choose tensor cores, shared-memory tiles or loops for a GPU matmul or convolution."""
    op, dtype = b.root, sum_dtype(b.root)
    plan = _plan_tensor_cores(b)
    if plan is not None:
        return plan
    block = None
    if op.attrs.get("feature_groups", 1) == 1 and dtype in ("f32", "i32"):
        c = contraction_of(op)
        block = best_thread_block(c.batch, c.m, c.n, c.k, size_of(dtype), b.target)
    return plan_contract_loops(b) if block is None else block


def _plan_tensor_cores(b: RegionBuilder) -> TensorCorePlan | None:
    """Return the tiling with the least modelled time, or None if tensor cores have none."""
    op, dtype = b.root, sum_dtype_of(b.root)
    if dtype is None or (op.operands[0].type.dtype in FP8 and not b.target.has_fp8):
        return None
    c = contraction_of(op)
    if not is_for_tensor_cores(c.batch, c.m, c.n, c.k):
        return None
    body = tensor_core_loops(b, b.trial_elements(), dtype)
    read = read_product(Kernel(b.function.name, b.inputs, b.outputs, (), 1, body, (), 0, 0))
    window = im2col_window_of(op, b.target) if op.name == "conv" else None
    tiling = best_tiling(read, b.target, window, b.function.attrs.get("concurrent", 1))
    return None if tiling is None else TensorCorePlan(dtype, tiling)


# --- without tensor cores ---

SLICE_PAD = 4  # padding elements per line of a slice in shared memory, so that columns start in different banks
BLOCKS = (SharedTilePlan(128, 64, 8, 4, 16), SharedTilePlan(64, 64, 4, 4, 32), SharedTilePlan(32, 32, 2, 2, 64))
SKINNY = SharedTilePlan(8, 32, 1, 1, 128)
SMALL = SharedTilePlan(16, 16, 1, 1, 16)  # needs less than 4 KiB of shared memory: the choice if no other block fits


def best_thread_block(batch: Sequence[Dim], m: Dim, n: Dim, k: Dim, size: int, target: Target) -> SharedTilePlan | None:
    """Return the largest thread block that still occupies the GPU; None for one thread per element.

    Sums and slices of the block, with elements of ``size`` bytes, fit in shared memory.
    """
    block = _best_thread_block_of_matmul(batch, m, n, k)
    fitting = [b for b in (block, *BLOCKS, SMALL) if b is not None and b.elements * size <= target.shared]
    return fitting[0] if block is not None and fitting else None


GPU_EXTENT = Limit(
    23,
    "rows, columns or terms, at most, that are too few for a regular GPU block",
    "most threads of a block would have nothing to do",
)
GPU_TERMS = Limit(
    127,
    "terms of a product of few rows, at most, that uses one thread per element",
    "the block for few rows reads slices of 128 terms",
)
GPU_IDLE_BLOCKS = Limit(
    127,
    "blocks, at most, that leave multiprocessors of a GPU idle, so that smaller blocks are chosen",
    "an H200 has 132 multiprocessors",
)


def _best_thread_block_of_matmul(batch: Sequence[Dim], m: Dim, n: Dim, k: Dim) -> SharedTilePlan | None:
    """Return the block for the size of a matmul alone, or None for one thread per element."""
    few_rows, few_columns, few_terms = (GPU_EXTENT.holds(d) for d in (m, n, k))
    if few_columns or few_terms:
        return None
    if few_rows:
        return None if GPU_TERMS.holds(k) else SKINNY
    if not isinstance(m, int) or not isinstance(n, int):
        return BLOCKS[1]
    products = product(batch)
    count = products if isinstance(products, int) else 1
    enough = (b for b in BLOCKS if not GPU_IDLE_BLOCKS.holds(count * -(-m // b.rows) * -(-n // b.cols)))
    return next(enough, BLOCKS[-1])
