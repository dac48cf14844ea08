"""How many items of a command a participant claims at once: fewer, the slower its thread is.

All participants claim from one counter, so a slow one claims seldom. Its last claim remains, and the others wait for
it: at a tenth of their speed it takes ten times as long as theirs. So each participant compares its time per item with
the shortest that any participant needed for the same command. It remembers how far it lags behind, also for later
commands and calls, and claims fewer items the further it lags. Commands that are claimed whole are not measured.
"""

from __future__ import annotations

from numba import njit

from aotc.kernels.cpu.executor.atomics import acquire, at, release
from aotc.kernels.cpu.executor.words import LAG, PACE
from aotc.kernels.limits import LAG_MOST

# Unit in which a participant's lag behind the fastest one is counted: 0 is equally fast, 921 a tenth of the speed. A
# power of two.
LAG_WHOLE = 1024


PACE_BITS = 8  # of the fraction of the ticks that an item takes


# Lag, of LAG_WHOLE, up to which a participant claims as many items as the fastest: half of its speed, so that two
# threads of one core, or noise, change nothing. The last claim then takes twice as long as the other participants'.
LAG_FREE = 512


@njit
def claim_size(items, grain, who):
    """Return the number of items of a command that a participant claims at once."""
    if grain >= items or who[LAG] <= LAG_FREE:
        return grain
    return max(grain * (LAG_WHOLE - who[LAG]) // LAG_WHOLE, 1)


@njit
def note_pace(cell, who, items, taken):
    """Record the time of a claim, and update how far this thread lags behind the fastest one."""
    mine = (max(taken, 1) << PACE_BITS) // items
    best = acquire(at(cell, PACE))
    behind = 0
    if best == 0 or mine < best:
        release(at(cell, PACE), max(mine, 1))
    else:
        behind = LAG_WHOLE - LAG_WHOLE * best // mine
    who[LAG] = min((who[LAG] + 3 * behind) // 4, LAG_MOST)
