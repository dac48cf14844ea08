"""Verify a command buffer against its steps: it has the same commands, in a safe order.

The check is independent of ``schedule`` and ``dependences``. It compares every two commands of a graph that access a
common byte, if one of them writes it: there must be a path of edges from the first to the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from aotc.ir.dims.algebra import Dim, product, sym
from aotc.ir.limits import FINDINGS
from aotc.ir.program.ir import Branch, Copy, Launch, Loop, Step, Storage, accessed_storages, storages_with_offsets, walk
from aotc.ir.program.text import step_title
from aotc.ir.program.verify import evaluated_dim, sample_dim_values
from aotc.lowering.program.schedule import CommandBuffer, slot_and_offset
from aotc.lowering.program.tile_dependences import covers_accesses
from aotc.vmfb.abi import COPY, Case, Command, Control, Graph, Node, Slots, TileEdge, WhileNode, operand_value
from aotc.vmfb.commands import decode_commands
from aotc.vmfb.dtypes import size_of


def verify_schedule(
    buffer: CommandBuffer,
    steps: Sequence[Step],
    slots: Slots,
    kernel_number: Callable[[str], int],
    kernel_sizes: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> list[str]:
    """Return the errors of a valid command buffer, one sentence each (at most 20), or an empty list.

    Parameters
    ----------
    buffer : CommandBuffer
    steps : sequence of Step
        The steps that it encodes.
    slots, kernel_number, given
        As for :class:`~aotc.lowering.program.schedule.CommandBufferEncoder`, whose ``sizes`` are ``kernel_sizes``.
    """
    pairs: list[_Pair] = []
    try:
        _match_graphs_with_steps(decode_commands(buffer.code), steps, iter(buffer.orders), pairs)
    except ValueError as error:
        return [str(error)]
    leaves = [step for step in walk(steps) if isinstance(step, Launch | Copy)]
    places = [s for step in leaves for part in accessed_storages(step) for s in part]
    sizes = [d for s in places for d in (s.size, s.offset)]
    findings: dict[str, None] = {}
    # Symbolic sizes are verified for a sample of their values.
    for values in sample_dim_values(list(dict.fromkeys([*sizes, *buffer.parameters]))):
        check = _ScheduleCheck(
            values, [evaluated_dim(e, values) for e in buffer.parameters], slots, kernel_number, kernel_sizes
        )
        for graph, some in pairs:
            findings.update(
                dict.fromkeys(f for c, s in zip(graph, some, strict=True) for f in check.differences_from_step(c, s))
            )
            findings.update(dict.fromkeys(check.data_race_errors(graph, some)))
    return list(findings)[:FINDINGS]


Part: TypeAlias = Launch | Copy | Loop | Branch
_Pair: TypeAlias = tuple[Sequence[Command | Control], Sequence[Part]]
"""The commands of a graph and the steps that they were made from, both in program order."""


def _match_graphs_with_steps(
    nodes: Sequence[Node], steps: Sequence[Step], orders: Iterator[Sequence[int]], pairs: list[_Pair]
) -> None:
    """Match each graph of a command buffer with its steps; raise ValueError for a mismatch."""
    rest: list[Part] = [step for step in steps if isinstance(step, Launch | Copy | Loop | Branch)]
    for node in nodes:
        count = len(node.commands) if isinstance(node, Graph) else 1
        some, rest = rest[:count], rest[count:]
        if len(some) < count:
            raise ValueError(f"there are {count - len(some)} more commands than launches, copies, loops and branches")
        if isinstance(node, Graph):
            order = next(orders)
            graph = _in_program_order(node.commands, order)
            pairs.append((graph, some))
            for command, number in zip(node.commands, order, strict=True):
                if isinstance(command, Control):
                    _match_graphs_with_steps(command.nodes, [some[number]], orders, pairs)
        else:
            _match_inner_graphs(node, some[0], orders, pairs)
    if rest:
        more = f" (and {len(rest) - 1} more)" if len(rest) > 1 else ""
        raise ValueError(f"{step_title(rest[0])} has no command{more}")


def _match_inner_graphs(
    node: WhileNode | Case, step: Part, orders: Iterator[Sequence[int]], pairs: list[_Pair]
) -> None:
    """Match the graphs inside a loop or branch with the steps inside ``step``; raise ValueError for a mismatch."""
    match node, step:
        case WhileNode(), Loop(cond=cond, body=body):
            bodies = list(zip((node.condition, node.body), (cond, body)))
        case Case(), Branch(branches=branches) if len(branches) == len(node.branches):
            bodies = list(zip(node.branches, branches))
        case _:
            raise ValueError(f"{step_title(step)}: the node is a {type(node).__name__}")
    for inner, steps in bodies:
        _match_graphs_with_steps(inner, steps, orders, pairs)


def _in_program_order(graph: Sequence[Command | Control], order: Sequence[int]) -> list[Command | Control]:
    """Return the commands of a graph in program order, with successors renumbered."""
    commands: list[Command | Control] = []
    for _, c in sorted(zip(order, graph, strict=True), key=lambda pair: pair[0]):
        successors = [order[s] for s in c.successors]
        if isinstance(c, Control):
            commands.append(Control(c.cell, c.predecessors, successors, c.nodes))
        else:
            commands.append(
                Command(
                    c.kind, c.kernel, c.items, c.grain, c.predecessors, successors, c.places, c.dims,
                    tiles=[TileEdge(order[t.producer], t.times, t.over, t.plus) for t in c.tiles],
                    followers=[order[f] for f in c.followers],
                )
            )
    return commands


# Positions in the list of accesses of a command buffer. The schedule check looks for conflicts no further back than
# this, so that long graphs take linear time.
CONFLICT_WINDOW = 2048


@dataclass(frozen=True, slots=True)
class _ScheduleCheck:
    """Compare the commands of a command buffer with its steps, for given values of its parameters."""

    values: Mapping[str, int]
    parameters: Sequence[int]
    slots: Slots
    kernel_number: Callable[[str], int]
    given: Mapping[str, Sequence[int]]

    def value_of_operand(self, operand: int) -> int:
        """Return the value of an operand word."""
        return operand_value(operand, self.parameters)

    def slot_and_byte(self, s: Storage, begin: int = 0) -> tuple[int, int]:
        """Return the slot and the byte offset of byte ``begin`` of a storage."""
        slot, offset = slot_and_offset(s, self.slots)
        return slot, evaluated_dim(offset + begin, self.values)

    def differences_from_step(self, command: Command | Control, step: Part) -> Iterator[str]:
        """Yield the differences of a command from its step; contents of loops and branches are compared separately."""
        if isinstance(command, Control) or isinstance(step, Loop | Branch):
            if not isinstance(command, Control) or not isinstance(step, Loop | Branch):
                yield f"{step_title(step)}: the command is a {type(command).__name__}"
            return
        places = [self.slot_and_byte(*part) for part in storages_with_offsets(step)]
        words = [(slot, self.value_of_operand(offset)) for slot, offset in command.places]
        if words != places:
            yield f"{step_title(step)}: its places are {words}, expected {places}"
        if isinstance(step, Copy):
            numbers: tuple[int, list[Dim]] = (1, [step.size])
            same = command.kind == COPY
        else:
            named = [sym(n) for n in step.kernel.dims]
            numbers = (evaluated_dim(step.kernel.grid, self.values), [*named, *self.given.get(step.kernel.name, ())])
            same = command.kind != COPY and command.kernel == self.kernel_number(step.kernel.name)
        dims = [evaluated_dim(e, self.values) for e in numbers[1]]
        if not same:
            yield f"{step_title(step)}: the command is of kind {command.kind} and kernel {command.kernel}"
        if (
            self.value_of_operand(command.items) != numbers[0]
            or [self.value_of_operand(w) for w in command.dims] != dims
        ):
            yield f"{step_title(step)}: its grid or dims are not {numbers[0]} and {dims}"

    def data_race_errors(self, graph: Sequence[Command | Control], steps: Sequence[Part]) -> Iterator[str]:
        """Yield an error for each unordered pair of commands with a data race."""
        before = _transitive_predecessors_of_commands(graph)
        rows = [row for n, step in enumerate(steps) for row in self._accessed_byte_ranges(n, step)]
        command, slot, begin, end, writes = np.array(rows, np.int64).reshape(-1, 5).T.copy()
        for n, (current, place, first, last, written) in enumerate(rows):
            past = slice(max(0, n - CONFLICT_WINDOW), n)
            meet = (slot[past] == place) & (begin[past] < last) & (end[past] > first)
            if not written:
                meet &= writes[past] == 1
            for other in sorted({*command[past][meet].tolist()}):
                if other == current or before[current] >> other & 1:
                    continue
                tiles = [t for t in graph[current].tiles if t.producer == other]
                if not any(covers_accesses(t, steps[other], steps[current], self.values) for t in tiles):
                    late, early = step_title(steps[current]), step_title(steps[other])
                    yield f"{late} does not wait for {early}, and both touch slot {place}"

    def _accessed_byte_ranges(self, n: int, step: Part) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield, for each array of a command: command number, slot, first byte, end, and whether it is written."""
        for inner in walk([step]):
            sizes: list[Dim]
            match inner:
                case Launch(kernel=kernel):
                    sizes = [product(b.shape) * size_of(b.dtype) for b in (*kernel.inputs, *kernel.outputs)]
                case Copy(size=size):
                    sizes = [size, size]
                case _:
                    sizes = [size_of("i32") if isinstance(inner, Branch) else 1]
            read = len(accessed_storages(inner)[0])
            for k, (part, size) in enumerate(zip(storages_with_offsets(inner), sizes)):
                slot, begin = self.slot_and_byte(*part)
                yield n, slot, begin, begin + evaluated_dim(size, self.values), int(k >= read)


def _transitive_predecessors_of_commands(graph: Sequence[Command | Control]) -> list[int]:
    """Return, for each command of a graph, the bit set of its transitive predecessors.

    A command that waits for tiles of another begins while that runs, and ends after it.
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
