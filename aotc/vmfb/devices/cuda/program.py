"""Execution of command buffers on one GPU: memory of the pointer table's slots, and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from ctypes import c_void_p
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np

from aotc.vmfb.abi import COPY, Case, Command, Graph, Node, Place, WhileNode, operand_value
from aotc.vmfb.commands import all_commands, all_nodes
from aotc.vmfb.devices.cuda.commands import (
    CollectiveCommand,
    CopyCommand,
    GpuCommand,
    LaunchCommand,
    SignalCommand,
)
from aotc.vmfb.devices.cuda.driver import Gpu
from aotc.vmfb.devices.cuda.launch import launch_of
from aotc.vmfb.devices.cuda.libcuda.graphs import GraphMaker, Recording
from aotc.vmfb.devices.cuda.libcuda.library import driver_failure
from aotc.vmfb.devices.cuda.libcuda.recording import GraphRecorder, is_recorded
from aotc.vmfb.devices.cuda.loaded_kernels import LoadedGpu
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.host.interruption import Watch, raise_if_submission_stopped
from aotc.vmfb.host.release import Release
from aotc.vmfb.memory.pointers import PointerTable

Step: TypeAlias = Callable[[], None]


class CudaMemory:
    """Allocates the GPU memory behind slots of a pointer table; freed with the last reference to this object.

    Parameters
    ----------
    executable : LoadedGpu
    slots : array of int
        The pointer table, which receives the addresses.
    """

    def __init__(self, executable: LoadedGpu, slots: PointerTable) -> None:
        self._executable = executable
        self._slots = slots
        self._held: dict[int, tuple[int, int]] = {}  # address and size by slot
        self._release = Release(_free_slots, executable, self._held)

    def allocate_slot(self, slot: int, size: int) -> None:
        """Allocate ``size`` bytes for a slot and write the address to the pointer table.

        The slot's memory is reused if it already has this size.
        """
        if slot not in self._held or self._held[slot][1] != size:
            self._free_slot(slot)
            self._held[slot] = self._executable.gpu.allocate(size), size
            self._executable.usage.add_bytes(size)
        self._slots[slot] = self._held[slot][0]

    def allocated_bytes(self) -> int:
        """Return the number of allocated bytes of all slots."""
        return sum(size for _, size in self._held.values())

    def _free_slot(self, slot: int) -> None:
        if slot in self._held:
            address, size = self._held.pop(slot)
            self._executable.gpu.free([address])
            self._executable.usage.add_bytes(-size)

    def grow_slot(self, slot: int, size: int) -> None:
        """Allocate new memory of ``size`` bytes for a slot and copy the old content."""
        old, held = self._held.pop(slot, (0, 0))
        gpu = self._executable.gpu
        self.allocate_slot(slot, size)
        if old:
            gpu.copy(self._slots[slot], old, min(held, size))
            gpu.wait()
            gpu.free([old])
            self._executable.usage.add_bytes(-held)

    def release(self) -> None:
        """Free the memory of all slots."""
        _free_slots(self._executable, self._held)


def _free_slots(executable: LoadedGpu, blocks: dict[int, tuple[int, int]]) -> None:
    """Free the memory of all slots, and subtract it from the bytes in use."""
    rows = [blocks.pop(slot) for slot in list(blocks)]
    executable.gpu.free([address for address, _ in rows])
    executable.usage.add_bytes(-sum(size for _, size in rows))


class Recordings:
    """Owner of recorded graphs and events of a GPU; they are destroyed with the last reference to this object."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.graphs: list[Recording] = []
        self._events: list[c_void_p] = []
        self._release = Release(_release_recordings, gpu, self.graphs, self._events)

    def create_event(self) -> c_void_p:
        """Create a CUDA event that lives as long as this object."""
        self._events.append(self._gpu.take_event())
        return self._events[-1]


def _release_recordings(gpu: Gpu, graphs: list[Recording], events: list[c_void_p]) -> None:
    gpu.free((), graphs)
    gpu.return_events(events)


class CudaProgram:
    """A command buffer with its parameters and addresses filled in.

    The whole command buffer, with its loops and branches, is recorded as one graph, which ``recordings`` owns. The host
    runs the loops and branches that CUDA graphs cannot contain, and reads their conditions. These are all that contain
    collectives, and with older drivers, which lack conditional nodes, all others too. The commands between them are
    recorded. ``record=False`` launches commands directly, for addresses that are used only once. A recorded graph can
    be retargeted to other addresses. A copy to slot ``marks`` is a completion mark of a result that can be read before
    the call ends. Slots below ``first_own_slot`` are arguments and results.

    Attributes
    ----------
    graphs : list of Recording
        The recorded graph, if it is the whole program and has no loops; else empty.
    fixed : set of int
        Slots whose addresses cannot be changed in recorded graphs, because loops, branches or conditions use them.
    """

    def __init__(
        self,
        executable: LoadedGpu,
        slots: PointerTable,
        nodes: Sequence[Node],
        parameters: Sequence[int],
        recordings: Recordings,
        record: bool = True,
        marks: int = -1,
        first_own_slot: int = 0,
    ) -> None:
        self._executable, self._slots, self._parameters = executable, slots, parameters
        self._recordings, self._record, self._marks = recordings, record, marks
        self._first_own_slot = first_own_slot
        self._flag = np.zeros(8, np.uint8)
        # By slot: positions of addresses in node parameters, each with its byte offset from the slot's address, and
        # commands.
        self._by_slot: dict[int, list[tuple[Any, int, int, GpuCommand]]] = {}
        self.fixed: set[int] = set()
        self.graphs: list[Recording] = []
        self._steps = self._build_steps(nodes)
        whole = record and all(map(self._is_recorded, nodes))
        if whole and not _has_loops(nodes):
            self.graphs = recordings.graphs[-1:]

    def run(self) -> None:
        """Launch the whole command buffer on the stream; wait where the host must read a condition."""
        for step in self._steps:
            step()

    def retarget_slots(self, slots: Iterable[int]) -> None:
        """Retarget the recorded graphs to the current addresses of these slots."""
        touched: dict[GpuCommand, None] = {}
        for slot in slots:
            begin = self._slots[slot]
            for cells, number, offset, command in self._by_slot.get(slot, ()):
                cells[number] = begin + offset
                touched[command] = None
        for command in touched:
            status = (command.change or command.node_setter())()
            if status:
                raise driver_failure("a change of a graph", status)

    def _value(self, operand: int) -> int:
        return operand_value(operand, self._parameters)

    def _address(self, place: Place) -> int:
        slot, offset = place
        return self._slots[slot] + self._value(offset)

    def _is_recorded(self, node: Node) -> bool:
        executable = self._executable
        return self._record and is_recorded(node, executable.gpu, executable.collectives, self._first_own_slot)

    def _build_steps(self, nodes: Sequence[Node]) -> list[Step]:
        steps: list[Step] = []
        for recorded, found in groupby(nodes, self._is_recorded):
            group = list(found)
            steps += [self._record_graph_step(group)] if recorded else map(self._step_without_recording, group)
        return steps

    def _step_without_recording(self, node: Node) -> Step:
        """Return a function that runs one node without a recording, at the current addresses."""
        places = [p for c in all_commands([node]) for p in c.places] if isinstance(node, Graph) else [node.place]
        self.fixed.update(slot for slot, _ in places)
        match node:
            case Graph():
                return self._step_launching_graph(node)
            case WhileNode():
                return self._loop_step(node)
            case Case():
                return self._branch_step(node)

    def _step_launching_graph(self, graph: Graph) -> Step:
        """Return a function that launches a graph's commands one by one, in an order that respects its edges."""
        gpu = self._executable.gpu
        commands = [work for command in graph.leaves if (work := self._gpu_command(command)) is not None]

        def run_all() -> None:
            for command in commands:  # it owns the memory that the arguments point to
                method, arguments = command.method_call
                getattr(gpu, method)(*arguments)

        return run_all

    def _record_graph_step(self, nodes: Sequence[Node]) -> Step:
        """Record ``nodes`` as one CUDA graph, and return a function that launches the graph."""
        gpu = self._executable.gpu
        graph = gpu.new_graph()
        rows: list[tuple[Command, GpuCommand, int]] = []

        exchanges: list[GpuCommand] = []

        def added(command: Command, work: GpuCommand, node: int, maker: GraphMaker) -> None:
            """Store the graph node of a command for each slot that it accesses.

            Slots that inner graphs access are added to ``fixed``.
            """
            if isinstance(work, CollectiveCommand):
                exchanges.append(work)
            if maker is graph and work.cells:
                rows.append((command, work, node))
            elif work.cells or isinstance(work, CollectiveCommand):
                self.fixed.update(slot for slot, _ in command.places)

        try:
            GraphRecorder(self._gpu_command, self._address, added).add_nodes(graph, nodes)
            recording = gpu.instantiate_graph(graph)
        except BaseException:
            gpu.destroy_graph(graph)
            raise
        self._recordings.graphs.append(recording)
        if exchanges:
            gpu.register_collective_graph(recording)
        self.fixed.update(node.place[0] for node in all_nodes(nodes) if not isinstance(node, Graph))
        for command, work, node in rows:
            work.set_graph_node(recording, node)
            for cell, (slot, offset) in zip(work.cells, command.places, strict=True):
                self._by_slot.setdefault(slot, []).append((*cell, self._value(offset), work))
        loops = _has_loops(nodes)

        def run() -> None:
            if loops:
                gpu.expect_loops()
            gpu.run_graph(recording)

        return run

    def _gpu_command(self, command: Command) -> GpuCommand | None:
        """Return the GPU command of a dispatch or copy; None if it has no items or bytes."""
        addresses = [self._address(place) for place in command.places]
        dims = [self._value(word) for word in command.dims]
        if command.kind == COPY and command.places[1][0] == self._marks:
            return SignalCommand(self._executable, addresses[1])
        if command.kind == COPY:
            return CopyCommand(self._executable, addresses, dims[0]) if dims[0] else None
        if (collective := self._executable.collectives.get(command.kernel)) is not None:
            return CollectiveCommand(self._executable, collective, addresses)
        kernel, items = self._executable.kernels[command.kernel], self._value(command.items)
        shape = launch_of(self._executable.where, kernel, dims, items, self._executable.gpu.multiprocessors)
        if shape.is_empty:
            return None
        return LaunchCommand(self._executable, command.kernel, addresses, shape, [*dims, items])

    def _scalar_reader(self, place: Place, dtype: str) -> Callable[[], int]:
        """Return a function that waits for the stream and reads the integer at ``place``."""
        gpu, found = self._executable.gpu, self._flag.view(to_numpy(dtype))  # not self: self references the steps
        to, source = found.ctypes.data, self._address(place)

        def read() -> int:
            gpu.download(to, source, found.itemsize)
            gpu.wait()
            return int(found[0])

        return read

    def _loop_step(self, node: WhileNode) -> Step:
        condition, body = self._build_steps(node.condition), self._build_steps(node.body)
        return loop_step_on_host(condition, self._scalar_reader(node.place, "u8"), body)

    def _branch_step(self, node: Case) -> Step:
        branches = [self._build_steps(branch) for branch in node.branches]
        return branch_step_on_host(self._scalar_reader(node.place, "i32"), branches)


def loop_step_on_host(condition: Sequence[Step], continue_while: Callable[[], int], body: Sequence[Step]) -> Step:
    """Return a function that runs a loop whose condition the host reads.

    It checks for cancellation in each iteration.
    """

    def run() -> None:
        """Run the condition, and as long as it holds, the body and the condition again."""
        watch = Watch()
        while True:
            for step in condition:
                step()
            more = continue_while()
            watch.raise_pending_exception()
            if not more:
                return
            for step in body:
                step()

    return run


def branch_step_on_host(chosen: Callable[[], int], branches: Sequence[Sequence[Step]]) -> Step:
    """Return a function that runs the branch numbered ``chosen()``, the last one if the number is out of range."""

    def run() -> None:
        number = chosen()
        raise_if_submission_stopped()
        for step in branches[number if 0 <= number < len(branches) else -1]:
            step()

    return run


def _has_loops(nodes: Sequence[Node]) -> bool:
    return any(isinstance(node, WhileNode) for node in all_nodes(nodes))
