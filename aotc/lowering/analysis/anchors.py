"""Map each value of a fused region to its index in the region's iteration space.

A region iterates over the index space of one of its values, the *anchor*. For every other value, :class:`Anchors`
computes the index at which an iteration computes the value, if there is exactly one; it follows ops forward from the
anchor. Fusion uses these indices to decide which ops fit together. :func:`anchors_of` recomputes them by the same steps
in the outlined function, so that lowering emits each store at the index that fusion assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, Expr, Sym
from aotc.ir.dims.symbols import substitute_symbols, symbols
from aotc.ir.opset import ELEMENTWISE, PERMUTATIONS
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.analysis.index_maps import Index, is_long_index, operand_index_of_movement, result_index_of_movement


@dataclass(frozen=True, slots=True)
class LoopAxis(Sym):
    """Symbol of one axis of an iteration space; it never equals the symbol of a dim of the model."""

    number: int = 0


def loop_name(number: int) -> str:
    """Return the name of the variable for the loop over axis ``number`` in the text of a kernel."""
    return f"i{number}"


def iteration_space(shape: tuple[Dim, ...]) -> Index:
    """Return one :class:`LoopAxis` per dim; dims of size 1 have the index 0."""
    return tuple(
        0 if d == 1 else Expr(0, (((LoopAxis(loop_name(k), 0, d, k),), 1),)) for k, d in enumerate(shape)
    )


def single_axis(e: Dim) -> LoopAxis | None:
    """Return the axis if ``e`` is exactly one axis, without a factor or an offset; else None."""
    if isinstance(e, Expr) and not e.const and len(e.terms) == 1 and e.terms[0][1] == 1:
        ((monomial, _),) = e.terms
        if len(monomial) == 1 and isinstance(monomial[0], LoopAxis):
            return monomial[0]
    return None


def anchor_of(root: Op) -> Value:
    """Return the value that defines a region's iteration space: a reduction's operand, or the root's result."""
    return root.operands[0] if root.name == "reduce" else root.results[0]


def anchors_of(root: Op, ops: Sequence[Op]) -> Anchors:
    """Return the index of each value in a fused region's iteration space, starting from ``root``.

    Ops that depend on the root joined the region in program order, so extending in this order gives the indices that
    fusion used. All other ops are recomputed wherever their values are read. Their indices are added last, when they
    can no longer change those of the first ops.
    """
    anchors = Anchors(root, {v: op for op in ops for v in op.results})
    for v in root.results:
        if root.name != "reduce":
            anchors.record_index(v, anchors.space, 0)
    members: set[Op] = {root}
    dependent = set(root.results)
    for op in ops:
        if not dependent.isdisjoint(op.operands):
            dependent.update(op.results)
            members.add(op)
    for op in ops:
        if op in members and anchors.index.get(op.results[0]) is None:
            anchors.extend(op, members)
    everything = {*ops}
    for op in ops:
        if anchors.index.get(op.results[0]) is None:
            anchors.extend(op, everything)
        for v in op.operands if op in anchors.reads else ():
            if anchors.index.get(v) is None and v.type.shape == op.operands[0].type.shape:
                anchors.record_index(v, anchors.reads[op], 0)
    return anchors


class Anchors:
    """Index maps from the anchor of a region to its other values: the index at which an iteration computes each.

    Parameters
    ----------
    root : Op
        The op that the region grows from.
    ops : mapping of Value to Op
        The op that defines each value.

    Attributes
    ----------
    anchor : Value
        The value whose index space the region iterates over.
    space : Index
        The axes of that space.
    reduced : frozenset of int, or None
        Axes of the anchor that the region's reductions run over.
    levels : dict
        For each value with an index: the length of the longest chain of reductions before it.
    reads : dict
        For each reduction: the index at which it reads its operands.
    """

    def __init__(self, root: Op, ops: Mapping[Value, Op]) -> None:
        """Record the index of the anchor of ``root``; if ``root`` is a reduction, also those of its other inputs."""
        self.anchor, self.ops = anchor_of(root), ops
        self.space = iteration_space(self.anchor.type.shape)
        self.reduced: frozenset[int] | None = None
        self.index: dict[Value, Index | None] = {}
        self.levels: dict[Value, int] = {}
        self.reads: dict[Op, Index] = {}
        self.record_index(self.anchor, self.space, 0)
        if root.name == "reduce":
            for v in root.inputs[1:]:
                self.record_index(v, self.space, 0)
            self.extend(root, {root})

    def record_index(self, value: Value, index: Index, level: int) -> None:
        """Record the index and the loop level at which a region computes ``value``."""
        self.index[value], self.levels[value] = index, level

    def copy(self) -> Anchors:
        """Return an independent copy on which an extension can be tried."""
        other = Anchors.__new__(Anchors)
        other.anchor, other.ops, other.space, other.reduced = self.anchor, self.ops, self.space, self.reduced
        other.index, other.levels, other.reads = dict(self.index), dict(self.levels), dict(self.reads)
        return other

    def index_needed_for(self, value: Value, members: frozenset[Op] | set[Op]) -> Index | None:
        """Return the index at which an iteration of the region needs ``value``, or None.

        The search follows only the ops ``members`` and the movement ops between them.
        """
        if value in self.index:
            return self.index[value]
        op = self.ops.get(value)
        index: Index | None = None
        if (
            op is not None
            and op.operands
            and (op in members or op.name in PERMUTATIONS or op.name == "broadcast")
        ):
            index = self.extend(op, members).get(value)
        if index is not None or op is None or op in members:
            self.index[value] = index
        return index

    def extend(self, op: Op, members: frozenset[Op] | set[Op]) -> dict[Value, Index]:
        """Record the indices of the results of ``op``, derived from its operands; return them, or an empty dict."""
        if op.name == "reduce":
            return self._extend_reduce(op, members)
        indexed = [(v, i) for v in op.operands if (i := self.index_needed_for(v, members)) is not None]
        if not indexed:
            return {}
        value, at = indexed[0]
        index: Index | None = None
        if op.name in ELEMENTWISE and op.operands[0].type.rank == op.results[0].type.rank:
            index = at if all(i == at for _, i in indexed) else None
        elif op.name == "broadcast":
            index = self._index_of_row_broadcast(op, at)
        elif value is op.operands[0]:
            index = result_index_of_movement(op, at)
        if index is None or any(map(is_long_index, index)):
            return {}
        self.levels[op.results[0]] = max(self.levels[v] for v, _ in indexed)
        self.index[op.results[0]] = index
        return {op.results[0]: index}

    def _index_of_row_broadcast(self, op: Op, index: Index) -> Index | None:
        """Return the index of a broadcast of one scalar per row along exactly the reduced axes, or None for others."""
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
        if missing or not self._has_ordered_axes(result):
            return None
        return tuple(result)

    def _has_ordered_axes(self, index: list[Dim]) -> bool:
        """Return True if the plain axes in ``index`` are in order; otherwise axes of equal extent could be swapped."""
        axes = [a.number for a in map(single_axis, index) if a is not None]
        return axes == sorted(axes)

    def _extend_reduce(self, op: Op, members: frozenset[Op] | set[Op]) -> dict[Value, Index]:
        """Return the indices of the results of a reduction; empty if it does not fit the region.

        All operands must have one index, made of plain axes that cover the space. All reductions of a region run over
        the same axes of the anchor. An initial value must not depend on the iteration.
        """
        indices = [self.index_needed_for(v, members) for v in op.inputs]
        needed = [i for i in indices if i is not None]
        if not needed or any(i != needed[0] for i in needed):
            return {}
        if any(self.index_needed_for(v, members) is not None for v in op.inits):
            return {}
        at = needed[0]
        axes = _plain_axes_of_index([at[d] for d in op.attrs["dims"]])
        rest = tuple(e for d, e in enumerate(at) if d not in op.attrs["dims"])
        other = _plain_axes_of_index(rest)
        if axes is None or other is None or axes & other or axes | other != _plain_axes_of_index(self.space):
            return {}
        if self.reduced is not None and self.reduced != axes:
            return {}
        self.reduced, self.reads[op] = axes, at
        level = 1 + max(self.levels[v] for v, i in zip(op.operands, indices) if i is not None)
        for v in op.results:
            self.record_index(v, rest, level)
        return dict.fromkeys(op.results, rest)

    def source_of(self, op: Op) -> Index | None:
        """Return the operand's index of a movement op if the region also computes the operand at this index, else None.

        The two can differ: the index of a value may have been set for another reader.
        """
        source, result = self.index.get(op.operands[0]), self.index.get(op.results[0])
        if source is None or result is None:
            return None
        if op.name in PERMUTATIONS and result_index_of_movement(op, source) == result:
            return source
        return source if operand_index_of_movement(op, result) == source else None

    def is_row(self, value: Value) -> bool:
        """Return True if ``value`` is constant along the reduced axes."""
        index = self.index[value]
        return index is not None and self._is_independent_of_reduced_axes(index)

    def row_values(self) -> set[Value]:
        """Return the region's values that are constant along the reduced axes."""
        constant = {
            index: self._is_independent_of_reduced_axes(index)
            for index in set(self.index.values())
            if index is not None
        }
        return {v for v, index in self.index.items() if index is not None and constant[index]}

    def _is_independent_of_reduced_axes(self, index: Index) -> bool:
        """Return True if there is a reduction and ``index`` does not depend on its axes."""
        return self.reduced is not None and self.reduced.isdisjoint(n for e in index for n in _axes_in_expression(e))

    def index_at_iteration(self, index: Index, at: Index) -> Index:
        """Return ``index`` with the loop axes replaced by the concrete iteration ``at``."""
        values: dict[Sym, Dim] = {}
        for s, e in zip(self.space, at, strict=True):
            axis = single_axis(s)
            if axis is not None:
                values[axis] = e
        return tuple(_expression_at_values(e, values) for e in index)


def _expression_at_values(e: Dim, values: Mapping[Sym, Dim]) -> Dim:
    axis = single_axis(e)  # fast path: most expressions are a single axis
    return substitute_symbols(e, values) if axis is None else values[axis]


def _axes_in_expression(e: Dim) -> Iterable[int]:
    """Return the numbers of the axes on which ``e`` depends."""
    if not isinstance(e, Expr):
        return ()
    axis = single_axis(e)  # fast path: most expressions are a single axis
    return [s.number for s in symbols(e) if isinstance(s, LoopAxis)] if axis is None else (axis.number,)


def _plain_axes_of_index(index: Sequence[Dim]) -> frozenset[int] | None:
    """Return the numbers of the axes in ``index``, or None if it contains anything but plain axes and zeros."""
    axes = [single_axis(e) for e in index if e != 0]
    return None if None in axes else frozenset(a.number for a in axes if a is not None)
