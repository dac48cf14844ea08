"""Graphs in which some commands wait for tiles of others: a participant's part in one.

How it runs. Commands come to the ready list as in any graph, and one that waits for tiles when the first claim of each
of their producers has ended. A participant looks at the list from both ends: what waits for tiles first, the latest
first, so that a tile is read while it is still in a cache; then the others in their order. It claims items only if
what they read has been done.

What has been done. A producer's claims are of one size and at most as many as its second cell has bits. Whoever
finishes one sets its bit, after the kernel has written; whoever needs the items before some end reads the bits before
it, all of which must be set. Both are atomic, and bits are never cleared while the run is open, so what a bit stands
for is visible to whoever has seen it.

Why nobody waits in vain. Nothing is claimed before it can run, so whoever has claimed items finishes them without
waiting for anybody. Of the commands with items that nobody has claimed take the first of the graph, which is in
topological order: all items of those before it are claimed, and so will be done. Then it is in the list, and its next
items may be claimed by any participant that looks; the caller always does.
"""

from __future__ import annotations

from numba import njit

from aotc.kernels.cpu.executor.atomics import acquire, at, compare_exchange, fetch_add, fetch_or, words_at
from aotc.kernels.cpu.executor.control import participate, prepare_inner
from aotc.kernels.cpu.executor.run_graph import describe, finish, make_ready, run_claim, should_go
from aotc.kernels.cpu.executor.stress import begin_trial, is_own, is_stealing, number_run, pick_tail
from aotc.kernels.cpu.executor.tally import begin_wait, end_wait, now_if_waiting
from aotc.kernels.cpu.executor.words import (
    CALL,
    CELLS,
    DONE,
    EPOCH,
    FINISHED,
    HELPER,
    NEXT,
    NODE,
    OWNER,
    PENDING,
    READY,
    STATE,
    TAIL,
    dice_words,
    operand,
    run_words,
    wait_a_little,
)
from aotc.kernels.limits import IDLE_TURNS
from aotc.vmfb import abi

BITS = 64  # of a word
MOST_CLAIMS = BITS * STATE
NOTHING = -1  # can be claimed now


@njit
def tail_of(command):
    """Return the address of a command's tile edges: followers, then producers."""
    places = abi.PLACE_WORDS * command[abi.PLACES]
    return at(command, abi.COMMAND_HEADER + command[abi.SUCCESSORS] + places + command[abi.DIMS])


@njit
def items_of(command, params):
    """Return the number of items of a command; an empty command has one item, which does nothing."""
    return max(operand(command[abi.ITEMS], params), 1)


@njit
def claim_of(command, items, params):
    """Return the number of items of a claim."""
    return max(operand(command[abi.GRAIN], params), (items + (MOST_CLAIMS - 1)) // MOST_CLAIMS)


@njit
def bits_of(cells, count, number):
    """Return the bit set of a command (its second cell): a bit for each claim that has ended."""
    return at(cells, (count + number) * STATE)


@njit
def clear_bits(cells, count):
    """Clear the bit sets of all commands, before a run."""
    for i in range(count * STATE):
        cells[count * STATE + i] = 0


@njit
def have_ended(bits, claims):
    """Return True if the first ``claims`` claims of a command have ended."""
    for word in range(claims // BITS):
        if acquire(at(bits, word)) != -1:
            return False
    rest = claims % BITS
    mask = (1 << rest) - 1
    return rest == 0 or acquire(at(bits, claims // BITS)) & mask == mask


@njit
def may_run(node, cells, command, end, items, params):
    """Return True if the producers of the items before ``end`` have finished all items these depend on."""
    tail = tail_of(command)
    for n in range(tail[abi.TILES]):
        tile = at(tail, abi.TILED_HEADER + tail[abi.FOLLOWERS] + abi.TILE_WORDS * n)
        producer = at(node, node[abi.GRAPH_HEADER + tile[abi.TILE_PRODUCER]])
        of = items_of(producer, params)
        claim = claim_of(producer, of, params)
        need = of
        if end < items and tile[abi.TILE_OVER] > 0:
            need = max(0, min(of, (end * tile[abi.TILE_TIMES] + tile[abi.TILE_PLUS]) // tile[abi.TILE_OVER]))
        elif end < items < abi.FEW_ITEMS and of < abi.FEW_ITEMS:
            need = min(of, (end * of + items - 1) // items + tile[abi.TILE_PLUS])
        bits = bits_of(cells, node[abi.GRAPH_COMMANDS], tile[abi.TILE_PRODUCER])
        if not have_ended(bits, (need + claim - 1) // claim):
            return False
    return True


@njit
def claim_items(node, cells, number, params):
    """Claim items of a command; return the first of them, or NOTHING if none can be claimed now."""
    command = at(node, node[abi.GRAPH_HEADER + number])
    cell = at(cells, number * STATE)
    items = items_of(command, params)
    begin = acquire(at(cell, NEXT))
    if begin >= items:
        return NOTHING
    claim = claim_of(command, items, params)
    while begin < items and may_run(node, cells, command, min(begin + claim, items), items, params):
        found = compare_exchange(at(cell, NEXT), begin, begin + claim)
        if found == begin:
            return begin
        begin = found
    return NOTHING


@njit
def is_claimed(node, cells, entry, params):
    """Return True if all items of a ready command are claimed."""
    number = acquire(at(cells, entry * STATE + READY)) - 1
    if number < 0:
        return False
    return acquire(at(cells, number * STATE + NEXT)) >= items_of(at(node, node[abi.GRAPH_HEADER + number]), params)


@njit
def choose(node, cells, first, tail, params):
    """Claim items of any command of the ready list; return command and first item, or NOTHING twice."""
    for waits in range(2):
        for n in range(first, tail):
            entry = n if waits == 1 else first + tail - 1 - n
            number = acquire(at(cells, entry * STATE + READY)) - 1
            if number < 0 or (tail_of(at(node, node[abi.GRAPH_HEADER + number]))[abi.TILES] == 0) != (waits == 1):
                continue
            begin = claim_items(node, cells, number, params)
            if begin != NOTHING:
                return number, begin
    return NOTHING, NOTHING


@njit
def choose_own(trial, node, cells, first, tail, params, who, role):
    """Claim items like :func:`choose`, but only from this participant's commands (no stealing)."""
    for entry in range(first, tail):
        number = acquire(at(cells, entry * STATE + READY)) - 1
        if number >= 0 and is_own(trial, number, who, role):
            found, begin = choose(node, cells, entry, entry + 1, params)
            if found != NOTHING:
                return found, begin
    return NOTHING, NOTHING


@njit
def note_end(run, node, cells, number, begin, end, items, claim):
    """Mark a claim as ended, and append commands that waited for it to the ready list."""
    command = at(node, node[abi.GRAPH_HEADER + number])
    tail = tail_of(command)
    if tail[abi.FOLLOWERS] > 0:
        which = begin // claim
        fetch_or(at(bits_of(cells, node[abi.GRAPH_COMMANDS], number), which // BITS), 1 << (which % BITS))
        if begin == 0:
            for n in range(tail[abi.FOLLOWERS]):
                follower = tail[abi.TILED_HEADER + n]
                if fetch_add(at(cells, follower * STATE + PENDING), -1) == 1:
                    make_ready(run, cells, follower)
    if fetch_add(at(cells, number * STATE + FINISHED), end - begin) + (end - begin) == items:
        finish(run, command, cells)


@njit
def take_tiles(pool, run, who, role, tally):
    """Claim and run items of a graph with tile edges until it is finished; return how often items were claimed.

    Parameters, and reasons to leave earlier, are those of :func:`.run_graph.take_part`.
    """
    node, cells = words_at(run[NODE]), words_at(run[CELLS])
    params, count = words_at(words_at(run[CALL])[abi.CALL_PARAMS]), node[abi.GRAPH_COMMANDS]
    epoch, dice = acquire(at(pool, EPOCH)), dice_words()
    trial = begin_trial(pool, run, dice, who)
    cursor, idle, found = 0, 0, 0
    while acquire(at(run, DONE)) < count:
        while cursor < count and is_claimed(node, cells, cursor, params):
            cursor += 1
        tail = acquire(at(run, TAIL))
        if trial != 0:
            tail = pick_tail(words_at(trial), cursor, tail, dice)
        if trial == 0 or is_stealing(words_at(trial)):
            number, begin = choose(node, cells, cursor, tail, params)
        else:
            number, begin = choose_own(words_at(trial), node, cells, cursor, tail, params, who, role)
        if number != NOTHING:
            end_wait(tally, now_if_waiting(tally))
            idle = 0
            found += 1
            command = at(node, node[abi.GRAPH_HEADER + number])
            items = items_of(command, params)
            claim = claim_of(command, items, params)
            end = min(begin + claim, items)
            run_claim(pool, run, number, begin, end, who, dice)
            note_end(run, node, cells, number, begin, end, items, claim)
        elif role == HELPER:
            return found
        else:
            idle += 1
            if idle == IDLE_TURNS:
                begin_wait(tally)
            wait_a_little(idle)
        if idle % IDLE_TURNS == 0:
            before, epoch = epoch, acquire(at(pool, EPOCH))
            if should_go(pool, run, who, role, before != epoch):
                return found
    return found


@njit
def run_tiles_alone(pool, node, call, cells, who):
    """Run a graph on one thread, tile by tile as well, so that tiles are read from cache."""
    run = run_words()
    prepare_inner(pool, run, call)
    describe(run, node, call, cells)
    clear_bits(cells, node[abi.GRAPH_COMMANDS])
    number_run(pool, run)
    participate(pool, run, who, OWNER)
