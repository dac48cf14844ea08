"""Command buffers over several memory spaces: the device of each node, order, and synchronisation.

Consecutive nodes of one memory space become one native call on the CPU, or work on the stream of a GPU. A copy between
memory spaces is work on a stream too. A stream runs in order; work that depends on another stream waits for an *event*.
The host waits only before it accesses bytes that a copy still reads or writes.

Marks of early results (:mod:`aotc.vmfb.devices.early`) are stored by the device or host that runs the last step that
writes the result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from aotc.vmfb.abi import COPY, Case, Command, Graph, Node, Place, Slots, WhileNode, operand_value
from aotc.vmfb.commands import all_commands, all_nodes
from aotc.vmfb.devices.cuda.driver import Gpu
from aotc.vmfb.devices.cuda.libcuda.graphs import Recording
from aotc.vmfb.devices.cuda.loaded_kernels import LoadedGpu
from aotc.vmfb.devices.cuda.program import CudaProgram, Recordings, Step, branch_step_on_host, loop_step_on_host
from aotc.vmfb.devices.cuda.streams import CallStreams, StreamPool
from aotc.vmfb.devices.early import MARK_BYTES, add_result_marks
from aotc.vmfb.devices.mixed.host_part import HostPart
from aotc.vmfb.devices.mixed.spaces import Spaces, memory_space_of_node
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.errors import CallError
from aotc.vmfb.host.interruption import raise_if_submission_stopped
from aotc.vmfb.memory.arena import ArenaPool
from aotc.vmfb.memory.pointers import address_of
from aotc.vmfb.plan import Plan
from aotc.vmfb.profile.debug_texts import DebugText
from aotc.vmfb.verify.buffers import Buffers


class HostBytes(NamedTuple):
    """An access to a range of bytes of a slot in host memory; True if it writes."""

    slot: int
    begin: int
    end: int
    writes: bool

    def conflicts_with(self, other: HostBytes) -> bool:
        """Return True if two accesses must run in order: their ranges overlap, and one of them writes."""
        same = self.slot == other.slot and self.begin < other.end and other.begin < self.end
        return same and (self.writes or other.writes)


class Pending:
    """Copies on GPU streams that may still access host memory."""

    def __init__(self) -> None:
        self._copies: dict[HostBytes, tuple[Gpu, ctypes.c_void_p]] = {}

    def add(self, touch: HostBytes, gpu: Gpu, event: ctypes.c_void_p) -> None:
        """Record a copy that accesses the host memory ``touch`` until ``event`` has occurred."""
        self._copies.pop(touch, None)
        self._copies[touch] = gpu, event

    def wait_for_bytes(self, touches: Sequence[HostBytes]) -> None:
        """Wait until no pending copy conflicts with accesses to these bytes."""
        for held in [c for c in self._copies if any(c.conflicts_with(t) for t in touches)]:
            gpu, event = self._copies.pop(held)
            gpu.synchronize_event(event)

    def wait_all(self) -> None:
        """Wait until all copies are complete."""
        while self._copies:
            gpu, event = self._copies.popitem()[1]
            gpu.synchronize_event(event)

    def clear(self) -> None:
        """Drop the records of all copies, because the streams have completed their work."""
        self._copies.clear()


class CallState:
    """State that all programs of a plan share: pointer table, scratch memory, and pending copies.

    Attributes
    ----------
    layout : Slots
    slots : ctypes array of int64
        Its last entry, number ``marks``, is the address of the marks of early results.
    marks : int
    scratch : ctypes.c_void_p
        Scratch memory of the CPU's kernels.
    pending : Pending
    """

    def __init__(self, layout: Slots) -> None:
        self.layout = layout
        self.marks = layout.count
        self.slots = (ctypes.c_int64 * (layout.count + 1))()
        self.scratch = ctypes.c_void_p()
        self.pending = Pending()

    def address_of_mark(self, number: int) -> int:
        """Return the address of the completion mark of result ``number``."""
        return self.slots[self.marks] + MARK_BYTES * (1 + number)

    def mark(self, number: int) -> None:
        """Mark result ``number`` as complete, after the host has written it."""
        ctypes.c_int64.from_address(self.address_of_mark(number)).value = 1


class CallContext(Protocol):
    """Interface: the parts of a :class:`~aotc.vmfb.devices.mixed.executable.PlacedExecutable` that a call uses.

    Attributes
    ----------
    buffers : Buffers
    writes : list of frozenset of int
        For each command buffer the slots that it writes.
    pool : StreamPool
    host : HostPart or None
    known : Spaces or None
    """

    buffers: Buffers
    writes: list[frozenset[int]]
    pool: StreamPool
    host: HostPart | None
    known: Spaces | None

    @property
    def arenas(self) -> ArenaPool:
        """Return the pool from which calls allocate host memory."""

    def streams(self) -> AbstractContextManager[CallStreams]:
        """Take streams for the block."""

    def kernel_texts(self) -> list[DebugText] | None:
        """Return the debug information of each kernel, or None if the bundle has none."""

    def command_locs(self, number: int) -> dict[int, str]:
        """Return the locations of the commands of buffer ``number`` that differ from their kernel's own."""

    def origin(self) -> dict[str, str]:
        """Return the compiler version and the program digest of the bundle."""

    def stats(self) -> dict[str, Any]:
        """Return properties and counters for ``module.stats()``."""

    def out_of_memory(self, plan: Plan, own: Sequence[int], arrays: Sequence[tuple[int, str]]) -> CallError:
        """Return the error for a call that needs more memory than a GPU has; ``own`` are the GPU memory spaces."""


class PlacedProgram:
    """A command buffer with its parameters and addresses filled in.

    Parameters
    ----------
    spaces : sequence of LoadedGpu or HostPart
    call : CallState
    buffers : Buffers
    number : int
        Number of the command buffer.
    parameters : sequence of int
    record : bool
        Record CUDA graphs, for later calls with the same addresses.
    marked : dict of int to int
        Slots, by number of the result, of the results to mark as soon as they are complete, if the program writes them.
        A result in host memory that a loop over several memories writes last has no mark.

    Attributes
    ----------
    fixed : set of int
        Slots whose addresses cannot be changed in recorded graphs.
    """

    def __init__(
        self, spaces: Sequence[LoadedGpu | HostPart], call: CallState, buffers: Buffers, number: int,
        parameters: Sequence[int], record: bool = True, marked: Mapping[int, int] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._spaces, self._call, self._buffers, self._record = spaces, call, buffers, record
        self._words, self._parameters = buffers.words[number], parameters
        nodes = buffers.nodes[number]
        self._states = max((n.state + len(n.commands) for n in all_nodes(nodes) if isinstance(n, Graph)), default=0)
        self._recordings = [Recordings(space.gpu) if isinstance(space, LoadedGpu) else None for space in spaces]
        self._programs: list[CudaProgram] = []
        self._steps = self._functions_by_memory_space(nodes, marked)
        self.fixed = {slot for program in self._programs for slot in program.fixed}

    def run(self) -> None:
        """Run the steps in order: native calls on the CPU, launches on GPUs; stop if the call was cancelled."""
        for step in self._steps:
            raise_if_submission_stopped()
            step()

    def retarget_slots(self, slots: Iterable[int]) -> None:
        """Retarget recorded graphs to the current addresses of these slots; all other work reads the pointer table."""
        for program in self._programs:
            program.retarget_slots(slots)

    def graphs(self) -> list[Recording]:
        """Return the recorded graphs in order if the program consists of graphs of one GPU only, else an empty list."""
        if len(self._steps) != 1 or len(self._programs) != 1:
            return []
        return self._programs[0].graphs

    def _recordings_of(self, space: int) -> Recordings:
        found = self._recordings[space]
        assert found is not None
        return found

    def _gpu(self, space: int) -> Gpu | None:
        loaded = self._spaces[space]
        return loaded.gpu if isinstance(loaded, LoadedGpu) else None

    def _functions_by_memory_space(
        self, nodes: Sequence[Node], marked: Mapping[int, int] = MappingProxyType({})
    ) -> list[Step]:
        """Return a function for each run of consecutive nodes of one memory space, and for each node of several spaces.

        ``marked`` has slots by number of the result. The last function that writes such a slot also marks the result as
        complete.
        """
        groups: list[tuple[int, list[Node]]] = []
        for space, found in groupby(nodes, lambda node: memory_space_of_node(node, self._call.layout)):
            group = list(found)
            groups += [(space, group)] if space >= 0 else [(space, [node]) for node in group]
        last: dict[int, dict[int, int]] = {}  # by step: the results that it writes last, with slots
        for number, slot in marked.items():
            writers = [n for n, (_, group) in enumerate(groups) if self._writes(group, slot)]
            if writers:
                last.setdefault(writers[-1], {})[number] = slot
        return [self._function_of_group(space, group, last.get(n, {})) for n, (space, group) in enumerate(groups)]

    def _writes(self, nodes: Sequence[Node], slot: int) -> bool:
        return any(slot in self._outputs(command) for command in all_commands(nodes))

    def _function_of_group(self, space: int, nodes: Sequence[Node], marked: Mapping[int, int]) -> Step:
        """Return a function that runs consecutive nodes of a memory space, or one node of several (``space`` -1)."""
        if space >= 0:
            return self._function_of_one_space(space, nodes, marked)
        step = self._function_of_several_spaces(nodes[0])
        for number, slot in marked.items():
            gpu = self._gpu_that_completes(nodes[0], slot)
            step = step if gpu is None else self._step_with_mark(step, gpu, number)
        return step

    def _gpu_that_completes(self, node: Node, slot: int) -> Gpu | None:
        """Return the GPU whose stream completes ``slot`` in a node of several memory spaces.

        None if no single GPU does.
        """
        gpu = self._gpu(self._call.layout.memory_space(slot))
        if gpu is None and isinstance(node, Graph):  # a copy to the host is on the stream of the GPU that it reads
            gpu = self._gpu(self._call.layout.memory_space(node.leaves[0].places[0][0]))
        return gpu

    def _step_with_mark(self, step: Step, gpu: Gpu, number: int) -> Step:
        """Return a function that runs ``step``, then lets the GPU mark result ``number`` as complete."""
        call = self._call

        def run() -> None:
            step()
            gpu.make_context_current()
            gpu.signal(call.address_of_mark(number))

        return run

    def _outputs(self, command: Command) -> list[int]:
        inputs = 1 if command.kind == COPY else self._buffers.kernels[command.kernel].inputs
        return [slot for slot, _ in command.places[inputs:]]

    def _function_of_one_space(self, space: int, nodes: Sequence[Node], marked: Mapping[int, int]) -> Step:
        """Return a function that runs consecutive nodes of one memory space (host or a GPU)."""
        loaded, slots, parameters, marks = self._spaces[space], self._call.slots, self._parameters, self._call.marks
        if isinstance(loaded, LoadedGpu):
            loaded.gpu.make_context_current()
            if marked:
                nodes, _ = add_result_marks(nodes, marked, self._outputs, marks, 0, shares=False)
            recordings, own = self._recordings_of(space), self._call.layout.arena
            program = CudaProgram(loaded, slots, nodes, parameters, recordings, self._record, marks, own)
            self._programs.append(program)
            return _with_gpu_current(loaded.gpu, program.run)
        touches = list(self._host_accesses(nodes))
        call = loaded.call_of_nodes(self._words, nodes, self._states, slots, parameters, self._call.scratch)
        pending, mark = self._call.pending, self._call.mark

        def run() -> None:
            pending.wait_for_bytes(touches)
            call()
            for number in marked:
                mark(number)

        return run

    def _function_of_several_spaces(self, node: Node) -> Step:
        """Return a function that runs a node of several memory spaces: a copy, or a loop or branch."""
        match node:
            case Graph():
                (source, target), (size,) = node.leaves[0].places, node.leaves[0].dims
                return self._copy_between_spaces(source, target, operand_value(size, self._parameters))
            case WhileNode():
                return self._loop_step(node)
            case Case():
                return self._branch_step(node)

    # ------------------------------------------------------------ host accesses

    def _host_accesses(self, nodes: Sequence[Node]) -> Iterator[HostBytes]:
        """Yield the accesses to host memory of command buffer nodes."""
        interfaces = self._buffers.kernels
        for node in all_nodes(nodes):
            if not isinstance(node, Graph):
                yield self._host_access(node.place, 1 if isinstance(node, WhileNode) else 4, False)
                continue
            for command in node.leaves:
                dims = [operand_value(word, self._parameters) for word in command.dims]
                if command.kind == COPY:
                    sizes, inputs = [dims[0]] * 2, 1
                else:
                    interface = interfaces[command.kernel]
                    sizes, inputs = interface.evaluate_sizes(dims)[1], interface.inputs
                for n, (place, size) in enumerate(zip(command.places, sizes)):
                    yield self._host_access(place, size, n >= inputs)

    def _host_access(self, place: Place, size: int, writes: bool) -> HostBytes:
        begin = operand_value(place[1], self._parameters)
        return HostBytes(place[0], begin, begin + size, writes)

    # ------------------------------------------------------------ copies

    def _copy_between_spaces(self, source: Place, target: Place, size: int) -> Step:
        """Return a function that copies ``size`` bytes from one memory space to another."""
        slots, layout = self._call.slots, self._call.layout
        begin, end = self._host_access(source, size, False), self._host_access(target, size, True)
        giver, taker = (self._gpu(layout.memory_space(place[0])) for place in (source, target))

        def addresses() -> tuple[int, int]:
            return slots[target[0]] + end.begin, slots[source[0]] + begin.begin

        if giver is None and taker is not None:
            event = self._recordings_of(layout.memory_space(target[0])).create_event()
            return self._host_copy(taker, taker.upload, addresses, begin, event)
        if taker is None and giver is not None:
            event = self._recordings_of(layout.memory_space(source[0])).create_event()
            return self._host_copy(giver, giver.download, addresses, end, event)
        assert giver is not None
        assert taker is not None
        made = self._recordings_of(layout.memory_space(source[0])).create_event()
        moved = self._recordings_of(layout.memory_space(target[0])).create_event()

        def run() -> None:
            """Copy between two GPUs, in the order of their streams."""
            giver.make_context_current()
            if giver.may_run_loops:  # a host that waits for the taker could not stop these loops
                giver.wait()
            giver.record_event(made)
            taker.make_context_current()
            taker.wait_for_event(made)
            taker.copy_from(giver, *addresses(), size)
            taker.record_event(moved)
            giver.make_context_current()
            giver.wait_for_event(moved)  # its next work may overwrite the value

        return run

    def _host_copy(
        self, gpu: Gpu, copy: Callable[[int, int, int], None], addresses: Callable[[], tuple[int, int]],
        touch: HostBytes, event: ctypes.c_void_p,
    ) -> Step:  # fmt: skip
        """Return a function that copies between a GPU and host memory at ``touch``, and records the pending copy."""
        pending, size = self._call.pending, touch.end - touch.begin

        def run() -> None:
            pending.wait_for_bytes([touch])
            gpu.make_context_current()
            copy(*addresses(), size)
            gpu.record_event(event)
            pending.add(touch, gpu, event)

        return run

    # ------------------------------------------------------------ loops and branches

    def _scalar_reader(self, place: Place, dtype: str) -> Callable[[], int]:
        """Return a function that waits for earlier work and reads an integer in any memory space."""
        slot, offset = place[0], operand_value(place[1], self._parameters)
        return partial(read_scalar, self._spaces, self._call, slot, offset, dtype)

    def _loop_step(self, node: WhileNode) -> Step:
        condition, body = self._functions_by_memory_space(node.condition), self._functions_by_memory_space(node.body)
        return loop_step_on_host(condition, self._scalar_reader(node.place, "u8"), body)

    def _branch_step(self, node: Case) -> Step:
        branches = [self._functions_by_memory_space(branch) for branch in node.branches]
        return branch_step_on_host(self._scalar_reader(node.place, "i32"), branches)


def _with_gpu_current(gpu: Gpu, step: Step) -> Step:
    def run() -> None:
        gpu.make_context_current()
        step()

    return run


def read_scalar(spaces: Sequence[LoadedGpu | HostPart], call: CallState, slot: int, offset: int, dtype: str) -> int:
    """Read the integer at a byte offset of a slot in any memory space, after all previously launched work."""
    loaded = spaces[call.layout.memory_space(slot)]
    found = np.zeros(1, to_numpy(dtype))
    address = call.slots[slot] + offset
    if isinstance(loaded, LoadedGpu):
        loaded.gpu.make_context_current()
        loaded.gpu.download(address_of(found), address, found.nbytes)
        loaded.gpu.wait()
    else:
        call.pending.wait_for_bytes([HostBytes(slot, offset, offset + found.nbytes, False)])
        ctypes.memmove(address_of(found), address, found.nbytes)
    return int(found[0])
