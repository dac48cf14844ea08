"""Where the values of a fused region lie in its iteration space.

A region is iterated over the index space of one of its values, the *anchor*.
:class:`Anchors` follows ops forward from it and says at which index of every
other value an iteration works, or that no such index exists. Fusion uses this
to decide what fits together; lowering uses it to place the stores.
"""

from __future__ import annotations

from collections.abc import Mapping

from aotc.ir.dims import Dim, Expr, sym, symbols
from aotc.ir.opset import ELEMENTWISE, PERMUTATIONS
from aotc.ir.tensor_ir import Op, Value
from aotc.lowering.analysis.index_maps import Index, forward


def iteration_space(shape: tuple[Dim, ...]) -> Index:
    """Return one loop symbol per dim, ``i0, i1, ...``; dims of size 1 are the index 0."""
    return tuple(0 if d == 1 else sym(f"i{k}", 0, d) for k, d in enumerate(shape))


def axis_of(e: Dim) -> int | None:
    """Return ``k`` if ``e`` is exactly the loop symbol ``ik``."""
    if isinstance(e, Expr) and not e.const and len(e.terms) == 1 and e.terms[0][1] == 1:
        ((monomial, _),) = e.terms
        name = str(monomial[0])
        if len(monomial) == 1 and name[0] == "i" and name[1:].isdigit():
            return int(name[1:])
    return None


class Anchors:
    """Forward index maps from one anchor value.

    Attributes
    ----------
    space : Index
        The loop symbols of the anchor's dims.
    reduced : frozenset of int, or None
        Axes of the anchor that the region's reductions run over.
    levels : dict
        For each value that has an index: how many reductions come before it.
    """

    def __init__(self, anchor: Value, ops: Mapping[Value, Op]) -> None:
        self.anchor, self.ops = anchor, ops
        self.space = iteration_space(anchor.type.shape)
        self.reduced: frozenset[int] | None = None
        self.index: dict[Value, Index | None] = {anchor: self.space}
        self.levels: dict[Value, int] = {anchor: 0}

    def copy(self) -> Anchors:
        """Return an independent copy, to try an extension on."""
        other = Anchors.__new__(Anchors)
        other.anchor, other.ops, other.space, other.reduced = self.anchor, self.ops, self.space, self.reduced
        other.index, other.levels = dict(self.index), dict(self.levels)
        return other

    def resolve(self, value: Value, members: frozenset[Op] | set[Op]) -> Index | None:
        """Return the index of ``value`` at an iteration, or None.

        Only ``members`` and movement ops between them are followed.
        """
        if value in self.index:
            return self.index[value]
        op = self.ops.get(value)
        found: Index | None = None
        if (
            op is not None
            and op.operands
            and (op in members or op.name in PERMUTATIONS or op.name == "broadcast")
        ):
            found = self.extend(op, members).get(value)
        if found is not None or op is None or op in members:
            self.index[value] = found
        return found

    def extend(self, op: Op, members: frozenset[Op] | set[Op]) -> dict[Value, Index]:
        """Return the indices of the results of ``op`` from those of its operands (empty: none)."""
        if op.name == "reduce":
            return self._extend_reduce(op, members)
        known = [(v, i) for v in op.operands if (i := self.resolve(v, members)) is not None]
        if not known:
            return {}
        value, at = known[0]
        index: Index | None = None
        if op.name in ELEMENTWISE and op.operands[0].type.rank == op.results[0].type.rank:
            index = at if all(i == at for _, i in known) else None
        elif op.name == "broadcast":
            index = self._broadcast(op, at)
        elif value is op.operands[0]:
            index = forward(op, at)
        if index is None:
            return {}
        self.levels[op.results[0]] = max(self.levels[v] for v, _ in known)
        self.index[op.results[0]] = index
        return {op.results[0]: index}

    def _broadcast(self, op: Op, index: Index) -> Index | None:
        """A row value spread over exactly the reduced axes again; any other broadcast has no map."""
        source, target = op.operands[0].type.shape, op.result.type.shape
        missing = [k for k in sorted(self.reduced or ()) if self.space[k] not in index]
        result: list[Dim] = []
        placed = {d: k for k, d in enumerate(op.attrs["dims"])}
        for d, extent in enumerate(target):
            k = placed.get(d)
            if k is not None and (source[k] == extent):
                result.append(index[k])
            elif extent == 1:
                result.append(0)
            elif missing and self.anchor.type.shape[missing[0]] == extent:
                result.append(self.space[missing.pop(0)])
            else:
                return None
        if missing or not self._ordered(result):
            return None
        return tuple(result)

    def _ordered(self, index: list[Dim]) -> bool:
        """Do the plain loop symbols of ``index`` appear in order? (Equal extents could be swapped.)"""
        axes = [a for a in map(axis_of, index) if a is not None]
        return axes == sorted(axes)

    def _extend_reduce(self, op: Op, members: frozenset[Op] | set[Op]) -> dict[Value, Index]:
        count = len(op.operands) // 2
        indices = [self.resolve(v, members) for v in op.operands[:count]]
        known = [i for i in indices if i is not None]
        if not known or any(i != known[0] for i in known):
            return {}
        if any(self.resolve(v, members) is not None for v in op.operands[count:]):
            return {}
        axes = set()
        for d in op.attrs["dims"]:
            axis = axis_of(known[0][d])
            if axis is None and known[0][d] != 0:
                return {}
            if axis is not None:
                axes.add(axis)
        kept = tuple(e for d, e in enumerate(known[0]) if d not in op.attrs["dims"])
        kept_axes = {axis_of(e) for e in kept} - {None}
        everything = {k for k, e in enumerate(self.space) if e != 0}
        if axes & kept_axes or (axes | kept_axes) != everything:
            return {}
        if any(axis_of(e) is None and e != 0 for e in kept):
            return {}
        if self.reduced is not None and self.reduced != axes:
            return {}
        self.reduced = frozenset(axes)
        level = 1 + max(self.levels[v] for v, i in zip(op.operands, indices) if i is not None)
        for v in op.results:
            self.index[v], self.levels[v] = kept, level
        return dict.fromkeys(op.results, kept)

    def is_row(self, value: Value) -> bool:
        """Is ``value`` constant along the reduced axes?"""
        index = self.index[value]
        if self.reduced is None or index is None:
            return False
        names = {f"i{k}" for k in self.reduced}
        return not any(s.name in names for e in index for s in symbols(e))
