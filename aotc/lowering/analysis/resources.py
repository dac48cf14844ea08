"""What a region may take of a target, and what one of a given form takes: asked before fusion forms it.

A worker of a CPU is a thread: it has a stack, scratch memory of its own in the arena, and caches. One of a GPU is a
block of threads with shared memory. The figures are columns of the table of targets, which options shrink; what is
here is how much of each the forms of a region take.
"""

from __future__ import annotations

from aotc.ir.dims import Dim, product
from aotc.lowering.analysis.cost import (
    GPU_FEW_ROWS,
    GPU_ROW_MEDIUM,
    GPU_ROW_SHORT,
    GPU_ROW_THREADS,
    ROW_SCRATCH,
    SHARED_ROW,
    THREAD_ROW,
    THREAD_ROW_OF_MANY,
)
from aotc.lowering.analysis.row_stages import RowStages
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of


def row_threads(stages: RowStages, target: Target) -> int:
    """Return how many threads of a GPU share a row of a region: a block if rows are contiguous and long, else one.

    Each has a partial result of every reduction in shared memory: as many threads as that has room for.
    """
    anchors = stages.anchors
    reduced = anchors.reduced or frozenset()
    kept = [k for k, s in enumerate(anchors.space) if s != 0 and k not in reduced]
    shape = anchors.anchor.type.shape
    work, rows = product(shape[k] for k in sorted(reduced)), product(shape[k] for k in kept)
    contiguous = max(reduced, default=0) > max(kept, default=-1)
    plenty = not GPU_FEW_ROWS.holds(rows) and THREAD_ROW_OF_MANY.holds(work)
    if not contiguous or plenty or THREAD_ROW.holds(work):
        return 1
    threads, warp = _block_threads(work), GPU_ROW_THREADS.value // 4
    while threads >= warp and threads * partial_bytes(stages) > target.shared:
        threads //= 2
    return threads if threads >= warp else 1


def partial_bytes(stages: RowStages) -> int:
    """Return the bytes of the partial results of a thread, of all reductions."""
    return sum(size_of(v.type.dtype) for loop in stages.loops for op in loop.ops for v in op.results)


def _block_threads(work: Dim) -> int:
    least = GPU_ROW_THREADS.value
    if GPU_ROW_SHORT.holds(work):
        return least
    return 2 * least if GPU_ROW_MEDIUM.holds(work) else 4 * least


def row_fits(target: Target, stages: RowStages, size: int) -> bool:
    """May a worker keep ``size`` bytes of values of a row of a region between its loops?

    On a CPU they lie in its scratch memory, and stay in its second-level cache; on a GPU in the shared memory of its
    block beside the partial results, or in the memory of a thread that has a row to itself.
    """
    if target.kind == "cpu":
        return ROW_SCRATCH.holds(size) and size <= target.l2 // 2
    threads = row_threads(stages, target)
    if threads == 1:
        return size <= target.stack
    return SHARED_ROW.holds(size) and size + threads * partial_bytes(stages) <= target.shared


def memory_limits(target: Target) -> dict[str, tuple[str, int]]:
    """Return what the memory is called that a kernel makes arrays in, and how much there is, by space of buffers."""
    return {
        "private": ("stack" if target.kind == "cpu" else "a thread's memory", target.stack),
        "scratch": ("scratch memory", min(ROW_SCRATCH.value, target.l2 // 2)),
        "shared": ("shared memory", target.shared),
    }


def row_memory(target: Target, stages: RowStages) -> tuple[str, int]:
    """Return what the memory is called that a worker keeps values of a row in, and how many bytes are for them."""
    if target.kind == "cpu":
        return memory_limits(target)["scratch"]
    threads = row_threads(stages, target)
    if threads == 1:
        return memory_limits(target)["private"]
    return "shared memory", min(SHARED_ROW.value, target.shared - threads * partial_bytes(stages))
