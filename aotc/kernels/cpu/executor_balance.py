"""How much a participant claims at once, and what is counted of participants.

All claim from one counter, so who is slow claims seldom. What remains is its last claim, for which the others wait:
with a tenth of their speed it takes ten times as long as theirs. So each participant compares the time that it takes
for an item with the shortest that anybody took of this command, remembers how far it lags behind, also for later
commands and calls, and claims the less at once the slower it is. Commands that are claimed whole are not measured.
"""

from __future__ import annotations

from numba import njit

from aotc.kernels.cpu.atomics import acquire, at, fetch_add, release
from aotc.kernels.cpu.executor_words import LAG, PACE
from aotc.kernels.limits import LAG_FREE, LAG_MOST, LAG_WHOLE
from aotc.vmfb.abi import POOL_IDLE, POOL_STEALS

# Words of a participant's tally: items that it ran of the command that it is at, steals, nanoseconds that it waited.
MINE, STOLEN, WAITED = range(3)
PACE_BITS = 8  # of the fraction of the ticks that an item takes


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
def end_tally(pool, tally):
    """Add what was counted to what all others counted."""
    if tally[STOLEN] > 0:
        fetch_add(at(pool, POOL_STEALS), tally[STOLEN])
    if tally[WAITED] > 0:
        fetch_add(at(pool, POOL_IDLE), tally[WAITED])
