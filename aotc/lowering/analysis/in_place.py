"""Find operands that an op updates in place: its first results overwrite them.

Such an operand and its result share memory, in which ``bufferize`` stores the operand before the kernel starts. So the
kernel has no separate input for the operand.
"""

from __future__ import annotations

from collections.abc import Iterable

from aotc.ir.dims.algebra import product
from aotc.ir.dims.compare import is_provable_relation
from aotc.ir.opset import FREE, OPS
from aotc.ir.opset.control import VIEWS
from aotc.ir.tensor.ir import Function, Op, TensorType, Value, values_captured_by_op


def updated_operands(op: Op) -> tuple[int, ...]:
    """Return the positions of the operands that the results 0, 1... of ``op`` overwrite, in this order."""
    return OPS[op.name].in_place(op.attrs)


class UpdatedArrays:
    """Analysis of the arrays of a region that ops update in place, and of the readers of these arrays.

    A kernel that reads an array after its update needs a copy of the array as it was before.

    Parameters
    ----------
    ops : iterable of Op
        The ops of a region, in order.
    """

    def __init__(self, ops: Iterable[Op]) -> None:
        """Record, for each array, the ops among ``ops`` that update it in place, also through views."""
        self._updates: dict[Value, list[Op]] = {}
        self._makers: dict[Value, Op] = {}
        for op in ops:
            self._makers.update((v, op) for v in op.results)
            updated = range(len(op.operands)) if op.name == "while" else updated_operands(op)
            for n in updated:
                self._updates.setdefault(self._array_behind_view(op.operands[n]), []).append(op)

    def _array_behind_view(self, v: Value) -> Value:
        while (maker := self._makers.get(v)) is not None and maker.name in VIEWS:
            v = maker.operands[0]
        return v

    def arrays_read_by(self, ops: Iterable[Op]) -> set[Value]:
        """Return the updated arrays that ``ops`` read, directly or through movement ops, but do not update."""
        if not self._updates:
            return set()
        left = [v for op in ops for n, v in enumerate(op.operands) if n not in updated_operands(op)]
        arrays: set[Value] = set()
        seen: set[Value] = set()
        while left:
            v = left.pop()
            if v in seen:
                continue
            seen.add(v)
            if v in self._updates:
                arrays.add(v)
            elif (maker := self._makers.get(v)) is not None and maker.name in FREE:
                left += maker.operands
        return arrays

    def is_updated_in(self, array: Value, ops: Iterable[Op]) -> bool:
        """Return True if one of ``ops`` updates ``array`` in place, or may do so in a region that reads it."""
        viewed = self._array_behind_view(array)
        some = self._updates.get(viewed, ())
        return any(op in some or viewed in map(self._array_behind_view, values_captured_by_op(op)) for op in ops)

    def updates_after_reads(self, ops: Iterable[Op], type_: TensorType) -> list[Op]:
        """Return the ops that update an array larger than ``type_`` whose old value one of ``ops`` reads."""
        size = product(type_.shape)
        read = [v for v in self.arrays_read_by(ops) if is_provable_relation(">", product(v.type.shape), size)]
        return [op for v in read for op in self._updates[v]]


def count_overwritten_parameters(function: Function) -> int:
    """Return the number of leading parameters of an outlined region that share memory with its results."""
    if function.attrs["kind"] not in ("single", "update") or not function.body.results:
        return 0
    op = next(op for op in function.body.ops if function.body.results[0] in op.results)
    return len(updated_operands(op))


def donated_argument_pairs(function: Function) -> list[tuple[int, int]]:
    """Return pairs of a donated argument and the result that may reuse its memory; both have the same type.

    JAX names the result for most donated arguments. The others get the first free result of their type.
    """
    body, pairs = function.body, list[tuple[int, int]]()
    free = list(range(len(body.results)))
    wishes = function.attrs.get("donated_into", {})
    for a in sorted(function.attrs.get("donated", ()), key=lambda a: str(a) not in wishes):
        fit = [n for n in free if body.results[n].type == body.params[a].type]
        named = wishes.get(str(a), -1)
        n = named if named in fit else next(iter(fit), -1)
        if n >= 0:
            pairs.append((a, n))
            free.remove(n)
    return pairs
