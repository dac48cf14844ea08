"""Claim sizes: the number of items of a command that a participant claims at once, smaller for slower threads.

All participants claim from one counter, so a slow participant claims rarely. Its last claim delays the end: at a tenth
of the speed of the others it takes ten times as long as their claims. Each participant therefore compares its time per
item with the shortest time of any participant for the same command. It remembers its lag for later commands and calls,
and claims fewer items the larger its lag is. Commands that are claimed as a whole are not measured.
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
def record_claim_time(cell, who, items, taken):
    """Record the time of a claim, and update this thread's lag behind the fastest participant.

    ``taken`` is the time of the claim in ticks, for ``items`` items.
    """
    mine = (max(taken, 1) << PACE_BITS) // items
    best = acquire(at(cell, PACE))
    behind = 0
    if best == 0 or mine < best:
        release(at(cell, PACE), max(mine, 1))
    else:
        behind = LAG_WHOLE - LAG_WHOLE * best // mine
    who[LAG] = min((who[LAG] + 3 * behind) // 4, LAG_MOST)
