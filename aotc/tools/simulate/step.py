"""Simulate a call of a sharded model on all ranks of a cluster.

A rank has two lanes: kernels, each of which uses the whole device, and collectives, in their total order. Without
overlap both are one lane, in the order of the program. With overlap a command begins when its lane is free and the
commands that it depends on in the compiled program have ended; these include the reuse of memory. A collective begins
when all ranks of its group are ready. All ranks run the same order of kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from aotc.tools.flow import Flow, FlowStep
from aotc.tools.simulate.cluster import RankCluster


class Exchange(NamedTuple):
    """A collective to simulate: ``groups`` of ranks, or ``pairs`` of source and target; ``size`` bytes of operands."""

    op: str
    size: int
    groups: tuple[tuple[int, ...], ...]
    pairs: tuple[tuple[int, int], ...]


class _Timed(NamedTuple):
    """An exchange with times: the ranks and seconds of each group, and the time in which each rank is busy."""

    members: list[np.ndarray]
    seconds: list[float]
    busy: np.ndarray

    @property
    def longest(self) -> float:
        """Return the time of the slowest group."""
        return max(self.seconds, default=0.0)


class _Work(NamedTuple):
    """A command of a graph: a kernel or copy of ``seconds``, a collective, or a loop or branch with collectives.

    ``after`` are the positions of commands in the graph that it depends on. A loop has ``blocks``, and the ``seconds``
    that it takes alone.
    """

    seconds: float
    exchange: _Timed | None
    blocks: tuple[_Block, ...]
    after: tuple[int, ...]


class _Block(NamedTuple):
    """A graph of commands, or a loop (``iterations``) or branch (one of ``sides``) of inner blocks."""

    graph: tuple[_Work, ...] = ()
    sides: tuple[tuple[_Block, ...], ...] = ()
    iterations: int = 1


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Times of a simulated call.

    Attributes
    ----------
    seconds : float
        The time of the slowest rank.
    kernels : float
        Time in which kernels and copies run on a rank.
    collectives : float
        Time in which collectives transfer data, on the rank with the longest.
    exposed : float
        The part of ``seconds`` in which no kernel runs.
    by_rank : tuple of float
        The time of each rank.
    """

    seconds: float
    kernels: float
    collectives: float
    exposed: float
    by_rank: tuple[float, ...]


@dataclass(slots=True)
class _State:
    """Clocks of all ranks: of both lanes, and the sums of time in kernels and in collectives."""

    lanes: list[np.ndarray]
    kernels: float
    collectives: np.ndarray

    def copy(self) -> _State:
        """Return an independent copy; without overlap its lanes are one, too."""
        kernels, transfers = self.lanes
        first = kernels.copy()
        lanes = [first, first if transfers is kernels else transfers.copy()]
        return _State(lanes, self.kernels, self.collectives.copy())

    @property
    def end(self) -> float:
        """Return the latest time of any rank."""
        return float(max(lane.max() for lane in self.lanes))


class Simulation:
    """The commands of a call with their times in a cluster.

    Parameters
    ----------
    flow : Flow
        The commands.
    seconds : sequence of float
        The time of each step that is a kernel or a copy.
    exchanges : mapping of int to Exchange
        The collectives, by the number of their step.
    ranks : int
        Number of ranks.
    cluster : RankCluster
    """

    def __init__(
        self, flow: Flow, seconds: Sequence[float], exchanges: Mapping[int, Exchange], ranks: int, cluster: RankCluster
    ) -> None:
        self._flow, self._seconds, self._cluster, self._ranks = flow, seconds, cluster, ranks
        self._timed = {number: self._with_times(exchange) for number, exchange in exchanges.items()}
        self._blocks = self._blocks_of(flow.steps, "")
        self._orders: dict[int, list[int]] = {}

    def run(self, overlap: bool) -> SimulatedRun:
        """Simulate a call, with or without overlap of kernels and collectives."""
        lane = np.zeros(self._ranks)
        state = _State([lane, lane.copy()] if overlap else [lane, lane], 0.0, np.zeros(self._ranks))
        self._run_blocks(self._blocks, state, overlap)
        by_rank = np.maximum(*state.lanes)
        seconds = float(by_rank.max())
        collectives = float(state.collectives.max())
        return SimulatedRun(seconds, state.kernels, collectives, seconds - state.kernels, tuple(by_rank.tolist()))

    def _with_times(self, exchange: Exchange) -> _Timed:
        if exchange.pairs:
            groups: Sequence[Sequence[int]] = [(a, b) for a, b in exchange.pairs if a != b]
            times = [self._cluster.permute_time(exchange.size, a, b).seconds for a, b in groups]
        else:
            groups = exchange.groups or (tuple(range(self._ranks)),)
            times = [self._cluster.seconds_of(exchange.op, exchange.size, group).seconds for group in groups]
        members, busy = [np.array(group) for group in groups], np.zeros(self._ranks)
        for some, seconds in zip(members, times, strict=True):
            busy[some] = np.maximum(busy[some], seconds)
        return _Timed(members, times, busy)

    # ------------------------------------------------------------ the commands as blocks

    def _blocks_of(self, steps: Sequence[FlowStep], prefix: str) -> tuple[_Block, ...]:
        """Return graphs, loops and branches whose steps' ``within`` begins with ``prefix``, in order."""
        found: list[_Block] = []
        at = 0
        while at < len(steps):
            end = self._end_of_block(steps, at, prefix)
            part = _part_of(steps[at], prefix)
            found.append(self._nested(steps[at:end], prefix, part) if part else self._graph(steps[at:end], prefix))
            at = end
        return tuple(found)

    def _end_of_block(self, steps: Sequence[FlowStep], at: int, prefix: str) -> int:
        """Return the position after the loop, branch or graph that begins at ``at``."""
        part, graph, inside = _part_of(steps[at], prefix), steps[at].graph, -1
        end = at
        while end < len(steps):
            step = steps[end]
            own = _part_of(step, prefix)
            is_other = own.partition(".")[0] != part.partition(".")[0] or (not own and step.graph != graph)
            if step.number >= inside and is_other:
                break
            if not part and step.control:
                inside = max(inside, step.end)
            end += 1
        return end

    def _nested(self, steps: Sequence[FlowStep], prefix: str, part: str) -> _Block:
        """Return a loop or branch: the steps of each side."""
        names = list(dict.fromkeys(_part_of(step, prefix) for step in steps))
        sides = tuple(
            self._blocks_of([s for s in steps if _part_of(s, prefix) == name], f"{prefix}{name} > ") for name in names
        )
        return _Block(sides=sides, iterations=self._flow.iterations_of(part))

    def _graph(self, steps: Sequence[FlowStep], prefix: str) -> _Block:
        """Return a graph of commands; the steps inside of a loop or branch among them belong to it."""
        own: list[_Work] = []
        place: dict[int, int] = {}
        at = 0
        while at < len(steps):
            step = steps[at]
            inner = [s for s in steps[at + 1 :] if s.number < step.end] if step.control else []
            place[step.number] = len(own)
            after = tuple(place[n] for n in step.after if n in place)
            blocks, seconds = self._blocks_of(inner, prefix), self._seconds[step.number]
            if inner:
                seconds = self._sequential_seconds(blocks)
                if not any(s.number in self._timed for s in inner):
                    blocks = ()  # kernels alone are like one of them
            own.append(_Work(seconds, self._timed.get(step.number), blocks, after))
            at += 1 + len(inner)
        return _Block(graph=tuple(own))

    def _sequential_seconds(self, blocks: Sequence[_Block]) -> float:
        lane = np.zeros(self._ranks)
        state = _State([lane, lane], 0.0, np.zeros(self._ranks))
        self._run_blocks(blocks, state, False)
        return state.end

    # ------------------------------------------------------------ clocks

    def _run_blocks(self, blocks: Sequence[_Block], state: _State, overlap: bool) -> None:
        for block in blocks:
            if block.graph:
                self._run_graph(block.graph, state, overlap)
            elif block.sides:
                self._run_nested(block, state, overlap)

    def _run_nested(self, block: _Block, state: _State, overlap: bool) -> None:
        """Run the longest side of a branch, or one iteration of a loop, whose others take the same time."""
        sides = [state.copy() for _ in block.sides]
        for blocks, side in zip(block.sides, sides, strict=True):
            self._run_blocks(blocks, side, overlap)
        chosen = max(sides, key=lambda side: side.end)
        more, took = block.iterations - 1, chosen.end - state.end
        for lane, other in zip(state.lanes, chosen.lanes, strict=True):
            lane[:] = other + more * took
        state.kernels = chosen.kernels + more * (chosen.kernels - state.kernels)
        state.collectives = chosen.collectives + more * (chosen.collectives - state.collectives)

    def _run_graph(self, works: Sequence[_Work], state: _State, overlap: bool) -> None:
        start = np.maximum(*state.lanes)
        for lane in state.lanes:
            lane[:] = start
        ends: list[np.ndarray] = [start] * len(works)
        for n in self._order(works, overlap):
            work = works[n]
            ready = start
            for p in work.after:
                ready = np.maximum(ready, ends[p])
            ends[n] = self._run_work(work, ready, state, overlap)

    def _run_work(self, work: _Work, ready: np.ndarray, state: _State, overlap: bool) -> np.ndarray:
        """Advance the clocks by one command that may begin at ``ready``; return the time at which it ends."""
        kernels, transfers = state.lanes
        if work.blocks:
            kernels[:] = transfers[:] = np.maximum(np.maximum(kernels, transfers), ready)
            self._run_blocks(work.blocks, state, overlap)
            kernels[:] = transfers[:] = np.maximum(kernels, transfers)
            return kernels.copy()
        if work.exchange is None:
            kernels[:] = np.maximum(kernels, ready) + work.seconds
            state.kernels += work.seconds
            return kernels.copy()
        begin = np.maximum(transfers, ready)
        end = begin.copy()
        for members, seconds in zip(work.exchange.members, work.exchange.seconds, strict=True):
            end[members] = np.maximum(end[members], begin[members].max() + seconds)
        state.collectives += work.exchange.busy
        transfers[:] = end
        return end

    def _order(self, works: Sequence[_Work], overlap: bool) -> Sequence[int]:
        """Return the order in which the commands of a graph begin: of the program, or by list scheduling."""
        if not overlap:
            return range(len(works))
        if id(works) not in self._orders:
            self._orders[id(works)] = _list_schedule(works)
        return self._orders[id(works)]


def _part_of(step: FlowStep, prefix: str) -> str:
    """Return the loop or side of a branch after ``prefix`` that a step is in; empty at this level."""
    return f"{step.within} > "[len(prefix) :].partition(" > ")[0]


def _list_schedule(works: Sequence[_Work]) -> list[int]:
    """Return the commands in the order in which they begin if each begins as soon as its lane is free."""
    waits = [len(set(work.after)) for work in works]
    followers: list[list[int]] = [[] for _ in works]
    for n, work in enumerate(works):
        for p in set(work.after):
            followers[p].append(n)
    begins = [0.0] * len(works)
    ready = {n for n, count in enumerate(waits) if not count}
    clocks, order = [0.0, 0.0], list[int]()
    while ready:
        n = min(ready, key=lambda n: (max(begins[n], clocks[works[n].exchange is not None]), n))
        ready.remove(n)
        order.append(n)
        lane, exchange = works[n].exchange is not None, works[n].exchange
        seconds = exchange.longest if exchange else works[n].seconds
        clocks[lane] = end = max(begins[n], clocks[lane]) + seconds
        for f in followers[n]:
            waits[f] -= 1
            begins[f] = max(begins[f], end)
            if not waits[f]:
                ready.add(f)
    return order
