"""Control commands: loops and branches that run concurrently with other commands of a graph.

The participant that claims a control command runs its nodes. A graph in these nodes with work for several threads is
opened as the command's *inner run*, a run record in the cells of the command. Participants of the outer graph without
work to claim help with open inner runs; they keep their participant number, and so their scratch memory. An inner run
ends as any other run: see :mod:`aotc.kernels.cpu.executor.scheduler`.

Nodes contain graphs, and commands of graphs contain nodes, but Numba's functions cannot be mutually recursive. The walk
over nodes and the participation in a graph are therefore exported and called by address. This also avoids inlined
copies, which would make the executor larger and slower to load.
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
def participate_in_run(pool, run, who, role):
    """Work on a run as one participant, by the exported function ``aotc_take_part``; return the number of claims.

    ``who`` points to the words of the participant. ``role`` is MEMBER, OWNER or HELPER.
    """
    part = part_words()
    part[PART_POOL], part[PART_RUN] = address_of(pool), address_of(run)
    part[PART_WHO], part[PART_ROLE] = address_of(who), role
    return call_host(claims_entry(), address_of(part))


@njit
def call_node_walk(pool, call, code, words, threads, inner, who, monitor):
    """Run the nodes of a command buffer by the exported function ``aotc_run_nodes``.

    ``threads`` is the maximum number of threads for each of their graphs.
    """
    part = part_words()
    part[PART_POOL], part[PART_CALL], part[PART_RUN] = address_of(pool), address_of(call), inner
    part[PART_CODE], part[PART_LENGTH] = address_of(code), words
    part[PART_WHO], part[PART_MONITOR], part[PART_THREADS] = address_of(who), address_of(monitor), threads
    call_host(nodes_entry(), address_of(part))


@njit
def initialize_inner_run(pool, inner, call):
    """Write the fields of an inner run that stay constant for all of its graphs."""
    inner[MONITOR] = worker_monitor()
    inner[MONITOR_RUN] = address_of(inner)
    inner[MONITOR_POOL] = address_of(pool)
    inner[THREADS], inner[DEVICES] = call[CALL_THREADS], call[CALL_DEVICES]


@njit
def run_control_command(pool, call, inner, command, who, monitor):
    """Run the nodes of a loop or branch command: on one thread if ``inner``, the address of an inner run, is 0."""
    code = at(command, COMMAND_HEADER + command[SUCCESSORS])
    call_node_walk(pool, call, code, command[DIMS], call[CALL_THREADS] if inner != 0 else 1, inner, who, monitor)


@njit
def help_inner_run(pool, inner, who):
    """Work on an inner run while it has items to claim; return the number of claims."""
    found = 0
    fetch_add(at(inner, INSIDE), 1)
    if fetch_add(at(inner, OPEN), 0) == 1:
        found = participate_in_run(pool, inner, who, HELPER)
    fetch_add(at(inner, INSIDE), -1)
    return found


@njit
def help_inner_runs(pool, run, who):
    """Work on the open inner runs of a graph's control commands; return the number of claims."""
    cells = at(words_at(run[CELLS]), run[COUNT] * STATE)
    found = 0
    for i in range(run[CONTROLS]):
        inner = at(cells, i * INNER_CELLS * STATE)
        if acquire(at(inner, OPEN)) == 1:
            found += help_inner_run(pool, inner, who)
    return found
