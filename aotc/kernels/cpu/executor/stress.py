"""Trials of the executor: shuffled order, no stealing, slow participants or commands, and a trace of claims.

Tests shuffle (``AOTC_SHUFFLE``, see ``docs/debugging.md``): results must be the same in any order that the edges allow.
Benchmarks forbid stealing, to measure what it saves. The words of a trial are described in :mod:`aotc.vmfb.abi`, its
*dice* are the state of a random generator. Without a trial a claim costs comparisons of a register with 0.
"""

from __future__ import annotations

from numba import njit

from aotc.kernels.cpu.executor.atomics import (
    acquire,
    address_of,
    at,
    fetch_add,
    pause,
    processor_clock,
    words_at,
    yield_processor,
)
from aotc.kernels.cpu.executor.claim_sizes import claim_size
from aotc.kernels.cpu.executor.words import (
    CELLS,
    DEVICES,
    MEMBER,
    NEXT,
    NODE,
    NUMBER,
    OWNER,
    READY,
    SEAT,
    STATE,
    TAIL,
    operand,
    time_words,
)
from aotc.vmfb import abi

# Knuth's linear congruential generator of 64 bits; its upper bits are good.
MULTIPLIER, INCREMENT, BITS = 6364136223846793005, 1442695040888963407, 33
SPREAD = 0x9E3779B97F4A7C1  # apart from each other: the seeds of participants


@njit
def is_shuffled(pool):
    """Return True if a stress trial shuffles the order of work."""
    trial = acquire(at(pool, abi.POOL_TRIAL))
    return trial != 0 and has_seed(words_at(trial))


@njit
def has_seed(trial):
    """Return True if the trial shuffles the order of work."""
    return trial[abi.TRIAL_ORDER] & 1 == 1


@njit
def is_stealing(trial):
    """Return True if participants may claim items of commands that belong to others."""
    return trial[abi.TRIAL_ORDER] == 0 or has_seed(trial)


@njit
def is_own(trial, number, who, role):
    """Return True if a command belongs to this participant, in a trial without work stealing.

    The graph of a control command is run by the participant that claimed the command: if it waited for others, two
    such graphs could wait for each other's participants.
    """
    return role == OWNER or (role == MEMBER and number % (trial[abi.TRIAL_ORDER] >> 1) == who[SEAT])


@njit
def number_run(pool, run):
    """Number a new graph run, if a trial records claims."""
    trial = acquire(at(pool, abi.POOL_TRIAL))
    if trial != 0:
        run[NUMBER] = fetch_add(at(words_at(trial), abi.TRIAL_RUNS), 1)


@njit
def throw(dice):
    """Return a random number of 31 bits."""
    dice[0] = dice[0] * MULTIPLIER + INCREMENT
    return (dice[0] >> BITS) & 0x7FFFFFFF


@njit
def begin_trial(pool, run, dice, who):
    """Return the address of the active stress trial, or 0; seed the random numbers of this participant."""
    trial = acquire(at(pool, abi.POOL_TRIAL))
    if trial != 0:
        dice[0] = words_at(trial)[abi.TRIAL_ORDER] + SPREAD * (who[SEAT] + 1) + run[NUMBER] * MULTIPLIER
        throw(dice)
    return trial


@njit
def pick_entry(trial, run, params, dice, cursor, who, role):
    """Return the ready list entry to claim from next: a random one if shuffled, else one of this participant."""
    if has_seed(trial):
        return pick_any(run, params, dice)
    return cursor if is_stealing(trial) else pick_own(trial, run, params, who, role)


@njit
def is_left(run, number, params):
    """Return True if a command has unclaimed items."""
    items = operand(at(words_at(run[NODE]), words_at(run[NODE])[abi.GRAPH_HEADER + number])[abi.ITEMS], params)
    return acquire(at(words_at(run[CELLS]), number * STATE + NEXT)) < max(items, 1)


@njit
def pick_own(trial, run, params, who, role):
    """Return the first ready list entry of this participant with unclaimed items, or the end of the list."""
    for entry in range(acquire(at(run, TAIL))):
        number = acquire(at(words_at(run[CELLS]), entry * STATE + READY)) - 1
        if number >= 0 and is_own(trial, number, who, role) and is_left(run, number, params):
            return entry
    return words_at(run[NODE])[abi.GRAPH_COMMANDS]


@njit
def pick_any(run, params, dice):
    """Return a random ready list entry with unclaimed items, or the end of the list."""
    tail = acquire(at(run, TAIL))
    if tail == 0:
        return 0
    first = throw(dice) % tail
    for iteration in range(tail):
        entry = (first + iteration) % tail
        number = acquire(at(words_at(run[CELLS]), entry * STATE + READY))
        if number != 0 and is_left(run, number - 1, params):
            return entry
    return tail


@njit
def pick_tail(trial, first, tail, dice):
    """Return the end of the ready list that a participant sees: if shuffled, a random one after the first entry."""
    if not has_seed(trial) or tail <= first:
        return tail
    return first + 1 + throw(dice) % (tail - first)


@njit
def pick_claim(trial, items, grain, who, dice):
    """Return the number of items to claim: if shuffled, a random one up to the grain."""
    return 1 + throw(dice) % grain if has_seed(trial) else claim_size(items, grain, who)


# Maximum length, in iterations of about 15 ns, of the random pauses in a shuffled run: as long as some small kernels.
SHUFFLE_PAUSES = 2000
# Maximum number of sched_yield calls in such a pause; if there are more threads than cores, others run meanwhile.
SHUFFLE_YIELDS = 4


@njit
def dawdle(trial, dice):
    """Wait for a random time: mostly none, sometimes long enough for other threads to run."""
    if not has_seed(trial):
        return
    kind = throw(dice) % 8
    if kind == 0:
        for _ in range(throw(dice) % SHUFFLE_YIELDS):
            yield_processor()
    elif kind < 3:
        for _ in range(throw(dice) % SHUFFLE_PAUSES):
            pause()


@njit
def begin_claim(trial, dice):
    """Return the trial's logical time at which a claim begins, after a random delay."""
    dawdle(trial, dice)
    return fetch_add(at(trial, abi.TRIAL_CLOCK), 1)


@njit
def slow_since(trial, command, who):
    """Return the processor time at the start of a claim that the trial slows down, else 0.

    Wall-clock time would make a thread that the system suspends during a claim as many times slower.
    """
    if trial[abi.TRIAL_SLOW] == who[SEAT] + 1 or trial[abi.TRIAL_SLOW] == address_of(command):
        return processor_clock(time_words())
    return 0


@njit
def end_claim(trial, run, command, first, last, began, since, who, dice):
    """Record a claim that ended, first delaying it if it is slow: it began at processor time ``since``."""
    if since != 0:
        end = since + (processor_clock(time_words()) - since) * trial[abi.TRIAL_FACTOR]
        while processor_clock(time_words()) < end:
            pause()
    dawdle(trial, dice)
    ended = fetch_add(at(trial, abi.TRIAL_CLOCK), 1)
    number = fetch_add(at(trial, abi.TRIAL_ROWS), 1)
    if number < trial[abi.TRIAL_CAPACITY]:
        row = at(trial, abi.TRIAL_HEADER + number * abi.ROW_WORDS)
        row[abi.ROW_RUN], row[abi.ROW_COMMAND] = run[NUMBER], address_of(command)
        row[abi.ROW_FIRST], row[abi.ROW_LAST] = first, last
        row[abi.ROW_BEGAN], row[abi.ROW_ENDED], row[abi.ROW_WHO] = began, ended, who[SEAT]
        row[abi.ROW_DEVICES] = run[DEVICES]
    dawdle(trial, dice)
