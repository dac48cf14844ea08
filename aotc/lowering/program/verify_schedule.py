"""Check a command buffer against the steps that it was made from: the same commands, in an order that is safe.

Independent of ``schedule`` and ``dependences``: every two commands of a graph that touch a common byte, one of them
writing it, are compared, and there must be a path of edges from the first to the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aotc.ir.dims import Dim, product, sym
from aotc.ir.limits import FINDINGS
from aotc.ir.program_ir import Copy, Launch, Step, Storage, touched, walk
from aotc.ir.program_verify import number, samples, title
from aotc.lowering.analysis.limits import CONFLICT_WINDOW
from aotc.lowering.program.schedule import CommandBuffer, place_of
from aotc.lowering.program.tile_edges import covers
from aotc.vmfb.abi import COPY, Command, Graph, Slots, TileEdge, value_of
from aotc.vmfb.commands import all_nodes, read_commands
from aotc.vmfb.dtypes import size_of


def verify_schedule(
    buffer: CommandBuffer,
    steps: Sequence[Step],
    slots: Slots,
    kernel_number: Callable[[str], int],
) -> list[str]:
    """Return what is wrong with a valid command buffer, one sentence each (at most 20), or an empty list.

    Parameters
    ----------
    buffer : CommandBuffer
    steps : sequence of Step
        What it was made from.
    slots, kernel_number
        As for :class:`~aotc.lowering.program.schedule.Scheduler`.
    """
    leaves = [s for s in walk(steps) if isinstance(s, Launch | Copy)]
    commands = [node.commands for node in all_nodes(read_commands(buffer.code)) if isinstance(node, Graph)]
    count = sum(map(len, commands))
    if count != len(leaves):
        return [f"there are {count} commands for {len(leaves)} launches and copies"]
    places = [s for step in leaves for part in touched(step) for s in part]
    sizes = [d for s in places for d in (s.size, s.offset)]
    findings: dict[str, None] = {}
    for values in samples(list(dict.fromkeys([*sizes, *buffer.parameters]))):
        check = _ScheduleCheck(values, [number(e, values) for e in buffer.parameters], slots, kernel_number)
        rest = iter(leaves)
        for words, order in zip(commands, buffer.orders, strict=True):
            graph = _in_program_order(words, order)
            some = [next(rest) for _ in graph]
            findings.update(dict.fromkeys(f for c, s in zip(graph, some) for f in check.differs(c, s)))
            findings.update(dict.fromkeys(check.races(graph, some)))
    return list(findings)[:FINDINGS]


def _in_program_order(graph: Sequence[Command], order: Sequence[int]) -> list[Command]:
    """Return the commands of a graph as the program has them, their successors numbered so too."""
    return [
        Command(
            c.kind, c.kernel, c.items, c.grain, c.predecessors, [order[s] for s in c.successors], c.places, c.dims,
            tiles=[TileEdge(order[t.producer], t.times, t.over, t.plus) for t in c.tiles],
            followers=[order[f] for f in c.followers],
        )
        for _, c in sorted(zip(order, graph, strict=True), key=lambda pair: pair[0])
    ]


@dataclass(frozen=True, slots=True)
class _ScheduleCheck:
    values: Mapping[str, int]
    parameters: Sequence[int]
    slots: Slots
    kernel_number: Callable[[str], int]

    def word(self, operand: int) -> int:
        """Return the number that an operand is."""
        return value_of(operand, self.parameters)

    def place(self, s: Storage) -> tuple[int, int]:
        """Return the slot and byte that a storage begins at."""
        slot, offset = place_of(s, self.slots)
        return slot, number(offset, self.values)

    def differs(self, command: Command, step: Launch | Copy) -> Iterator[str]:
        """Compare a command with its step."""
        reads, writes = touched(step)
        places = [self.place(s) for s in (*reads, *writes)]
        words = [(slot, self.word(offset)) for slot, offset in command.places]
        if words != places:
            yield f"{title(step)}: its places are {words}, expected {places}"
        if isinstance(step, Copy):
            numbers: tuple[int, list[Dim]] = (1, [step.size])
            same = command.kind == COPY
        else:
            numbers = (number(step.kernel.grid, self.values), [sym(n) for n in step.kernel.dims])
            same = command.kind != COPY and command.kernel == self.kernel_number(step.kernel.name)
        dims = [number(e, self.values) for e in numbers[1]]
        if not same:
            yield f"{title(step)}: the command is of kind {command.kind} and kernel {command.kernel}"
        if self.word(command.items) != numbers[0] or [self.word(w) for w in command.dims] != dims:
            yield f"{title(step)}: its grid or dims are not {numbers[0]} and {dims}"

    def races(self, graph: Sequence[Command], steps: Sequence[Launch | Copy]) -> Iterator[str]:
        """Find commands that touch a common byte and are not ordered."""
        before = _ancestors(graph)
        rows = [row for n, pair in enumerate(zip(graph, steps, strict=True)) for row in self._bytes(n, *pair)]
        command, slot, begin, end, writes = np.array(rows, np.int64).reshape(-1, 5).T.copy()
        for n, (here, place, first, last, written) in enumerate(rows):
            past = slice(max(0, n - CONFLICT_WINDOW), n)
            meet = (slot[past] == place) & (begin[past] < last) & (end[past] > first)
            if not written:
                meet &= writes[past] == 1
            for other in sorted({*command[past][meet].tolist()}):
                if other == here or before[here] >> other & 1:
                    continue
                tiles = [t for t in graph[here].tiles if t.producer == other]
                if not any(covers(t, steps[other], steps[here]) for t in tiles):
                    yield f"{title(steps[here])} does not wait for {title(steps[other])}, and both touch slot {place}"

    def _bytes(self, n: int, command: Command, step: Launch | Copy) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield command, slot, first byte, byte after the last, and whether it is written, for each place."""
        if isinstance(step, Copy):
            sizes: list[Dim] = [step.size, step.size]
        else:
            sizes = [product(b.shape) * size_of(b.dtype) for b in (*step.kernel.inputs, *step.kernel.outputs)]
        count = len(touched(step)[0])
        for k, ((slot, offset), size) in enumerate(zip(command.places, sizes)):
            begin = self.word(offset)
            yield n, slot, begin, begin + number(size, self.values), int(k >= count)


def _ancestors(graph: Sequence[Command]) -> list[int]:
    """Return, for each command, the set of those that are done when it begins, as bits.

    What waits for tiles of a command begins while that runs, and ends after it.
    """
    before = [0] * len(graph)
    after = [1 << n for n in range(len(graph))]
    for n, command in enumerate(graph):
        after[n] |= before[n]
        for successor in command.successors:
            before[successor] |= after[n]
        for follower in command.followers:
            before[follower] |= before[n]
            after[follower] |= after[n]
    return before
