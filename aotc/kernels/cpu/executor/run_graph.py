"""Run a graph of commands: on one thread, or as one of several participants.

Control commands are run by exported functions (:mod:`aotc.kernels.cpu.executor.control`), because they contain graphs
themselves.
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
from aotc.kernels.cpu.executor.cancel import is_stop_requested, poll_host
from aotc.kernels.cpu.executor.claim_sizes import claim_size, record_claim_time
from aotc.kernels.cpu.executor.concurrent_calls import should_worker_change_run
from aotc.kernels.cpu.executor.control import help_inner_runs, run_control_command
from aotc.kernels.cpu.executor.stress import (
    begin_traced_claim,
    begin_trial,
    end_traced_claim,
    pick_claim_size,
    pick_ready_entry,
    slow_claim_start,
)
from aotc.kernels.cpu.executor.tally import begin_wait_time, count_stolen_items, end_wait_time, time_if_waiting
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
    buffer_address,
    dice_words,
    dim_words,
    operand_value,
    place_words,
    spin_or_yield,
)
from aotc.kernels.limits import IDLE_TURNS
from aotc.vmfb import abi


@njit
def run_command_items(command, begin, end, slots, params, scratch, monitor):
    """Run items ``[begin, end)`` of a kernel command, or a whole copy command."""
    first = abi.COMMAND_HEADER + command[abi.SUCCESSORS]
    places = command[abi.PLACES]
    dims_at = first + abi.PLACE_WORDS * places
    buffers = place_words()
    dims = dim_words()
    for i in range(places):
        buffers[i] = buffer_address(command, i, first, slots, params)
    if command[abi.KIND] == abi.COPY:
        copy_bytes(buffers[1], buffers[0], operand_value(command[dims_at], params))
        return
    for i in range(command[abi.DIMS]):
        dims[i] = operand_value(command[dims_at + i], params)
    call_kernel(command[abi.KERNEL], buffers, dims, begin, end, scratch, monitor)


@njit
def is_call_stopped(pool, call, me):
    """Return True if the call was stopped; only the caller (``me`` is 0) notifies the host."""
    return poll_host(call) if me == 0 else is_stop_requested(pool, call)


@njit
def run_graph_on_one_thread(node, pool, call, slots, params, scratch, monitor, who):
    """Run all commands of a graph on this thread, in their order, which is topological."""
    serial = node[abi.GRAPH_SERIAL] == 1
    for i in range(node[abi.GRAPH_COMMANDS]):
        command = at(node, node[abi.GRAPH_HEADER + i])
        items = operand_value(command[abi.ITEMS], params)
        grain = items if serial else max(operand_value(command[abi.GRAIN], params), 1)
        begin = items - items  # a literal 0 has another type, for which Numba would compile the callee again
        while begin < items:
            end = min(begin + grain, items)
            if command[abi.KIND] == abi.CONTROL:
                run_control_command(pool, call, 0, command, who, monitor)
            else:
                run_command_items(command, begin, end, slots, params, scratch, monitor)
            begin = end
            if not serial and is_call_stopped(pool, call, who[SEAT]):
                return


@njit
def has_no_work_for_second_thread(node, params):
    """Return True if a graph is serial or empty, or if its only command is a single claim."""
    if node[abi.GRAPH_SERIAL] == 1 or node[abi.GRAPH_COMMANDS] == 0:
        return True
    command = at(node, node[abi.GRAPH_HEADER])
    return node[abi.GRAPH_COMMANDS] == 1 and (
        operand_value(command[abi.ITEMS], params) <= operand_value(command[abi.GRAIN], params)
    )


@njit
def append_to_ready_list(run, cells, number):
    """Append command ``number`` to the ready list of a run."""
    entry = fetch_add(at(run, TAIL), 1)
    release(at(cells, entry * STATE + READY), number + 1)


@njit
def initialize_run(run, node, call, cells):
    """Initialize a run record and the ready list for a graph, before participants enter."""
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
            append_to_ready_list(run, cells, i)
    run[NODE] = address_of(node)
    run[CALL] = address_of(call)
    run[CELLS] = address_of(cells)
    run[COUNT] = count
    run[CONTROLS] = controls


@njit
def finish_command(run, command, cells):
    """Count a command as done, and append successors without unfinished predecessors to the ready list."""
    for i in range(command[abi.SUCCESSORS]):
        successor = command[abi.COMMAND_HEADER + i]
        if fetch_add(at(cells, successor * STATE + PENDING), -1) == 1:
            append_to_ready_list(run, cells, successor)
    fetch_add(at(run, DONE), 1)


@njit
def should_leave_run(pool, run, who, role, is_new):
    """Return True if a participant should leave an unfinished run: it was stopped, or another run needs the worker.

    ``is_new`` is True if calls began or ended since the last check.
    """
    if is_call_stopped(pool, words_at(run[CALL]), who[SEAT]):
        return True
    return who[SEAT] != 0 and is_new and (role == HELPER or (role != OWNER and should_worker_change_run(pool, run)))


@njit
def help_while_idle(pool, run, who, idle, tally):
    """Work on inner runs of control commands; return ``idle``, or ``IDLE_TURNS`` if there was work."""
    since = time_if_waiting(tally)
    if help_inner_runs(pool, run, who) == 0:
        return idle
    end_wait_time(tally, since)
    return IDLE_TURNS


@njit
def run_claimed_items(pool, run, number, begin, end, who, dice):
    """Run the claimed items ``[begin, end)`` of command ``number``, and record the claim if a trial is active."""
    node, call, cells = words_at(run[NODE]), words_at(run[CALL]), words_at(run[CELLS])
    slots, params = words_at(call[abi.CALL_SLOTS]), words_at(call[abi.CALL_PARAMS])
    command = at(node, node[abi.GRAPH_HEADER + number])
    monitor = call if who[SEAT] == 0 else at(run, MONITOR)
    scratch = words_at(call[abi.CALL_SCRATCH])[0] + who[SEAT] * call[abi.CALL_STRIDE]
    trial = acquire(at(pool, abi.POOL_TRIAL))
    began = begin_traced_claim(words_at(trial), dice) if trial != 0 else 0
    since = slow_claim_start(words_at(trial), command, who) if trial != 0 else 0
    if command[abi.KIND] == abi.CONTROL:
        run_control_command(pool, call, address_of(at(cells, command[abi.KERNEL] * STATE)), command, who, monitor)
    elif operand_value(command[abi.ITEMS], params) > 0:
        run_command_items(command, begin, end, slots, params, scratch, monitor)
    if trial != 0:
        end_traced_claim(words_at(trial), run, command, begin, end, began, since, who, dice)


@njit
def run_graph_as_participant(pool, run, who, role, tally):
    """Claim and run items until the graph is finished, the call is stopped, or this worker should leave.

    A participant with role HELPER also leaves when there is nothing to claim. ``tally`` points to the counters of
    stolen items and waiting time. Return the number of claims.
    """
    node, cells = words_at(run[NODE]), words_at(run[CELLS])
    params, count = words_at(words_at(run[CALL])[abi.CALL_PARAMS]), node[abi.GRAPH_COMMANDS]
    epoch, dice = acquire(at(pool, EPOCH)), dice_words()
    trial = begin_trial(pool, run, dice, who)
    cursor, idle, found = 0, 0, 0
    while True:
        if trial != 0:
            cursor = pick_ready_entry(words_at(trial), run, params, dice, cursor, who, role)
        number = acquire(at(cells, cursor * STATE + READY)) if cursor < count else 0
        if number == 0:
            if role == HELPER or acquire(at(run, DONE)) >= count:
                return found
            idle += 1
            if run[CONTROLS] > 0:
                idle = help_while_idle(pool, run, who, idle, tally)
            if idle == IDLE_TURNS:
                begin_wait_time(tally)
            if idle % IDLE_TURNS == 0:
                before, epoch = epoch, acquire(at(pool, EPOCH))
                if should_leave_run(pool, run, who, role, before != epoch):
                    return found
            spin_or_yield(idle)
            continue
        end_wait_time(tally, time_if_waiting(tally))
        idle = 0
        command, cell = at(node, node[abi.GRAPH_HEADER + number - 1]), at(cells, (number - 1) * STATE)
        whole = max(operand_value(command[abi.ITEMS], params), 1)
        grain = max(operand_value(command[abi.GRAIN], params), 1)
        most = (
            claim_size(whole, grain, who) if trial == 0 else pick_claim_size(words_at(trial), whole, grain, who, dice)
        )
        begin = whole if acquire(at(cell, NEXT)) >= whole else fetch_add(at(cell, NEXT), most)
        if begin >= whole:
            count_stolen_items(tally, whole, run[THREADS])
            cursor += 1
            continue
        found += 1
        end = min(begin + most, whole)
        since = ticks() if grain < whole else 0
        run_claimed_items(pool, run, number - 1, begin, end, who, dice)
        if grain < whole:
            record_claim_time(cell, who, end - begin, ticks() - since)
            tally[MINE] += end - begin
        if fetch_add(at(cell, FINISHED), end - begin) + (end - begin) == whole:
            finish_command(run, command, cells)
        before, epoch = epoch, acquire(at(pool, EPOCH))
        if should_leave_run(pool, run, who, role, before != epoch):
            return found
