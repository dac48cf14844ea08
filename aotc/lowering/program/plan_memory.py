"""Assign offsets in one arena to storages by their live ranges.

Static storages are placed largest first, at the lowest offset that no storage alive at the same time occupies (greedy
by size: Y. Pisarchyk and J. Lee, "Efficient memory management for deep neural net inference", 2020). Symbolic
ones follow; two of equal size that are never alive together share an offset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np

from aotc.ir.dims.algebra import Dim, static
from aotc.ir.program.ir import Storage, place_after_guard_gap
from aotc.lowering.program.avoid_reuse import COMMAND, CONTROL, waits_added_by_reuse
from aotc.lowering.program.graphs import Run
from aotc.lowering.threshold import Limit
from aotc.vmfb.abi import ALIGNMENT


def plan_memory(arena: list[Storage]) -> Dim:
    """Set the ``offset`` of every storage; return the bytes of the arena."""
    return plan_stages(arena, lambda size: 0, 1)[0]


def plan_stages(
    arena: list[Storage], stage_of: Callable[[Dim], int], count: int, guard_gaps: bool = False,
    runs: Sequence[Run] = (),    most: int | None = None,
) -> list[Dim]:  # fmt: skip
    """Set the ``offset`` of every storage; return the bytes of the arena in each of ``count`` stages.

    Parameters
    ----------
    stage_of : callable
        ``stage_of(size)`` is the first stage in which a size is known. Offsets depend only on sizes of the same stage
        and earlier ones, so the arena of one stage is a prefix of the next one's.
    guard_gaps : bool
        If True, storages share nothing and have guards between them.
    runs : sequence of Run
        The commands of each graph. Memory reuse that would make a command wait is avoided if that costs little memory.
    most : int, optional
        Bound on the bytes of the arena for that purpose.
    """
    fixed = [s for s in arena if isinstance(s.size, int)]
    total: Dim = _place_without_sharing(fixed, 0) if guard_gaps else _place_avoiding_reuse(fixed, runs, most)
    stages: list[list[Storage]] = [[] for _ in range(count)]
    for s in arena:
        if not isinstance(s.size, int):
            stages[stage_of(s.size)].append(s)
    totals = []
    for storages in stages:
        total = _place_without_sharing(storages, total) if guard_gaps else _place_symbolic(storages, total)
        totals.append(total)
    return totals


def _place_without_sharing(storages: list[Storage], total: Dim) -> Dim:
    for s in storages:
        s.offset, total = place_after_guard_gap(total, s.size)
    return total


def _place_symbolic(storages: list[Storage], total: Dim) -> Dim:
    """Place storages with symbolic sizes behind ``total``; return the new size of the arena."""
    used: dict[Dim, list[tuple[int, int, Dim]]] = {}  # by size: a heap of offsets by their last use
    for number, s in enumerate(sorted(storages, key=lambda s: s.first)):
        places = used.setdefault(s.size, [])
        if places and places[0][0] < s.first:
            s.offset = heappop(places)[2]
        else:
            s.offset = total
            total = total + (s.size + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
        heappush(places, (s.last, number, s.offset))
    return total


SPREAD_BYTES = Limit(
    1 << 18,
    "bytes of an arena, up to which no command waits for memory of another",
    "it fits an L2 cache",
)
SPREAD_PERCENT = Limit(
    12,
    "percent by which an arena may grow so that commands need not wait for memory",
    "the wait would end as soon as a thread is free, so it is worth little memory",
)
OVERLAP_MEMORY = Limit(
    100,
    "percent by which an arena may grow so that loops and branches run concurrently with other commands",
    "they run long, so a wait for memory would idle whole cores",
)


def _place_avoiding_reuse(storages: list[Storage], runs: Sequence[Run], most: int | None) -> int:
    """Place storages; pairs whose sharing would make a command wait are separated if that costs little memory."""
    least = _place_static(storages)
    loose = waits_added_by_reuse(runs, storages)
    if loose is None or (most is not None and least >= most):
        return least

    def is_worth_memory(top: int, kind: int) -> bool:
        percent = OVERLAP_MEMORY if kind == CONTROL else SPREAD_PERCENT
        little = SPREAD_BYTES.holds(top) or percent.holds(100 * (top - least) // least)
        return little and (most is None or top <= most)

    total = _place_static(storages, loose, is_worth_memory)
    return total if most is None or total <= most else _place_static(storages)  # other storages found no gap


def _place_static(
    storages: list[Storage], waiting: np.ndarray | None = None,
    fits: Callable[[int, int], bool] = lambda top, kind: True,
) -> int:  # fmt: skip
    """Place storages so that storages alive at the same time do not overlap; return the size of the arena.

    Pairs marked in ``waiting`` do not overlap either, if the end of the later one ``fits`` for that kind of wait.
    """
    numbers = sorted(range(len(storages)), key=lambda n: (-static(storages[n].size), storages[n].first))
    placed = np.zeros((5, len(numbers)), np.int64)  # begin, end, first and last use, number; sorted by begin
    for count, number in enumerate(numbers):
        s = storages[number]
        size = -(-static(s.size) // ALIGNMENT) * ALIGNMENT
        begins, ends, first, last, others = placed[:, :count]
        overlapping = (first <= s.last) & (last >= s.first)
        s.offset = _lowest_arena_gap(begins, ends, overlapping, size)
        waits_for = None if waiting is None else waiting[number, others]
        if waits_for is not None and waits_for.any():
            for kind in (COMMAND, CONTROL):
                separate_offset = _lowest_arena_gap(begins, ends, overlapping | (waits_for >= kind), size)
                if fits(separate_offset + size, kind):
                    s.offset = separate_offset
                    break
        at = int(np.searchsorted(begins, s.offset, "right"))
        placed[:, at + 1 : count + 1] = placed[:, at:count]
        placed[:, at] = s.offset, s.offset + size, s.first, s.last, number
    return int(placed[1].max(initial=0))


def _lowest_arena_gap(begins: np.ndarray, ends: np.ndarray, overlapping: np.ndarray, size: int) -> int:
    """Return the lowest offset of a gap of ``size`` bytes between the storages marked in ``overlapping``."""
    begins, ends = begins[overlapping], ends[overlapping]
    tops = np.zeros(len(ends) + 1, np.int64)
    np.maximum.accumulate(ends, out=tops[1:])
    wide = begins - tops[:-1] >= size
    return int(tops[wide.argmax() if wide.any() else -1])
