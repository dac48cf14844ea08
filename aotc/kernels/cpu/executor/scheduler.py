"""The executor: a pool of native threads that runs command buffers.

Numba compiles this Python code to a library that calls no Python. Every bundle contains the library; a process uses
that of the first bundle that it loads. :mod:`aotc.vmfb.abi` describes the encoding of command buffers.

**Graphs.** Every command is appended to a *ready list* exactly once, when its last predecessor has finished. Each
participant walks the list with a private cursor, claims ``grain`` items at a time from the command at the cursor by
fetch-add, and moves on when no item is left. The participant that finishes the last item of a command decrements the
counters of its successors. Commands that wait for tiles of other commands can be claimed as soon as these tiles are
done, see :mod:`aotc.kernels.cpu.executor.tile_graph`. The caller takes part, so progress never depends on a worker
being awake.

**Concurrent calls** have a run record each and share the workers, see
:mod:`aotc.kernels.cpu.executor.concurrent_calls`.

**Late workers.** ``INSIDE`` counts the workers that may access a run. A worker first adds itself and then reads
``OPEN``. To end a run, the caller first clears ``OPEN`` and then waits for ``INSIDE`` to become 0. Both operations are
sequentially consistent, so either the worker sees the run closed and leaves, or the caller sees the worker and waits.
The description of a run is written only while ``OPEN`` and ``INSIDE`` are 0.

**Early end of a call.** The block of a call has a stop word. Every participant reads it between two claims, and kernels
that may run long read it through ``aotc_poll_call`` and ``aotc_poll_worker``. Only the caller's thread notifies the
host and sets the stop word; it returns when every worker has left.

**Number of workers.** A run starts workers if it wants more than there are. A worker that is about to sleep exits
instead if no run of the last seconds needed as many workers.
"""

from __future__ import annotations

from typing import Any

from numba import njit
from numba.core import types

from aotc.kernels.cpu.executor.atomics import (
    FUTEX_WAKE_PRIVATE,
    WORDS,
    acquire,
    at,
    call_host,
    exchange,
    fetch_add,
    futex,
    load_byte,
    load_int32,
    release,
    words_at,
    yield_processor,
)
from aotc.kernels.cpu.executor.cancel import (
    is_stop_requested,
    poll_host_rarely,
    poll_stop_on_caller,
    poll_stop_on_worker,
)
from aotc.kernels.cpu.executor.concurrent_calls import (
    count_missing_workers,
    count_wanted_and_present_workers,
    release_run,
    reserve_run,
    wake_workers,
)
from aotc.kernels.cpu.executor.control import call_node_walk, initialize_inner_run, participate_in_run
from aotc.kernels.cpu.executor.run_graph import (
    has_no_work_for_second_thread,
    initialize_run,
    is_call_stopped,
    run_graph_as_participant,
    run_graph_on_one_thread,
)
from aotc.kernels.cpu.executor.stress import is_pool_shuffled, number_traced_run
from aotc.kernels.cpu.executor.tally import add_tally_to_pool, reset_tally
from aotc.kernels.cpu.executor.tile_graph import (
    clear_ended_claims,
    run_tile_graph_as_participant,
    run_tile_graph_on_one_thread,
)
from aotc.kernels.cpu.executor.words import (
    ALIVE,
    ALL,
    BODY,
    BRANCH,
    CONDITION,
    EPOCH,
    HELD,
    INSIDE,
    MEMBER,
    NODE,
    OPEN,
    OWNER,
    PART_CALL,
    PART_CODE,
    PART_LENGTH,
    PART_MONITOR,
    PART_POOL,
    PART_ROLE,
    PART_RUN,
    PART_THREADS,
    PART_WHO,
    POOL_WORDS,
    SEAT,
    STATE,
    STOP,
    WAKE,
    call_monitor,
    nesting_words,
    operand_value,
    spin_or_yield,
    tally_words,
)
from aotc.kernels.cpu.executor.worker_threads import run_worker_thread, start_missing_workers
from aotc.kernels.limits import IDLE_TURNS, LAG_MOST, SMALL_TURNS
from aotc.vmfb import abi


@njit
def open_run_for_graph(pool, run, node, call, cells):
    """Initialize a run record for a graph, and open it to workers."""
    initialize_run(run, node, call, cells)
    if node[abi.NODE_KIND] == abi.TILED:
        clear_ended_claims(cells, node[abi.GRAPH_COMMANDS])
    number_traced_run(pool, run)
    exchange(at(run, OPEN), 1)


@njit
def run_graph_on_threads(pool, own, node, call, cells, threads):
    """Run a graph on several threads: open the run, take part, close it, wait for the workers to leave."""
    several = acquire(at(pool, HELD)) > 1
    start_missing_workers(pool, count_wanted_and_present_workers(pool)[0] if several else threads - 1)
    open_run_for_graph(pool, own, node, call, cells)
    fetch_add(at(pool, EPOCH), 1)
    wake_workers(pool, min(threads - 1, count_missing_workers(pool)) if several else threads - 1)
    participate_in_run(pool, own, at(call, abi.CALL_LAG), MEMBER)
    exchange(at(own, OPEN), 0)
    wait_for_threads_to_leave(pool, own, call, 0)


@njit
def run_inner_graph(pool, inner, node, call, cells, who):
    """Run a graph inside of a loop or branch command; participants of the outer graph help."""
    initialize_inner_run(pool, inner, call)
    open_run_for_graph(pool, inner, node, call, cells)
    participate_in_run(pool, inner, who, OWNER)
    exchange(at(inner, OPEN), 0)
    wait_for_threads_to_leave(pool, inner, call, who[SEAT])


@njit
def wait_for_threads_to_leave(pool, run, call, me):
    """Wait until no thread accesses a closed run any more."""
    idle = 0
    while fetch_add(at(run, INSIDE), 0) != 0:
        idle += 1
        if idle % IDLE_TURNS == 0:
            is_call_stopped(pool, call, me)
        spin_or_yield(idle)


@njit
def walk_command_nodes(pool, call, code, words, threads, inner, who, monitor):
    """Run the nodes of a call, or of control command ``inner``; a stack has the loops and branches around a node."""
    cells = words_at(call[abi.CALL_CELLS])
    slots, params = words_at(call[abi.CALL_SLOTS]), words_at(call[abi.CALL_PARAMS])
    me = who[SEAT]
    scratch = words_at(call[abi.CALL_SCRATCH])[0] + me * call[abi.CALL_STRIDE]
    stack = nesting_words()
    depth, here, end = 0, 0, words
    while not (poll_host_rarely(call) if me == 0 else is_stop_requested(pool, call)):
        if here >= end:
            if depth == 0:
                return
            depth -= 1
            node, phase, outer = stack[3 * depth], stack[3 * depth + 1], stack[3 * depth + 2]
            head = at(code, node)
            here, end = node + head[abi.NODE_WORDS], outer
            place = slots[head[abi.WHILE_SLOT]] + operand_value(head[abi.WHILE_OFFSET], params)
            if phase == CONDITION and load_byte(place) != 0:
                here = node + abi.WHILE_HEADER + head[abi.WHILE_CONDITION]
                end = here + head[abi.WHILE_BODY]
                stack[3 * depth + 1] = BODY
                depth += 1
            elif phase == BODY:
                here = node + abi.WHILE_HEADER
                end = here + head[abi.WHILE_CONDITION]
                stack[3 * depth + 1] = CONDITION
                depth += 1
            continue
        head = at(code, here)
        if head[abi.NODE_KIND] == abi.GRAPH or head[abi.NODE_KIND] == abi.TILED:
            together = (threads > 1 and not has_no_work_for_second_thread(head, params)) or is_pool_shuffled(pool)
            own = at(cells, head[abi.GRAPH_STATE] * STATE)
            if together and inner == 0 and call[abi.CALL_RUN] == 0:
                call[abi.CALL_RUN] = reserve_run(pool, call, threads)
            if together and inner != 0:
                run_inner_graph(pool, words_at(inner), head, call, own, who)
            elif together and call[abi.CALL_RUN] != 0:
                run_graph_on_threads(pool, words_at(call[abi.CALL_RUN]), head, call, own, threads)
            elif head[abi.NODE_KIND] == abi.TILED:
                run_tile_graph_on_one_thread(pool, head, call, own, who)
            else:
                run_graph_on_one_thread(head, pool, call, slots, params, scratch, monitor, who)
            here += head[abi.NODE_WORDS]
            continue
        stack[3 * depth], stack[3 * depth + 2] = here, end
        if head[abi.NODE_KIND] == abi.WHILE:
            stack[3 * depth + 1] = CONDITION
            here += abi.WHILE_HEADER
            end = here + head[abi.WHILE_CONDITION]
        else:
            stack[3 * depth + 1] = BRANCH
            branches = head[abi.CASE_BRANCHES]
            chosen = load_int32(slots[head[abi.CASE_SLOT]] + operand_value(head[abi.CASE_OFFSET], params))
            if chosen < 0 or chosen >= branches:
                chosen = branches - 1
            here += abi.CASE_HEADER + branches
            for i in range(chosen):
                here += head[abi.CASE_HEADER + i]
            end = here + head[abi.CASE_HEADER + chosen]
        depth += 1


def run_command_buffer(call):
    """Run a call's command buffer on its share of the thread pool; return 1 if the call was stopped, else 0.

    The caller holds the host's lock (Python's GIL) at the beginning and at the end, and releases it in between.
    """
    pool = words_at(call[abi.CALL_POOL])
    call[abi.CALL_MONITOR] = call_monitor()
    release(at(call, abi.CALL_STOP), 0)
    call[abi.CALL_SINCE] = 0
    # a short call after another need not learn it again
    call[abi.CALL_PERIOD] = max(call[abi.CALL_PERIOD], call[abi.CALL_EVERY])
    call[abi.CALL_TURNS] = SMALL_TURNS
    call[abi.CALL_RUN] = 0
    call[abi.CALL_LAG], call[abi.CALL_SEAT] = min(max(call[abi.CALL_LAG], 0), LAG_MOST), 0
    hosted = pool[abi.POOL_RELEASE] != 0
    if hosted:
        call[abi.CALL_STATE] = call_host(pool[abi.POOL_RELEASE], 0)
    code = words_at(call[abi.CALL_CODE])
    call_node_walk(pool, call, code, call[abi.CALL_LENGTH], call[abi.CALL_THREADS], 0, at(call, abi.CALL_LAG), call)
    if call[abi.CALL_RUN] != 0:
        release_run(pool, words_at(call[abi.CALL_RUN]))
    if hosted:
        call_host(pool[abi.POOL_REGAIN], call[abi.CALL_STATE])
    return acquire(at(call, abi.CALL_STOP))


def walk_nodes_entry(part):
    """Run the nodes of a call or of a control command, with the arguments in ``part``.

    Exported as ``aotc_run_nodes``.
    """
    call, inner, threads = words_at(part[PART_CALL]), part[PART_RUN], part[PART_THREADS]
    code, who, monitor = words_at(part[PART_CODE]), words_at(part[PART_WHO]), words_at(part[PART_MONITOR])
    walk_command_nodes(words_at(part[PART_POOL]), call, code, part[PART_LENGTH], threads, inner, who, monitor)
    return 0


def participate_entry(part):
    """Work on a run as one participant, with the arguments in ``part``; return the number of claims.

    Exported as ``aotc_take_part``.
    """
    pool, run, who = words_at(part[PART_POOL]), words_at(part[PART_RUN]), words_at(part[PART_WHO])
    tally = tally_words()
    reset_tally(tally)
    if words_at(run[NODE])[abi.NODE_KIND] == abi.TILED:
        found = run_tile_graph_as_participant(pool, run, who, part[PART_ROLE], tally)
    else:
        found = run_graph_as_participant(pool, run, who, part[PART_ROLE], tally)
    add_tally_to_pool(pool, tally)
    return found


def stop_workers(pool):
    """Stop all workers of a pool and wait until they have exited."""
    release(at(pool, STOP), 1)
    while acquire(at(pool, ALIVE)) > 0:
        fetch_add(at(pool, WAKE), 1)
        futex(at(pool, WAKE), FUTEX_WAKE_PRIVATE, ALL, words_at(0))
        yield_processor()
    release(at(pool, STOP), 0)


def pool_bytes():
    """Return the size of a pool in bytes."""
    return POOL_WORDS * 8


def executor_version():
    """Return the version of the interface between executor and runtime."""
    return abi.EXECUTOR_VERSION


_I = types.int64
EXPORTS: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
    "aotc_executor_version": (executor_version, _I, ()),
    "aotc_poll_call": (poll_stop_on_caller, _I, (WORDS,)),
    "aotc_poll_worker": (poll_stop_on_worker, _I, (WORDS,)),
    "aotc_pool_bytes": (pool_bytes, _I, ()),
    "aotc_pool_stop": (stop_workers, types.void, (WORDS,)),
    "aotc_run": (run_command_buffer, _I, (WORDS,)),
    "aotc_run_nodes": (walk_nodes_entry, _I, (WORDS,)),
    "aotc_take_part": (participate_entry, _I, (WORDS,)),
    "aotc_worker": (run_worker_thread, types.void, (WORDS,)),
}
