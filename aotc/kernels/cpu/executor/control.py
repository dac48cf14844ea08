"""Control commands: loops and branches that run beside other commands of a graph.

Whoever claims one runs its nodes. Graphs in there that several threads can share are opened as the command's *inner
run*, which lies in cells of its own and has the words of a run up to its seats. Participants of the graph around it who
find nothing to claim help with open inner runs; they keep their seat, and so their scratch memory. An inner run ends as
any other does: see :mod:`aotc.kernels.cpu.executor.scheduler`.

Nodes hold graphs, whose commands hold nodes: what runs nodes, and a participant's part in a graph, are exported and
called by address. Numba's functions cannot call each other in a circle, and so they stand in the executor once: loading
takes longer by its size.
"""

from __future__ import annotations

from numba import njit

from aotc.kernels.cpu.executor.atomics import acquire, address_of, at, call_host, fetch_add, words_at
from aotc.kernels.cpu.executor.words import (
    CELLS,
    CONTROLS,
    COUNT,
    DEVICES,
    HELPER,
    INSIDE,
    MONITOR,
    MONITOR_POOL,
    MONITOR_RUN,
    OPEN,
    PART_CALL,
    PART_CODE,
    PART_LENGTH,
    PART_MONITOR,
    PART_POOL,
    PART_ROLE,
    PART_RUN,
    PART_THREADS,
    PART_WHO,
    STATE,
    THREADS,
    claims_entry,
    nodes_entry,
    part_words,
    worker_monitor,
)
from aotc.vmfb.abi import CALL_DEVICES, CALL_THREADS, COMMAND_HEADER, DIMS, INNER_CELLS, SUCCESSORS


@njit
def participate(pool, run, who, role):
    """Work on a run as one participant; return how often work was claimed."""
    part = part_words()
    part[PART_POOL], part[PART_RUN] = address_of(pool), address_of(run)
    part[PART_WHO], part[PART_ROLE] = address_of(who), role
    return call_host(claims_entry(), address_of(part))


@njit
def enter_nodes(pool, call, code, words, threads, inner, who, monitor):
    """Run the nodes of a command buffer, with graphs on up to ``threads`` threads."""
    part = part_words()
    part[PART_POOL], part[PART_CALL], part[PART_RUN] = address_of(pool), address_of(call), inner
    part[PART_CODE], part[PART_LENGTH] = address_of(code), words
    part[PART_WHO], part[PART_MONITOR], part[PART_THREADS] = address_of(who), address_of(monitor), threads
    call_host(nodes_entry(), address_of(part))


@njit
def prepare_inner(pool, inner, call):
    """Initialize the constant fields of an inner run (the body of a loop or branch command)."""
    inner[MONITOR] = worker_monitor()
    inner[MONITOR_RUN] = address_of(inner)
    inner[MONITOR_POOL] = address_of(pool)
    inner[THREADS], inner[DEVICES] = call[CALL_THREADS], call[CALL_DEVICES]


@njit
def run_control(pool, call, inner, command, who, monitor):
    """Run the body of a loop or branch command; on one thread if no inner run is available."""
    code = at(command, COMMAND_HEADER + command[SUCCESSORS])
    enter_nodes(pool, call, code, command[DIMS], call[CALL_THREADS] if inner != 0 else 1, inner, who, monitor)


@njit
def help_with(pool, inner, who):
    """Work on an inner run while it has items to claim; return how often work was claimed."""
    found = 0
    fetch_add(at(inner, INSIDE), 1)
    if fetch_add(at(inner, OPEN), 0) == 1:
        found = participate(pool, inner, who, HELPER)
    fetch_add(at(inner, INSIDE), -1)
    return found


@njit
def help_inside(pool, run, who):
    """Work on the open inner runs of a graph's control commands; return how often work was claimed."""
    cells = at(words_at(run[CELLS]), run[COUNT] * STATE)
    found = 0
    for i in range(run[CONTROLS]):
        inner = at(cells, i * INNER_CELLS * STATE)
        if acquire(at(inner, OPEN)) == 1:
            found += help_with(pool, inner, who)
    return found
