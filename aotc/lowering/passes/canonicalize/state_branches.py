"""Turn a select between whole arrays that a loop carries into a ``case``.

Before::

    while c { a, b = select(p, b, a), select(p, a, b) }     // reads and writes both arrays in each iteration
After::

    while c { a, b = case p { yield a, b } { yield b, a } }

Both operands are in memory, so a ``case`` copies at most what the select would read and write. A branch that returns an
array unchanged copies nothing, and states that swap exchange the roles of their buffers
(:mod:`aotc.lowering.program.owners.exchange_buffers`). If an operand is computed only for the select, the select stays,
as that operand then needs no memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from aotc.ir.opset import FREE, PARTIAL_WRITES
from aotc.ir.opset.control import VIEWS
from aotc.ir.tensor.copies import Names
from aotc.ir.tensor.ir import Function, Op, Region, TensorType, Value, captured_values, values_captured_by_op, walk
from aotc.lowering.analysis.index_maps import value_before_movement
from aotc.lowering.cost_model.work import estimated_bytes
from aotc.lowering.passes.canonicalize.array_passes import is_branch_worthwhile
from aotc.options import Options

_SAME_ARRAY = (PARTIAL_WRITES | VIEWS) - {"pad"}


def branch_on_states(function: Function, options: Options) -> Function:
    """Return ``function`` with branches instead of selects of large arrays that its loops carry."""
    if "while" not in function.body.names or "select" not in function.body.names:
        return function
    return function.with_body(_StateBranchRewriter(function.body, options).region_with_state_branches(function.body))


class _StateBranchRewriter:
    """Replace selects of whole loop states by branches."""

    def __init__(self, body: Region, options: Options) -> None:
        self.options, self.names = options, Names(body)
        self.makers = {v: op for op in walk(body) for v in op.results}

    def region_with_state_branches(self, region: Region) -> Region:
        """Return ``region`` with the loops in it rewritten."""
        ops = []
        for op in region.ops:
            if op.regions:
                regions = [self.region_with_state_branches(r) for r in op.regions]
                if op.name == "while":
                    regions[1] = self._body_with_branches(regions[1])
                op = op.on(op.operands, tuple(regions))
            ops.append(op)
        return region.with_ops(ops, region.results)

    def _body_with_branches(self, body: Region) -> Region:
        """Return a loop's body with one ``case`` for all selects of states that have the same condition."""
        groups: dict[Value, list[Op]] = {}
        stored = {*body.params, *captured_values(body)}
        for op in body.ops:
            if op.name == "select" and op.result in body.results and is_branch_worthwhile(op.result, self.options):
                test = value_before_movement(op.operands[0], self.makers)
                if test.type.rank == 0 and all(self._is_stored(v, stored) for v in op.operands[1:]):
                    groups.setdefault(test, []).append(op)
        ops = list(body.ops)
        for test, selects in groups.items():
            ops = self._ops_with_branch(ops, test, selects)
        return body.with_ops(ops, body.results)

    def _is_stored(self, v: Value, stored: Collection[Value]) -> bool:
        """Return True if ``v`` is one of the arrays ``stored``, updated or not, or filled with one number."""
        while v not in stored and (maker := self.makers.get(v)) is not None and maker.name in _SAME_ARRAY:
            v = maker.operands[0]
        return v in stored or value_before_movement(v, self.makers).type.rank == 0

    def _ops_with_branch(self, ops: Sequence[Op], test: Value, selects: Sequence[Op]) -> list[Op]:
        """Return ``ops`` with one branch in place of ``selects``, unless other ops read a result as a whole."""
        results = {op.result for op in selects}
        readers = [op for op in ops if not results.isdisjoint((*op.operands, *values_captured_by_op(op)))]
        last = max(map(ops.index, selects))
        if any(ops.index(op) < last or not _reads_part(op) for op in readers):
            return list(ops)
        index = Value(self.names.fresh("index"), TensorType("i32"))
        sides = (self._branch_side([op.operands[n] for op in selects]) for n in (2, 1))
        convert = Op("convert", (test,), (index,), loc=selects[0].loc)
        branch = Op("case", (index,), tuple(op.result for op in selects), {}, tuple(sides), selects[0].loc)
        self.makers.update((v, op) for op in (convert, branch) for v in op.results)
        rest = [op for op in ops[: last + 1] if op not in selects]
        return [*rest, convert, branch, *ops[last + 1 :]]

    def _branch_side(self, values: Sequence[Value]) -> Region:
        """Return one side of the branch: a region that returns ``values``, with uniform arrays created inside."""
        ops: list[Op] = []
        results = []
        for v in values:
            scalar = value_before_movement(v, self.makers)
            if scalar.type.rank == 0:
                v = Value(self.names.fresh(v.name), v.type)
                ops.append(Op("broadcast", (scalar,), (v,), {"dims": ()}))
            results.append(v)
        return Region((), tuple(ops), tuple(results))


def _reads_part(op: Op) -> bool:
    """Return True if ``op`` reads only a part of its operand, as a slice or a gather does."""
    return op.name in FREE and estimated_bytes(op.results[0]) < estimated_bytes(op.operands[0])
