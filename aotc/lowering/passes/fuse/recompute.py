"""Recompute values that several regions on a GPU read, where that is cheaper than storing them.

Before::

    %3, %4 = dispatch %x, %w1, %w2 {callee = "k0"}  // %p = convert (broadcast %x); %3 = %p * %w1, %4 = %p * %w2
    %5 = dispatch %3 {callee = "k1"}                // k1 holds the reduction of %3
    %6 = dispatch %4 {callee = "k2"}                // k2 holds the reduction of %4
After::

    %5 = dispatch %x, %w1 {callee = "k1"}           // k1 holds the product too
    %6 = dispatch %x, %w2 {callee = "k2"}

Ops join the region of their operand. So an op that broadcasts a vector to the size of a matrix collects all readers of
the matrix, and their results have several readers. Such large values should not be stored if they are made of smaller
ones: the bytes that all readers would read instead are compared with the bytes of writing the value once and reading it
everywhere. This is classical rematerialisation with bytes as the cost (Briggs, Cooper, Torczon: Rematerialization, PLDI
1992).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aotc.ir.opset import CONTROL_FLOW, ELEMENTWISE, EXPENSIVE, FREE
from aotc.ir.tensor.ir import Op, Value, post_order
from aotc.lowering.analysis.in_place import updated_operands
from aotc.lowering.analysis.index_maps import value_before_movement
from aotc.lowering.cost_model.work import estimated_bytes
from aotc.lowering.passes.fuse.absorb import ABSORBING, GroupAbsorber
from aotc.lowering.passes.fuse.outline import Group
from aotc.lowering.plans.thresholds import REPEATED_WORK
from aotc.lowering.threshold import Limit

_SOURCES = ("loop", "row", "reduce")


RECOMPUTED_BYTES = Limit(
    1 << 16,
    "bytes of a value that a GPU stores for several kernels, however cheap it is to recompute",
    "writing and reading it takes less time than a kernel launch",
)


class CheapValueRecomputer:
    """Copies ops of cheap values into the groups that read them.

    Parameters
    ----------
    absorber : Absorber
        Decides which ops a group may absorb, and has the readers of each value.
    group_of : mapping of Op to Group
    """

    def __init__(self, absorber: GroupAbsorber, group_of: dict[Op, Group]) -> None:
        self.absorber, self.group_of = absorber, group_of
        self.makers = absorber.budget.makers
        self.overwritten = {
            value_before_movement(v, self.makers) for op in group_of for v in _operands_overwritten_by(op)
        }

    def recompute_cheap_values(self, groups: Sequence[Group]) -> None:
        """Duplicate cheap values of fusion ``groups`` in their readers, operands before users."""
        if self.absorber.budget.target.kind != "cuda":
            return
        for group in groups:
            if group.kind in _SOURCES and group.members:
                self._duplicate_group_in_readers(group)

    def _duplicate_group_in_readers(self, group: Group) -> None:
        """Duplicate the ops of a group in the readers of its values; drop the group if no value remains."""
        copied: dict[Group, list[Op]] = {}
        stays = False
        for v in [v for op in group.members for v in op.results]:
            readers = self._reading_groups(v, group)
            if v in self.absorber.needed:
                stays = True
            elif readers:
                cone = self._cheap_cone_of(v, group)
                if cone and self._recomputing_saves_bytes(v, cone, readers) and self._is_recomputable(cone, readers):
                    for reader in readers:
                        copied.setdefault(reader, []).extend(cone)
                else:
                    stays = True
        for reader, ops in copied.items():
            inside = {*reader.members, *reader.absorbed}
            reader.absorbed += [op for op in dict.fromkeys(ops) if op not in inside]
        if copied and not stays:
            self.absorber.record.absorbed[group] = next(iter(copied))
            group.members, group.absorbed = [], []

    def _reading_groups(self, v: Value, group: Group) -> list[Group]:
        """Return the other groups that read ``v``, directly or through movement ops."""
        groups = (self.group_of[op] for op in self.absorber.readers.get(v, ()))
        return [g for g in dict.fromkeys(groups) if g is not group]

    def _cheap_cone_of(self, v: Value, group: Group) -> list[Op]:
        """Return the ops of ``group`` that compute ``v``, in order; empty unless all are cheap and elementwise."""
        inside = {*group.members, *group.absorbed}

        def operand_ops(op: Op) -> list[Op]:
            makers = [self.makers.get(x) for x in op.operands]
            return [m for m in makers if m is not None and (m in inside or self._is_copied_by_readers(m))]

        ops = [op for op in post_order([self.makers[v]], operand_ops) if op in inside]
        cheap = all(op.name in ELEMENTWISE and op.name not in EXPENSIVE and not op.regions for op in ops)
        return ops if cheap and REPEATED_WORK.holds(len(ops)) else []

    def _is_copied_by_readers(self, op: Op) -> bool:
        """Return True if ``op`` is a movement op or a constant, of which every group that reads it has a copy."""
        return op.name in FREE and op not in self.group_of

    def _recomputing_saves_bytes(self, v: Value, cone: Sequence[Op], readers: Sequence[Group]) -> bool:
        """Return True if reading the inputs of ``v`` in each reader takes no more bytes than storing ``v``."""
        size = estimated_bytes(v)
        if RECOMPUTED_BYTES.holds(size):
            return False
        reads = self._outside_values_read(cone)
        if reads & self.overwritten:  # later reads of it would need a copy
            return False
        more = sum(
            estimated_bytes(x) for g in readers for x in reads - self._outside_values_read([*g.members, *g.absorbed])
        )
        return more <= size * (1 + len(readers))

    def _outside_values_read(self, ops: Iterable[Op]) -> set[Value]:
        """Return the values from outside that ``ops`` read, looking through movement ops."""
        inside = {*ops}
        values: set[Value] = set()
        seen: set[Value] = set()
        stack = [x for op in inside for x in op.operands]
        while stack:
            x = stack.pop()
            maker = self.makers.get(x)
            if x in seen or maker in inside:
                continue
            seen.add(x)
            if maker is not None and self._is_copied_by_readers(maker):
                stack += maker.operands
            else:
                values.add(x)
        return values

    def _is_recomputable(self, cone: Sequence[Op], readers: Sequence[Group]) -> bool:
        """Return True if every reader may compute the ops of ``cone`` too."""
        for reader in readers:
            part = Group(reader.number, "loop", [cone[-1]], absorbed=list(cone[:-1]))
            refusal = "its kind of region absorbs nothing"
            if reader.kind in ABSORBING:
                refusal = self.absorber.refusal(part, reader)
            reason = "to compute it again reads fewer bytes than to store it"
            if not self.absorber.record.record_decision(cone, reader, refusal, reason):
                return False
        return True


def _operands_overwritten_by(op: Op) -> Sequence[Value]:
    """Return the operands in whose memory ``op`` may store its results."""
    return op.operands if op.name in CONTROL_FLOW else [op.operands[n] for n in updated_operands(op)]
