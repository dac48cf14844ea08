"""Graphs in which some commands wait for tiles of other commands.

**Order.** A command that waits for tiles enters the ready list when the first claim of each of its producers has ended;
other commands enter as in any graph. A participant first tries the commands that wait for tiles, the latest first, so
that it reads a tile while the tile is in a cache; then the other commands in their order. It claims items only if the
items that they read are done.

**Completion.** All claims of a producer have the same size, and there are at most as many as the producer's second cell
has bits. The participant that finishes a claim sets its bit after the kernel has written. A consumer of all items up to
some end reads the bits of these items, and all must be set. Both accesses are atomic, and bits are not cleared while
the run is open, so the writes behind a bit are visible to every thread that has read the bit.

**No deadlock.** Items are claimed only if they can run, so a participant finishes its claims without waiting. Consider
the first command of the graph, in topological order, with unclaimed items. All items of earlier commands are claimed,
and so will be done. The command then is in the ready list, and any participant that looks can claim its next items; the
caller always looks.
"""

from __future__ import annotations

from numba import njit

from aotc.kernels.cpu.executor.atomics import acquire, at, compare_exchange, fetch_add, fetch_or, words_at
from aotc.kernels.cpu.executor.control import initialize_inner_run, participate_in_run
from aotc.kernels.cpu.executor.run_graph import (
    append_to_ready_list,
    finish_command,
    initialize_run,
    run_claimed_items,
    should_leave_run,
)
from aotc.kernels.cpu.executor.stress import (
    allows_work_stealing,
    begin_trial,
    is_command_of_participant,
    number_traced_run,
    pick_visible_tail,
)
from aotc.kernels.cpu.executor.tally import begin_wait_time, end_wait_time, time_if_waiting
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
    operand_value,
    run_words,
    spin_or_yield,
)
from aotc.kernels.limits import IDLE_TURNS
from aotc.vmfb import abi

BITS = 64  # of a word
MOST_CLAIMS = BITS * STATE
NOTHING = -1  # can be claimed now


@njit
def tile_edges_of(command):
    """Return the pointer to a command's tile edges: the numbers of its followers, then its producers."""
    places = abi.PLACE_WORDS * command[abi.PLACES]
    return at(command, abi.COMMAND_HEADER + command[abi.SUCCESSORS] + places + command[abi.DIMS])


@njit
def item_count(command, params):
    """Return the number of items of a command; an empty command counts as one item, which does nothing."""
    return max(operand_value(command[abi.ITEMS], params), 1)


@njit
def tiled_claim_size(command, items, params):
    """Return the number of items of each claim of a command, so that it has at most ``MOST_CLAIMS`` claims."""
    return max(operand_value(command[abi.GRAIN], params), (items + (MOST_CLAIMS - 1)) // MOST_CLAIMS)


@njit
def ended_claim_bits(cells, count, number):
    """Return the pointer to the bit set of a command (its second cell), with a bit for each claim that has ended."""
    return at(cells, (count + number) * STATE)


@njit
def clear_ended_claims(cells, count):
    """Clear the bit sets of all commands, before a run."""
    for i in range(count * STATE):
        cells[count * STATE + i] = 0


@njit
def have_first_claims_ended(bits, claims):
    """Return True if the first ``claims`` claims of a command have ended."""
    for word in range(claims // BITS):
        if acquire(at(bits, word)) != -1:
            return False
    rest = claims % BITS
    mask = (1 << rest) - 1
    return rest == 0 or acquire(at(bits, claims // BITS)) & mask == mask


@njit
def are_producer_tiles_done(node, cells, command, end, items, params):
    """Return True if the producers of a command have finished all items that its items before ``end`` read."""
    tail = tile_edges_of(command)
    for n in range(tail[abi.TILES]):
        tile = at(tail, abi.TILED_HEADER + tail[abi.FOLLOWERS] + abi.TILE_WORDS * n)
        producer = at(node, node[abi.GRAPH_HEADER + tile[abi.TILE_PRODUCER]])
        of = item_count(producer, params)
        claim = tiled_claim_size(producer, of, params)
        need = of
        if end < items and tile[abi.TILE_OVER] > 0:
            need = max(0, min(of, (end * tile[abi.TILE_TIMES] + tile[abi.TILE_PLUS]) // tile[abi.TILE_OVER]))
        elif end < items < abi.FEW_ITEMS and of < abi.FEW_ITEMS:
            need = min(of, (end * of + items - 1) // items + tile[abi.TILE_PLUS])
        bits = ended_claim_bits(cells, node[abi.GRAPH_COMMANDS], tile[abi.TILE_PRODUCER])
        if not have_first_claims_ended(bits, (need + claim - 1) // claim):
            return False
    return True


@njit
def claim_command_items(node, cells, number, params):
    """Claim items of command ``number``; return the first of them, or NOTHING if no item can be claimed now."""
    command = at(node, node[abi.GRAPH_HEADER + number])
    cell = at(cells, number * STATE)
    items = item_count(command, params)
    begin = acquire(at(cell, NEXT))
    if begin >= items:
        return NOTHING
    claim = tiled_claim_size(command, items, params)
    while begin < items and are_producer_tiles_done(node, cells, command, min(begin + claim, items), items, params):
        found = compare_exchange(at(cell, NEXT), begin, begin + claim)
        if found == begin:
            return begin
        begin = found
    return NOTHING


@njit
def is_entry_claimed(node, cells, entry, params):
    """Return True if all items of the command at a ready list entry are claimed."""
    number = acquire(at(cells, entry * STATE + READY)) - 1
    if number < 0:
        return False
    return acquire(at(cells, number * STATE + NEXT)) >= item_count(at(node, node[abi.GRAPH_HEADER + number]), params)


@njit
def claim_from_ready_list(node, cells, first, tail, params):
    """Claim items of a command in entries ``[first, tail)`` of the ready list; return command and first item.

    Return NOTHING twice if no item can be claimed now.
    """
    for waits in range(2):
        for n in range(first, tail):
            entry = n if waits == 1 else first + tail - 1 - n
            number = acquire(at(cells, entry * STATE + READY)) - 1
            if number < 0 or (tile_edges_of(at(node, node[abi.GRAPH_HEADER + number]))[abi.TILES] == 0) != (waits == 1):
                continue
            begin = claim_command_items(node, cells, number, params)
            if begin != NOTHING:
                return number, begin
    return NOTHING, NOTHING


@njit
def claim_own_command(trial, node, cells, first, tail, params, who, role):
    """Claim items like :func:`claim_from_ready_list`, but only of this participant's commands (no work stealing)."""
    for entry in range(first, tail):
        number = acquire(at(cells, entry * STATE + READY)) - 1
        if number >= 0 and is_command_of_participant(trial, number, who, role):
            found, begin = claim_from_ready_list(node, cells, entry, entry + 1, params)
            if found != NOTHING:
                return found, begin
    return NOTHING, NOTHING


@njit
def finish_tiled_claim(run, node, cells, number, begin, end, items, claim):
    """Set the bit of a claim that has ended, and append commands that waited for it to the ready list."""
    command = at(node, node[abi.GRAPH_HEADER + number])
    tail = tile_edges_of(command)
    if tail[abi.FOLLOWERS] > 0:
        which = begin // claim
        fetch_or(at(ended_claim_bits(cells, node[abi.GRAPH_COMMANDS], number), which // BITS), 1 << (which % BITS))
        if begin == 0:
            for n in range(tail[abi.FOLLOWERS]):
                follower = tail[abi.TILED_HEADER + n]
                if fetch_add(at(cells, follower * STATE + PENDING), -1) == 1:
                    append_to_ready_list(run, cells, follower)
    if fetch_add(at(cells, number * STATE + FINISHED), end - begin) + (end - begin) == items:
        finish_command(run, command, cells)


@njit
def run_tile_graph_as_participant(pool, run, who, role, tally):
    """Claim and run items of a graph with tile edges until it is finished; return the number of claims.

    The parameters, and the reasons to leave earlier, are those of :func:`.run_graph.run_graph_as_participant`.
    """
    node, cells = words_at(run[NODE]), words_at(run[CELLS])
    params, count = words_at(words_at(run[CALL])[abi.CALL_PARAMS]), node[abi.GRAPH_COMMANDS]
    epoch, dice = acquire(at(pool, EPOCH)), dice_words()
    trial = begin_trial(pool, run, dice, who)
    cursor, idle, found = 0, 0, 0
    while acquire(at(run, DONE)) < count:
        while cursor < count and is_entry_claimed(node, cells, cursor, params):
            cursor += 1
        tail = acquire(at(run, TAIL))
        if trial != 0:
            tail = pick_visible_tail(words_at(trial), cursor, tail, dice)
        if trial == 0 or allows_work_stealing(words_at(trial)):
            number, begin = claim_from_ready_list(node, cells, cursor, tail, params)
        else:
            number, begin = claim_own_command(words_at(trial), node, cells, cursor, tail, params, who, role)
        if number != NOTHING:
            end_wait_time(tally, time_if_waiting(tally))
            idle = 0
            found += 1
            command = at(node, node[abi.GRAPH_HEADER + number])
            items = item_count(command, params)
            claim = tiled_claim_size(command, items, params)
            end = min(begin + claim, items)
            run_claimed_items(pool, run, number, begin, end, who, dice)
            finish_tiled_claim(run, node, cells, number, begin, end, items, claim)
        elif role == HELPER:
            return found
        else:
            idle += 1
            if idle == IDLE_TURNS:
                begin_wait_time(tally)
            spin_or_yield(idle)
        if idle % IDLE_TURNS == 0:
            before, epoch = epoch, acquire(at(pool, EPOCH))
            if should_leave_run(pool, run, who, role, before != epoch):
                return found
    return found


@njit
def run_tile_graph_on_one_thread(pool, node, call, cells, who):
    """Run a graph with tile edges on one thread, in an order that reads tiles from cache."""
    run = run_words()
    initialize_inner_run(pool, run, call)
    initialize_run(run, node, call, cells)
    clear_ended_claims(cells, node[abi.GRAPH_COMMANDS])
    number_traced_run(pool, run)
    participate_in_run(pool, run, who, OWNER)
