"""List scheduling (R. Graham, 1969): start commands in the order of their critical paths, if that helps.

The commands of a graph start in a fixed order, each as soon as its predecessors are done. Program order is used unless
the cost model predicts that critical-path order ends sooner: program order has better cache locality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from aotc.lowering.plans.thresholds import ORDER_WORKERS
from aotc.lowering.threshold import Limit

ORDER_GAIN = Limit(
    1,
    "percent of a graph's time saved by another order, up to which commands stay in program order",
    "commands next to each other in the program find their operands in caches",
)


def list_schedule_order(
    before: Sequence[Sequence[int]], nanoseconds: Sequence[float], widths: Sequence[int]
) -> list[int]:
    """Return the commands of a graph in the order in which to start them.

    Parameters
    ----------
    before : sequence of sequence of int
        The commands that each command waits for, all earlier in program order.
    nanoseconds : sequence of float
        Time of each command on one core.
    widths : sequence of int
        Number of workers that can share each command.
    """
    program = list(range(len(before)))
    other = _critical_path_first(before, nanoseconds)
    if other == program:
        return program
    ends = [makespan(order, before, nanoseconds, widths) for order in (program, other)]
    return program if ORDER_GAIN.holds(round(100 * (1 - ends[1] / max(ends[0], 1e-9)))) else other


def critical_paths(
    before: Sequence[Sequence[int]], nanoseconds: Sequence[float], lags: Mapping[tuple[int, int], float] | None = None
) -> list[float]:
    """Return the time from the start of each command to the end of the critical path through it.

    ``lags`` has nanoseconds between the starts of two commands if the second waits only for a part of the first.
    """
    lengths = list(nanoseconds)
    for n in reversed(range(len(before))):
        for p in before[n]:
            lengths[p] = max(lengths[p], (lags or {}).get((p, n), nanoseconds[p]) + lengths[n])
    return lengths


def _critical_path_first(before: Sequence[Sequence[int]], nanoseconds: Sequence[float]) -> list[int]:
    """Return the commands in topological order: of the ready commands, the longest critical path is first."""
    path_lengths = critical_paths(before, nanoseconds)
    waiting = list(map(len, before))
    successors: list[list[int]] = [[] for _ in before]
    for n, some in enumerate(before):
        for p in some:
            successors[p].append(n)
    ready: list[tuple[float, int]] = []
    for n, count in enumerate(waiting):
        if not count:
            heappush(ready, (-path_lengths[n], n))
    order = []
    while ready:
        _, n = heappop(ready)
        order.append(n)
        for s in successors[n]:
            waiting[s] -= 1
            if not waiting[s]:
                heappush(ready, (-path_lengths[s], s))
    return order


def makespan(
    order: Sequence[int], before: Sequence[Sequence[int]], nanoseconds: Sequence[float], widths: Sequence[int]
) -> float:
    """Return the time in nanoseconds at which the last command ends if workers start commands in ``order``.

    The other parameters are those of :func:`list_schedule_order`.
    """
    workers = [0.0] * ORDER_WORKERS.value
    ends = [0.0] * len(before)
    for n in order:
        share = max(1, min(widths[n], len(workers)))
        workers.sort()
        begin = max([workers[share - 1], *(ends[p] for p in before[n])])
        ends[n] = begin + nanoseconds[n] / share
        workers[:share] = [ends[n]] * share
    return max(ends, default=0.0)
