"""The executor: a pool of native threads that runs command buffers.

Python compiled by Numba without Python: it is linked into a library of its own,
travels in every bundle, and the first one loaded serves the whole process. The
encoding of command buffers is described in :mod:`aotc.vmfb.abi`.

How a graph runs. Every command is appended to a *ready list* exactly once, when
its last predecessor has finished. Each participant walks the list with a cursor
of its own, claims ``grain`` items at a time from the command there by fetch-add,
and moves on when none is left. Whoever finishes the last item of a command
counts down its successors. What waits for tiles of another command is claimed as
soon as they are done, see :mod:`aotc.kernels.cpu.executor.tile_graph`. The caller
takes part, so progress never depends on a worker being awake.

Several calls at a time have a run each and share the workers, see
:mod:`aotc.kernels.cpu.executor.concurrent_calls`.

Why a late worker is harmless. ``INSIDE`` counts the workers that may look at a
run; a worker adds itself and only then reads ``OPEN``. To end a run the caller
clears ``OPEN`` and only then waits for ``INSIDE`` to become 0. Both are
sequentially consistent, so either the worker sees the run closed and leaves, or
the caller sees the worker and waits. The description of a run is written while
``OPEN`` is 0 and ``INSIDE`` has been 0 since, and never changed while it is 1.

How a call ends early. Its block has a stop word, which every participant looks at
between two claims, and kernels that may run long through :func:`poll_call` and
:func:`poll_worker`. The caller's thread alone gives the host the word, so it is the
one that finds out, and sets the stop word; it returns when every worker has left.

How many workers there are. A run that wants more than there are starts them. One
that goes to sleep ends instead if no run of the last seconds wanted so many.
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
from aotc.kernels.cpu.executor.cancel import is_stopped, poll_call, poll_seldom, poll_worker
from aotc.kernels.cpu.executor.concurrent_calls import count_workers, give_run, missing_workers, take_run, wake
from aotc.kernels.cpu.executor.control import enter_nodes, participate, prepare_inner
from aotc.kernels.cpu.executor.run_graph import describe, is_small, run_alone, should_leave, take_part
from aotc.kernels.cpu.executor.stress import is_shuffled, number_run
from aotc.kernels.cpu.executor.tally import begin_tally, end_tally
from aotc.kernels.cpu.executor.tile_graph import clear_bits, run_tiles_alone, take_tiles
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
    operand,
    tally_words,
    wait_a_little,
)
from aotc.kernels.cpu.executor.worker_threads import start_missing_workers, worker
from aotc.kernels.limits import IDLE_TURNS, LAG_MOST, SMALL_TURNS
from aotc.vmfb import abi


@njit
def begin_graph(pool, run, node, call, cells):
    """Initialize a run record for a graph, and open it to workers."""
    describe(run, node, call, cells)
    if node[abi.NODE_KIND] == abi.TILED:
        clear_bits(cells, node[abi.GRAPH_COMMANDS])
    number_run(pool, run)
    exchange(at(run, OPEN), 1)


@njit
def run_together(pool, own, node, call, cells, threads):
    """Run a graph on several threads: open the run, take part, close it, wait for the workers."""
    several = acquire(at(pool, HELD)) > 1
    start_missing_workers(pool, count_workers(pool)[0] if several else threads - 1)
    begin_graph(pool, own, node, call, cells)
    fetch_add(at(pool, EPOCH), 1)
    wake(pool, min(threads - 1, missing_workers(pool)) if several else threads - 1)
    participate(pool, own, at(call, abi.CALL_LAG), MEMBER)
    exchange(at(own, OPEN), 0)
    wait_for_the_others(pool, own, call, 0)


@njit
def run_inner(pool, inner, node, call, cells, who):
    """Run a graph inside of a loop or branch command; participants of the outer graph help."""
    prepare_inner(pool, inner, call)
    begin_graph(pool, inner, node, call, cells)
    participate(pool, inner, who, OWNER)
    exchange(at(inner, OPEN), 0)
    wait_for_the_others(pool, inner, call, who[SEAT])


@njit
def wait_for_the_others(pool, run, call, me):
    """Wait until no thread accesses a closed run any more."""
    idle = 0
    while fetch_add(at(run, INSIDE), 0) != 0:
        idle += 1
        if idle % IDLE_TURNS == 0:
            should_leave(pool, call, me)
        wait_a_little(idle)


@njit
def run_nodes(pool, call, code, words, threads, inner, who, monitor):
    """Walk a call's nodes, or those in ``inner``; an explicit stack holds the loops and branches around one."""
    cells = words_at(call[abi.CALL_CELLS])
    slots, params = words_at(call[abi.CALL_SLOTS]), words_at(call[abi.CALL_PARAMS])
    me = who[SEAT]
    scratch = words_at(call[abi.CALL_SCRATCH])[0] + me * call[abi.CALL_STRIDE]
    stack = nesting_words()
    depth, here, end = 0, 0, words
    while not (poll_seldom(call) if me == 0 else is_stopped(pool, call)):
        if here >= end:
            if depth == 0:
                return
            depth -= 1
            node, phase, outer = stack[3 * depth], stack[3 * depth + 1], stack[3 * depth + 2]
            head = at(code, node)
            here, end = node + head[abi.NODE_WORDS], outer
            place = slots[head[abi.WHILE_SLOT]] + operand(head[abi.WHILE_OFFSET], params)
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
            together = (threads > 1 and not is_small(head, params)) or is_shuffled(pool)
            own = at(cells, head[abi.GRAPH_STATE] * STATE)
            if together and inner == 0 and call[abi.CALL_RUN] == 0:
                call[abi.CALL_RUN] = take_run(pool, call, threads)
            if together and inner != 0:
                run_inner(pool, words_at(inner), head, call, own, who)
            elif together and call[abi.CALL_RUN] != 0:
                run_together(pool, words_at(call[abi.CALL_RUN]), head, call, own, threads)
            elif head[abi.NODE_KIND] == abi.TILED:
                run_tiles_alone(pool, head, call, own, who)
            else:
                run_alone(head, pool, call, slots, params, scratch, monitor, who)
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
            chosen = load_int32(slots[head[abi.CASE_SLOT]] + operand(head[abi.CASE_OFFSET], params))
            if chosen < 0 or chosen >= branches:
                chosen = branches - 1
            here += abi.CASE_HEADER + branches
            for i in range(chosen):
                here += head[abi.CASE_HEADER + i]
            end = here + head[abi.CASE_HEADER + chosen]
        depth += 1


def run(call):
    """Run a command buffer on the call's share of the thread pool; return True if it was stopped.

    The call begins and ends with the host's lock held.
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
    enter_nodes(pool, call, code, call[abi.CALL_LENGTH], call[abi.CALL_THREADS], 0, at(call, abi.CALL_LAG), call)
    if call[abi.CALL_RUN] != 0:
        give_run(pool, words_at(call[abi.CALL_RUN]))
    if hosted:
        call_host(pool[abi.POOL_REGAIN], call[abi.CALL_STATE])
    return acquire(at(call, abi.CALL_STOP))


def walk(part):
    """Run the nodes of a call or of a control command."""
    call, inner, threads = words_at(part[PART_CALL]), part[PART_RUN], part[PART_THREADS]
    code, who, monitor = words_at(part[PART_CODE]), words_at(part[PART_WHO]), words_at(part[PART_MONITOR])
    run_nodes(words_at(part[PART_POOL]), call, code, part[PART_LENGTH], threads, inner, who, monitor)
    return 0


def claims(part):
    """Work on a run as one participant; return how often work was claimed."""
    pool, run, who = words_at(part[PART_POOL]), words_at(part[PART_RUN]), words_at(part[PART_WHO])
    tally = tally_words()
    begin_tally(tally)
    if words_at(run[NODE])[abi.NODE_KIND] == abi.TILED:
        found = take_tiles(pool, run, who, part[PART_ROLE], tally)
    else:
        found = take_part(pool, run, who, part[PART_ROLE], tally)
    end_tally(pool, tally)
    return found


def stop(pool):
    """End all workers and wait until they have left."""
    release(at(pool, STOP), 1)
    while acquire(at(pool, ALIVE)) > 0:
        fetch_add(at(pool, WAKE), 1)
        futex(at(pool, WAKE), FUTEX_WAKE_PRIVATE, ALL, words_at(0))
        yield_processor()
    release(at(pool, STOP), 0)


def pool_bytes():
    """Return the bytes of a pool."""
    return POOL_WORDS * 8


def version():
    """Return the version of the contract."""
    return abi.EXECUTOR_VERSION


_I = types.int64
EXPORTS: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
    "aotc_executor_version": (version, _I, ()),
    "aotc_poll_call": (poll_call, _I, (WORDS,)),
    "aotc_poll_worker": (poll_worker, _I, (WORDS,)),
    "aotc_pool_bytes": (pool_bytes, _I, ()),
    "aotc_pool_stop": (stop, types.void, (WORDS,)),
    "aotc_run": (run, _I, (WORDS,)),
    "aotc_run_nodes": (walk, _I, (WORDS,)),
    "aotc_take_part": (claims, _I, (WORDS,)),
    "aotc_worker": (worker, types.void, (WORDS,)),
}
