"""Plan sorts on a GPU: rows by one thread each, runs by blocks of threads, or by one digit of all keys at a time."""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.limits import PRIVATE_BYTES
from aotc.ir.loop.ir import WARP, Buffer
from aotc.ir.loop.scratch import shared_bytes_of_buffers
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.thresholds import BANKS
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.cpu_sort import MergeSortPlan, sorted_row_bytes
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.plans.resources import sorted_run_buffer_shape, sorts_by_counting
from aotc.lowering.plans.thresholds import DIGIT_THREADS, LANE_DIGITS, MERGED_EACH
from aotc.lowering.threshold import BlockSize
from aotc.vmfb.abi import GPU_ALIGNMENT


def plan_gpu_sort(b: RegionBuilder) -> MergeSortPlan:
    """Return the plan of a merge sort with one thread per row.

    Raises
    ------
    CompileError
        If a row does not fit the private memory of one thread.
    """
    op = b.region_root_op("sort")
    bytes_, n = sorted_row_bytes(op)
    if not isinstance(bytes_, int) or bytes_ > PRIVATE_BYTES:
        hint = f"sort rows of at most {PRIVATE_BYTES} bytes, or use a CPU target"
        raise b.unsupported_error(op, f"sort of {n} elements", hint)
    return MergeSortPlan(private=True)


# --- runs --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CountedRunPlan(RegionPlan):
    """Plan of a sort by counting: the position of an element is the number of elements of its row before it.

    Attributes
    ----------
    warps : int
        Warps of a block; each compares with a part of the elements.
    width : int
        Neighbours that are loaded at a time.
    """

    warps: int
    width: int


@dataclass(frozen=True, slots=True)
class BlockSortPlan(RegionPlan):
    """Plan in which a block of threads sorts an unsorted run.

    Attributes
    ----------
    width : int
        Elements that the block has room for: a power of two.
    threads : int
        Threads of the block.
    private : bool
        Are the elements in the memory of a single thread? Else they are in shared memory.
    """

    width: int
    threads: int
    private: bool = False


@dataclass(frozen=True, slots=True)
class MergedPairPlan(RegionPlan):
    """Plan that merges pairs of sorted runs, ``each`` elements by a thread."""

    each: int


@dataclass(frozen=True, slots=True)
class MergedRunPlan(RegionPlan):
    """Plan that merges several sorted runs, with a thread for each element."""


RunPlan = CountedRunPlan | BlockSortPlan | MergedPairPlan | MergedRunPlan

COUNTED_WARPS = BlockSize(
    8,
    "warps of a GPU block that share the elements to compare the block's elements with",
    "reasoning: 8192 elements give each warp scheduler of an NVIDIA H200 four warps",
)


def plan_sort_runs(b: RegionBuilder) -> RunPlan:
    """Return the plan for ``sort_runs``: a merge of sorted runs, a block per run, or counting for longer runs."""
    op = b.region_root_op("sort_runs")
    if sorts_by_counting(op, b.target):
        n = op.operands[0].type.shape[-1]
        return CountedRunPlan(COUNTED_WARPS.value, GPU_ALIGNMENT // 4 if n % (GPU_ALIGNMENT // 4) == 0 else 1)
    if op.attrs["done"] == 1:
        return _plan_block_sort(b, op)
    if op.attrs["width"] == 2 * op.attrs["done"]:
        return MergedPairPlan(MERGED_EACH.value)
    return MergedRunPlan()


def _plan_block_sort(b: RegionBuilder, op: Op) -> BlockSortPlan:
    """Return the plan of a block per run, in shared memory if the run fits."""
    width, n = op.attrs["width"], op.operands[0].type.shape[-1]
    while isinstance(n, int) and width >= 2 * n and width > 1:
        width //= 2
    moved, _ = sorted_arrays(b, op)
    cells = [Buffer("run", op.results[k].type.dtype, sorted_run_buffer_shape(width), "shared") for k in moved]
    if shared_bytes_of_buffers(cells) > b.target.shared:
        return BlockSortPlan(width, 1, private=True)
    return BlockSortPlan(width, max(width // MERGED_EACH.value, min(width, BANKS)))


def sorted_arrays(b: RegionBuilder, op: Op) -> tuple[list[int], list[int]]:
    """Return the numbers of the arrays that a sort moves, and of those that its comparator reads."""
    compared = comparator_operands(op)
    moved = [n for n, v in enumerate(op.results) if b.output_buffer_of(v) is not None or n in compared]
    return moved, compared


def comparator_operands(op: Op) -> list[int]:
    """Return the numbers of the arrays that the comparator of ``op`` reads."""
    (region,) = op.regions
    inside = {v for op in region.ops for v in op.operands} | set(region.results)
    return [n for n in range(len(op.results)) if inside & set(region.params[2 * n : 2 * n + 2])]


# --- digits ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DigitCountPlan(RegionPlan):
    """Plan in which a block counts the digits of a part of a row.

    Attributes
    ----------
    threads : int
        Threads of the block.
    adjacent : int
        Adjacent elements that a thread loads by one access.
    """

    threads: int
    adjacent: int


@dataclass(frozen=True, slots=True)
class DigitSortPlan(RegionPlan):
    """Plan in which a block of ``threads`` threads orders a part of a row by a digit."""

    threads: int


def plan_digit_counts(b: RegionBuilder) -> DigitCountPlan:
    """Return the plan of ``digit_counts``."""
    part = b.region_root_op("digit_counts").attrs["part"]
    threads = _digit_sort_threads(part)
    return DigitCountPlan(threads, min(4, -(-part // threads)))


def plan_digit_sort(b: RegionBuilder) -> DigitSortPlan:
    """Return the plan of ``digit_sort``."""
    return DigitSortPlan(_digit_sort_threads(b.region_root_op("digit_sort").attrs["part"]))


def _digit_sort_threads(part: int) -> int:
    return min(max(part // LANE_DIGITS.value, WARP), DIGIT_THREADS.value)
