"""Divide a region with reductions into loops over a row; choose the values to store between these loops.

Each reduction whose result is needed along the row requires another loop. Fusion uses this division to decide whether
an op may join, and lowering emits the same loops. A value that two loops need is computed in the first one and stored,
or computed in both. Expensive values are stored; if the region would still repeat too much work, cheaper ones are too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from aotc.ir.dims.algebra import product
from aotc.ir.opset import OPS
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.analysis.anchors import Anchors
from aotc.lowering.threshold import Estimate, Limit
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class RowLoop:
    """One loop along the rows of a region.

    Attributes
    ----------
    ops : tuple of Op
        The reductions that it computes.
    stores : tuple of Value
        The results of the region of which each iteration writes an element.
    cone : mapping of Value to None
        The values along the row that ``ops`` and ``stores`` need, operands of reductions first.
    """

    ops: tuple[Op, ...]
    stores: tuple[Value, ...]
    cone: Mapping[Value, None]


LOAD_WORK = Estimate(2, "scalar operations that a load counts as in REPEATED_STAGE_WORK")
REPEATED_STAGE_WORK = Limit(
    7,
    "scalar operations of a value, at most, that each loop over a row recomputes",
    "about the cost of storing and loading the value",
)


class RowStages:
    """Loops along the rows of a region; each computes reductions that depend on earlier loops only.

    The first loop computes the reductions that depend on no other one, each further loop those that depend on earlier
    loops. The last loop, if there is anything left to store, has no reductions.

    Parameters
    ----------
    ops : mapping of Value to Op
        The op that computes each value of the region, copied movement ops included.
    anchors : Anchors
        The indices of the values in the iteration space.
    stored : sequence of Value
        The results of the region that are not one scalar per row.
    """

    def __init__(self, ops: Mapping[Value, Op], anchors: Anchors, stored: Sequence[Value]) -> None:
        """Group the reductions of a region by level: the loop of level n reads results of earlier levels only.

        ``stored`` are the values that the region writes to memory; each is stored by the first loop that can compute
        it.
        """
        self.ops, self.anchors = ops, anchors
        self._rows = anchors.row_values()
        levels: dict[int, dict[Op, None]] = {}
        for op in dict.fromkeys(ops.values()):
            if op.name == "reduce" and anchors.index.get(op.results[0]) is not None:
                levels.setdefault(anchors.levels[op.results[0]], {})[op] = None
        stages: list[tuple[Op, ...]] = [*(tuple(levels[n]) for n in sorted(levels)), ()]
        last = len(stages) - 1
        loops = []
        for n, reductions in enumerate(stages):
            stores = tuple(v for v in stored if min(anchors.levels[v], last) == n)
            roots = [*(v for op in reductions for v in op.inputs), *stores]
            loops.append(RowLoop(reductions, stores, self.values_needed_for(roots)))
        self.loops = tuple(loop for loop in loops if loop.ops or loop.stores)
        self.elements = product(anchors.anchor.type.shape[k] for k in anchors.reduced or ())

    def is_row_scalar(self, value: Value) -> bool:
        """Return True if ``value`` is one scalar per row."""
        return value in self._rows

    def row_scalars_before(self, loop: RowLoop, stored: Collection[Value]) -> list[Value]:
        """Return the scalars per row that ``loop`` reads, except results of reductions, if ``stored`` are stored."""
        roots = [*(v for op in loop.ops for v in op.inputs), *loop.stores]
        read = [u for v in self.values_needed_for(roots, stored) for u in self.ops[v].operands]
        return [
            v for v in dict.fromkeys(read) if v in self.ops and self.is_row_scalar(v) and self.ops[v].name != "reduce"
        ]

    def values_needed_for(self, roots: Iterable[Value], available: Collection[Value] = ()) -> dict[Value, None]:
        """Return the per-row values on which ``roots`` depend, up to reductions and ``available`` values."""
        needed: dict[Value, None] = {}
        stack = list(roots)
        while stack:
            v = stack.pop()
            op = self.ops.get(v)
            if v in needed or v in available or op is None or self.is_row_scalar(v):
                continue
            needed[v] = None
            stack += op.operands
        return needed

    def values_to_store(self, fits: Callable[[Sequence[int]], bool], cheap: bool = False) -> dict[Value, int]:
        """Return the row values that the first loop should store for later loops, with their bytes.

        Values that are expensive to compute twice are stored; with ``cheap``, all that fit.

        Parameters
        ----------
        fits : callable
            Returns True if there is memory for values of these sizes in bytes.
        cheap : bool
        """
        chosen: dict[Value, int] = {}
        if not isinstance(self.elements, int):
            return chosen
        for n, loop in enumerate(self.loops):
            for v in loop.cone:
                first = next(k for k, earlier in enumerate(self.loops) if v in earlier.cone)
                if first == n or v in chosen or not self._is_storable(v):
                    continue
                if not self._feeds_later_stage_only(v, loop.cone, self.loops[first].cone):
                    continue
                size = self.elements * size_of(v.type.dtype)
                if (cheap or self._is_expensive(v)) and fits([*chosen.values(), size]):
                    chosen[v] = size
        return chosen

    def _is_storable(self, value: Value) -> bool:
        """Return True if each step along the row computes one element of ``value``, at its own index."""
        op = self.ops[value]
        return bool(op.operands) and self.anchors.index.get(value) == self.anchors.space

    def _feeds_later_stage_only(self, value: Value, later: Mapping[Value, None], first: Mapping[Value, None]) -> bool:
        """Return True if ``later`` computes a value from ``value`` that ``first`` does not compute."""
        readers = [v for v in later if value in self.ops[v].operands]
        return not readers or any(v not in first for v in readers)

    def _is_expensive(self, value: Value) -> bool:
        """Return True if ``value`` is too expensive to be computed in two loops."""
        cone = self.values_needed_for([value])
        ops = [self.ops[v] for v in cone]
        loads = len({u for op in ops for u in op.operands if u not in self.ops})
        work = sum(max(OPS[op.name].work, 1) for op in ops) + LOAD_WORK.value * loads
        return not REPEATED_STAGE_WORK.holds(work)
