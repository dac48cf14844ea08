"""Run a graph of commands: alone on one thread, or as one of several participants.

Control commands are run, and helped with, by exported functions (:mod:`aotc.kernels.cpu.executor.control`): their
nodes hold graphs again.
"""

from __future__ import annotations

from numba import njit

from aotc.kernels.cpu.executor.atomics import (
    acquire,
    address_of,
    at,
    call_kernel,
    copy_bytes,
    fetch_add,
    release,
    ticks,
    words_at,
)
from aotc.kernels.cpu.executor.cancel import is_stopped, poll
from aotc.kernels.cpu.executor.claim_sizes import claim_size, note_pace
from aotc.kernels.cpu.executor.concurrent_calls import is_needed_elsewhere
from aotc.kernels.cpu.executor.control import help_inside, run_control
from aotc.kernels.cpu.executor.stress import (
    begin_claim,
    begin_trial,
    end_claim,
    pick_claim,
    pick_entry,
    slow_since,
)
from aotc.kernels.cpu.executor.tally import begin_wait, end_wait, leave_command, now_if_waiting
from aotc.kernels.cpu.executor.words import (
    CALL,
    CELLS,
    CONTROLS,
    COUNT,
    DONE,
    EPOCH,
    FINISHED,
    HELPER,
    INSIDE,
    MINE,
    MONITOR,
    NEXT,
    NODE,
    OPEN,
    OWNER,
    PACE,
    PENDING,
    READY,
    SEAT,
    STATE,
    TAIL,
    THREADS,
    dice_words,
    dim_words,
    operand,
    place,
    place_words,
    wait_a_little,
)
from aotc.kernels.limits import IDLE_TURNS
from aotc.vmfb import abi


@njit
def run_items(command, begin, end, slots, params, scratch, monitor):
    """Run items ``[begin, end)`` of one command."""
    first = abi.COMMAND_HEADER + command[abi.SUCCESSORS]
    places = command[abi.PLACES]
    dims_at = first + abi.PLACE_WORDS * places
    buffers = place_words()
    dims = dim_words()
    for i in range(places):
        buffers[i] = place(command, i, first, slots, params)
    if command[abi.KIND] == abi.COPY:
        copy_bytes(buffers[1], buffers[0], operand(command[dims_at], params))
        return
    for i in range(command[abi.DIMS]):
        dims[i] = operand(command[dims_at + i], params)
    call_kernel(command[abi.KERNEL], buffers, dims, begin, end, scratch, monitor)


@njit
def should_leave(pool, call, me):
    """Return True if the call was stopped; only the caller (``me`` is 0) polls the host."""
    return poll(call) if me == 0 else is_stopped(pool, call)


@njit
def run_alone(node, pool, call, slots, params, scratch, monitor, who):
    """Run a graph on this thread: its commands are in topological order."""
    serial = node[abi.GRAPH_SERIAL] == 1
    for i in range(node[abi.GRAPH_COMMANDS]):
        command = at(node, node[abi.GRAPH_HEADER + i])
        items = operand(command[abi.ITEMS], params)
        grain = items if serial else max(operand(command[abi.GRAIN], params), 1)
        begin = items - items  # a literal 0 has a type of its own, for which run_items would be compiled once more
        while begin < items:
            end = min(begin + grain, items)
            if command[abi.KIND] == abi.CONTROL:
                run_control(pool, call, 0, command, who, monitor)
            else:
                run_items(command, begin, end, slots, params, scratch, monitor)
            begin = end
            if not serial and should_leave(pool, call, who[SEAT]):
                return


@njit
def is_small(node, params):
    """Return True if a graph has no work for a second thread: serial, or a single claim."""
    if node[abi.GRAPH_SERIAL] == 1 or node[abi.GRAPH_COMMANDS] == 0:
        return True
    command = at(node, node[abi.GRAPH_HEADER])
    return node[abi.GRAPH_COMMANDS] == 1 and operand(command[abi.ITEMS], params) <= operand(command[abi.GRAIN], params)


@njit
def make_ready(run, cells, number):
    """Append a command to the ready list."""
    entry = fetch_add(at(run, TAIL), 1)
    release(at(cells, entry * STATE + READY), number + 1)


@njit
def describe(run, node, call, cells):
    """Initialize a run record and its ready list for a graph, before participants enter."""
    count = node[abi.GRAPH_COMMANDS]
    controls = 0
    run[TAIL] = 0
    run[DONE] = 0
    for i in range(count):
        command = at(node, node[abi.GRAPH_HEADER + i])
        cells[i * STATE + NEXT] = 0
        cells[i * STATE + FINISHED] = 0
        cells[i * STATE + PENDING] = command[abi.PREDECESSORS]
        cells[i * STATE + READY] = 0
        cells[i * STATE + PACE] = 0
        if command[abi.KIND] == abi.CONTROL:
            inner = at(cells, command[abi.KERNEL] * STATE)
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
    """Mark a command as done, and append successors without further predecessors to the ready list."""
    for i in range(command[abi.SUCCESSORS]):
        successor = command[abi.COMMAND_HEADER + i]
        if fetch_add(at(cells, successor * STATE + PENDING), -1) == 1:
            make_ready(run, cells, successor)
    fetch_add(at(run, DONE), 1)


@njit
def should_go(pool, run, who, role, is_new):
    """Return True if a participant should leave an unfinished run: stopped, or a worker needed elsewhere."""
    if should_leave(pool, words_at(run[CALL]), who[SEAT]):
        return True
    return who[SEAT] != 0 and is_new and (role == HELPER or (role != OWNER and is_needed_elsewhere(pool, run)))


@njit
def help_others(pool, run, who, idle, tally):
    """Work on inner runs of control commands; return the number of idle iterations, 0 after work."""
    since = now_if_waiting(tally)
    if help_inside(pool, run, who) == 0:
        return idle
    end_wait(tally, since)
    return IDLE_TURNS


@njit
def run_claim(pool, run, number, begin, end, who, dice):
    """Run the claimed items of a command, and record the claim if there is a trial."""
    node, call, cells = words_at(run[NODE]), words_at(run[CALL]), words_at(run[CELLS])
    slots, params = words_at(call[abi.CALL_SLOTS]), words_at(call[abi.CALL_PARAMS])
    command = at(node, node[abi.GRAPH_HEADER + number])
    monitor = call if who[SEAT] == 0 else at(run, MONITOR)
    scratch = words_at(call[abi.CALL_SCRATCH])[0] + who[SEAT] * call[abi.CALL_STRIDE]
    trial = acquire(at(pool, abi.POOL_TRIAL))
    began = begin_claim(words_at(trial), dice) if trial != 0 else 0
    since = slow_since(words_at(trial), command, who) if trial != 0 else 0
    if command[abi.KIND] == abi.CONTROL:
        run_control(pool, call, address_of(at(cells, command[abi.KERNEL] * STATE)), command, who, monitor)
    elif operand(command[abi.ITEMS], params) > 0:
        run_items(command, begin, end, slots, params, scratch, monitor)
    if trial != 0:
        end_claim(words_at(trial), run, command, begin, end, began, since, who, dice)


@njit
def take_part(pool, run, who, role, tally):
    """Claim and run items until the graph is finished, the call is stopped, or this worker must leave.

    A helper leaves also when there is nothing to claim. Return how often items were claimed; ``tally`` has the
    counters of stolen items and waiting.
    """
    node, cells = words_at(run[NODE]), words_at(run[CELLS])
    params, count = words_at(words_at(run[CALL])[abi.CALL_PARAMS]), node[abi.GRAPH_COMMANDS]
    epoch, dice = acquire(at(pool, EPOCH)), dice_words()
    trial = begin_trial(pool, run, dice, who)
    cursor, idle, found = 0, 0, 0
    while True:
        if trial != 0:
            cursor = pick_entry(words_at(trial), run, params, dice, cursor, who, role)
        number = acquire(at(cells, cursor * STATE + READY)) if cursor < count else 0
        if number == 0:
            if role == HELPER or acquire(at(run, DONE)) >= count:
                return found
            idle += 1
            if run[CONTROLS] > 0:
                idle = help_others(pool, run, who, idle, tally)
            if idle == IDLE_TURNS:
                begin_wait(tally)
            if idle % IDLE_TURNS == 0:
                before, epoch = epoch, acquire(at(pool, EPOCH))
                if should_go(pool, run, who, role, before != epoch):
                    return found
            wait_a_little(idle)
            continue
        end_wait(tally, now_if_waiting(tally))
        idle = 0
        command, cell = at(node, node[abi.GRAPH_HEADER + number - 1]), at(cells, (number - 1) * STATE)
        whole, grain = max(operand(command[abi.ITEMS], params), 1), max(operand(command[abi.GRAIN], params), 1)
        most = claim_size(whole, grain, who) if trial == 0 else pick_claim(words_at(trial), whole, grain, who, dice)
        begin = whole if acquire(at(cell, NEXT)) >= whole else fetch_add(at(cell, NEXT), most)
        if begin >= whole:
            leave_command(tally, whole, run[THREADS])
            cursor += 1
            continue
        found += 1
        end = min(begin + most, whole)
        since = ticks() if grain < whole else 0
        run_claim(pool, run, number - 1, begin, end, who, dice)
        if grain < whole:
            note_pace(cell, who, end - begin, ticks() - since)
            tally[MINE] += end - begin
        if fetch_add(at(cell, FINISHED), end - begin) + (end - begin) == whole:
            finish(run, command, cells)
        before, epoch = epoch, acquire(at(pool, EPOCH))
        if should_go(pool, run, who, role, before != epoch):
            return found
