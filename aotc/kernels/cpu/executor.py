"""The executor: a pool of native threads that runs command buffers.

Python compiled by Numba without Python: it is linked into a library of its own,
travels in every bundle, and the first one loaded serves the whole process. The
encoding of command buffers is described in :mod:`aotc.vmfb.abi`.

How a graph runs. Every command is appended to a *ready list* exactly once, when
its last predecessor has finished. Each participant walks the list with a cursor
of its own, claims ``grain`` items at a time from the command there by fetch-add,
and moves on when none is left. Whoever finishes the last item of a command
counts down its successors. The caller takes part, so progress never depends on
a worker being awake.

Why a late worker is harmless. ``INSIDE`` counts the workers that may look at the
run; a worker adds itself and only then reads ``OPEN``. To end a run the caller
clears ``OPEN`` and only then waits for ``INSIDE`` to become 0. Both are
sequentially consistent, so either the worker sees the run closed and leaves, or
the caller sees the worker and waits. The description of a run is written while
``OPEN`` is 0 and ``INSIDE`` has been 0 since, and never changed while it is 1.
"""

from __future__ import annotations

from typing import Any

from numba import njit
from numba.core import types

from aotc.kernels.cpu.atomics import (
    FUTEX_WAIT_PRIVATE,
    FUTEX_WAKE_PRIVATE,
    WORDS,
    acquire,
    address_of,
    at,
    call_kernel,
    copy_bytes,
    exchange,
    fetch_add,
    futex,
    load_byte,
    load_int32,
    pause,
    release,
    stack_words,
    start_thread,
    words_at,
    yield_processor,
)
from aotc.kernels.limits import ACTIVE_SPINS, SPINS, YIELD_AFTER
from aotc.vmfb import abi
from aotc.vmfb.abi import (
    CASE_BRANCHES,
    CASE_HEADER,
    CASE_OFFSET,
    CASE_SLOT,
    COMMAND_HEADER,
    COPY,
    DIMS,
    GRAIN,
    GRAPH,
    GRAPH_COMMANDS,
    GRAPH_HEADER,
    GRAPH_SERIAL,
    GRAPH_STATE,
    ITEMS,
    KERNEL,
    KIND,
    NODE_KIND,
    NODE_WORDS,
    PLACE_OFFSET,
    PLACE_SLOT,
    PLACE_WORDS,
    PLACES,
    PREDECESSORS,
    SUCCESSORS,
    WHILE,
    WHILE_BODY,
    WHILE_CONDITION,
    WHILE_HEADER,
    WHILE_OFFSET,
    WHILE_SLOT,
)

# Words of the pool, each on a cache line of its own.
LOCK, EPOCH, INSIDE, SLEEPERS, STOP, ALIVE, OPEN, JOINED, TAIL, DONE = range(0, 80, 8)
# The description of the current run.
NODE, SLOTS, PARAMS, CELLS, SCRATCH, STRIDE, THREADS = range(80, 87)
POOL_WORDS = 96

# Words of a command's cell.
NEXT, FINISHED, PENDING, READY = range(4)
STATE = abi.STATE_WORDS

ALL = 1 << 30
CONDITION, BODY, BRANCH = range(3)  # where in a loop or a branch the nodes stand that are run

place_words, dim_words = stack_words(abi.MAX_PLACES), stack_words(abi.MAX_DIMS)
nesting_words = stack_words(3 * abi.MAX_NESTING)


@njit
def operand(word, params):
    """Return the value of an operand word."""
    if word & 1:
        return params[word >> 1]
    return word >> 1


@njit
def place(command, number, first, slots, params):
    """Return the address of place ``number`` of a command whose places start at word ``first``."""
    at_place = first + PLACE_WORDS * number
    return slots[command[at_place + PLACE_SLOT]] + operand(command[at_place + PLACE_OFFSET], params)


@njit
def run_items(command, begin, end, slots, params, scratch):
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
    call_kernel(command[KERNEL], buffers, dims, begin, end, scratch)


@njit
def run_alone(node, slots, params, scratch):
    """Run a graph on this thread: its commands are in topological order."""
    for i in range(node[GRAPH_COMMANDS]):
        command = at(node, node[GRAPH_HEADER + i])
        items = operand(command[ITEMS], params)
        if items > 0:
            run_items(command, 0, items, slots, params, scratch)


@njit
def is_small(node, params):
    """Is a graph marked as serial, or a single command that one participant would claim whole?"""
    if node[GRAPH_SERIAL] == 1 or node[GRAPH_COMMANDS] == 0:
        return True
    command = at(node, node[GRAPH_HEADER])
    return node[GRAPH_COMMANDS] == 1 and operand(command[ITEMS], params) <= operand(command[GRAIN], params)


@njit
def make_ready(pool, cells, number):
    """Append a command to the ready list."""
    entry = fetch_add(at(pool, TAIL), 1)
    release(at(cells, entry * STATE + READY), number + 1)


@njit
def finish(pool, command, cells):
    """Count down the successors of a finished command."""
    for i in range(command[SUCCESSORS]):
        successor = command[COMMAND_HEADER + i]
        if fetch_add(at(cells, successor * STATE + PENDING), -1) == 1:
            make_ready(pool, cells, successor)
    fetch_add(at(pool, DONE), 1)


@njit
def take_part(pool, me):
    """Claim and run items until the whole graph is finished."""
    node = words_at(pool[NODE])
    slots, params, cells = words_at(pool[SLOTS]), words_at(pool[PARAMS]), words_at(pool[CELLS])
    scratch = pool[SCRATCH] + me * pool[STRIDE]
    count = node[GRAPH_COMMANDS]
    cursor = 0
    idle = 0
    while True:
        number = acquire(at(cells, cursor * STATE + READY)) if cursor < count else 0
        if number == 0:
            if acquire(at(pool, DONE)) >= count:
                return
            idle += 1
            if idle > YIELD_AFTER:
                yield_processor()
            else:
                pause()
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
        if items > 0:
            run_items(command, begin, end, slots, params, scratch)
        if fetch_add(at(cell, FINISHED), end - begin) + (end - begin) == whole:
            finish(pool, command, cells)


@njit
def run_together(pool, node, slots, params, cells, scratch, stride, threads):
    """Run a graph with the pool: describe it, open it, take part, close it, wait for the workers to leave."""
    count = node[GRAPH_COMMANDS]
    pool[TAIL] = 0
    pool[DONE] = 0
    pool[JOINED] = 0
    for i in range(count):
        cells[i * STATE + NEXT] = 0
        cells[i * STATE + FINISHED] = 0
        cells[i * STATE + PENDING] = at(node, node[GRAPH_HEADER + i])[PREDECESSORS]
        cells[i * STATE + READY] = 0
    for i in range(count):
        if cells[i * STATE + PENDING] == 0:
            make_ready(pool, cells, i)
    pool[NODE] = address_of(node)
    pool[SLOTS] = address_of(slots)
    pool[PARAMS] = address_of(params)
    pool[CELLS] = address_of(cells)
    pool[SCRATCH] = scratch
    pool[STRIDE] = stride
    pool[THREADS] = threads
    exchange(at(pool, OPEN), 1)
    fetch_add(at(pool, EPOCH), 1)
    if fetch_add(at(pool, SLEEPERS), 0) > 0:
        futex(at(pool, EPOCH), FUTEX_WAKE_PRIVATE, threads - 1)
    take_part(pool, 0)
    exchange(at(pool, OPEN), 0)
    idle = 0
    while fetch_add(at(pool, INSIDE), 0) != 0:
        idle += 1
        if idle > YIELD_AFTER:
            yield_processor()
        else:
            pause()


def worker(pool):
    """The life of a worker thread."""
    seen = 0
    spins = 0
    while acquire(at(pool, STOP)) == 0:
        epoch = acquire(at(pool, EPOCH))
        if epoch == seen:
            spins += 1
            if spins < SPINS:
                pause()
                continue
            if spins < ACTIVE_SPINS and acquire(at(pool, LOCK)) == 1:
                yield_processor()
                continue
            fetch_add(at(pool, SLEEPERS), 1)
            if fetch_add(at(pool, EPOCH), 0) == seen and acquire(at(pool, STOP)) == 0:
                futex(at(pool, EPOCH), FUTEX_WAIT_PRIVATE, seen & 0xFFFFFFFF)
            fetch_add(at(pool, SLEEPERS), -1)
            spins = 0
            continue
        seen = epoch
        spins = 0
        fetch_add(at(pool, INSIDE), 1)
        if fetch_add(at(pool, OPEN), 0) == 1:
            me = fetch_add(at(pool, JOINED), 1) + 1
            if me < pool[THREADS]:
                take_part(pool, me)
        fetch_add(at(pool, INSIDE), -1)
    fetch_add(at(pool, ALIVE), -1)


@njit
def run_nodes(pool, code, words, slots, params, cells, scratch, stride, threads):
    """Walk the nodes; an explicit stack holds the loops and branches around the current one."""
    stack = nesting_words()
    depth = 0
    here = 0
    end = words
    while True:
        if here >= end:
            if depth == 0:
                return
            depth -= 1
            node, phase, outer = stack[3 * depth], stack[3 * depth + 1], stack[3 * depth + 2]
            head = at(code, node)
            here, end = node + head[NODE_WORDS], outer
            if phase == CONDITION and load_byte(slots[head[WHILE_SLOT]] + operand(head[WHILE_OFFSET], params)) != 0:
                here = node + WHILE_HEADER + head[WHILE_CONDITION]
                end = here + head[WHILE_BODY]
                stack[3 * depth + 1] = BODY
                depth += 1
            elif phase == BODY:
                here = node + WHILE_HEADER
                end = here + head[WHILE_CONDITION]
                stack[3 * depth + 1] = CONDITION
                depth += 1
            continue
        head = at(code, here)
        if head[NODE_KIND] == GRAPH:
            if threads > 1 and not is_small(head, params):
                run_together(pool, head, slots, params, at(cells, head[GRAPH_STATE] * STATE), scratch, stride, threads)
            else:
                run_alone(head, slots, params, scratch)
            here += head[NODE_WORDS]
            continue
        stack[3 * depth], stack[3 * depth + 2] = here, end
        if head[NODE_KIND] == WHILE:
            stack[3 * depth + 1] = CONDITION
            here += WHILE_HEADER
            end = here + head[WHILE_CONDITION]
        else:
            stack[3 * depth + 1] = BRANCH
            branches = head[CASE_BRANCHES]
            chosen = load_int32(slots[head[CASE_SLOT]] + operand(head[CASE_OFFSET], params))
            if chosen < 0 or chosen >= branches:
                chosen = branches - 1
            here += CASE_HEADER + branches
            for i in range(chosen):
                here += head[CASE_HEADER + i]
            end = here + head[CASE_HEADER + chosen]
        depth += 1


def run(pool, code, words, slots, params, cells, scratch, stride, threads):
    """Run a command buffer; if the pool is busy with another caller's, run it on this thread alone."""
    if threads > 1 and acquire(at(pool, ALIVE)) > 0 and exchange(at(pool, LOCK), 1) == 0:
        run_nodes(pool, code, words, slots, params, cells, scratch, stride, threads)
        release(at(pool, LOCK), 0)
    else:
        run_nodes(pool, code, words, slots, params, cells, scratch, stride, 1)
    return 0


def start(pool, workers):
    """Start threads; return how many of them the system refused."""
    for started in range(workers):
        fetch_add(at(pool, ALIVE), 1)
        if start_thread(pool) != 0:
            fetch_add(at(pool, ALIVE), -1)
            return workers - started
    return 0


def stop(pool):
    """End all workers and wait until they have left."""
    release(at(pool, STOP), 1)
    while acquire(at(pool, ALIVE)) > 0:
        fetch_add(at(pool, EPOCH), 1)
        futex(at(pool, EPOCH), FUTEX_WAKE_PRIVATE, ALL)
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
    "aotc_pool_bytes": (pool_bytes, _I, ()),
    "aotc_pool_start": (start, _I, (WORDS, _I)),
    "aotc_pool_stop": (stop, types.void, (WORDS,)),
    "aotc_run": (run, _I, (WORDS, WORDS, _I, WORDS, WORDS, WORDS, _I, _I, _I)),
    "aotc_worker": (worker, types.void, (WORDS,)),
}


