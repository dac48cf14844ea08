"""Control commands: loops and branches that run beside other commands of a graph.

Whoever claims one runs its nodes. Graphs in there that several threads can share are opened as the command's *inner
run*, which lies in cells of its own and has the words of a run up to its seats. Participants of the graph around it who
find nothing to claim help with open inner runs; they keep their seat, and so their scratch memory. An inner run ends as
any other does: see :mod:`aotc.kernels.cpu.executor`.

Nodes hold graphs, whose commands hold nodes: what runs them is exported and called by address, as Numba's functions
cannot call each other in a circle.
"""

from __future__ import annotations

from numba import njit

from aotc.kernels.cpu.atomics import acquire, address_of, at, call_host, fetch_add, words_at
from aotc.kernels.cpu.executor_words import (
    CELLS,
    CONTROLS,
    COUNT,
    INSIDE,
    MONITOR,
    MONITOR_POOL,
    MONITOR_RUN,
    OPEN,
    PART_CALL,
    PART_CODE,
    PART_LENGTH,
    PART_ME,
    PART_MONITOR,
    PART_POOL,
    PART_RUN,
    PART_THREADS,
    STATE,
    control_entry,
    help_entry,
    part_words,
    worker_monitor,
)
from aotc.vmfb.abi import (
    CALL_THREADS,
    COMMAND_HEADER,
    DIMS,
    INNER_CELLS,
    SUCCESSORS,
)


@njit
def prepare_inner(pool, inner):
    """Write what an inner run always holds."""
    inner[MONITOR] = worker_monitor()
    inner[MONITOR_RUN] = address_of(inner)
    inner[MONITOR_POOL] = address_of(pool)


@njit
def run_control(pool, call, inner, command, me, monitor):
    """Run the nodes of a control command; alone, if it has no inner run."""
    part = part_words()
    part[PART_POOL] = address_of(pool)
    part[PART_CALL] = address_of(call)
    part[PART_RUN] = inner
    part[PART_CODE] = address_of(at(command, COMMAND_HEADER + command[SUCCESSORS]))
    part[PART_LENGTH] = command[DIMS]
    part[PART_ME] = me
    part[PART_MONITOR] = address_of(monitor)
    part[PART_THREADS] = call[CALL_THREADS] if inner != 0 else 1
    call_host(control_entry(), address_of(part))


@njit
def help_with(pool, inner, me):
    """Take part in an inner run while it has something to claim; return how often it had."""
    found = 0
    fetch_add(at(inner, INSIDE), 1)
    if fetch_add(at(inner, OPEN), 0) == 1:
        part = part_words()
        part[PART_POOL] = address_of(pool)
        part[PART_RUN] = address_of(inner)
        part[PART_ME] = me
        found = call_host(help_entry(), address_of(part))
    fetch_add(at(inner, INSIDE), -1)
    return found


@njit
def help_inside(pool, run, me):
    """Take part in what control commands of a graph have open; return how often something was found to claim."""
    cells = at(words_at(run[CELLS]), run[COUNT] * STATE)
    found = 0
    for i in range(run[CONTROLS]):
        inner = at(cells, i * INNER_CELLS * STATE)
        if acquire(at(inner, OPEN)) == 1:
            found += help_with(pool, inner, me)
    return found
