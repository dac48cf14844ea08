"""Plan updates of part of an array in place on a GPU: in parallel where the order of updates does not matter."""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, mod, product
from aotc.ir.loop.scratch import shared_array_bytes
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.parallel_scatters import has_atomic_combiner, has_disjoint_updates, is_parallel_scatter
from aotc.lowering.analysis.prefix_scans import combiner_op_name, neutral_value
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.plans.scatters import SerialScatterPlan, SliceUpdatePlan, plan_serial_scatter
from aotc.lowering.threshold import BlockSize, Limit
from aotc.targets import Target
from aotc.vmfb.abi import GPU_ALIGNMENT
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class ParallelScatterPlan(RegionPlan):
    """Plan with a thread for each element of the updates, which it applies by an atomic operation if ``atomic``."""

    atomic: bool


@dataclass(frozen=True, slots=True)
class RunScatterPlan(RegionPlan):
    """Plan for sorted updates: the threads of a run's first update apply the run in order, ``lanes`` elements each."""

    lanes: int


@dataclass(frozen=True, slots=True)
class BlockScatterPlan(RegionPlan):
    """Plan for updates to few elements: a block combines ``each`` updates per thread in shared memory."""

    threads: int
    each: int


ScatterPlan = ParallelScatterPlan | RunScatterPlan | BlockScatterPlan | SerialScatterPlan


def plan_gpu_update(b: RegionBuilder) -> ScatterPlan | SliceUpdatePlan:
    """Return the plan of a region that updates part of an array with values that it computes."""
    scatters = any(op.name == "scatter" for op in b.function.body.ops)
    return plan_gpu_scatter(b) if scatters else plan_gpu_slice(b)


def plan_gpu_slice(b: RegionBuilder) -> SliceUpdatePlan:
    """Return the plan that writes a slice of an array with one GPU thread for each element."""
    return SliceUpdatePlan(by_rows=False)


CROWDED_THREADS = BlockSize(
    512,
    "threads of a GPU block that combines updates in shared memory",
    "four blocks per multiprocessor",
)
CROWDED_EACH = BlockSize(8, "updates per thread of such a block", "256 blocks for a million updates")


def plan_gpu_scatter(b: RegionBuilder) -> ScatterPlan:
    """Choose how a GPU scatters: disjoint updates, atomic updates, or runs of sorted updates."""
    op = b.region_root_op("scatter")
    if not is_parallel_scatter(op):
        return plan_serial_scatter(op, 1)
    size = updated_elements(op)
    if size == 0 or has_disjoint_updates(op):
        return ParallelScatterPlan(atomic=False)
    if not has_atomic_combiner(op):
        return RunScatterPlan(_update_elements_per_thread(op))
    if _has_contended_updates(op, size, b.target):
        return BlockScatterPlan(CROWDED_THREADS.value, CROWDED_EACH.value)
    return ParallelScatterPlan(atomic=True)


def updated_elements(op: Op) -> Dim:
    """Return the number of elements in the updates of a scatter; 0 if the updated array is empty."""
    return 0 if 0 in op.operands[0].type.shape else product(op.operands[len(op.inputs) + 1].type.shape)


def _update_elements_per_thread(op: Op) -> int:
    """Return the adjacent elements per thread: a vector if updates cover whole rows, else 1."""
    update = op.operands[len(op.inputs) + 1].type
    last = update.shape[-1]
    is_whole = update.rank > 1 and last == op.operands[0].type.shape[-1] and isinstance(last, int)
    width = GPU_ALIGNMENT // max(size_of(v.type.dtype) for v in op.results)
    return width if is_whole and width > 0 and mod(last, width) == 0 else 1


CROWDED_CELLS = Limit(
    4096,
    "elements of a scatter's result for which GPU blocks combine updates in shared memory",
    "32 KiB of i64; on an NVIDIA H200 a million sums into 1000 elements waited 80 us for each other",
)
CROWDED_UPDATES = Limit(
    (1 << 16) - 1,
    "updates of a scatter that go directly to GPU memory, however few elements the result has",
    "each of the blocks that fill the multiprocessors would clear and write all elements",
    unknown=True,
)


def _has_contended_updates(op: Op, size: Dim, target: Target) -> bool:
    """Return True if many updates apply to few elements, which fit the shared memory of a block."""
    result = op.operands[0].type
    cells = product(result.shape)
    if not isinstance(cells, int) or not CROWDED_CELLS.holds(cells):
        return False
    if shared_array_bytes(cells * size_of(result.dtype)) > target.shared:
        return False
    return neutral_value(
        combiner_op_name(op) or "", op.results[0].type.dtype
    ) is not None and not CROWDED_UPDATES.holds(size)
