"""Plan ``dft``: the number of neighbouring transforms per grid item, and the threads of a GPU that compute them."""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.dims.algebra import product, static
from aotc.ir.limits import TRANSFORM_LANES
from aotc.ir.loop.scratch import shared_array_bytes
from aotc.lowering.analysis.thresholds import BANKS
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.row_axis import RowBlocks
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.threshold import BlockSize
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class CalledDftPlan(RegionPlan):
    """Plan in which a CPU worker calls the transform's library function.

    Attributes
    ----------
    most : int
        The largest number of neighbouring transforms in a grid item.
    pitch : int
        Stride, in the function's work memory, from one point of all transforms to the next; 0 for a single transform.
    """

    most: int
    pitch: int


@dataclass(frozen=True, slots=True)
class ThreadDftPlan(RegionPlan):
    """Plan in which a GPU thread computes up to ``most`` neighbouring transforms."""

    most: int


@dataclass(frozen=True, slots=True)
class BlockDftPlan(RegionPlan):
    """Plan in which a block of ``threads`` GPU threads computes a transform in shared memory."""

    threads: int


def plan_cpu_dft(b: RegionBuilder) -> CalledDftPlan:
    """Return the plan of a call for one signal, or for neighbouring signals in whole vectors."""
    x, axis = b.inputs[0], b.region_root_op("dft").attrs["axis"]
    constant = isinstance(product(x.shape[axis + 1 :]), int)  # a call takes as long for few signals as for a block
    most = _neighbouring_signals(b) if constant else DFT_LANES.value
    block, pitch = RowBlocks(x.shape, axis, most).block, 0
    if block > 1:
        lanes = min(TRANSFORM_LANES, 1 << (block - 1).bit_length())
        pitch = -(-block // lanes) * lanes
    return CalledDftPlan(most, pitch)


DFT_ELEMENTS = BlockSize(1 << 13, "points of the neighbouring transforms of a grid item", "the same as DFT_POINTS")
DFT_LANES = BlockSize(
    16,
    "neighbouring transforms per grid item, at least; larger items have a multiple of it",
    "a 512-bit vector of f32",
)


def _neighbouring_signals(b: RegionBuilder) -> int:
    n, lanes = _dft_points(b), DFT_LANES.value
    return max(lanes, DFT_ELEMENTS.value // n // lanes * lanes)


def _dft_points(b: RegionBuilder) -> int:
    return static(b.inputs[0].shape[b.region_root_op("dft").attrs["axis"]])


DFT_THREAD_POINTS = BlockSize(
    16,
    "points of a signal per thread of a block; one thread alone transforms signals of no more points",
    "two radix-8 butterflies, in registers",
)
DFT_THREADS = BlockSize(
    256,
    "threads of a block that transforms one signal, at most",
    "for signals of 4096 points a thread computes two radix-8 butterflies per stage",
)


def plan_gpu_dft(b: RegionBuilder) -> BlockDftPlan | ThreadDftPlan:
    """Return the plan of a block if the signal fits shared memory and has work for a warp, else of one thread."""
    n = _dft_points(b)
    bytes_ = 2 * shared_array_bytes((n + n // BANKS) * size_of(b.inputs[0].dtype) // 2)  # real and imaginary parts
    if n <= DFT_THREAD_POINTS.value or bytes_ > b.target.shared:
        return ThreadDftPlan(_neighbouring_signals(b))
    threads = BANKS
    while threads < DFT_THREADS.value and threads * DFT_THREAD_POINTS.value < n:
        threads *= 2
    return BlockDftPlan(threads)
