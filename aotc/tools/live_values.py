"""Lifetimes of the values in the arenas of a call, across branches and loops."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from aotc.tools.flow import Flow, FlowBlock, FlowStep, Place, arena_places


@dataclass(slots=True)
class MemoryRow:
    """A value in an arena, live from the step that creates it to its last reader.

    A value that one side of a branch overwrites has a separate row in each later side that reads it. If the sides leave
    values in the same bytes, the row of the last side represents all of them after the branch.

    Attributes
    ----------
    space : str
        Memory space of the arena: the model's name of a GPU, or ``cpu`` or ``cuda``.
    offset, bytes : int
        Its place in the arena.
    first, last : int
        First and last step in which the value is live.
    type : str
        Dtype and shape; empty if unknown.
    made_by, read_by : str
        Names of the kernels that create and read it.
    loc : str
        Location in the model of the op that creates it.
    replaced : int
        The step that overwrites it, or -1.
    """

    space: str
    offset: int
    bytes: int
    first: int
    last: int
    type: str
    producer: str
    loc: str
    read_by: list[str] = field(default_factory=list)
    replaced: int = -1

    @property
    def end(self) -> int:
        """Return the offset after its last byte."""
        return self.offset + self.bytes


@dataclass(eq=False, slots=True)
class _LiveValue:
    """A value during the analysis: its row, and the step ``made`` that created it.

    ``others`` are values of other sides of a branch in the same bytes, each with the step until which it lives if this
    one is read.
    """

    row: MemoryRow
    made: int
    others: list[tuple[_LiveValue, int]] = field(default_factory=list)


def live_rows(flow: Flow) -> list[MemoryRow]:
    """Return the values of a call in the order of their creation."""
    walk = _LiveValueWalk(flow)
    walk.run(0, len(flow.steps))
    return sorted((v.row for v in walk.listed), key=lambda row: row.first)


class _LiveValueWalk:
    """Lifetime analysis in one pass over the steps; ``current`` holds the values that are not overwritten yet."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.current: list[_LiveValue] = []
        self.listed: dict[_LiveValue, None] = {}
        self.read: list[tuple[_LiveValue, Place]] = []
        self.blocks = [block for block in flow.blocks if block.begin < block.end]
        self.entered = 0

    def run(self, begin: int, end: int) -> None:
        """Process the steps of a range, with its loops and branches."""
        at = begin
        while at < end:
            block = self.blocks[self.entered] if self.entered < len(self.blocks) else None
            if block is None or block.begin != at:
                self._process_step(self.flow.steps[at])
                at += 1
                continue
            self.entered += 1
            self._process_loop(block) if block.is_loop else self._process_branch(block)
            at = block.end

    def _process_step(self, step: FlowStep) -> None:
        """Extend the lifetimes of the values that a step reads, and create rows for those that it writes."""
        touched = list(arena_places(self.flow, step))
        name = self.flow.name_of(step)
        for place, written, _ in touched:
            if not written or step.updates:
                for value in self._values_overlapping(place):
                    self.read.append((value, place))
                    self._extend_lifetime(value, step.number)
                    value.row.read_by += [] if name in value.row.read_by else [name]
        for place, written, type_ in touched:
            if written and not (step.updates and self._values_overlapping(place)):
                for value in self._values_overlapping(place):
                    value.row.replaced = step.number
                    self.current.remove(value)
                made = _LiveValue(self._create_row(step, place, type_), step.number)
                self.listed[made] = None
                self.current.append(made)

    def _process_loop(self, block: FlowBlock) -> None:
        """Process a loop: values that the next iteration reads before it overwrites them live to its end."""
        seen = len(self.read)
        self.run(block.begin, block.end)
        places = [place for value, place in self.read[seen:] if value.made < block.begin]
        for place in places:
            for value in self._values_overlapping(place):
                self._extend_lifetime(value, block.end - 1)

    def _process_branch(self, block: FlowBlock) -> None:
        """Process each side of a branch with the values from before the branch, then merge their values."""
        before, ends = self.current, list[tuple[list[_LiveValue], int]]()
        for begin, end in block.sides:
            self.current = [self._copy_for_side(value, block.begin, begin) for value in before]
            self.run(begin, end)
            ends.append((self.current, end - 1))
        merged = list(self.current)
        for values, last in ends[:-1]:
            for value in values:
                same = [v for v in self.current if _places_overlap(v.row, value.row) and v is not value]
                for v in same:
                    v.others.append((value, last))
                if not same and value not in merged:
                    merged.append(value)
        self.current = merged

    def _copy_for_side(self, value: _LiveValue, start: int, begin: int) -> _LiveValue:
        """Return ``value``, or a copy for a side of a branch if an earlier side overwrote it.

        The branch starts at step ``start``, the side at step ``begin``.
        """
        if value.row.replaced < start:
            return value
        row = replace(value.row, first=begin, last=begin, read_by=[], replaced=-1)
        return _LiveValue(row, value.made, [(value, start - 1)])

    def _extend_lifetime(self, value: _LiveValue, step: int) -> None:
        """Extend the lifetime of a value, and of the values that its row represents, to ``step``."""
        if step < value.row.first:
            return
        self.listed[value] = None
        value.row.last = max(value.row.last, step)
        others, value.others = value.others, []
        for other, last in others:
            self._extend_lifetime(other, last)

    def _values_overlapping(self, place: Place) -> list[_LiveValue]:
        """Return the current values that overlap the byte range ``place``."""
        slot, begin, end = place
        space = self.flow.spaces[self.flow.slots.memory_space(slot)].name
        return [v for v in self.current if v.row.space == space and v.row.offset < end and begin < v.row.end]

    def _create_row(self, step: FlowStep, place: Place, type_: str) -> MemoryRow:
        """Create the row of a value that ``step`` writes to ``place``."""
        slot, begin, end = place
        space = self.flow.spaces[self.flow.slots.memory_space(slot)].name
        name = self.flow.name_of(step)
        return MemoryRow(space, begin, end - begin, step.number, step.number, type_, name, step.loc)


def _places_overlap(a: MemoryRow, b: MemoryRow) -> bool:
    return a.space == b.space and a.offset < b.end and b.offset < a.end
