"""What a region may take of a target, and what one of a given form takes: asked before fusion forms it.

A worker of a CPU is a thread: it has a stack, scratch memory of its own in the arena, and caches. One of a GPU is a
block of threads with shared memory. The figures are columns of the table of targets, which options shrink; what is
here is how much of each the forms of a region take.
"""

from __future__ import annotations

from aotc.ir.dims import Dim, product
from aotc.lowering.analysis.anchors import Anchors
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
from aotc.targets import Target


def row_threads(anchors: Anchors) -> int:
    """Return how many threads of a GPU share a row of a region: a block if rows are contiguous and long, else one."""
    reduced = anchors.reduced or frozenset()
    kept = [k for k, s in enumerate(anchors.space) if s != 0 and k not in reduced]
    shape = anchors.anchor.type.shape
    work, rows = product(shape[k] for k in sorted(reduced)), product(shape[k] for k in kept)
    contiguous = max(reduced, default=0) > max(kept, default=-1)
    plenty = not GPU_FEW_ROWS.holds(rows) and THREAD_ROW_OF_MANY.holds(work)
    return _block_threads(work) if contiguous and not plenty and not THREAD_ROW.holds(work) else 1


def _block_threads(work: Dim) -> int:
    least = GPU_ROW_THREADS.value
    if GPU_ROW_SHORT.holds(work):
        return least
    return 2 * least if GPU_ROW_MEDIUM.holds(work) else 4 * least


def row_fits(target: Target, anchors: Anchors, size: int) -> bool:
    """May a worker keep ``size`` bytes of values of a row of a region between its loops?

    On a CPU they lie in its scratch memory, and stay in its second-level cache; on a GPU in the shared memory of its
    block beside the partial results, or in the memory of a thread that has a row to itself.
    """
    if target.kind == "cpu":
        return ROW_SCRATCH.holds(size) and size <= target.l2 // 2
    if row_threads(anchors) > 1:
        return SHARED_ROW.holds(size) and size <= target.shared_memory
    return size <= target.stack
