"""Counters of a participant in a call: items that it stole, and time that it waited for work.

A participant counts in its own memory, and adds the sums to the counters of the pool when it leaves the call.
"""

from __future__ import annotations

from numba import njit

from aotc.kernels.cpu.executor.atomics import at, exact_clock, fetch_add
from aotc.kernels.cpu.executor.words import MINE, SINCE, STOLEN, TALLY_WORDS, WAITED, time_words
from aotc.vmfb.abi import POOL_IDLE, POOL_STEALS


@njit
def count_stolen_items(tally, items, threads):
    """Count the items of a command that a participant ran beyond its equal share as stolen."""
    if tally[MINE] > 0:
        tally[STOLEN] += max(tally[MINE] - -(-items // threads), 0)
        tally[MINE] = 0


@njit
def reset_tally(tally):
    """Set all counters of a participant to 0."""
    for i in range(TALLY_WORDS):
        tally[i] = 0


@njit
def begin_wait_time(tally):
    """Record the start of a wait for work."""
    tally[SINCE] = exact_clock(time_words())


@njit
def end_wait_time(tally, until):
    """Add a wait for work that ended at time ``until`` to the counters, if one had begun."""
    if tally[SINCE] != 0:
        tally[WAITED] += until - tally[SINCE]
        tally[SINCE] = 0


@njit
def time_if_waiting(tally):
    """Return the time in nanoseconds if a wait has begun, else 0 (reading the clock is slow)."""
    return exact_clock(time_words()) if tally[SINCE] != 0 else 0


@njit
def add_tally_to_pool(pool, tally):
    """Add a participant's counters to those of the pool, which all participants share."""
    end_wait_time(tally, time_if_waiting(tally))
    if tally[STOLEN] > 0:
        fetch_add(at(pool, POOL_STEALS), tally[STOLEN])
    if tally[WAITED] > 0:
        fetch_add(at(pool, POOL_IDLE), tally[WAITED])
