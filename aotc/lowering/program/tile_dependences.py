"""Let a command of a graph wait for tiles (ranges of grid items) of another command, rather than for all of it.

Two dependent commands access common bytes. If the items of both move through these bytes in the same direction, an item
of the later command needs the first items of the earlier one, up to a bound. The bound is a linear function (*line*) of
the item's number; its distance ahead is the halo. A command that reads in another order than the earlier one writes, or
reads all of its result, waits for the whole command. For symbolic sizes one line with constant numbers must be valid
for all sizes.

Overwriting bytes that the earlier command still reads is a dependence, too, by the offsets of the memory plan. A
command that waits for tiles starts while earlier commands still run, so it is compared with each command that it
would otherwise follow indirectly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from math import gcd
from types import MappingProxyType
from typing import TypeAlias, TypeGuard

import numpy as np

from aotc.ir.dims.algebra import Dim, Expr, Monomial, bounds
from aotc.ir.dims.symbols import evaluate
from aotc.ir.loop.ir import Kernel
from aotc.ir.program.ir import Copy, Launch, Step, Storage, accessed_storages, storages_with_offsets
from aotc.lowering.analysis.access_intervals import ItemSpans, item_spans
from aotc.lowering.analysis.access_lines import ItemLine, ItemLines, item_lines
from aotc.lowering.cost_model.kernel_facts import FactsOfKernels
from aotc.lowering.cost_model.model import Costs
from aotc.lowering.cost_model.work import estimated_dim
from aotc.lowering.plans.thresholds import ORDER_WORKERS
from aotc.lowering.threshold import BlockSize, Estimate, Limit
from aotc.vmfb.abi import TileEdge

ITEM_BLOCKS = BlockSize(
    512,
    "blocks of grid items per command, whose bytes are compared to find which wait for which",
    "comparing two commands takes a millisecond; in larger grids a block has several items",
)


LastMet: TypeAlias = Callable[[ItemSpans, ItemSpans, int], np.ndarray]
"""How far the items of an earlier command that touch the same bytes reach: :func:`last_conflicting_block_ends`."""


@dataclass(frozen=True, slots=True)
class CommandWaits:
    """Dependences of a command: on whole commands, and on tiles of others."""

    wholes: tuple[int, ...]
    tiles: tuple[TileEdge, ...] = ()

    @property
    def all_predecessors(self) -> list[int]:
        """Return all commands that the command waits for, as a whole or for tiles."""
        return sorted((*self.wholes, *(t.producer for t in self.tiles)))


@dataclass
class TileEdges:
    """Choose between dependences on whole commands and on tiles, by the cost model ``costs``."""

    costs: Costs
    _blocks: FactsOfKernels[ItemBlocks] = field(default_factory=lambda: FactsOfKernels(blocks_of))
    _lines: FactsOfKernels[ItemLines] = field(default_factory=lambda: FactsOfKernels(item_lines))  # of groups
    _last_met: LastMet = field(default_factory=lambda: cache(last_conflicting_block_ends))

    def waits_of_commands(self, steps: Sequence[Launch | Copy], before: Sequence[Sequence[int]]) -> list[CommandWaits]:
        """Return the dependences of each command: on whole commands, or on tiles where that starts earlier."""
        ancestors: list[int] = []  # bit sets
        begun: list[int] = []  # commands that are done when a command begins
        ended: list[int] = []  # commands that are done when it ends
        result = []
        for n, some in enumerate(before):
            ancestors.append(_union_of_sets(ancestors[p] | 1 << p for p in some))
            waits = self._waits_of_command(steps, n, some, ancestors[n], begun, ended)
            done = _union_of_sets([ended[p] for p in waits.wholes] + [begun[t.producer] for t in waits.tiles])
            begun.append(done)
            ended.append(_union_of_sets([done, 1 << n, *(ended[t.producer] for t in waits.tiles)]))
            result.append(waits)
        return result

    def _waits_of_command(
        self, steps: Sequence[Launch | Copy], n: int, before: Sequence[int], ancestors: int, begun: Sequence[int],
        ended: Sequence[int],
    ) -> CommandWaits:  # fmt: skip
        """Return the dependences of command ``n``: on tiles of predecessors, unless an indirect conflict prevents it.

        ``ancestors``, ``begun`` and ``ended`` are bit sets of commands that precede a command, or have begun or ended
        before it begins.
        """
        tiles: dict[int, TileEdge] = {}
        for p in before:
            if tile_edge_pays(steps[p], steps[n], self.costs) and (tile := self.tile_edge(steps[p], steps[n], p)):
                tiles[p] = tile
        whole = CommandWaits(tuple(before))
        while tiles:
            wholes = [p for p in before if p not in tiles]
            done = _union_of_sets([ended[p] for p in wholes] + [begun[p] for p in tiles])
            tiles = {p: t for p, t in tiles.items() if not done >> p & 1}
            left = [p for p in range(n) if (ancestors & ~done) >> p & 1 and p not in tiles and p not in wholes]
            conflicting = [p for p in left if commands_conflict(steps[p], steps[n])]
            if not conflicting:
                return CommandWaits(tuple(wholes), tuple(tiles[p] for p in sorted(tiles)))
            for p in conflicting:
                tile = self.tile_edge(steps[p], steps[n], p)
                if tile is None:
                    return whole
                tiles[p] = tile
        return whole

    def tile_edge(self, earlier: Launch | Copy, later: Launch | Copy, number: int) -> TileEdge | None:
        """Return the tile edge between two commands: the items of ``earlier`` that each item of ``later`` needs.

        ``number`` is the number of the earlier command. None if the items are unknown, or so many that waiting for the
        whole command is as good.

        None if that is unknown, or so many that waiting for the whole command is as good.
        """
        if not isinstance(earlier, Launch) or not isinstance(later, Launch):
            return None
        if _has_static_accesses(earlier) and _has_static_accesses(later):
            one, other = self._blocks.facts_of(earlier.kernel), self._blocks.facts_of(later.kernel)
            need = items_needed_by_blocks(earlier, later, one, other, last=self._last_met)
            tile = None if need is None else lowest_linear_tile_edge(number, need, one.edges, other.edges)
        else:
            tile = self._tile_edge_for_all_sizes(earlier, later, number)
        return tile if tile and begins_before_earlier_ends(earlier, later, tile, self.costs) else None

    def _tile_edge_for_all_sizes(self, earlier: Launch, later: Launch, number: int) -> TileEdge | None:
        """Return a tile edge that is valid for all symbolic sizes, or None."""
        (own, *wide), (mine, *long) = (self._lines.facts_of(step.kernel, 1).parts for step in (earlier, later))
        for of, by in dict.fromkeys(((1, 1), (own, mine), *((c, 1) for c in wide), *((1, c) for c in long))):
            one, other = self._lines.facts_of(earlier.kernel, of), self._lines.facts_of(later.kernel, by)
            pairs = []
            for a, b in conflicting_arrays(earlier, later):
                firsts, ends = one.firsts[a.number], other.ends[b.number]
                if firsts is None or ends is None:
                    break
                away = b.at - a.at
                pairs += [(first, ItemLine(end.slope, end.start + away)) for first in firsts for end in ends]
            else:
                tile = tile_edge_for_all_sizes(number, pairs)
                if tile and isinstance(of, int) and isinstance(by, int):
                    return edge_over_items(tile, of, by)
                if tile and (
                    edge := edge_over_items_of_equal_groups(tile, (earlier.kernel.grid, of), (later.kernel.grid, by))
                ):
                    return edge
        return None


@dataclass(frozen=True, slots=True)
class ItemBlocks:
    """Items of a command divided into blocks at ``edges``, and the bytes that each block accesses."""

    edges: Sequence[int]
    spans: Sequence[ItemSpans]


def blocks_of(kernel: Kernel, sizes: Mapping[str, int] = MappingProxyType({})) -> ItemBlocks:
    """Return the blocks of a command, which must have known sizes and at least one item."""
    items = evaluate(kernel.grid, sizes)
    return _blocks_of_edges(kernel, [*range(0, items, -(-items // ITEM_BLOCKS.value)), items], sizes)


def _blocks_of_edges(kernel: Kernel, edges: Sequence[int], sizes: Mapping[str, int]) -> ItemBlocks:
    return ItemBlocks(edges, item_spans(kernel, edges, sizes))


def last_conflicting_block_ends(a: ItemSpans, b: ItemSpans, away: int) -> np.ndarray:
    """Return, for each later block, the end of the last earlier block that accesses a common byte.

    The array of the later command, whose bytes are ``b``, begins ``away`` bytes behind that of the earlier one.
    """
    begins, ends = b.begins + away, b.ends + away
    meet = (a.begins < ends[:, None]) & (a.ends > begins[:, None]) & (a.begins < a.ends)
    meet &= (begins < ends)[:, None]
    last = meet.shape[1] - np.argmax(meet[:, ::-1], axis=1)
    return np.where(meet.any(1), last, 0)


def items_needed_by_blocks(
    earlier: Launch, later: Launch, one: ItemBlocks, other: ItemBlocks, sizes: Mapping[str, int] = MappingProxyType({}),
    last: LastMet = last_conflicting_block_ends,
) -> np.ndarray | None:  # fmt: skip
    """Return, for each block of ``later``, the number of items of ``earlier`` it depends on; None if unknown.

    ``one`` and ``other`` are the blocks of the two commands; ``last`` is a variant of
    :func:`last_conflicting_block_ends`.
    """
    need = np.zeros(len(other.edges) - 1, np.int64)
    for a, b in conflicting_arrays(earlier, later):
        if not sizes and not (isinstance(a.at, int) and isinstance(b.at, int)):
            return None
        away = evaluate(b.at, sizes) - evaluate(a.at, sizes)
        need = np.maximum(need, last(one.spans[a.number], other.spans[b.number], away))
    return np.maximum.accumulate(np.array([0, *one.edges[1:]], np.int64)[need])


def covers_accesses(
    tile: TileEdge, earlier: Step, later: Step, sizes: Mapping[str, int] = MappingProxyType({})
) -> bool:
    """Return True if under the edge ``tile`` each item of ``later`` waits for all conflicting items of ``earlier``.

    An edge between tiles says by a linear function which items of the earlier command an item of the later one needs.
    With symbolic sizes it is tested for ``sizes``, and for a sample of the items if there are many.
    """
    if not isinstance(earlier, Launch) or not isinstance(later, Launch):
        return False
    of, items = evaluate(earlier.kernel.grid, sizes), evaluate(later.kernel.grid, sizes)
    if not of or not items:
        return True
    if _has_static_accesses(earlier) and _has_static_accesses(later):
        one, other = blocks_of(earlier.kernel, sizes), blocks_of(later.kernel, sizes)
        looked = other.edges[:-1]
    else:
        looked = range(0, items, -(-items // ITEM_BLOCKS.value))
        one = _blocks_of_edges(earlier.kernel, range(of + 1), sizes)
        other = _blocks_of_edges(later.kernel, sorted({*looked, *(b + 1 for b in looked), items}), sizes)
    need = items_needed_by_blocks(earlier, later, one, other, sizes)
    if need is None:
        return False
    needed = dict(zip(other.edges[:-1], need, strict=True))
    return all(tile.required_items(b + 1, items, of) >= needed[b] for b in looked)


@dataclass(frozen=True, slots=True)
class _ArrayAccess:
    """One array of a command: its number among the command's arrays, and its offset in memory."""

    number: int
    storage: Storage
    written: bool
    begin: int

    @property
    def at(self) -> int | Expr:
        """Return the offset of the first byte in its memory."""
        return (self.storage.offset if self.storage.kind == "arena" else 0) + self.begin


def _array_accesses_of_step(step: Launch | Copy) -> Iterator[_ArrayAccess]:
    """Yield the accesses of a command to arrays, reads first, without those to constants."""
    read = len(accessed_storages(step)[0])
    for number, (s, begin) in enumerate(storages_with_offsets(step)):
        if s.kind != "constant":
            yield _ArrayAccess(number, s, number >= read, begin)


def conflicting_arrays(earlier: Launch | Copy, later: Launch | Copy) -> Iterator[tuple[_ArrayAccess, _ArrayAccess]]:
    """Yield the pairs of arrays of two commands that may share bytes, one of them written."""
    mine = list(_array_accesses_of_step(later))
    for a in _array_accesses_of_step(earlier):
        for b in mine:
            if (a.written or b.written) and _may_share_bytes(a.storage, b.storage):
                yield a, b


def commands_conflict(earlier: Launch | Copy, later: Launch | Copy) -> bool:
    """Return True if two commands must not run in parallel."""
    return next(conflicting_arrays(earlier, later), None) is not None


def _may_share_bytes(a: Storage, b: Storage) -> bool:
    """Return True unless two storages certainly have no common byte."""
    if a is b:
        return True
    if a.kind != b.kind or a.space != b.space:
        return False
    if a.kind != "arena":
        return a.number == b.number
    if isinstance(a.offset, int) and isinstance(b.offset, int) and isinstance(a.size, int) and isinstance(b.size, int):
        return a.offset < b.offset + b.size and b.offset < a.offset + a.size
    return a.offset == b.offset  # symbolic ones never overlap partially: plan_memory


def _has_static_accesses(step: Step) -> TypeGuard[Launch]:
    if not isinstance(step, Launch) or step.kernel.dims:
        return False
    return isinstance(step.kernel.grid, int) and step.kernel.grid > 0


def lowest_linear_tile_edge(
    number: int, need: np.ndarray, edges: Sequence[int], later_edges: Sequence[int]
) -> TileEdge:
    """Return the lowest linear bound (a tile edge) that covers the needs ``need`` of all waiting blocks."""
    items, of = later_edges[-1], edges[-1]
    common = gcd(items, of)
    times, over = of // common, items // common
    first = np.array(later_edges[:-1], np.int64) + 1  # the least end of an item range with an item in the block
    return TileEdge(number, times, over, max(0, int((need * over - times * first).max())))


def _union_of_sets(sets: Sequence[int] | Iterator[int]) -> int:
    """Return the union of bit sets."""
    bits = 0
    for some in sets:
        bits |= some
    return bits


# ---------------------------------------------------------------- sizes that only a call knows

# Items of both commands move through their common bytes by a number of bytes each. If these numbers have a constant
# ratio, and an item's bytes span at most a constant number of the earlier command's steps, then the later command's
# item needs a constant number of the earlier one's items, whatever the sizes are.


def tile_edge_for_all_sizes(number: int, pairs: Iterable[tuple[ItemLine, ItemLine]]) -> TileEdge | None:
    """Return the edge that waits for command ``number``, or None if no constants are valid for all sizes.

    In each pair, the first line is a lower bound of the first byte that an item of that command accesses. The second is
    an upper bound of the end of the bytes of the waiting command's item.
    """
    edge: TileEdge | None = None
    for first, end in pairs:
        ratio = _constant_ratio(end.slope, first.slope)
        if ratio is None or (edge and ratio != Fraction(edge.times, edge.over)):
            return None
        times, over = ratio.numerator, ratio.denominator
        steps = _multiplier_to_reach((end.start - first.start) * over, first.slope)
        if steps is None:
            return None
        edge = TileEdge(number, times, over, max(0, edge.plus if edge else 0, steps - times + over - 1))
    return edge


def edge_over_items(tile: TileEdge, of: int, by: int) -> TileEdge:
    """Convert an edge over groups to one over items: ``of`` per group, ``by`` for the waiting command."""
    times, over = of * tile.times, by * tile.over
    plus = of * (tile.times * (by - 1) + tile.plus * by)
    common = gcd(times, over, plus)
    return TileEdge(tile.producer, times // common, over // common, plus // common)


def edge_over_items_of_equal_groups(
    tile: TileEdge, earlier: tuple[Dim, Dim], later: tuple[Dim, Dim]
) -> TileEdge | None:
    """Convert an edge over groups to one over items if both commands have the same number of groups, else None.

    ``earlier`` and ``later`` are pairs of the number of items and the items per group; one of the latter is an
    expression. The first ``n`` waiting items are in ``n / by`` groups, begun ones included, which need ``n / by * of``
    items. A halo of groups is not a constant number of items if ``of`` is an expression.
    """
    (items, of), (waiting, by) = earlier, later
    if tile.times != tile.over or items * by != waiting * of or (tile.plus and not isinstance(of, int)):
        return None
    return TileEdge(tile.producer, 1, 0, tile.halo)


def _constant_ratio(a: Dim, b: Dim) -> Fraction | None:
    """Return ``a / b`` if it is the same positive number for all sizes for which ``b`` is not 0."""
    one, other = (e.terms[0][1] if isinstance(e, Expr) else e for e in (a, b))
    low = bounds(b)[0]
    if not one or not other or low is None or low < 0 or a * other != b * one or one * other < 0:
        return None
    return Fraction(one, other)


def _multiplier_to_reach(width: Dim, slope: Dim) -> int | None:
    """Return the least ``times`` for which ``slope * times`` is provably at least ``width``, or None."""
    own = _monomial_coefficients(slope)
    shared = {-(-c // own[m]) for m, c in _monomial_coefficients(width).items() if own.get(m)}
    for times in sorted({0, *shared, *(n + 1 for n in shared)}):
        low = bounds(slope * times - width)[0]
        if times >= 0 and low is not None and low >= 0:
            return times
    return None


def _monomial_coefficients(e: Dim) -> dict[Monomial, int]:
    """Return the coefficient of each monomial, the constant included."""
    return {**dict(e.terms), (): e.const} if isinstance(e, Expr) else {(): e}


FIRST_TILE = Limit(
    50,
    "percent of a command's items that the first claim of a later command waits for, to begin early",
    "if it waits for more, it gains little by beginning early",
)


def begins_before_earlier_ends(earlier: Launch, later: Launch, tile: TileEdge, costs: Costs) -> bool:
    """Return True if the first claim of ``later`` may begin long before ``earlier`` ends."""
    of, items = estimated_dim(earlier.kernel.grid), estimated_dim(later.kernel.grid)
    first = tile.required_items(min(costs.grain(later.kernel), items), items, of)
    return FIRST_TILE.holds(100 * first // max(of, 1))


TILE_GAIN = Limit(
    20,
    "thousandths of two commands' time gained by waiting for tiles, up to which one waits for the whole other",
)
TILE_CLAIM = Estimate(100, "nanoseconds added to each claim where commands wait for tiles")


def tile_edge_pays(earlier: Launch | Copy, later: Launch | Copy, costs: Costs) -> bool:
    """Return True if two commands end sooner if the later one waits only for tiles of the earlier one."""
    if not isinstance(earlier, Launch) or not isinstance(later, Launch):
        return False
    one, other = earlier.kernel, later.kernel
    gained = _idle_nanoseconds_at_end(one, costs) + _reread_nanoseconds(earlier, later, costs)
    spent = TILE_CLAIM.value * (_claims_of_kernel(one, costs) + _claims_of_kernel(other, costs))
    total = costs.of(one).ns + costs.of(other).ns
    return not TILE_GAIN.holds(round(1000 * (gained - spent) / total))


def _claims_of_kernel(kernel: Kernel, costs: Costs) -> int:
    return max(-(-estimated_dim(kernel.grid) // costs.grain(kernel)), 1)


def _idle_nanoseconds_at_end(kernel: Kernel, costs: Costs) -> float:
    """Return the idle time, in nanoseconds of one core, during the last claims of a kernel."""
    workers, claims = ORDER_WORKERS.value, _claims_of_kernel(kernel, costs)
    return (-claims % workers) * costs.of(kernel).ns / claims


TILE_BYTES = Estimate(
    40_000,
    "bytes per microsecond that a command rereads from a near cache, if it waits for tiles",
    "one thread: 30 to 41 bytes per nanosecond (conv_pool, conv_pool_thin, rows)",
    benchmark="python -m benchmarks runtime tiles",
)


def _reread_nanoseconds(earlier: Launch, later: Launch, costs: Costs) -> float:
    """Return the nanoseconds that ``later`` loses by rereading the results of ``earlier`` from beyond the L2 cache."""
    written = sum(estimated_dim(s.size) for s in dict.fromkeys(later.reads) if s in earlier.writes)
    near = costs.target.l2
    part = written // _claims_of_kernel(earlier.kernel, costs)
    return 1e3 * (written - near) / TILE_BYTES.value if part <= near < written else 0.0
