"""Live ranges of the values of a function, through loops and branches.

Every op has a number, its *point*. An op at point ``p`` reads at moment ``2 * p`` and writes at ``2 * p + 1``, so that
its result does not overlap with an operand of which it is the last reader. A value that only some branches read is live
in these branches, not in the others; a value from outside of a loop is live until the loop ends. A carried value of a
loop (the parameters of condition and body, and the result) counts as one value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from aotc.ir.opset.control import VIEWS
from aotc.ir.tensor.ir import Function, Op, Region, Value

Span = tuple[int, int]
"""The first and the last moment of a live range."""


@dataclass(slots=True)
class Life:
    """Live range of one value, with the points of its writes and reads.

    Attributes
    ----------
    spans : list of Span
    writes : dict of int to int
        The points at which the value is written, with its number among the op's results.
    reads : dict of int to tuple of int
        The points at which the value is read, with its numbers among the op's operands.
    read_only : bool
        Is the value's memory read-only, like that of a constant or of a caller's argument?
    """

    spans: list[Span] = field(default_factory=list)
    writes: dict[int, int] = field(default_factory=dict)
    reads: dict[int, tuple[int, ...]] = field(default_factory=dict)
    read_only: bool = False


_Tail = tuple[int, Sequence[Span]]
"""The last moment of a range that began earlier, and the ranges inside of branches that follow."""
_NOTHING: Sequence[Span] = ()


class LiveRanges:
    """Live ranges of the values of ``function``, computed by one walk over its ops.

    Attributes
    ----------
    lives : dict of Value to Life
        By the root of a value: the root of a view is that of its operand, of a loop's parameters that of its result.
    ops : dict of int to Op
        The op at each point.
    point_of : dict of Op to int
        The point of each op; of a loop or branch the one where it begins.
    end : int
        The point at which the function returns.
    """

    def __init__(self, function: Function, space: Callable[[Value], int]) -> None:
        """Number the points of ``function`` in execution order, and compute the life of each value."""
        self.space = space
        self.lives: dict[Value, Life] = {}
        self.roots: dict[Value, Value] = {}
        self.ops: dict[int, Op] = {}
        self.point_of: dict[Op, int] = {}
        self.end = 0
        body = function.body
        for p in body.params:
            self.lives[p] = Life(read_only=True)
        _, self.end = self._visit_region(body, 1)

    def root_of(self, value: Value) -> Value:
        """Return the value whose memory ``value`` is a view of."""
        return self.roots.get(value, value)

    def is_view(self, op: Op) -> bool:
        """Return True if the result of ``op`` is its operand's memory."""
        return op.name in VIEWS and self.space(op.result) == self.space(op.operands[0])

    def _next_point(self) -> int:
        self.end += 1
        return self.end

    def _visit_region(self, region: Region, begin: int) -> tuple[Mapping[Value, _Tail], int]:
        """Visit a region from the moment ``begin``; return the ranges of outer values in it, and its last point."""
        last: dict[Value, _Tail] = {}
        born = {self.root_of(p): begin for p in region.params}
        for op in region.ops:
            if op.name == "constant":
                self.lives[op.result] = Life(read_only=True)
                born[op.result] = begin
            elif self.is_view(op):
                self.roots[op.result] = self.root_of(op.operands[0])
            else:
                self._visit_op(op, last, born)
        end = self._next_point()
        for v in region.results:
            last[self.root_of(v)] = 2 * end, []
        for root, first in born.items():
            stop, inner = last.pop(root, (first, _NOTHING))
            spans = self.lives[root].spans
            spans.append((first, stop if stop > first else first))
            spans += inner
        return last, end

    def _visit_op(self, op: Op, last: dict[Value, _Tail], born: dict[Value, int]) -> None:
        """Give ``op`` a point, and record its reads, writes and results; ``last`` maps values to their last reads."""
        point = self._next_point()
        self.ops[point] = op
        self.point_of[op] = point
        roots, lives, tail = self.roots, self.lives, (2 * point, _NOTHING)
        for n, v in enumerate(op.operands):
            root = roots.get(v, v)
            last[root] = tail
            read = lives[root].reads
            read[point] = (*read[point], n) if point in read else (n,)
        for n, v in enumerate(op.results):
            lives[v] = Life([], {} if op.name == "case" else {point: n}, {})
        if op.name == "while":
            self._visit_while(op, point, last)
        elif op.name == "case":
            self._visit_branch(op, point, last)
        first = 2 * self.end if op.regions else 2 * point + 1
        for v in op.results:
            born[v] = first

    def _visit_while(self, op: Op, point: int, last: dict[Value, _Tail]) -> None:
        """Record the live ranges of a loop's state: the condition, the body, and the moments between them."""
        cond, body = op.regions
        for row in (cond.params, body.params):
            self.roots.update(zip(row, op.results, strict=True))
        read, tested = self._visit_region(cond, 2 * point + 1)
        read_too, again = self._visit_region(body, 2 * tested)
        end = self._next_point()
        for v in op.results:
            self.lives[v].spans += [(2 * point + 1, 2 * tested), (2 * again + 1, 2 * end)]
            self.lives[v].writes[again] = -1
        predicate = self.root_of(cond.results[0])
        if predicate not in op.results and predicate not in read:
            self.lives[predicate].spans.append((2 * point + 1, 2 * end))
        for root in (*read, *read_too):
            last[root] = 2 * end, []

    def _visit_branch(self, op: Op, point: int, last: dict[Value, _Tail]) -> None:
        """Record the live ranges of values in the branches of a ``case``: each value only in branches that read it."""
        within: dict[Value, list[Span]] = {}
        for region in op.regions:
            begin = 2 * self._next_point()
            read, end = self._visit_region(region, begin)
            for root, (stop, inner) in read.items():
                within.setdefault(root, []).extend([(begin, stop), *inner])
            for v in op.results:
                self.lives[v].spans.append((2 * end + 1, 2 * end + 1))
                self.lives[v].writes[end] = -1
        end = self._next_point()
        for root, spans in within.items():
            last[root] = 2 * point, spans
        last[self.root_of(op.operands[0])] = 2 * end, []
