"""What a region may take of a target, and what one of a given form takes: asked before fusion forms it.

A worker of a CPU is a thread: it has a stack, scratch memory of its own in the arena, and caches. One of a GPU is a
block of threads with shared memory. The figures are columns of the table of targets, which options shrink; what is
here is how much of each the forms of a region take.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from aotc.ir.loop.ir import WARP, Buffer
from aotc.ir.loop.scratch import bytes_of_all, shared_array_bytes
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.thresholds import BANKS
from aotc.lowering.cost_model.machines import L3_SIZE
from aotc.lowering.cost_model.row_stages import RowStages
from aotc.lowering.plans.gpu_registers import estimate_registers
from aotc.lowering.plans.gpu_rows import RowPlan, kept_registers, row_plan, shared_bytes
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
    """Return how many threads of a GPU share a row of a region."""
    return row_plan(stages, target).group


def row_fits(target: Target, stages: RowStages, sizes: Sequence[int]) -> bool:
    """Return True if a worker may keep values of a row of a region, of ``sizes`` in bytes, between its loops.

    On a CPU they lie in its scratch memory, and stay in its second-level cache; on a GPU in the shared memory of its
    block beside the partial results, in the registers of its threads, or in the memory of a thread that has a row.
    """
    size = sum(sizes)
    if target.kind == "cpu":
        return ROW_SCRATCH.holds(size) and size <= target.l2 // 2
    plan = row_plan(stages, target)
    if plan.group == 1:
        return size <= target.stack
    if plan.steps:
        return size <= _register_bytes(plan)
    shared = sum(map(shared_array_bytes, sizes)) + shared_bytes(plan, stages)
    held = target.multiprocessor.held_blocks(plan.threads, row_registers(stages), shared)
    return shared <= target.shared_memory and held > 0


def row_registers(stages: RowStages) -> int:
    """Return about how many registers a thread takes for the loops over a row of a region."""
    return estimate_registers(stages.ops, [v for loop in stages.loops for v in loop.stores])


def _register_bytes(plan: RowPlan) -> int:
    """Return the bytes of a row that the registers of its threads hold."""
    return 4 * plan.group * kept_registers(plan)


def run_cells(width: int) -> tuple[int, int]:
    """Return the shape of what a GPU's block keeps of a run that it sorts: two copies, elements in different banks."""
    return 2, width + width // BANKS


GPU_SORT_BYTES = BlockSize(
    16 << 10,
    "bytes of the elements that one GPU block sorts in shared memory, which also holds a second copy of them",
    "two blocks of 1024 threads on a multiprocessor, within the 48 KiB of every GPU",
)


def sorted_width(dtypes: Collection[str], target: Target) -> int:
    """Return how many elements of such arrays a GPU's block sorts: a power of two, those of one thread at least."""
    width = 1 << max((GPU_SORT_BYTES.value // sum(map(size_of, dtypes))).bit_length() - 1, 0)

    def taken(width: int) -> int:
        return bytes_of_all(Buffer("run", dtype, run_cells(width), "shared") for dtype in dtypes)

    while width > MERGED_EACH.value and taken(width) > target.shared:
        width //= 2
    return max(width, MERGED_EACH.value)


def counted_width(dtypes: Collection[str], n: int, target: Target) -> int:
    """Return a width of runs that are rows of ``n``, and more than a block sorts."""
    return max(2 * sorted_width(dtypes, target), 1 << (n - 1).bit_length())


def counted(op: Op, target: Target) -> bool:
    """Are the runs that ``op`` sorts whole rows, which no block holds?"""
    a, n = op.attrs, op.operands[0].type.shape[-1]
    whole = isinstance(n, int) and n <= a["width"] == a["keep"] and a["done"] == 1 and not a["numbered"]
    return whole and a["width"] > sorted_width([v.type.dtype for v in op.results], target)


def memory_limits(target: Target) -> dict[str, tuple[str, int]]:
    """Return what the memory is called that a kernel makes arrays in, and how much there is, by space of buffers."""
    return {
        "private": ("stack" if target.kind == "cpu" else "a thread's memory", target.stack),
        "scratch": ("scratch memory", min(ROW_SCRATCH.value, target.l2 // 2)),
        "shared": ("shared memory", target.shared_memory),
    }


def row_memory(target: Target, stages: RowStages) -> tuple[str, int]:
    """Return what the memory is called that a worker keeps values of a row in, and how many bytes are for them."""
    if target.kind == "cpu":
        return memory_limits(target)["scratch"]
    plan = row_plan(stages, target)
    if plan.group == 1:
        return memory_limits(target)["private"]
    if plan.steps:
        return "registers", _register_bytes(plan)
    return "shared memory", target.shared_memory - shared_bytes(plan, stages)


def row_room(target: Target) -> tuple[str, int]:
    """Return what the memory is called that a worker reads a long row from again, and how many bytes there are."""
    if target.kind == "cpu":
        return "the last-level cache", L3_SIZE.value
    registers = 4 * KEPT_REGISTERS_LONG.value * LONG_ROW_THREADS.value
    partial = 2 * size_of("f64") * LONG_ROW_THREADS.value // WARP
    return max(("registers", registers), ("shared memory", target.shared_memory - partial), key=lambda room: room[1])
