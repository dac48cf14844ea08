"""Reorder ops so that reads of a value precede the op that could overwrite it, which then needs no copy.

Before::

    x1 = x.at[j].set(a)        // x is read later, so x1 needs a copy of it
    b = x[j + 1]
After::

    b = x[j + 1]
    x1 = x.at[j].set(a)        // in place

Ops that depend on the update stay behind it, and nothing moves across a check or an op with effects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aotc.ir.loop.ir import Kernel
from aotc.ir.opset.control import JUDGED, VIEWS
from aotc.ir.tensor.ir import Function, Op, Region, Value, values_captured_by_op
from aotc.lowering.analysis.in_place import count_overwritten_parameters
from aotc.lowering.program.memory_limit.order_ops import has_effects


def move_reads_before_updates(
    function: Function, functions: Mapping[str, Function], kernels: Mapping[str, Kernel]
) -> Function:
    """Return ``function`` with reads of updated values moved before the updates."""
    return function.with_body(_ReadMover(functions, kernels).reordered_region(function.body, {}))


class _ReadMover:
    """Reorder the ops of a function so that reads of a value precede the op that could overwrite it."""

    def __init__(self, functions: Mapping[str, Function], kernels: Mapping[str, Kernel]) -> None:
        self.functions, self.kernels = functions, kernels
        self.roots: dict[Value, Value] = {}
        self.consumed: dict[Op, frozenset[Value]] = {}

    def reordered_region(self, region: Region, state: Mapping[Value, Value]) -> Region:
        """Return a region in the new order; ``state`` maps each result to the parameter whose next value it is."""
        ops: list[Op] = []
        for op in region.ops:
            if op.regions:
                inner = [self.reordered_region(r, _loop_state_of_result(op, n)) for n, r in enumerate(op.regions)]
                op = op.on(op.operands, tuple(inner))
            if op.name in VIEWS:
                self.roots[op.result] = self.root_of(op.operands[0])
            self.consumed[op] = frozenset(self._values_op_could_overwrite(op, state))
            ops.append(op)
        for op in [op for op in ops if self.consumed[op]]:
            ops = self._move_readers_before_update(ops, op)
        return region.with_ops(ops, region.results)

    def root_of(self, value: Value) -> Value:
        return self.roots.get(value, value)

    def _memory_reads_of(self, op: Op) -> set[Value]:
        """Return the memory roots that ``op`` reads."""
        return {self.root_of(v) for v in (*op.operands, *values_captured_by_op(op))} if op.name not in VIEWS else set()

    def _values_op_could_overwrite(self, op: Op, state: Mapping[Value, Value]) -> set[Value]:
        """Return the values that ``op`` could overwrite."""
        match op.name:
            case "dispatch":
                callee = op.attrs["callee"]
                count = count_overwritten_parameters(self.functions[callee])
                values = {self.root_of(v) for v in op.operands[:count]}
                for result, number in self.kernels[callee].aliases:
                    old = self.root_of(op.operands[count + number])
                    if state.get(op.results[result]) is old:
                        values.add(old)
                return values
            case "while":
                return {self.root_of(v) for v in op.operands}
            case "case":
                outer = set(map(self.root_of, values_captured_by_op(op)))
                inner = {v for r in op.regions for o in r.ops for v in self.consumed[o]}
                returned = {self.root_of(v) for r in op.regions for v in r.results}
                return outer & (inner | returned)
        return set()

    def _move_readers_before_update(self, ops: list[Op], update: Op) -> list[Op]:
        """Return the ops with readers of values that ``update`` overwrites moved before it, as far as possible."""
        at = ops.index(update)
        mine = self.consumed[update]
        behind: set[Value] = set(update.results)
        needed: list[Op] = []
        makers: dict[Value, Op] = {}
        for op in ops[at + 1 :]:
            if op.name in JUDGED or has_effects(op, self.functions):
                break
            if not behind.isdisjoint(op.operands) or not behind.isdisjoint(values_captured_by_op(op)):
                behind.update(op.results)
                continue
            makers.update((v, op) for v in op.results)
            if self._memory_reads_of(op) & mine and not self.consumed[op] & mine:
                needed.append(op)
        if not needed:
            return ops
        first = _with_producing_ops(needed, makers)
        rest = [op for op in ops[at + 1 :] if op not in first]
        if self._overwrites_later_read(ops[at:], first):
            return ops
        return [*ops[:at], *(op for op in ops[at + 1 :] if op in first), update, *rest]

    def _overwrites_later_read(self, ops: Sequence[Op], first: set[Op]) -> bool:
        """Return True if a moved op would overwrite a value that one of the ops it moves past reads."""
        passed: set[Value] = set()
        for op in ops:
            if op not in first:
                passed |= self._memory_reads_of(op)
            elif self.consumed[op] & passed:
                return True
        return False


def _loop_state_of_result(op: Op, number: int) -> dict[Value, Value]:
    """Return the current state for each next state, for the body (region 1) of a loop; else nothing."""
    if op.name != "while" or number != 1:
        return {}
    body = op.regions[1]
    return dict(zip(body.results, body.params, strict=True))


def _with_producing_ops(ops: Sequence[Op], makers: Mapping[Value, Op]) -> set[Op]:
    """Return ``ops`` and those of ``makers`` that they depend on."""
    needed: set[Op] = set()
    stack = list(ops)
    while stack:
        op = stack.pop()
        if op not in needed:
            needed.add(op)
            stack += [makers[v] for v in (*op.operands, *values_captured_by_op(op)) if v in makers]
    return needed
