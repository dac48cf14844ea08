"""Conversion of a command buffer to one CUDA graph.

Edges between commands become edges between graph nodes; loops and branches become conditional nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from aotc.vmfb.abi import DISPATCH, Case, Command, Graph, Node, Place, WhileNode
from aotc.vmfb.commands import all_commands
from aotc.vmfb.devices.cuda.commands import GpuCommand, SignalCommand
from aotc.vmfb.devices.cuda.driver import Gpu
from aotc.vmfb.devices.cuda.libcuda.graphs import GraphMaker
from aotc.vmfb.ranks.gpu_calls import GpuCall

After: TypeAlias = "tuple[int, ...]"


def is_recorded(node: Node, gpu: Gpu, collectives: Mapping[int, GpuCall], first_own_slot: int) -> bool:
    """Return True if a node of a command buffer can be part of a recorded graph.

    ``collectives`` has the collectives by kernel number. CUDA does not allow collectives in loops and branches. NCCL
    requires that all ranks record the same collectives. A collective on arguments or results, whose slots are below
    ``first_own_slot``, is never recorded, because their addresses may change on some ranks only.
    """
    found = [c for c in all_commands([node]) if c.kind == DISPATCH and c.kernel in collectives]
    if isinstance(node, Graph):
        inside = all(slot >= first_own_slot for command in found for slot, _ in command.places)
        return inside and all(collectives[command.kernel].is_recorded for command in found)
    return gpu.has_conditions() and not found


class GraphRecorder:
    """Adds the commands of a command buffer to a CUDA graph.

    Parameters
    ----------
    work : callable
        Converts a command to a :class:`GpuCommand`; None if it does nothing.
    address : callable
        Returns the address of a place.
    added : callable
        Called for each command that has become a node, with the graph that contains it.
    """

    def __init__(
        self, work: Callable[[Command], GpuCommand | None], address: Callable[[Place], int],
        added: Callable[[Command, GpuCommand, int, GraphMaker], None],
    ) -> None:  # fmt: skip
        self._work, self._address, self._added = work, address, added

    def add_nodes(self, maker: GraphMaker, nodes: Sequence[Node], after: After = ()) -> After:
        """Add nodes of a command buffer in sequence after ``after``.

        Return the graph nodes that a successor must wait for.
        """
        for node in nodes:
            match node:
                case Graph():
                    after = self._add_commands(maker, node, after)
                case WhileNode():
                    after = self._add_loop(maker, node, after)
                case Case():
                    after = self._add_branch(maker, node, after)
        return after

    def _add_commands(self, maker: GraphMaker, graph: Graph, after: After) -> After:
        """Add the commands of a graph, each after its predecessors, or one after the other if the graph is serial."""
        commands = graph.leaves
        waits: list[list[int]] = [[] for _ in commands]
        for n, command in enumerate(commands):
            for later in (n + 1,) if graph.serial else command.successors:
                if later < len(commands):
                    waits[later].append(n)
        begin = (maker.add_join(after),) if len(after) > 1 and waits.count([]) > 1 else after
        ends: list[After] = []
        for command, before in zip(commands, waits, strict=True):
            earlier = tuple(dict.fromkeys(node for n in before for node in ends[n])) if before else begin
            work = self._work(command)
            node = earlier if work is None else (self._add_command(maker, command, work, earlier),)
            ends.append(earlier if isinstance(work, SignalCommand) else node)
        waited = {n for before in waits for n in before}
        last = [end for n, end in enumerate(ends) if n not in waited]
        return tuple(dict.fromkeys(node for end in last for node in end)) if last else after

    def _add_command(self, maker: GraphMaker, command: Command, work: GpuCommand, after: After) -> int:
        method, arguments = work.method_call
        node: int = getattr(maker, method)(after, *arguments)
        self._added(command, work, node, maker)
        return node

    def _add_loop(self, maker: GraphMaker, loop: WhileNode, after: After) -> After:
        """Add a loop: decision kernel, conditional node, and in its body the nodes and the decision kernel again."""
        flag = self._address(loop.place)
        after = self.add_nodes(maker, loop.condition, after)
        handle = maker.create_condition()
        node, body = maker.add_loop((maker.add_loop_condition(after, handle, flag),), handle)
        body.add_loop_condition(self.add_nodes(body, [*loop.body, *loop.condition]), handle, flag)
        return (node,)

    def _add_branch(self, maker: GraphMaker, case: Case, after: After) -> After:
        """Add a branch: decision kernel, and a conditional node with a graph for each case."""
        handle, count = maker.create_condition(), len(case.branches)
        chosen = maker.add_branch_choice(after, handle, self._address(case.place), count)
        node, branches = maker.add_branches((chosen,), handle, count)
        for body, nodes in zip(branches, case.branches, strict=True):
            if not self.add_nodes(body, nodes):
                body.add_join(())
        return (node,)
