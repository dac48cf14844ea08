"""How much a participant claims at once, and what is counted of participants.

All claim from one counter, so who is slow claims seldom. What remains is its last claim, for which the others wait:
with a tenth of their speed it takes ten times as long as theirs. So each participant compares the time that it takes
for an item with the shortest that anybody took of this command, remembers how far it lags behind, also for later
commands and calls, and claims the less at once the slower it is. Commands that are claimed whole are not measured.
"""

from __future__ import annotations

from numba import njit

from aotc.kernels.cpu.executor.atomics import acquire, at, exact_clock, fetch_add, release
from aotc.kernels.cpu.executor.words import LAG, MINE, PACE, SINCE, STOLEN, TALLY_WORDS, WAITED, time_words
from aotc.kernels.limits import LAG_MOST
from aotc.vmfb.abi import POOL_IDLE, POOL_STEALS

# Unit in which a participant's lag behind the fastest one is counted: 0 is equally fast, 921 a tenth of the speed. A
# power of two.
LAG_WHOLE = 1024


PACE_BITS = 8  # of the fraction of the ticks that an item takes


# Lag, of LAG_WHOLE, up to which a participant claims as many items as the fastest: half of its speed, so that two
# threads of one core, or noise, change nothing. The last claim then takes twice as long as the other participants'.
LAG_FREE = 512


@njit
def claim_of(items, grain, who):
    """Return how many items of a command a participant claims at once."""
    if grain >= items or who[LAG] <= LAG_FREE:
        return grain
    return max(grain * (LAG_WHOLE - who[LAG]) // LAG_WHOLE, 1)


@njit
def note_pace(cell, who, items, taken):
    """Note that a participant took so many ticks for a claim, and so how far it lags behind the fastest."""
    mine = (max(taken, 1) << PACE_BITS) // items
    best = acquire(at(cell, PACE))
    behind = 0
    if best == 0 or mine < best:
        release(at(cell, PACE), max(mine, 1))
    else:
        behind = LAG_WHOLE - LAG_WHOLE * best // mine
    who[LAG] = min((who[LAG] + 3 * behind) // 4, LAG_MOST)


@njit
def leave_command(tally, items, threads):
    """Count what a participant ran of a command beyond its share, if each had as many items as the others."""
    if tally[MINE] > 0:
        tally[STOLEN] += max(tally[MINE] - -(-items // threads), 0)
        tally[MINE] = 0


@njit
def begin_tally(tally):
    """Count from nothing."""
    for i in range(TALLY_WORDS):
        tally[i] = 0


@njit
def begin_wait(tally):
    """Note that there was nothing to do for so long that it counts."""
    tally[SINCE] = exact_clock(time_words())


@njit
def end_wait(tally, until):
    """Note that a wait, if there was one, ended at a time."""
    if tally[SINCE] != 0:
        tally[WAITED] += until - tally[SINCE]
        tally[SINCE] = 0


@njit
def now_if_waiting(tally):
    """Return the time, if that is needed to end a wait."""
    return exact_clock(time_words()) if tally[SINCE] != 0 else 0


@njit
def end_tally(pool, tally):
    """Add what was counted to what all others counted."""
    end_wait(tally, now_if_waiting(tally))
    if tally[STOLEN] > 0:
        fetch_add(at(pool, POOL_STEALS), tally[STOLEN])
    if tally[WAITED] > 0:
        fetch_add(at(pool, POOL_IDLE), tally[WAITED])
