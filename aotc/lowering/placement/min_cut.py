"""Divide nodes into two sides at the least cost: a minimum cut by blocking flows.

Source: E. A. Dinic, "Algorithm for solution of a problem of maximum flow in networks with power estimation", 1970.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

FIRST, SECOND = 0, 1
"""The two terminals of the network: nodes that are fixed to the first and to the second side."""
_NEVER = 1 << 60


class MinCut:
    """A flow network: numbered nodes to divide into two sides, and the costs of separating them.

    Each edge has a capacity, and is stored next to its reverse edge: edge ``e`` and edge ``e ^ 1`` belong together.
    """

    def __init__(self) -> None:
        self._edges: list[list[int]] = [[], []]  # the outgoing edges of each node
        self._to: list[int] = []  # the node at the end of each edge
        self._left: list[int] = []  # the residual capacity of each edge

    def add_node(self) -> int:
        """Add a node to the flow network; return its number."""
        self._edges.append([])
        return len(self._edges) - 1

    def _add_edge(self, a: int, b: int, weight: int, back: int = 0) -> None:
        """Add an edge and its reverse, whose number differs in the lowest bit; ``back`` is the reverse capacity."""
        for begin, end, left in ((a, b, weight), (b, a, back)):
            self._edges[begin].append(len(self._to))
            self._to.append(end)
            self._left.append(left)

    def set_side_costs(self, thing: int, first: float, second: float) -> None:
        """Set the costs of a node on the first and on the second side."""
        if first != second:
            begin, end = (FIRST, thing) if second > first else (thing, SECOND)
            self._add_edge(begin, end, round(abs(first - second)))

    def fix_to_side(self, thing: int, side: int) -> None:
        """Fix a node to a side."""
        begin, end = (FIRST, thing) if side == FIRST else (thing, SECOND)
        self._add_edge(begin, end, _NEVER)

    def add_separation_cost(self, things: Iterable[int], weight: float) -> None:
        """Add cost ``weight`` for a cut that separates any two of the nodes ``things``.

        For more than two nodes there are two auxiliary nodes: one is on the first side if any of the nodes is, the
        other one only if all are. The edge between these is cut if and only if the nodes are separated.
        """
        every = list(dict.fromkeys(things))
        if len(every) == 2:
            self._add_edge(every[0], every[1], round(weight), round(weight))
        elif len(every) > 2:
            some_first, all_first = self.add_node(), self.add_node()
            self._add_edge(some_first, all_first, round(weight))
            for thing in every:
                self._add_edge(thing, some_first, _NEVER)
                self._add_edge(all_first, thing, _NEVER)

    def first_side_of_min_cut(self) -> set[int]:
        """Return the first side of a minimum cut, the smallest one if there are several."""
        while True:
            levels = self._residual_distances()
            if levels[SECOND] < 0:
                return {thing for thing, level in enumerate(levels) if level >= 0}
            self._add_blocking_flow(levels)

    def _residual_distances(self) -> list[int]:
        """Return the distance of each node from the first terminal in the residual network, -1 if unreachable."""
        levels = [-1] * len(self._edges)
        levels[FIRST] = 0
        queue = deque([FIRST])
        while queue:
            thing = queue.popleft()
            for edge in self._edges[thing]:
                end = self._to[edge]
                if self._left[edge] > 0 and levels[end] < 0:
                    levels[end] = levels[thing] + 1
                    queue.append(end)
        return levels

    def _add_blocking_flow(self, levels: list[int]) -> None:
        """Add a blocking flow: saturate an edge on every shortest path to the second terminal."""
        # Dinic's current arcs: an edge that led to a dead end, or that is full, is not tried again in this phase.
        tried = [0] * len(self._edges)
        path: list[int] = []
        at = FIRST
        while True:
            if at == SECOND:
                room = min(self._left[edge] for edge in path)
                for edge in path:
                    self._left[edge] -= room
                    self._left[edge ^ 1] += room
                path, at = [], FIRST
                continue
            edges = self._edges[at]
            while tried[at] < len(edges):
                edge = edges[tried[at]]
                if self._left[edge] > 0 and levels[self._to[edge]] == levels[at] + 1:
                    break
                tried[at] += 1
            else:
                if not path:
                    return
                at = self._to[path.pop() ^ 1]
                tried[at] += 1
                continue
            path.append(edge)
            at = self._to[edge]
