"""Command buffers on one GPU: the memory of a plan, and the CUDA graphs that run over it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias
from weakref import finalize

import numpy as np

from aotc.vmfb.abi import COPY, Case, Command, Graph, Node, Place, WhileNode, value_of
from aotc.vmfb.devices.driver import Gpu
from aotc.vmfb.devices.gpu.commands import CopyCommand, GpuCommand, LaunchCommand
from aotc.vmfb.devices.launch import launch_of
from aotc.vmfb.devices.loaded_gpu import LoadedGpu
from aotc.vmfb.limits import STEPS_AHEAD
from aotc.vmfb.process.interruption import Watch, end_if_stopped, is_submitted

Step: TypeAlias = Callable[[], None]


class CudaMemory:
    """What the slots of a pointer table have of a GPU's memory.

    It goes back with the last reference to it.

    Parameters
    ----------
    executable : LoadedGpu
    slots : array of int
        The pointer table: the addresses of what is taken are put there.
    """

    def __init__(self, executable: LoadedGpu, slots: Any) -> None:
        self._executable = executable
        self._slots = slots
        self._held: dict[int, tuple[int, int]] = {}  # address and size by slot
        finalize(self, _give_back, executable, self._held).atexit = False

    def take(self, slot: int, size: int) -> None:
        """Put the address of memory for a slot in the table; what it had is given back if it is of another size."""
        if slot not in self._held or self._held[slot][1] != size:
            self._drop(slot)
            self._held[slot] = self._executable.gpu.allocate(size), size
            self._executable.usage.count(size)
        self._slots[slot] = self._held[slot][0]

    def held_bytes(self) -> int:
        """Return how much it has."""
        return sum(size for _, size in self._held.values())

    def _drop(self, slot: int) -> None:
        if slot in self._held:
            address, size = self._held.pop(slot)
            self._executable.gpu.free([address])
            self._executable.usage.count(-size)

    def grow(self, slot: int, size: int) -> None:
        """Take other memory for a slot, which keeps what it holds."""
        old, held = self._held.pop(slot, (0, 0))
        gpu = self._executable.gpu
        self.take(slot, size)
        if old:
            gpu.copy(self._slots[slot], old, min(held, size))
            gpu.wait()
            gpu.free([old])
            self._executable.usage.count(-held)

    def release(self) -> None:
        """Give everything back."""
        _give_back(self._executable, self._held)


def _give_back(executable: LoadedGpu, held: dict[int, tuple[int, int]]) -> None:
    """Give the memory of all slots back."""
    rows = [held.pop(slot) for slot in list(held)]
    executable.gpu.free([address for address, _ in rows])
    executable.usage.count(-sum(size for _, size in rows))


class Recordings:
    """Graphs that were recorded on a GPU, and events; they go back with the last reference to this."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.graphs: list[Any] = []
        self._events: list[Any] = []
        finalize(self, _forget, gpu, self.graphs, self._events).atexit = False

    def event(self) -> Any:
        """Return a new event."""
        self._events.append(self._gpu.take_event())
        return self._events[-1]


def _forget(gpu: Gpu, graphs: list[Any], events: list[Any]) -> None:
    gpu.free((), graphs)
    gpu.give_events(events)


class CudaProgram:
    """A command buffer with its parameters and addresses put in.

    Graphs are recorded once, and belong to ``recordings``; ``record=False`` runs their commands directly, for a call
    whose addresses are used only once. Recorded ones can be moved to other addresses.

    Attributes
    ----------
    graphs : list of Recording
        What it runs, one after the other, if it is nothing but recorded graphs; else empty.
    """

    def __init__(
        self,
        executable: LoadedGpu,
        slots: Any,
        nodes: Sequence[Node],
        parameters: Sequence[int],
        recordings: Recordings,
        record: bool = True,
    ) -> None:
        self._executable, self._slots, self._parameters = executable, slots, parameters
        self._recordings, self._record = recordings, record
        # By slot: the recorded commands that name it, as which of their arrays, and how many bytes behind its begin.
        self._named: dict[int, list[tuple[GpuCommand, int, int]]] = {}
        self._flag = np.zeros(8, np.uint8)
        self._steps = self._steps_of(nodes)
        plain = record and all(isinstance(node, Graph) for node in nodes)
        self.graphs: list[Any] = list(recordings.graphs[-len(nodes) :]) if plain and nodes else []

    def run(self) -> None:
        """Put the whole command buffer on the stream; waits where the host must read a predicate.

        Of a submission, which may be cancelled, few graphs are asked for ahead.
        """
        if len(self._steps) > 1 and is_submitted():
            self._run_in_turn()
            return
        for step in self._steps:
            step()

    def _run_in_turn(self) -> None:
        """Ask for a step when the one before the last is done, unless the call is to end."""
        gpu = self._executable.gpu
        events = [gpu.take_event() for _ in range(STEPS_AHEAD)]
        try:
            for number, step in enumerate(self._steps):
                event = events[number % STEPS_AHEAD]
                if number >= STEPS_AHEAD:
                    gpu.finish(event)
                end_if_stopped()
                step()
                gpu.record(event)
        finally:
            gpu.give_events(events)

    def move(self, slots: Iterable[int]) -> None:
        """Put the addresses that these slots have now into the recorded graphs."""
        touched: dict[GpuCommand, None] = {}
        for slot in slots:
            begin = self._slots[slot]
            for command, number, offset in self._named.get(slot, ()):
                command.put(number, begin + offset)
                touched[command] = None
        for command in touched:
            command.update()

    def _value(self, operand: int) -> int:
        return value_of(operand, self._parameters)

    def _steps_of(self, nodes: Sequence[Node]) -> list[Step]:
        steps: list[Step] = []
        for node in nodes:
            match node:
                case Graph():
                    steps.append(self._graph(node))
                case WhileNode():
                    steps.append(self._while(node))
                case Case():
                    steps.append(self._case(node))
        return steps

    def _graph(self, graph: Graph) -> Step:
        """Return what runs a graph; its commands are in an order that respects the edges."""
        gpu = self._executable.gpu
        rows = [(command, leaf) for leaf in graph.leaves if (command := self._command(leaf)) is not None]

        def run_all() -> None:
            for command, _ in rows:
                command.run()

        if not self._record:
            return run_all
        nodes = []
        gpu.begin_capture()
        try:
            for command, _ in rows:
                command.run()
                nodes.append(gpu.last_node())
        finally:
            recording = gpu.end_capture()
        self._recordings.graphs.append(recording)
        for (command, leaf), node in zip(rows, nodes):
            command.recorded = recording, node
            for number, (slot, offset) in enumerate(leaf.places):
                self._named.setdefault(slot, []).append((command, number, self._value(offset)))
        return lambda: gpu.run_graph(recording)

    def _command(self, command: Command) -> GpuCommand | None:
        """Return what runs a command, or None if it does nothing."""
        addresses = [self._slots[slot] + self._value(offset) for slot, offset in command.places]
        dims = [self._value(word) for word in command.dims]
        if command.kind == COPY:
            return CopyCommand(self._executable, addresses, dims[0]) if dims[0] else None
        kernel = self._executable.kernels[command.kernel]
        items = self._value(command.items)
        gpu, where = self._executable.gpu, self._executable.where
        shape = launch_of(where, kernel, dims, items, gpu.multiprocessors)
        if shape.is_empty:
            return None
        return LaunchCommand(self._executable, command.kernel, addresses, shape, [*dims, items])

    def _read(self, place: Place, size: int) -> Step:
        """Return what brings a scalar to ``_flag``."""
        gpu, to = self._executable.gpu, self._flag.ctypes.data
        slots, slot, offset = self._slots, place[0], self._value(place[1])

        def read() -> None:
            gpu.download(to, slots[slot] + offset, size)
            gpu.wait()

        return read

    def _while(self, node: WhileNode) -> Step:
        condition, body = self._steps_of(node.condition), self._steps_of(node.body)
        read, flag = self._read(node.place, 1), self._flag  # not this object, which holds the steps

        def run() -> None:
            watch = Watch()
            while True:
                for step in condition:
                    step()
                read()
                watch.look()
                if not flag[0]:
                    return
                for step in body:
                    step()

        return run

    def _case(self, node: Case) -> Step:
        branches = [self._steps_of(branch) for branch in node.branches]
        read, number_read = self._read(node.place, 4), self._flag.view(np.int32)

        def run() -> None:
            read()
            end_if_stopped()
            number = int(number_read[0])
            for step in branches[number if 0 <= number < len(branches) else -1]:
                step()

        return run
