"""What it gains to wait for tiles of a command rather than for the whole: idle cores, and bytes that are still near.

A core that finds nothing to claim waits until the last claims of a command have ended: with few claims that is a large
part of it. What a command has made goes out of the near caches before the next one reads it, unless that begins soon.
"""

from __future__ import annotations

from aotc.ir.loop_ir import Kernel
from aotc.ir.program_ir import Copy, Launch
from aotc.lowering.analysis.cost import FIRST_TILE, ORDER_WORKERS, TILE_BYTES, TILE_CLAIM, TILE_GAIN
from aotc.lowering.analysis.costs.model import Costs
from aotc.lowering.analysis.costs.work import guess
from aotc.vmfb.abi import TileEdge


def begins_early(earlier: Launch, later: Launch, tile: TileEdge, costs: Costs) -> bool:
    """May the first claim of ``later`` begin long before ``earlier`` has ended?"""
    of, items = guess(earlier.kernel.grid), guess(later.kernel.grid)
    first = tile.need(min(costs.grain(later.kernel), items), items, of)
    return FIRST_TILE.holds(100 * first // max(of, 1))


def pays(earlier: Launch | Copy, later: Launch | Copy, costs: Costs) -> bool:
    """Do two commands end sooner if the later one waits for tiles of the earlier one only, provided that it can?"""
    if not isinstance(earlier, Launch) or not isinstance(later, Launch):
        return False
    one, other = earlier.kernel, later.kernel
    gained = _idle(one, costs) + _fetched(earlier, later, costs)
    spent = TILE_CLAIM.value * (_claims(one, costs) + _claims(other, costs))
    total = costs.of(one).ns + costs.of(other).ns
    return not TILE_GAIN.holds(round(1000 * (gained - spent) / total))


def _claims(kernel: Kernel, costs: Costs) -> int:
    return max(-(-guess(kernel.grid) // costs.grain(kernel)), 1)


def _idle(kernel: Kernel, costs: Costs) -> float:
    """Return the nanoseconds of one core that cores wait for the last claims of a kernel."""
    workers, claims = ORDER_WORKERS.value, _claims(kernel, costs)
    return (-claims % workers) * costs.of(kernel).ns / claims


def _fetched(earlier: Launch, later: Launch, costs: Costs) -> float:
    """Return the nanoseconds that ``later`` waits for bytes which ``earlier`` made, and which are no longer near."""
    made = sum(guess(s.size) for s in dict.fromkeys(later.reads) if s in earlier.writes)
    near = costs.target.l2
    part = made // _claims(earlier.kernel, costs)
    return 1e3 * (made - near) / TILE_BYTES.value if part <= near < made else 0.0
