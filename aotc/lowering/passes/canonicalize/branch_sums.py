"""Move an addition to the result of a ``case`` into its branches, where one branch adds nothing.

Before::

    t = case p { yield zeros } { yield dynamic_update_slice zeros, g, i }
    y = add x, t                        // fills, copies and adds whole arrays
After::

    y = case p { yield add x, zeros } { yield add x, (dynamic_update_slice zeros, g, i) }

Each addition can then be removed, or become an update in place (:mod:`aotc.lowering.passes.update_in_place`). The
backward pass of a scan whose body has a ``case`` contains this pattern: branches that do not read an array return zeros
for it. Other ops with a neutral value are treated likewise. The arithmetic does not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aotc.ir.opset import PARTIAL_WRITES, SCALARS
from aotc.ir.tensor.copies import Names
from aotc.ir.tensor.ir import Function, Op, Region, Value, use_counts, values_captured_by_op, walk
from aotc.lowering.analysis.constant_values import splat_of
from aotc.lowering.analysis.prefix_scans import neutral_value
from aotc.lowering.passes.dce import has_effect

COMBINERS = frozenset(name for name, row in SCALARS.items() if row.neutral)


def move_sums_into_branches(function: Function) -> Function:
    """Return ``function`` with additions moved into branches, where one of the branches adds nothing."""
    names = function.body.names
    if "case" not in names or names.isdisjoint(COMBINERS):
        return function
    return function.with_body(_SumMover(function).region_with_moved_sums(function.body))


class _SumMover:
    """Move additions to results of ``case`` ops into the branches."""

    def __init__(self, function: Function) -> None:
        self.counts = use_counts(function.body)
        self.makers = {v: op for op in walk(function.body) for v in op.results}
        self.names = Names(function.body)

    def region_with_moved_sums(self, region: Region) -> Region:
        """Return ``region`` with its additions moved into branches; outer branches come before the ones inside them."""
        ops = list(region.ops)
        while (site := self._next_branch_and_sum(ops)) is not None:
            ops = self._move_sum_into_branch(ops, *site)
        inner = [
            op.on(op.operands, tuple(map(self.region_with_moved_sums, op.regions))) if op.regions else op for op in ops
        ]
        return region.with_ops(inner, region.results)

    def _next_branch_and_sum(self, ops: Sequence[Op]) -> tuple[int, int, int] | None:
        """Return the positions in ``ops`` of a ``case`` and of an op that adds its result, and the operand's number."""
        places = {op: n for n, op in enumerate(ops)}
        for n, op in enumerate(ops):
            for number, part in enumerate(op.operands if op.name in COMBINERS else ()):
                branch = self.makers.get(part)
                if branch in places and branch.name == "case" and self.counts[part] == 1 and not has_effect(branch):
                    at = branch.results.index(part)
                    sides = [r.results[at] for r in branch.regions]
                    if any(self._adds_few_elements(op.name, v) for v in sides) and self._can_move_to_sum(
                        ops, places[branch], n
                    ):
                        return places[branch], n, number
        return None

    def _adds_few_elements(self, name: str, v: Value) -> bool:
        """Return True if ``v`` is neutral for the op ``name`` in all elements, or in all but updated ones."""
        while (maker := self.makers.get(v)) is not None and maker.name == "reshape":
            v = maker.operands[0]
        if maker is not None and maker.name in PARTIAL_WRITES:
            v = maker.operands[1 if maker.name == "pad" else 0]
        elif maker is not None and maker.name == "case":
            at = maker.results.index(v)
            return any(self._adds_few_elements(name, r.results[at]) for r in maker.regions)
        fill, neutral = splat_of(v, self.makers), neutral_value(name, v.type.dtype)
        return fill is not None and neutral is not None and bool(fill == neutral)

    def _can_move_to_sum(self, ops: Sequence[Op], branch: int, end: int) -> bool:
        """Return True if the ``case`` can move to its addition: ops between them do not read its results."""
        results = set(ops[branch].results)
        return all(results.isdisjoint((*op.operands, *values_captured_by_op(op))) for op in ops[branch + 1 : end])

    def _move_sum_into_branch(self, ops: Sequence[Op], place: int, end: int, number: int) -> list[Op]:
        """Replace the ``case`` at ``place`` and the addition at ``end`` by a ``case`` that adds in each branch.

        ``number`` is the number of the addition's operand that the ``case`` computes.
        """
        branch, total = ops[place], ops[end]
        at = branch.results.index(total.operands[number])
        regions = []
        for region in branch.regions:
            inside = dict(zip(branch.results, region.results))  # the other operand may be a result of the branch, too
            operands = tuple([inside.get(v, v) for v in total.operands])
            moved = Value(self.names.fresh(total.result.name), total.result.type)
            self.makers[moved] = inner = Op(total.name, operands, (moved,), total.attrs, loc=total.loc)
            results = (*region.results[:at], moved, *region.results[at + 1 :])
            regions.append(Region(region.params, (*region.ops, inner), results))
        results = (*branch.results[:at], total.result, *branch.results[at + 1 :])
        new = Op(branch.name, branch.operands, results, branch.attrs, tuple(regions), branch.loc)
        self.makers.update((v, new) for v in results)
        others = [v for n, v in enumerate(total.operands) if n != number]
        self.counts = _with_more_counts(self.counts, {v: 0 if v in branch.results else len(regions) for v in others})
        return [*ops[:place], *ops[place + 1 : end], new, *ops[end + 1 :]]


def _with_more_counts(counts: Mapping[Value, int], more: Mapping[Value, int]) -> dict[Value, int]:
    return {**counts, **{v: counts.get(v, 0) + n - 1 for v, n in more.items()}}
