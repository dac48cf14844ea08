"""Graphs of commands: on one thread, and a participant's part in one that several run.

Control commands are run, and helped with, by exported functions (:mod:`aotc.kernels.cpu.executor_control`): their
nodes hold graphs again.
"""

from __future__ import annotations

from numba import njit

from aotc.kernels.cpu.atomics import acquire, address_of, at, call_kernel, copy_bytes, fetch_add, release, words_at
from aotc.kernels.cpu.executor_control import help_inside, run_control
from aotc.kernels.cpu.executor_monitor import is_stopped, poll
from aotc.kernels.cpu.executor_shares import is_needed_elsewhere
from aotc.kernels.cpu.executor_words import (
    CALL,
    CELLS,
    CONTROLS,
    COUNT,
    DONE,
    EPOCH,
    FINISHED,
    HELPER,
    INSIDE,
    MONITOR,
    NEXT,
    NODE,
    OPEN,
    OWNER,
    PENDING,
    READY,
    STATE,
    TAIL,
    dim_words,
    operand,
    place,
    place_words,
    wait_a_little,
)
from aotc.kernels.limits import IDLE_TURNS
from aotc.vmfb.abi import (
    CALL_PARAMS,
    CALL_SCRATCH,
    CALL_SLOTS,
    CALL_STRIDE,
    COMMAND_HEADER,
    CONTROL,
    COPY,
    DIMS,
    GRAIN,
    GRAPH_COMMANDS,
    GRAPH_HEADER,
    GRAPH_SERIAL,
    ITEMS,
    KERNEL,
    KIND,
    PLACE_WORDS,
    PLACES,
    PREDECESSORS,
    SUCCESSORS,
)


@njit
def run_items(command, begin, end, slots, params, scratch, monitor):
    """Run items ``[begin, end)`` of one command."""
    first = COMMAND_HEADER + command[SUCCESSORS]
    places = command[PLACES]
    dims_at = first + PLACE_WORDS * places
    if command[KIND] == COPY:
        size = operand(command[dims_at], params)
        copy_bytes(place(command, 1, first, slots, params), place(command, 0, first, slots, params), size)
        return
    buffers = place_words()
    dims = dim_words()
    for i in range(places):
        buffers[i] = place(command, i, first, slots, params)
    for i in range(command[DIMS]):
        dims[i] = operand(command[dims_at + i], params)
    call_kernel(command[KERNEL], buffers, dims, begin, end, scratch, monitor)


@njit
def should_leave(pool, call, me):
    """Should this participant leave the run? The caller is number 0."""
    return poll(call) if me == 0 else is_stopped(pool, call)


@njit
def run_alone(node, pool, call, slots, params, scratch, monitor, me):
    """Run a graph on this thread: its commands are in topological order."""
    serial = node[GRAPH_SERIAL] == 1
    for i in range(node[GRAPH_COMMANDS]):
        command = at(node, node[GRAPH_HEADER + i])
        items = operand(command[ITEMS], params)
        grain = items if serial else max(operand(command[GRAIN], params), 1)
        begin = 0
        while begin < items:
            end = min(begin + grain, items)
            if command[KIND] == CONTROL:
                run_control(pool, call, 0, command, me, monitor)
            else:
                run_items(command, begin, end, slots, params, scratch, monitor)
            begin = end
            if not serial and should_leave(pool, call, me):
                return


@njit
def is_small(node, params):
    """Is a graph marked as serial, or a single command that one participant would claim whole?"""
    if node[GRAPH_SERIAL] == 1 or node[GRAPH_COMMANDS] == 0:
        return True
    command = at(node, node[GRAPH_HEADER])
    return node[GRAPH_COMMANDS] == 1 and operand(command[ITEMS], params) <= operand(command[GRAIN], params)


@njit
def make_ready(run, cells, number):
    """Append a command to the ready list."""
    entry = fetch_add(at(run, TAIL), 1)
    release(at(cells, entry * STATE + READY), number + 1)


@njit
def describe(run, node, call, cells):
    """Say in the words of a run which graph it is; nothing of that has begun, and nobody looks at it yet."""
    count = node[GRAPH_COMMANDS]
    controls = 0
    run[TAIL] = 0
    run[DONE] = 0
    for i in range(count):
        command = at(node, node[GRAPH_HEADER + i])
        cells[i * STATE + NEXT] = 0
        cells[i * STATE + FINISHED] = 0
        cells[i * STATE + PENDING] = command[PREDECESSORS]
        cells[i * STATE + READY] = 0
        if command[KIND] == CONTROL:
            inner = at(cells, command[KERNEL] * STATE)
            inner[OPEN] = 0
            inner[INSIDE] = 0
            controls += 1
    for i in range(count):
        if cells[i * STATE + PENDING] == 0:
            make_ready(run, cells, i)
    run[NODE] = address_of(node)
    run[CALL] = address_of(call)
    run[CELLS] = address_of(cells)
    run[COUNT] = count
    run[CONTROLS] = controls


@njit
def finish(run, command, cells):
    """Count down the successors of a finished command."""
    for i in range(command[SUCCESSORS]):
        successor = command[COMMAND_HEADER + i]
        if fetch_add(at(cells, successor * STATE + PENDING), -1) == 1:
            make_ready(run, cells, successor)
    fetch_add(at(run, DONE), 1)


@njit
def should_move(pool, run, role):
    """Should a worker look for another place, now that something has changed?"""
    return role == HELPER or (role != OWNER and is_needed_elsewhere(pool, run))


@njit
def take_part(pool, run, me, role):
    """Claim and run items until the graph is finished, the call stopped, or this worker is needed elsewhere.

    A helper leaves also when there is nothing to claim. Return how often something was found.
    """
    node, call, cells = words_at(run[NODE]), words_at(run[CALL]), words_at(run[CELLS])
    slots, params = words_at(call[CALL_SLOTS]), words_at(call[CALL_PARAMS])
    scratch = words_at(call[CALL_SCRATCH])[0] + me * call[CALL_STRIDE]
    monitor = call if me == 0 else at(run, MONITOR)
    epoch = acquire(at(pool, EPOCH))
    count = node[GRAPH_COMMANDS]
    controls = run[CONTROLS]
    cursor = 0
    idle = 0
    found = 0
    while True:
        number = acquire(at(cells, cursor * STATE + READY)) if cursor < count else 0
        if number == 0:
            if role == HELPER or acquire(at(run, DONE)) >= count:
                return found
            idle += 1
            if controls > 0 and help_inside(pool, run, me) > 0:
                idle = IDLE_TURNS
            if idle % IDLE_TURNS == 0:
                if should_leave(pool, call, me):
                    return found
                if me != 0 and epoch != acquire(at(pool, EPOCH)):
                    epoch = acquire(at(pool, EPOCH))
                    if should_move(pool, run, role):
                        return found
            wait_a_little(idle)
            continue
        idle = 0
        command = at(node, node[GRAPH_HEADER + number - 1])
        cell = at(cells, (number - 1) * STATE)
        items = operand(command[ITEMS], params)
        whole = max(items, 1)
        grain = max(operand(command[GRAIN], params), 1)
        begin = whole
        if acquire(at(cell, NEXT)) < whole:
            begin = fetch_add(at(cell, NEXT), grain)
        if begin >= whole:
            cursor += 1
            continue
        end = min(begin + grain, whole)
        found += 1
        if command[KIND] == CONTROL:
            run_control(pool, call, address_of(at(cells, command[KERNEL] * STATE)), command, me, monitor)
        elif items > 0:
            run_items(command, begin, end, slots, params, scratch, monitor)
        if fetch_add(at(cell, FINISHED), end - begin) + (end - begin) == whole:
            finish(run, command, cells)
        if should_leave(pool, call, me):
            return found
        if me != 0 and epoch != acquire(at(pool, EPOCH)):
            epoch = acquire(at(pool, EPOCH))
            if should_move(pool, run, role):
                return found
