"""Let small collectives that do not depend on each other be one call of several operands.

Each call waits for the other ranks once, which takes longer than a small operand itself.

Before: ``%3 = all_reduce %1``, ``%4 = multiply %2, %2``, ``%5 = all_reduce %4``. After: ``%4 = multiply %2, %2``,
``%3, %5 = all_reduce %1, %4``. The call is where the last of them was, or before the first op that reads a result.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from aotc.ir.dims.algebra import is_static, static
from aotc.ir.opset.collective import COMBINED
from aotc.ir.tensor.ir import Function, Module, Op, Region, Value, post_order, values_captured_by_op
from aotc.options import Options
from aotc.vmfb.dtypes import size_of

# Bytes of an operand up to which a collective is combined, and of all operands of a combined call. Measured by
# benchmarks/runtime/combined_collectives.py: decision 327.
LARGEST_OPERAND = 256 << 10
LARGEST_CALL = 1 << 20


def combine_collectives(module: Module, options: Options) -> Module:
    """Return ``module`` with one call for several small collectives of the same kind between the same ranks."""
    several = {
        n: f for n, f in module.functions.items() if "ranks" in f.attrs and not f.body.names.isdisjoint(COMBINED)
    }
    return module.with_functions({n: _with_combined_calls(f) for n, f in several.items()})


def _with_combined_calls(function: Function) -> Function:
    body = _combined_in_region(function.body)
    return function if body is function.body else function.with_body(body)


def _combined_in_region(region: Region) -> Region:
    """Return a region with combined collectives, also in the regions of its ops."""
    if region.names.isdisjoint(COMBINED):
        return region
    ops = [_combined_in_op(op) for op in region.ops]
    groups = [group for group in _Candidates(ops).groups if len(group.members) > 1]
    if not groups and all(new is old for new, old in zip(ops, region.ops, strict=True)):
        return region
    return replace(region, ops=tuple(_reordered(ops, groups)))


def _combined_in_op(op: Op) -> Op:
    regions = () if op.name in COMBINED else tuple(_combined_in_region(r) for r in op.regions)
    changed = any(new is not old for new, old in zip(regions, op.regions))
    return replace(op, regions=regions) if changed else op


def _kind(op: Op) -> Hashable | None:
    """Return the key that collectives of one call have in common; None for an op that is not combined."""
    if op.name not in COMBINED or len(op.operands) != 1 or not is_static(op.operands[0].type.shape):
        return None
    if not 0 < _bytes(op) <= LARGEST_OPERAND:
        return None
    (operand,) = op.operands
    reductions = tuple(inner.name for region in op.regions for inner in region.ops)
    simple = all(len(region.ops) == 1 and {*region.ops[0].operands} == {*region.params} for region in op.regions)
    attrs = tuple((key, bool(value) if key == "channel" else value) for key, value in sorted(op.attrs.items()))
    return (op.name, operand.type.dtype, reductions, attrs) if simple else None


def _bytes(op: Op) -> int:
    kind = op.operands[0].type
    return prod(map(static, kind.shape)) * size_of(kind.dtype)


@dataclass(slots=True)
class _Group:
    """Collectives that become one call: their positions among the ops of a region."""

    members: list[int] = field(default_factory=list)
    operands: set[Value] = field(default_factory=set)
    bytes: int = 0


class _Candidates:
    """The collectives of a region that may be combined, and what each depends on.

    A collective may join a group if it needs no result of the group. To need one may lead through other groups: a call
    of a group needs the operands of all its members.
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        """Group the collectives among ``ops`` that one call can compute, in program order.

        ``origins`` maps each value to the numbers of the collectives on whose results it depends: collectives of one
        group must not depend on each other.
        """
        self._needs: dict[int, frozenset[int]] = {}
        self._group_of: dict[int, _Group] = {}
        self.groups: list[_Group] = []
        origins: dict[Value, frozenset[int]] = {}
        open_groups: dict[Hashable, list[_Group]] = {}
        for n, op in enumerate(ops):
            read = (*op.operands, *values_captured_by_op(op))
            needs: frozenset[int] = frozenset().union(*(origins.get(v, frozenset()) for v in read))
            kind = _kind(op)
            if kind is not None:
                self._needs[n] = needs
                self._add(n, op, open_groups.setdefault(kind, []))
                needs = needs | {n}
            origins.update(dict.fromkeys(op.results, needs))
        self.groups = [group for row in open_groups.values() for group in row]

    def _add(self, number: int, op: Op, groups: list[_Group]) -> None:
        """Add a collective to the first group that has room and that it does not need, or to a new one."""
        needed, size = self._all_needed(number), _bytes(op)
        for group in groups:
            has_room = group.bytes + size <= LARGEST_CALL and group.operands.isdisjoint(op.operands)
            if has_room and needed.isdisjoint(group.members):
                break
        else:
            group = _Group()
            groups.append(group)
        group.members.append(number)
        group.operands.update(op.operands)
        group.bytes += size
        self._group_of[number] = group

    def _all_needed(self, number: int) -> set[int]:
        """Return the collectives whose results a collective needs, also through groups."""
        needed: set[int] = set()
        waiting = [*self._needs[number]]
        while waiting:
            one = waiting.pop()
            if one not in needed:
                needed.add(one)
                waiting += [m for m in self._group_of[one].members if m not in needed]
                waiting += self._needs[one] - needed
        return needed


def _reordered(ops: Sequence[Op], groups: Sequence[_Group]) -> list[Op]:
    """Return the ops with one call for each group; each op follows those that it needs, else the order stays."""
    calls = {group.members[-1]: _joined_call([ops[n] for n in group.members]) for group in groups}
    dropped = {n for group in groups for n in group.members[:-1]}
    joined = [calls.get(n, op) for n, op in enumerate(ops) if n not in dropped]
    definitions = {v: op for op in joined for v in op.results}

    def needs(op: Op) -> list[Op]:
        read = (*op.operands, *values_captured_by_op(op))
        return [definitions[v] for v in dict.fromkeys(read) if v in definitions]

    return post_order(joined, needs)


def _joined_call(members: Sequence[Op]) -> Op:
    operands = tuple(v for op in members for v in op.operands)
    return replace(members[0], operands=operands, results=tuple(v for op in members for v in op.results))
