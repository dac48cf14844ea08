"""Execution of a call with GPU memory command by command, for traces and profiles."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aotc.vmfb.abi import COPY, Command, Graph, Node, operand_value
from aotc.vmfb.devices.cuda.loaded_kernels import LoadedGpu
from aotc.vmfb.devices.cuda.program import CudaProgram, Recordings
from aotc.vmfb.devices.cuda.streams import CallStreams
from aotc.vmfb.devices.mixed.program import CallContext, CallState

if TYPE_CHECKING:
    from aotc.vmfb.memory.pointers import PointerTable
    from aotc.vmfb.profile.trace import StepRunner


class PlacedSteps:
    """Runs single commands of a call with GPU memory, and reads and writes its memory, for a stepper.

    Parameters
    ----------
    executable : PlacedExecutable
    streams : CallStreams
        Streams of the call.
    call : CallState
    """

    def __init__(self, executable: CallContext, streams: CallStreams, call: CallState) -> None:
        self._executable, self._streams, self._call = executable, streams, call
        self.kernel_texts = executable.kernel_texts
        self.command_locs = executable.command_locs
        self.origin = executable.origin
        self.stats = executable.stats
        self.has_callbacks = executable.host is not None and executable.host.has_callbacks

    def nodes(self, number: int) -> list[Node]:
        """Return the nodes of command buffer ``number``."""
        found: list[Node] = self._executable.buffers.nodes[number]
        return found

    # ------------------------------------------------------------ memory

    def _loaded(self, slot: int) -> LoadedGpu | None:
        return self._streams.gpu_of_slot(self._call.layout, slot)

    def read(self, slot: int, address: int, size: int) -> bytes:
        """Read ``size`` bytes at an address in a slot, after the GPU's work."""
        loaded = self._loaded(slot)
        if loaded is None:
            return ctypes.string_at(address, size)
        found = ctypes.create_string_buffer(size)
        loaded.gpu.make_context_current()
        loaded.gpu.download(ctypes.addressof(found), address, size)
        loaded.gpu.wait()
        return found.raw

    def write(self, slot: int, address: int, data: bytes) -> None:
        """Write bytes at an address in a slot."""
        loaded = self._loaded(slot)
        if loaded is None:
            ctypes.memmove(address, data, len(data))
        elif data:
            held = ctypes.create_string_buffer(data, len(data))
            loaded.gpu.make_context_current()
            loaded.gpu.upload(address, ctypes.addressof(held), len(data))
            loaded.gpu.wait()

    def devices_of(self, slot: int) -> tuple[str, ...]:
        """Return the kind of the device whose kernels use a slot.

        Also the device's name if it has memory of its own.
        """
        kind = "cpu" if self._loaded(slot) is None else "cuda"
        known = self._executable.known
        name = known.rows[self._call.layout.memory_space(slot)]["device"] if known is not None else ""
        return (kind, name) if name else (kind,)

    # ------------------------------------------------------------ commands

    def call_of_command(
        self, command: Command, slots: PointerTable, parameters: Sequence[int], scratch: ctypes.c_void_p, times: int = 1
    ) -> Callable[[], None]:
        """Return a function that runs one command ``times`` times and waits for it."""
        homes = {self._call.layout.memory_space(slot) for slot, _ in command.places}
        if command.kind == COPY and len(homes) > 1:
            return lambda: self._copy_between_spaces(command, parameters)
        loaded = self._loaded(command.places[0][0])
        if loaded is None:
            host = self._executable.host
            assert host is not None
            return host.call_of_command(command, slots, parameters, scratch, times)
        gpu = loaded.gpu
        gpu.make_context_current()
        graph = Graph([command] * times, state=0, serial=True)
        program = CudaProgram(loaded, slots, [graph], parameters, Recordings(gpu), record=times != 1)

        def run() -> None:
            gpu.make_context_current()
            program.run()
            gpu.wait()

        return run

    def _copy_between_spaces(self, command: Command, parameters: Sequence[int]) -> None:
        """Copy from one memory space to another through host memory, and wait."""
        (source, begin), (target, to) = command.places
        slots, size = self._call.slots, operand_value(command.dims[0], parameters)
        data = self.read(source, slots[source] + operand_value(begin, parameters), size) if size else b""
        self.write(target, slots[target] + operand_value(to, parameters), data)


class SteppedCall:
    """Runs command buffers by a stepper, and copies the arrays that they write to the host."""

    def __init__(self, stepper: StepRunner, bring_home: Callable[[int], None]) -> None:
        self._stepper, self._bring_home = stepper, bring_home

    def submit(self, number: int, parameters: Sequence[int]) -> None:
        """Run command buffer ``number``, command by command."""
        self._stepper.submit(number, parameters)
        self._bring_home(number)
