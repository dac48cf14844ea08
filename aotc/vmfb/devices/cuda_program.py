"""Command buffers on a GPU: the memory of a plan, and the CUDA graphs that run over it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias
from weakref import finalize

import numpy as np

from aotc.vmfb.abi import COPY, Case, Command, Graph, Node, Place, Slots, WhileNode, value_of
from aotc.vmfb.devices.driver import Gpu
from aotc.vmfb.errors import VmError
from aotc.vmfb.limits import MAX_BLOCKS

Step: TypeAlias = Callable[[], None]


class Loaded(Protocol):
    """A variant on a GPU: what memory and programs need of it.

    Attributes
    ----------
    gpu : Gpu
    kernels : list of dict
        Their entries in the manifest.
    functions : list
        What the driver launches, one for each kernel.
    constants : int
        Their address.
    bytes : int
        How much memory is in use.
    where : str
        The bundle, for messages.
    """

    gpu: Gpu
    kernels: list[dict[str, Any]]
    functions: list[Any]
    constants: int
    bytes: int
    most_bytes: int
    where: str


class CudaMemory:
    """The pointer table of a call: addresses on the GPU, and the graphs that were made for them.

    It goes back with the last reference to it.
    """

    def __init__(self, executable: Loaded, layout: Slots) -> None:
        self._executable = executable
        self.slots = [0] * layout.count
        self.slots[layout.constants] = executable.constants
        self.sizes = [0] * layout.constants
        self.ready = False
        self.graphs: list[Any] = []
        finalize(self, _give_back, executable, self.slots, self.sizes, self.graphs).atexit = False

    def reserve(self, sizes: Sequence[int]) -> None:
        """Take memory for all slots but the constants; what there was is given back."""
        self.release()
        for slot, size in enumerate(sizes):
            self.take(slot, size)

    def take(self, slot: int, size: int) -> None:
        """Take memory for one slot; what it had is given back."""
        if self.slots[slot]:
            self._executable.gpu.free([self.slots[slot]])
            self._executable.bytes -= self.sizes[slot]
            self.slots[slot] = 0
        self.slots[slot] = self._executable.gpu.allocate(size)
        self.sizes[slot] = size
        self._executable.bytes += size
        self._executable.most_bytes = max(self._executable.most_bytes, self._executable.bytes)

    def grow(self, slot: int, size: int) -> None:
        """Take other memory for a slot, which keeps what it holds."""
        old, held = self.slots[slot], self.sizes[slot]
        gpu = self._executable.gpu
        self.slots[slot] = 0
        self.take(slot, size)
        if old:
            gpu.copy(self.slots[slot], old, min(held, size))
            gpu.wait()
            gpu.free([old])
            self._executable.bytes -= held

    def release(self) -> None:
        """Give everything back."""
        self.ready = False
        _give_back(self._executable, self.slots, self.sizes, self.graphs)


def _give_back(executable: Loaded, slots: list[int], sizes: list[int], graphs: list[Any]) -> None:
    """Give the memory of all slots but the constants back, and the graphs over it."""
    taken = [n for n in range(len(sizes)) if slots[n]]
    size = sum(sizes[n] for n in taken)
    executable.gpu.free([slots[n] for n in taken], graphs)
    executable.bytes -= size
    graphs.clear()
    for n in taken:
        slots[n] = 0


class CudaProgram:
    """A command buffer with its parameters and addresses put in.

    Graphs are recorded once; ``record=False`` runs their commands directly, for a
    call whose addresses are used only once.
    """

    def __init__(
        self,
        executable: Loaded,
        memory: CudaMemory,
        nodes: Sequence[Node],
        parameters: Sequence[int],
        record: bool = True,
    ) -> None:
        self._executable, self._memory, self._parameters, self._record = executable, memory, parameters, record
        self._keep: list[Any] = []
        self._flag = np.zeros(8, np.uint8)
        self._steps = self._steps_of(nodes)

    def run(self) -> None:
        """Put the whole command buffer on the stream; waits where the host must read a predicate."""
        for step in self._steps:
            step()

    def _value(self, operand: int) -> int:
        return value_of(operand, self._parameters)

    def _address(self, place: Place) -> int:
        slot, offset = place
        return self._memory.slots[slot] + self._value(offset)

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
        commands = [self._command(command) for command in graph.commands]

        def run_all() -> None:
            for command in commands:
                command()

        if not self._record:
            return run_all
        gpu.begin_capture()
        try:
            run_all()
        finally:
            recording = gpu.end_capture()
        self._memory.graphs.append(recording)
        return lambda: gpu.run_graph(recording)

    def _command(self, command: Command) -> Step:
        gpu = self._executable.gpu
        pointers = [self._address(place) for place in command.places]
        dims = [self._value(word) for word in command.dims]
        if command.kind == COPY:
            return lambda: gpu.copy(pointers[1], pointers[0], dims[0])
        kernel, function = self._executable.kernels[command.kernel], self._executable.functions[command.kernel]
        items = self._value(command.items)
        blocks, threads = -(-items // kernel["items"]), kernel["threads"]
        if blocks > MAX_BLOCKS:
            raise VmError(self._executable.where, f"kernel {kernel['name']!r} has too large a grid", blocks, MAX_BLOCKS)
        values = [*pointers, *dims, items]
        arguments = (ctypes.c_int64 * len(values))(*values)
        start = ctypes.addressof(arguments)
        table = (ctypes.c_void_p * len(values))(*[start + 8 * n for n in range(len(values))])
        self._keep += [arguments, table]
        return (lambda: gpu.launch(function, blocks, threads, table)) if blocks else (lambda: None)

    def _read(self, place: Place, size: int) -> Step:
        """Return what brings a scalar to ``_flag``."""
        gpu, to = self._executable.gpu, self._flag.ctypes.data
        source = self._address(place)

        def read() -> None:
            gpu.download(to, source, size)
            gpu.wait()

        return read

    def _while(self, node: WhileNode) -> Step:
        condition, body = self._steps_of(node.condition), self._steps_of(node.body)
        read, flag = self._read(node.place, 1), self._flag  # not this object, which holds the steps

        def run() -> None:
            while True:
                for step in condition:
                    step()
                read()
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
            number = int(number_read[0])
            for step in branches[number if 0 <= number < len(branches) else -1]:
                step()

        return run
