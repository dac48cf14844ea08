"""Counters of a participant in a call: items that it stole, and time that it waited for work.

A participant counts in memory of its own and adds the sums to those of the pool when it leaves the call.
"""

from __future__ import annotations

from numba import njit

from aotc.kernels.cpu.executor.atomics import at, exact_clock, fetch_add
from aotc.kernels.cpu.executor.words import MINE, SINCE, STOLEN, TALLY_WORDS, WAITED, time_words
from aotc.vmfb.abi import POOL_IDLE, POOL_STEALS


@njit
def leave_command(tally, items, threads):
    """Count the items of a command that a participant ran beyond its equal share as stolen."""
    if tally[MINE] > 0:
        tally[STOLEN] += max(tally[MINE] - -(-items // threads), 0)
        tally[MINE] = 0


@njit
def begin_tally(tally):
    """Reset all counters."""
    for i in range(TALLY_WORDS):
        tally[i] = 0


@njit
def begin_wait(tally):
    """Start the clock of a wait for work."""
    tally[SINCE] = exact_clock(time_words())


@njit
def end_wait(tally, until):
    """Add a wait for work that ended at time ``until`` to the counters, if one had begun."""
    if tally[SINCE] != 0:
        tally[WAITED] += until - tally[SINCE]
        tally[SINCE] = 0


@njit
def now_if_waiting(tally):
    """Return the time if a wait has begun, else 0: reading the clock is slow."""
    return exact_clock(time_words()) if tally[SINCE] != 0 else 0


@njit
def end_tally(pool, tally):
    """Add the counters to those of the pool, which all participants share."""
    end_wait(tally, now_if_waiting(tally))
    if tally[STOLEN] > 0:
        fetch_add(at(pool, POOL_STEALS), tally[STOLEN])
    if tally[WAITED] > 0:
        fetch_add(at(pool, POOL_IDLE), tally[WAITED])
