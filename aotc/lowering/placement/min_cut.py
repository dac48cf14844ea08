"""The cheapest division of things into two sides: a cut of least weight, by blocking flows.

Source: E. A. Dinic, "Algorithm for solution of a problem of maximum flow in networks with power estimation", 1970.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

FIRST, SECOND = 0, 1
"""Things that are on the first side, and on the second, whatever that costs."""
_NEVER = 1 << 60


class LeastCut:
    """Things by number, and what it costs where they are on different sides."""

    def __init__(self) -> None:
        self._edges: list[list[int]] = [[], []]  # of each thing
        self._to: list[int] = []  # an edge and the one back follow each other
        self._left: list[int] = []

    def thing(self) -> int:
        """Return the number of a new thing."""
        self._edges.append([])
        return len(self._edges) - 1

    def _edge(self, a: int, b: int, weight: int, back: int = 0) -> None:
        for begin, end, left in ((a, b, weight), (b, a, back)):
            self._edges[begin].append(len(self._to))
            self._to.append(end)
            self._left.append(left)

    def prefer(self, thing: int, first: float, second: float) -> None:
        """Let a thing cost so much on the first side, and so much on the second."""
        if first != second:
            begin, end = (FIRST, thing) if second > first else (thing, SECOND)
            self._edge(begin, end, round(abs(first - second)))

    def fix(self, thing: int, side: int) -> None:
        """Put a thing on a side."""
        begin, end = (FIRST, thing) if side == FIRST else (thing, SECOND)
        self._edge(begin, end, _NEVER)

    def together(self, things: Iterable[int], weight: float) -> None:
        """Let it cost ``weight`` if things are not all on one side."""
        every = list(dict.fromkeys(things))
        if len(every) == 2:
            self._edge(every[0], every[1], round(weight), round(weight))
        elif len(every) > 2:
            some_first, all_first = self.thing(), self.thing()
            self._edge(some_first, all_first, round(weight))
            for thing in every:
                self._edge(thing, some_first, _NEVER)
                self._edge(all_first, thing, _NEVER)

    def first_side(self) -> set[int]:
        """Return what is on the first side in the cheapest division: as few things as can be."""
        while True:
            levels = self._levels()
            if levels[SECOND] < 0:
                return {thing for thing, level in enumerate(levels) if level >= 0}
            self._block(levels)

    def _levels(self) -> list[int]:
        """Return how many edges with room are between the first side and each thing, -1 if there is no way."""
        levels = [-1] * len(self._edges)
        levels[FIRST] = 0
        found = deque([FIRST])
        while found:
            thing = found.popleft()
            for edge in self._edges[thing]:
                end = self._to[edge]
                if self._left[edge] > 0 and levels[end] < 0:
                    levels[end] = levels[thing] + 1
                    found.append(end)
        return levels

    def _block(self, levels: list[int]) -> None:
        """Fill ways of ``levels`` to the second side until each has an edge without room."""
        tried = [0] * len(self._edges)
        way: list[int] = []
        at = FIRST
        while True:
            if at == SECOND:
                room = min(self._left[edge] for edge in way)
                for edge in way:
                    self._left[edge] -= room
                    self._left[edge ^ 1] += room
                way, at = [], FIRST
                continue
            edges = self._edges[at]
            while tried[at] < len(edges):
                edge = edges[tried[at]]
                if self._left[edge] > 0 and levels[self._to[edge]] == levels[at] + 1:
                    break
                tried[at] += 1
            else:
                if not way:
                    return
                at = self._to[way.pop() ^ 1]
                tried[at] += 1
                continue
            way.append(edge)
            at = self._to[edge]
