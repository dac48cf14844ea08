"""Early results: results that can be read before their call ends.

The command buffer is copied with an additional command for each result: after the last command that writes the result,
a *mark* copies a word to a table that the host polls. The graph's edges order the mark like any command, so no other
synchronisation is needed. Results are read-only until the call ends, because its other commands may read them too.

A GPU stores its marks in page-locked memory (:mod:`aotc.vmfb.devices.mixed.early_results`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from aotc.vmfb.abi import COPY, Command, Control, Graph, Node, TileEdge, constant_operand
from aotc.vmfb.commands import all_commands

Marks: TypeAlias = "ctypes.Array[ctypes.c_int64]"

MARK_BYTES = ctypes.sizeof(ctypes.c_int64)


class EarlyResults:
    """Results of a running call that can be read as soon as each is complete.

    Attributes
    ----------
    stage : int
        Number of completed submissions of the call's plan whose assertions have all been checked.
    stays : sequence of bool
        For each result, True if the caller gets it on the GPU that has computed it.
    """

    __slots__ = ("_arrays", "_fetch", "_is_stopped", "_marks", "_needed", "_ready", "stage", "stays")

    def __init__(self) -> None:
        self.stage = 0
        self.stays: Sequence[bool] = ()
        self._fetch: Callable[[int], None] | None = None
        self._arrays: Sequence[Any] = ()
        self._needed: Sequence[int] = ()
        self._marks: Sequence[int] | Marks = ()
        self._is_stopped: Callable[[], bool] = bool
        self._ready: frozenset[int] | None = None  # set when the call fails or is stopped: final

    def begin(
        self, arrays: Sequence[Any], marks: Marks, needed: Sequence[int], is_stopped: Callable[[], bool],
        fetch: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """Register the arrays of the results, before the call runs.

        Parameters
        ----------
        arrays : sequence of array
        marks : sequence of int
            A table of :func:`make_mark_table`: nonzero for each result whose commands have ended.
        needed : sequence of int
            For each result the minimum ``stage`` at which it can be read.
        is_stopped : callable
            Returns True if commands may have ended without completing their work.
        fetch : callable, optional
            Copies a result that is ready from a GPU to its array, if it must be copied.
        """
        self._marks, self._needed, self._is_stopped, self._fetch = marks, needed, is_stopped, fetch
        self._arrays = arrays  # last: another thread checks this field first

    def is_ready(self, number: int) -> bool:
        """Return True if result ``number`` is complete and can be read."""
        ready = self._ready
        return self._is_marked(number) if ready is None else number in ready

    def _is_marked(self, number: int) -> bool:
        if not self._arrays or not self._marks[1 + number] or self.stage < self._needed[number]:
            return False
        return not self._is_stopped()  # tested after the mark, which stopped work may have set

    def freeze(self) -> None:
        """Make no further results ready, because the call has failed or is being stopped."""
        if self._ready is None:
            self._ready = frozenset(n for n in range(len(self._arrays)) if self._is_marked(n))

    def result(self, number: int) -> Any:
        """Return result ``number``, which is ready, as a read-only array."""
        if self._fetch is not None:
            self._fetch(number)
        found = self._arrays[number]
        if not isinstance(found, np.ndarray):
            found = found.early(is_running=self._ready is None)
            if self.stays[number]:
                return found
            found = found.numpy()
        view = found.view()
        view.flags.writeable = False
        return view


def add_result_marks(
    nodes: Sequence[Node], slots: Mapping[int, int], written: Callable[[Command], Iterable[int]], table: int,
    states: int, shares: bool,
) -> tuple[list[Node], int]:  # fmt: skip
    """Add commands to a command buffer that mark results as complete; return its nodes, and its number of state cells.

    Parameters
    ----------
    nodes : sequence of Node
    slots : dict of int to int
        The slot of each result to mark. At least one command writes to it.
    written : callable
        Returns the slots that a command writes.
    table : int
        The slot of the table: the word 1, then a mark for each result.
    states : int
        Number of cells that ``nodes`` need.
    shares : bool
        Run every graph on several threads, because a Python function in it may take any time.
    """
    marked: list[Node] = []
    groups: dict[int, dict[int, int]] = {}
    for number, slot in slots.items():
        last = max(n for n, node in enumerate(nodes) if _node_writes_slot(node, slot, written))
        groups.setdefault(last, {})[number] = slot
    for n, node in enumerate(nodes):
        own = groups.get(n, {})
        if not own:
            marked.append(node)
        elif isinstance(node, Graph) and len(node.commands) > 1:
            made = _marked_graph(node, own, written, table, states)
            made.serial = made.serial and not shares
            marked.append(made)
            states += made.cells
        else:
            after = Graph([_marking_command(number, table, 0) for number in own], states, serial=True)
            marked += [node, after]
            states += after.cells
    return marked, states


def _node_writes_slot(node: Node, slot: int, written: Callable[[Command], Iterable[int]]) -> bool:
    return any(slot in written(command) for command in all_commands([node]))


def _command_writes_slot(command: Command | Control, slot: int, written: Callable[[Command], Iterable[int]]) -> bool:
    inside = [command] if isinstance(command, Command) else all_commands(command.nodes)
    return any(slot in written(c) for c in inside)


def _marking_command(number: int, table: int, predecessors: int) -> Command:
    one = constant_operand(1)
    places = [(table, constant_operand(0)), (table, constant_operand(MARK_BYTES * (1 + number)))]
    return Command(COPY, 0, one, one, predecessors, (), places, [constant_operand(MARK_BYTES)])


def _marked_graph(
    graph: Graph, slots: dict[int, int], written: Callable[[Command], Iterable[int]], table: int, state: int
) -> Graph:
    """Add to a graph a marking command for each result, after the last writers of the result's slot.

    A mark waits for all writers of its slot. Inserting commands renumbers the others.
    """
    writers: dict[int, list[int]] = {}
    for number, slot in slots.items():
        writers[number] = [
            n for n, command in enumerate(graph.commands) if _command_writes_slot(command, slot, written)
        ]
    behind: dict[int, list[int]] = {}
    for number, found in writers.items():
        behind.setdefault(found[-1], []).append(number)
    order: list[tuple[int, int]] = []  # a command and -1, or -1 and the result to mark
    for n in range(len(graph.commands)):
        order += [(n, -1), *((-1, number) for number in behind.get(n, ()))]
    place = {n: at for at, (n, _) in enumerate(order) if n >= 0}
    more: dict[int, list[int]] = {}
    for at, (_, number) in enumerate(order):
        for n in writers.get(number, ()):
            more.setdefault(n, []).append(at)
    added = len(order) - len(graph.commands)
    commands = [
        _renumbered_command(graph.commands[n], place, more.get(n, []), added) if n >= 0
        else _marking_command(number, table, len(writers[number]))
        for n, number in order
    ]  # fmt: skip
    return Graph(commands, state, graph.serial)


def _renumbered_command(
    command: Command | Control, place: dict[int, int], more: Sequence[int], added: int
) -> Command | Control:
    """Return a command with renumbered successors and the additional successors ``more``."""
    successors = [*(place[n] for n in command.successors), *more]
    if isinstance(command, Control):
        return Control(command.cell + added, command.predecessors, successors, command.nodes, command.at)
    tiles = [TileEdge(place[t.producer], t.times, t.over, t.plus) for t in command.tiles]
    followers = [place[n] for n in command.followers]
    return Command(
        command.kind, command.kernel, command.items, command.grain, command.predecessors, successors, command.places,
        command.dims, command.at, tiles, followers,
    )  # fmt: skip


def make_mark_table(results: int) -> Marks:
    """Create a table of completion marks for ``results`` results, all cleared; the first word is the mark to copy."""
    return (ctypes.c_int64 * (1 + results))(1)
