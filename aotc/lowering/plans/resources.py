"""Memory and registers that a region may use on a target; fusion checks these limits before it forms a region.

A CPU worker is a thread with a stack, thread-local scratch memory in the arena, and caches. A GPU worker is a block of
threads with shared memory. Sizes come from the table of targets; options can lower them. This module computes how much
of these resources each form of a region needs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from aotc.ir.loop.ir import WARP, Buffer
from aotc.ir.loop.scratch import shared_array_bytes, shared_bytes_of_buffers
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.thresholds import BANKS
from aotc.lowering.cost_model.machines import L3_SIZE
from aotc.lowering.cost_model.row_stages import RowStages
from aotc.lowering.plans.gpu_registers import estimate_registers
from aotc.lowering.plans.gpu_rows import RowGroup, registers_for_row_values, row_group, shared_bytes
from aotc.lowering.plans.thresholds import KEPT_REGISTERS_LONG, LONG_ROW_THREADS, MERGED_EACH
from aotc.lowering.threshold import BlockSize, Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of

ROW_SCRATCH = Limit(
    1 << 18,
    "bytes of scratch memory, at most, for the values of a row that later loops over it read again",
    "half of the second-level cache of the target is a second bound",
)


def row_threads(stages: RowStages, target: Target) -> int:
    """Return the number of GPU threads that share a row of a region."""
    return row_group(stages, target).group


def row_values_fit_worker(target: Target, stages: RowStages, sizes: Sequence[int]) -> bool:
    """Return True if a worker can store values of a row between the loops of a region; ``sizes`` are their bytes.

    A CPU worker stores them in its scratch memory, small enough for the second-level cache. A GPU block stores them in
    the registers of its threads, or in shared memory next to the partial results. A GPU thread that has a row of its
    own stores them in its private memory.
    """
    size = sum(sizes)
    if target.kind == "cpu":
        return ROW_SCRATCH.holds(size) and size <= target.l2 // 2
    plan = row_group(stages, target)
    if plan.group == 1:
        return size <= target.stack
    if plan.steps:
        return size <= _register_bytes(plan)
    shared = sum(map(shared_array_bytes, sizes)) + shared_bytes(plan, stages)
    resident = target.multiprocessor.resident_blocks(plan.threads, row_registers(stages), shared)
    return shared <= target.shared_memory and resident > 0


def row_registers(stages: RowStages) -> int:
    """Return the estimated registers of a thread for the loops over a row of a region."""
    return estimate_registers(stages.ops, [v for loop in stages.loops for v in loop.stores])


def _register_bytes(plan: RowGroup) -> int:
    """Return the bytes of a row that the registers of the threads sharing it hold."""
    return 4 * plan.group * registers_for_row_values(plan)


def sorted_run_buffer_shape(width: int) -> tuple[int, int]:
    """Return the shape of the shared buffer in which a GPU block sorts a run of ``width`` elements.

    It has two copies of the run. Each is padded by one element after every ``BANKS``, so that strided accesses hit
    different banks.
    """
    return 2, width + width // BANKS


GPU_SORT_BYTES = BlockSize(
    16 << 10,
    "bytes of the elements that one GPU block sorts in shared memory, which also holds a second copy of them",
    "two blocks of 1024 threads on a multiprocessor, within the 48 KiB of every GPU",
)


def sorted_width(dtypes: Collection[str], target: Target) -> int:
    """Return the number of elements that a GPU block can sort, for arrays of ``dtypes`` that are sorted together.

    It is a power of two, and at least ``MERGED_EACH``, the elements of one thread.
    """
    width = 1 << max((GPU_SORT_BYTES.value // sum(map(size_of, dtypes))).bit_length() - 1, 0)

    def shared_bytes_of_width(width: int) -> int:
        return shared_bytes_of_buffers(
            Buffer("run", dtype, sorted_run_buffer_shape(width), "shared") for dtype in dtypes
        )

    while width > MERGED_EACH.value and shared_bytes_of_width(width) > target.shared:
        width //= 2
    return max(width, MERGED_EACH.value)


def counting_sort_run_width(dtypes: Collection[str], n: int, target: Target) -> int:
    """Return the width of runs that sort rows of ``n`` elements by counting: a power of two above a block's width."""
    return max(2 * sorted_width(dtypes, target), 1 << (n - 1).bit_length())


def sorts_by_counting(op: Op, target: Target) -> bool:
    """Return True if ``op`` sorts by counting: its runs are whole rows, too long for one GPU block."""
    a, n = op.attrs, op.operands[0].type.shape[-1]
    whole = isinstance(n, int) and n <= a["width"] == a["keep"] and a["done"] == 1 and not a["numbered"]
    return whole and a["width"] > sorted_width([v.type.dtype for v in op.results], target)


def memory_limits(target: Target) -> dict[str, tuple[str, int]]:
    """Return the name and the bytes of the memory for the temporary arrays of a kernel, by the space of a buffer."""
    return {
        "private": ("stack" if target.kind == "cpu" else "a thread's memory", target.stack),
        "scratch": ("scratch memory", min(ROW_SCRATCH.value, target.l2 // 2)),
        "shared": ("shared memory", target.shared_memory),
    }


def row_memory(target: Target, stages: RowStages) -> tuple[str, int]:
    """Return the name and the bytes of the memory in which a worker stores values of a row between loops."""
    if target.kind == "cpu":
        return memory_limits(target)["scratch"]
    plan = row_group(stages, target)
    if plan.group == 1:
        return memory_limits(target)["private"]
    if plan.steps:
        return "registers", _register_bytes(plan)
    return "shared memory", target.shared_memory - shared_bytes(plan, stages)


def cheap_row_memory(target: Target) -> tuple[str, int]:
    """Return the name and the bytes of the memory from which a worker cheaply reads a long row a second time."""
    if target.kind == "cpu":
        return "the last-level cache", L3_SIZE.value
    registers = 4 * KEPT_REGISTERS_LONG.value * LONG_ROW_THREADS.value
    partial = 2 * size_of("f64") * LONG_ROW_THREADS.value // WARP
    return max(("registers", registers), ("shared memory", target.shared_memory - partial), key=lambda room: room[1])
