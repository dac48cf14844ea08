"""Trials of the executor: shuffled order, no work stealing, slow participants or commands, and a trace of claims.

Tests shuffle (``AOTC_SHUFFLE``, see ``docs/debugging.md``): results must be equal for any order that the edges allow.
Benchmarks forbid work stealing to measure its benefit. :mod:`aotc.vmfb.abi` describes the words of a trial. ``dice``
points to the state of a random number generator. Without a trial a claim costs only comparisons of a register with 0.
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
    operand_value,
    time_words,
)
from aotc.vmfb import abi

# Knuth's linear congruential generator of 64 bits; its upper bits are good.
MULTIPLIER, INCREMENT, BITS = 6364136223846793005, 1442695040888963407, 33
SPREAD = 0x9E3779B97F4A7C1  # apart from each other: the seeds of participants


@njit
def is_pool_shuffled(pool):
    """Return True if a trial is active that shuffles the order of work."""
    trial = acquire(at(pool, abi.POOL_TRIAL))
    return trial != 0 and shuffles_work(words_at(trial))


@njit
def shuffles_work(trial):
    """Return True if the trial shuffles the order of work."""
    return trial[abi.TRIAL_ORDER] & 1 == 1


@njit
def allows_work_stealing(trial):
    """Return True if the trial lets participants claim items of commands of other participants."""
    return trial[abi.TRIAL_ORDER] == 0 or shuffles_work(trial)


@njit
def is_command_of_participant(trial, number, who, role):
    """Return True if a command belongs to this participant, in a trial without work stealing.

    The participant that claimed a control command runs all of its graphs: otherwise two such graphs could wait for each
    other's participants.
    """
    return role == OWNER or (role == MEMBER and number % (trial[abi.TRIAL_ORDER] >> 1) == who[SEAT])


@njit
def number_traced_run(pool, run):
    """Give a graph's run the next number of the active trial, if any, for the trace."""
    trial = acquire(at(pool, abi.POOL_TRIAL))
    if trial != 0:
        run[NUMBER] = fetch_add(at(words_at(trial), abi.TRIAL_RUNS), 1)


@njit
def next_random(dice):
    """Return the next random number of 31 bits, and advance the generator."""
    dice[0] = dice[0] * MULTIPLIER + INCREMENT
    return (dice[0] >> BITS) & 0x7FFFFFFF


@njit
def begin_trial(pool, run, dice, who):
    """Return the address of the active trial, or 0, and seed the random numbers of this participant."""
    trial = acquire(at(pool, abi.POOL_TRIAL))
    if trial != 0:
        dice[0] = words_at(trial)[abi.TRIAL_ORDER] + SPREAD * (who[SEAT] + 1) + run[NUMBER] * MULTIPLIER
        next_random(dice)
    return trial


@njit
def pick_ready_entry(trial, run, params, dice, cursor, who, role):
    """Return the entry of the ready list to claim from next, by the rules of the trial.

    A shuffling trial picks a random entry; a trial without work stealing picks an entry of this participant.
    """
    if shuffles_work(trial):
        return pick_random_entry(run, params, dice)
    return cursor if allows_work_stealing(trial) else pick_own_entry(trial, run, params, who, role)


@njit
def has_unclaimed_items(run, number, params):
    """Return True if a command has unclaimed items."""
    items = operand_value(at(words_at(run[NODE]), words_at(run[NODE])[abi.GRAPH_HEADER + number])[abi.ITEMS], params)
    return acquire(at(words_at(run[CELLS]), number * STATE + NEXT)) < max(items, 1)


@njit
def pick_own_entry(trial, run, params, who, role):
    """Return the first ready list entry of this participant with unclaimed items, or the length of the whole list."""
    for entry in range(acquire(at(run, TAIL))):
        number = acquire(at(words_at(run[CELLS]), entry * STATE + READY)) - 1
        if number >= 0 and (
            is_command_of_participant(trial, number, who, role) and has_unclaimed_items(run, number, params)
        ):
            return entry
    return words_at(run[NODE])[abi.GRAPH_COMMANDS]


@njit
def pick_random_entry(run, params, dice):
    """Return a random ready list entry with unclaimed items, or the current length of the list."""
    tail = acquire(at(run, TAIL))
    if tail == 0:
        return 0
    first = next_random(dice) % tail
    for iteration in range(tail):
        entry = (first + iteration) % tail
        number = acquire(at(words_at(run[CELLS]), entry * STATE + READY))
        if number != 0 and has_unclaimed_items(run, number - 1, params):
            return entry
    return tail


@njit
def pick_visible_tail(trial, first, tail, dice):
    """Return the end of the ready list that a participant sees: if shuffled, a random position after ``first``."""
    if not shuffles_work(trial) or tail <= first:
        return tail
    return first + 1 + next_random(dice) % (tail - first)


@njit
def pick_claim_size(trial, items, grain, who, dice):
    """Return the number of items to claim: if shuffled, a random number up to the grain."""
    return 1 + next_random(dice) % grain if shuffles_work(trial) else claim_size(items, grain, who)


# Maximum length, in iterations of about 15 ns, of the random pauses in a shuffled run: as long as some small kernels.
SHUFFLE_PAUSES = 2000
# Maximum number of sched_yield calls in such a pause; if there are more threads than cores, others run meanwhile.
SHUFFLE_YIELDS = 4


@njit
def pause_randomly(trial, dice):
    """Wait for a random time in a shuffled run: mostly zero, sometimes long enough for other threads to run."""
    if not shuffles_work(trial):
        return
    kind = next_random(dice) % 8
    if kind == 0:
        for _ in range(next_random(dice) % SHUFFLE_YIELDS):
            yield_processor()
    elif kind < 3:
        for _ in range(next_random(dice) % SHUFFLE_PAUSES):
            pause()


@njit
def begin_traced_claim(trial, dice):
    """Return the trial's logical time at the start of a claim, after a random delay."""
    pause_randomly(trial, dice)
    return fetch_add(at(trial, abi.TRIAL_CLOCK), 1)


@njit
def slow_claim_start(trial, command, who):
    """Return the thread's processor time at the start of a claim that the trial slows down, else 0.

    Wall-clock time would also multiply the time for which the system suspends the thread.
    """
    if trial[abi.TRIAL_SLOW] == who[SEAT] + 1 or trial[abi.TRIAL_SLOW] == address_of(command):
        return processor_clock(time_words())
    return 0


@njit
def end_traced_claim(trial, run, command, first, last, began, since, who, dice):
    """Append a finished claim to the trace, after the delay of a slow claim.

    ``began`` is the logical time at the start of the claim. ``since`` is the processor time at its start if the trial
    slows it down, else 0.
    """
    if since != 0:
        end = since + (processor_clock(time_words()) - since) * trial[abi.TRIAL_FACTOR]
        while processor_clock(time_words()) < end:
            pause()
    pause_randomly(trial, dice)
    ended = fetch_add(at(trial, abi.TRIAL_CLOCK), 1)
    number = fetch_add(at(trial, abi.TRIAL_ROWS), 1)
    if number < trial[abi.TRIAL_CAPACITY]:
        row = at(trial, abi.TRIAL_HEADER + number * abi.ROW_WORDS)
        row[abi.ROW_RUN], row[abi.ROW_COMMAND] = run[NUMBER], address_of(command)
        row[abi.ROW_FIRST], row[abi.ROW_LAST] = first, last
        row[abi.ROW_BEGAN], row[abi.ROW_ENDED], row[abi.ROW_WHO] = began, ended, who[SEAT]
        row[abi.ROW_DEVICES] = run[DEVICES]
    pause_randomly(trial, dice)
