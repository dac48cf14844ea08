"""Buffer ownership: decide which values of a function share memory, and why each remaining copy is needed.

An *owner* is memory that several values use one after the other. Values that would be copied to each other
(:mod:`aotc.lowering.program.owners.ties`) get one owner if their live ranges
(:mod:`aotc.lowering.program.owners.live_ranges`) do not overlap. The most expensive copies are considered first. This
is copy coalescing (Z. Budimlic et al., "Fast copy coalescing and live-range identification", 2002), on structured
control flow. Bufferization and kernels that are whole loops use it. A carried buffer is thus updated in place through
loops, branches, and nested loops.

An owner may be the memory of an argument or of a result. An argument's memory is read-only unless the caller donated it
and a result is computed there. Neither is written before the last check of the function's data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from aotc.ir.dims.algebra import Dim
from aotc.ir.loop.ir import Kernel
from aotc.ir.opset.control import JUDGED
from aotc.ir.tensor.ir import Function, Op, Value
from aotc.lowering.analysis.in_place import donated_argument_pairs
from aotc.lowering.cost_model.work import estimated_bytes
from aotc.lowering.program.memories import tensor_bytes
from aotc.lowering.program.owners.live_ranges import Life, LiveRanges, Span
from aotc.lowering.program.owners.ties import NEXT_STATE, Tie, Ties


@dataclass(slots=True, eq=False)
class BufferOwner:
    """Memory of several ``values`` that are not live at the same time.

    Attributes
    ----------
    argument, result : int
        The number of the argument or the result whose memory this is, else -1. Both, if the caller donated the
        argument's memory to the result.
    first_write : int
        The first point at which an op of the function writes it; -1 if none does.
    """

    values: list[Value]
    life: Life
    size: Dim
    space: int
    argument: int = -1
    result: int = -1
    first_write: int = -1


@dataclass(frozen=True, slots=True)
class NeededCopy:
    """A copy that is still needed, and the reason."""

    tie: Tie
    reason: str


@dataclass
class Owners:
    """The owner of each value of a function; prints as a list of owners and of remaining copies.

    Attributes
    ----------
    function : Function
    ranges : LiveRanges
    ties : Ties
    refused : list of NeededCopy
        The remaining copies, the most expensive first.
    """

    function: Function
    ranges: LiveRanges
    ties: Ties
    refused: list[NeededCopy] = field(default_factory=list)
    _owners: dict[Value, BufferOwner] = field(default_factory=dict)
    _into: dict[int, int] = field(default_factory=dict)  # donated arguments, with the result that may use their memory
    _checked: int = -1  # the point of the last check

    def owner_of(self, value: Value) -> BufferOwner:
        """Return the owner (set of values that share memory) of a value."""
        return self._owners[self.ranges.root_of(value)]

    def share_memory(self, a: Value, b: Value) -> bool:
        """Return True if two values share memory."""
        return self.owner_of(a) is self.owner_of(b)

    def result_owner(self, number: int) -> BufferOwner:
        """Return the owner for the memory that the caller supplies for result ``number``."""
        return self._owners[self.results[number]]

    def copies_in_loop(self, loop: Op) -> list[Tie]:
        """Return the copies that remain inside of a loop."""
        return [one.tie for one in self.refused if loop in one.tie.loops]

    def __str__(self) -> str:
        owners = dict.fromkeys(self._owners.values())
        shared = [o for o in owners if len(o.values) > 1]
        rows = [f"owners of @{self.function.name}", *(_owner_report_line(o) for o in shared), "copies that remain"]
        return "\n".join([*rows, *(f"  {describe_needed_copy(one)}" for one in self.refused)]) + "\n"

    def __post_init__(self) -> None:
        """Give each value an owner, and each result of the function the caller's memory; then merge owners."""
        body, space = self.function.body, self.ranges.space
        for v, life in self.ranges.lives.items():
            if len(life.spans) > 1:
                life.spans = _union_of_ranges(life.spans, [])
            writes = -1 if life.read_only else min(life.writes)
            self._owners[v] = BufferOwner([v], life, tensor_bytes(v.type), space(v), first_write=writes)
        end = self.ranges.end
        self.results = [Value(f"result{n}", v.type) for n, v in enumerate(body.results)]
        for n, (mine, v) in enumerate(zip(self.results, body.results, strict=True)):
            life = Life([(2 * end + 1, 2 * end + 1)], {end: n})
            self._owners[mine] = BufferOwner([mine], life, tensor_bytes(v.type), space(v), result=n, first_write=end)
        for n, p in enumerate(body.params):
            self._owners[p].argument = n
        self._checked = max((self.ranges.point_of[op] for op in body.ops if op.name in JUDGED), default=-1)
        self._merge_owners()

    def _merge_owners(self) -> None:
        """Merge the owners of values that should share memory, where live ranges allow it.

        Function results come first, because they determine which arguments may be written; then copies, by cost.
        """
        body = self.function.body
        results = [Tie(mine, v, "a result", None, estimated_bytes(v)) for mine, v in zip(self.results, body.results)]
        pairs = donated_argument_pairs(self.function)
        for a, n in pairs:
            if self.owner_of(body.results[n]) is self.owner_of(body.params[a]):  # the argument is returned unchanged
                self._compute_result_in_argument(a, n)
        self._merge_tied_owners(results)
        late = self._donate_arguments(pairs)
        self._merge_tied_owners(sorted(self.ties.copies, key=lambda tie: -tie.cost))
        for a, n in late:
            self._compute_result_in_argument(a, n)
        moved = self._copied_next_states()
        for new, operands in self.ties.aliases:
            any(not self._join_owners(new, old) for old in operands if self.owner_of(old) not in moved.get(new, ()))
        self.refused.sort(key=lambda one: -one.tie.cost)

    def _copied_next_states(self) -> dict[Value, set[BufferOwner]]:
        """Return the copied next states, each with the memory that other states of its loop are copied to.

        If a state were computed in that memory, the copies would be a cycle, which needs one more copy.
        """
        targets: dict[Value, set[BufferOwner]] = {}
        for tie in (one.tie for one in self.refused if one.tie.kind == NEXT_STATE):
            assert tie.op is not None
            targets.setdefault(self.ranges.root_of(tie.old), set()).update(map(self.owner_of, tie.op.results))
        return targets

    def _merge_tied_owners(self, ties: list[Tie]) -> None:
        """Merge the owners of each tie, or record why that is not possible."""
        for tie in ties:
            reason = self._join_owners(tie.new, tie.old)
            if reason and tie.cost:
                self.refused.append(NeededCopy(tie, reason))

    # --- donated arguments ---

    def _donate_arguments(self, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Donate arguments to results that update them; return the pairs with other results."""
        if not pairs:
            return []
        linked = _UnionFind()
        for tie in self.ties.copies:
            linked.join(self.ranges.root_of(tie.new), self.ranges.root_of(tie.old))
        body, late = self.function.body, []
        for a, n in pairs:
            if linked.owner_of(body.params[a]) is linked.owner_of(self.ranges.root_of(body.results[n])):
                self._compute_result_in_argument(a, n)
            else:
                late.append((a, n))
        return late

    def _compute_result_in_argument(self, argument: int, result: int) -> None:
        """Compute a result in the memory of a donated argument, unless that is read later."""
        param, mine = self.function.body.params[argument], self.results[result]
        donated = self.owner_of(param)
        free = donated.argument == argument and donated.result < 0 and self.owner_of(mine).argument < 0
        if free and self.owner_of(self.function.body.results[result]) in (donated, self.owner_of(mine)):
            donated.life.read_only = False
            if self._join_owners(mine, param):
                donated.life.read_only = True

    # --- joining ---

    def _join_owners(self, new: Value, old: Value) -> str:
        """Merge the owners of two values; return an empty string, or the obstacle that prevents the merge."""
        a, b = self.owner_of(new), self.owner_of(old)
        if a is b:
            return ""
        reason = self._merge_obstacle(a, b)
        if reason:
            return reason
        if len(a.values) < len(b.values):
            a, b = b, a
        a.life.spans = _union_of_ranges(a.life.spans, b.life.spans)
        a.life.writes.update(b.life.writes)
        a.life.reads.update(b.life.reads)
        a.life.read_only = a.life.read_only or b.life.read_only
        a.argument, a.result = max(a.argument, b.argument), max(a.result, b.result)
        a.first_write = min((w for w in (a.first_write, b.first_write) if w >= 0), default=-1)
        a.values += b.values
        self._owners.update((v, a) for v in b.values)
        return ""

    def _merge_obstacle(self, a: BufferOwner, b: BufferOwner) -> str:
        """Return the reason why two owners cannot be merged, or an empty string."""
        if a.size != b.size or a.space != b.space:
            return "they differ in size or memory"
        for one, other in ((a, b), (b, a)):
            if one.life.read_only and (one.first_write >= 0 or other.first_write >= 0):
                whose = "a constant" if one.argument < 0 else "an argument of the caller's"
                return f"{one.values[0]} is {whose}"
        if min(a.result, b.result) >= 0 or min(a.argument, b.argument) >= 0:
            return "each is memory of the caller's"
        writes = [w for w in (a.first_write, b.first_write) if w >= 0]
        if max(a.result, b.result) >= 0 and writes and min(writes) <= self._checked:
            return "a check of data comes later, until which nothing of the caller's is written"
        moment = _first_common_moment(a.life.spans, b.life.spans)
        if moment >= 0:
            return self._describe_obstacle(a, b, moment)
        for written, read in ((a.life, b.life), (b.life, a.life)):
            point = self._conflicting_write_point(written, read)
            if point >= 0:
                return f"{self._op_name_at_point(point)} reads elements of one after it has written others"
        return ""

    def _conflicting_write_point(self, one: Life, other: Life) -> int:
        """Return the point of an op that writes ``one`` and must not read ``other`` in the same memory, or -1."""
        few, many = (one.writes, other.reads) if len(one.writes) < len(other.reads) else (other.reads, one.writes)
        for point in few:
            if point in many and not self.ties.allows_sharing(
                self.ranges.ops[point], one.writes[point], other.reads[point]
            ):
                return point
        return -1

    def _describe_obstacle(self, a: BufferOwner, b: BufferOwner, moment: int) -> str:
        """Return the text of an obstacle: the values that are live at the same ``moment``."""
        early, late = (a, b) if _start_of_range_at(a, moment) < _start_of_range_at(b, moment) else (b, a)
        readers = [p for p in early.life.reads if 2 * p >= moment]
        reader = f"is read by {self._op_name_at_point(min(readers))}" if readers else "is needed"
        return f"{early.values[0]} {reader} after {self._op_name_at_point(moment // 2)} writes {late.values[0]}"

    def _op_name_at_point(self, point: int) -> str:
        op = self.ranges.ops.get(point)
        return "the end of a region" if op is None else str(op.attrs.get("callee", op.name))


def owners_of(
    function: Function, functions: Mapping[str, Function], kernels: Mapping[str, Kernel],
    space: Callable[[Value], int],
) -> Owners:  # fmt: skip
    """Return the owners of a function's values; ``space`` maps a value to the number of its memory."""
    ties = Ties(functions, kernels)
    ties.collect_ties(function.body)
    return Owners(function, LiveRanges(function, space), ties)


class _UnionFind:
    """Disjoint sets of values."""

    def __init__(self) -> None:
        self._up: dict[Value, Value] = {}

    def owner_of(self, v: Value) -> Value:
        while (up := self._up.get(v, v)) is not v:
            v = up
        return v

    def join(self, a: Value, b: Value) -> None:
        a, b = self.owner_of(a), self.owner_of(b)
        if a is not b:
            self._up[a] = b


def _union_of_ranges(a: list[Span], b: list[Span]) -> list[Span]:
    """Return the union of two lists of ranges, sorted, adjacent ranges merged."""
    joined: list[Span] = []
    for begin, end in sorted([*a, *b]):
        if joined and begin <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def _first_common_moment(a: list[Span], b: list[Span]) -> int:
    """Return the first moment in ranges of both ordered lists, or -1."""
    i = j = 0
    while i < len(a) and j < len(b):
        begin = max(a[i][0], b[j][0])
        if begin <= min(a[i][1], b[j][1]):
            return begin
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return -1


def _start_of_range_at(owner: BufferOwner, moment: int) -> int:
    """Return the start of the range of ``owner`` that contains ``moment``."""
    return next(begin for begin, end in owner.life.spans if begin <= moment <= end)


def _owner_report_line(owner: BufferOwner) -> str:
    memory = f"argument {owner.argument}, " if owner.argument >= 0 else ""
    memory += f"result {owner.result}, " if owner.result >= 0 else ""
    return f"  {memory}{owner.size} bytes: {', '.join(map(str, owner.values))}"


def describe_needed_copy(one: NeededCopy) -> str:
    """Return a line of text that describes a remaining copy."""
    tie = one.tie
    return f"{tie.cost:,} bytes a call, {tie.old} to {tie.new} ({tie.kind}): {one.reason}"
