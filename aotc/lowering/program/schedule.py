"""Encode steps as a command buffer: graphs of commands with dependence edges, loops, branches.

Two commands depend on each other if one writes bytes that the other accesses. Edges implied by others are dropped
(transitive reduction). The encoding is that of ``vmfb.abi``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from aotc.diagnostics import Loc
from aotc.ir.dims.algebra import Dim, Expr, sym
from aotc.ir.program.ir import (
    Branch,
    Copy,
    Launch,
    Loop,
    Step,
    Storage,
    accessed_storages_in_nested_steps,
    storages_with_offsets,
)
from aotc.lowering.cost_model.model import Costs
from aotc.lowering.program.dependences import MemoryAccesses
from aotc.lowering.program.graphs import (
    Edges,
    Run,
    command_nanoseconds,
    is_lone_control_step,
    is_serial_graph,
    split_into_graphs,
    worker_width_of_command,
)
from aotc.lowering.program.list_schedule import list_schedule_order
from aotc.lowering.program.tile_dependences import CommandWaits, TileEdges
from aotc.vmfb import abi
from aotc.vmfb.commands import encode_commands


@dataclass
class CommandBuffer:
    """Code of a command buffer, and the expressions over the function's dims that are its parameters.

    ``orders`` has, for each graph in the code's order, its commands as numbers in program order. ``iterations`` has the
    trip count of each loop, None if it is not known. ``locs`` has for each command in the code's order the number of
    its kernel and the location that it was made of; None for a copy.
    """

    code: list[int]
    states: int
    parameters: list[Dim]
    orders: list[list[int]] = field(default_factory=list)
    iterations: list[int | None] = field(default_factory=list)
    locs: list[tuple[int, Loc] | None] = field(default_factory=list)


def slot_and_offset(storage: Storage, slots: abi.Slots) -> tuple[int, Dim]:
    """Return the slot of a storage, and its byte offset there."""
    match storage.kind:
        case "argument":
            return storage.number, 0
        case "result":
            return slots.result_slot(storage.number), 0
        case "arena":
            return slots.arena_slot(storage.space), storage.offset
        case _:
            return slots.constants_slot(storage.space), storage.number


class CommandBufferEncoder:
    """Encoder of the steps of one function.

    Parameters
    ----------
    slots : Slots
        The function's pointer table.
    kernel_number : callable
        Number of a kernel in the bundle by name.
    costs : Costs
        Cost model that decides about claims, threads and order.
    sizes : mapping of str to sequence of int
        By a kernel's name, the size arguments of the merged kernel in the bundle, after its dims.
    """

    def __init__(
        self, slots: abi.Slots, kernel_number: Callable[[str], int], costs: Costs,
        sizes: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Start with an empty command buffer.

        ``kernel_number`` returns the number of a kernel by name; ``sizes`` has the size arguments of merged kernels.
        """
        self.slots, self.kernel_number, self.costs, self.sizes = slots, kernel_number, costs, sizes
        self.parameters: list[Dim] = []
        self.orders: list[list[int]] = []
        self.iterations: list[int | None] = []
        self.locs: list[tuple[int, Loc] | None] = []
        self.states = 0
        self.tiles = TileEdges(costs)

    def encode(self, steps: Sequence[Step]) -> CommandBuffer:
        """Encode ``steps`` as a command buffer; they may not contain steps of the host program."""
        code = encode_commands(self._encode_nodes(steps))
        return CommandBuffer(code, self.states, self.parameters, self.orders, self.iterations, self.locs)

    def operand_word(self, value: Dim) -> int:
        """Return the operand word for a number: a constant, or a parameter of the call."""
        if not isinstance(value, Expr):
            return abi.constant_operand(int(value))
        if value not in self.parameters:
            self.parameters.append(value)
        return abi.parameter_operand(self.parameters.index(value))

    def place(self, storage: Storage, begin: int = 0) -> abi.Place:
        """Return the slot and offset of byte ``begin`` of a storage, as the encoding has it."""
        slot, offset = slot_and_offset(storage, self.slots)
        return slot, self.operand_word(offset + begin)

    def _encode_nodes(self, steps: Sequence[Step]) -> list[abi.Node]:
        """Return the graphs, loops and branches of ``steps`` as nodes of a command buffer."""
        commands: Run = [step for step in steps if isinstance(step, Launch | Copy | Loop | Branch)]
        runs = split_into_graphs(commands, self._command_predecessors, self.costs)
        return [self._encode_control(run[0]) if is_lone_control_step(run) else self._encode_graph(run) for run in runs]

    def _encode_control(self, step: Step) -> abi.Node:
        """Return a loop or branch as a node."""
        match step:
            case Loop(predicate, cond, body, iterations):
                self.iterations.append(iterations)
                return abi.WhileNode(self._encode_nodes(cond), self._encode_nodes(body), self.place(predicate))
            case Branch(index, branches):
                return abi.Case([self._encode_nodes(branch) for branch in branches], self.place(index))
        raise TypeError(step)

    def _encode_graph(self, steps: Run) -> abi.Graph:
        """Return a graph: its commands in the order in which to start them, with dependences between them."""
        predecessors = self._command_predecessors(steps)
        times = command_nanoseconds(steps, self.costs)
        serial = is_serial_graph(steps, self.costs)
        waits = [CommandWaits(tuple(before)) for before in predecessors]
        order = list(range(len(steps)))
        if not serial:
            leaves = [step for step in steps if isinstance(step, Launch | Copy)]
            if self.costs.target.kind == "cpu" and len(leaves) == len(steps):
                waits = self.tiles.waits_of_commands(leaves, predecessors)
            order = list_schedule_order(
                [w.all_predecessors for w in waits],
                times,
                [worker_width_of_command(step, self.costs) for step in steps],
            )
        state, cell = self.states, len(steps)
        self.states += len(steps) + abi.INNER_CELLS * sum(isinstance(step, Loop | Branch) for step in steps)
        # An outer graph comes before the graphs of its loops and branches, as :func:`verify_schedule` reads them.
        self.orders.append(order)
        commands: list[abi.Command | abi.Control] = []
        for n in order:
            step, before = steps[n], len(waits[n].all_predecessors)
            if isinstance(step, Loop | Branch):
                commands.append(abi.Control(cell, before, [], [self._encode_control(step)]))
                cell += abi.INNER_CELLS
            else:
                commands.append(self._encode_command(step, before))
        _connect_commands(commands, waits, order)
        graph = abi.Graph(commands, state, serial=serial)
        self.states = max(self.states, state + graph.cells)
        return graph

    def _encode_command(self, step: Launch | Copy, predecessors: int) -> abi.Command:
        """Return the command of a step, without successors."""
        if isinstance(step, Copy):
            self.locs.append(None)
            places = [self.place(step.source), self.place(step.target)]
            one, size = abi.constant_operand(1), self.operand_word(step.size)
            return abi.Command(abi.COPY, 0, one, one, predecessors, [], places, [size])
        kernel = step.kernel
        places = [self.place(s, begin) for s, begin in storages_with_offsets(step)]
        sizes: list[Dim] = [*map(sym, kernel.dims), *self.sizes.get(kernel.name, ())]
        dims = [self.operand_word(e) for e in sizes]
        number, items = self.kernel_number(kernel.name), self.operand_word(kernel.grid)
        claim = self.operand_word(self.costs.items_per_claim(kernel))
        self.locs.append((number, step.loc))
        return abi.Command(abi.DISPATCH, number, items, claim, predecessors, [], places, dims)

    def _command_predecessors(self, steps: Run) -> Edges:
        """Return the direct predecessors of every command."""
        memory = MemoryAccesses()
        before: list[int] = []  # bit sets: the commands that are done when this one begins
        result: list[list[int]] = []
        for n, step in enumerate(steps):
            reads, writes = accessed_storages_in_nested_steps(step)
            conflicts = {p for s in reads for p in memory.read(s, n)} | {p for s in writes for p in memory.write(s, n)}
            bits = 0
            direct = []
            for p in sorted(conflicts - {n}, reverse=True):
                if not bits >> p & 1:
                    direct.append(p)
                    bits |= before[p] | 1 << p
            before.append(bits)
            result.append(direct[::-1])
        return result


def _connect_commands(
    commands: Sequence[abi.Command | abi.Control], waits: Sequence[CommandWaits], order: Sequence[int]
) -> None:
    """Set successors, followers and tile edges of ``commands`` that run in ``order``."""
    place = {n: at for at, n in enumerate(order)}
    successors: list[list[int]] = [[] for _ in commands]
    followers: list[list[int]] = [[] for _ in commands]
    for at, n in enumerate(order):
        for p in waits[n].wholes:
            successors[place[p]].append(at)
        tiles = [abi.TileEdge(place[t.producer], t.times, t.over, t.plus) for t in waits[n].tiles]
        for t in tiles:
            followers[t.producer].append(at)
        if isinstance(command := commands[at], abi.Command):
            command.tiles = tiles
    for command, some, others in zip(commands, successors, followers, strict=True):
        command.successors = some
        if isinstance(command, abi.Command):
            command.followers = others
