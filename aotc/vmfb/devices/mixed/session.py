"""Calls with GPU memory whose host program is interpreted, because its control flow depends on data."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from aotc.vmfb.abi import Slots
from aotc.vmfb.devices.cuda.loaded_kernels import LoadedGpu
from aotc.vmfb.devices.cuda.program import CudaMemory
from aotc.vmfb.devices.cuda.staging import page_lock_arena
from aotc.vmfb.devices.mixed.program import CallContext, CallState, PlacedProgram, read_scalar
from aotc.vmfb.memory.arena import Arena
from aotc.vmfb.memory.pointers import EMPTY, address_of

if TYPE_CHECKING:
    from aotc.vmfb.devices.mixed.steps import SteppedCall
    from aotc.vmfb.profile.trace import Stepper


class PlacedSession:
    """One call whose host program is interpreted, on streams of a ``PlacedExecutable`` that it uses exclusively."""

    def __init__(self, executable: CallContext, layout: Slots) -> None:
        self._executable, self._layout = executable, layout
        self._held = ExitStack()
        self._streams = self._held.enter_context(executable.streams())
        self._call = CallState(layout)
        self._memories: dict[LoadedGpu, CudaMemory] = {}
        self._arrays: dict[int, np.ndarray] = {}  # by slot: host arrays that GPUs have copies of
        self._arena: Arena | None = None
        self._arena_bytes = 0
        self._scratch: Arena | None = None
        self._pool = executable.arenas
        try:
            self._prepare_memory()
        except BaseException:
            self._held.close()
            raise

    def _prepare_memory(self) -> None:
        """Write the addresses of the constants to the pointer table, and allocate scratch memory on the host."""
        layout = self._layout
        self._pool.begin_stepwise_allocation()
        for space, loaded in enumerate(self._streams.spaces):
            slot = layout.constants_slot(space)
            if isinstance(loaded, LoadedGpu):
                self._memories[loaded] = CudaMemory(loaded, self._call.slots)
                self._call.slots[slot] = loaded.constants
            else:
                self._call.slots[slot] = loaded.constants_address
                self._scratch = self._arena_of(loaded.scratch_bytes)
                self._call.scratch.value = self._scratch.address

    def allocate_arena(self, size: int) -> None:
        """Allocate an arena of ``size`` bytes in the first memory space; the content of an earlier one is copied."""
        self.allocate_arena_in_space(0, size)

    def allocate_arena_in_space(self, space: int, size: int) -> None:
        """Allocate an arena of ``size`` bytes in memory space ``space``.

        The content of an earlier one there is copied.
        """
        slot = self._layout.arena_slot(space)
        loaded = self._streams.gpu_of_slot(self._layout, slot)
        if loaded is not None:
            loaded.gpu.make_context_current()
            memory = self._memories[loaded]
            self._take_more(loaded, size, lambda: memory.grow_slot(slot, size))
            return
        self._streams.wait()  # copies may still access the old arena
        self._call.pending.clear()
        found = page_lock_arena(self._arena_of(size), size, self._streams.gpus[0])
        if self._arena is not None:
            ctypes.memmove(found.address, self._arena.address, min(size, self._arena_bytes))
            self._pool.return_arena(self._arena)
        self._arena, self._arena_bytes = found, size
        self._call.slots[slot] = found.address

    def _arena_of(self, size: int) -> Arena:
        held = [arena.size for arena in (self._arena, self._scratch) if arena is not None]
        return self._pool.take_further_arena(size, sum(held))

    def _take_more(self, loaded: LoadedGpu, size: int, take: Callable[[], None]) -> None:
        self._executable.pool.allocate_more(loaded, size, self._memories[loaded].allocated_bytes(), take)

    def bind_array(self, slot: int, array: np.ndarray) -> None:
        """Bind an argument or a result to its slot in the pointer table."""
        loaded = self._streams.gpu_of_slot(self._layout, slot)
        if loaded is None:
            self._call.slots[slot] = address_of(array if array.size else EMPTY)
            return
        loaded.gpu.make_context_current()
        memory = self._memories[loaded]
        self._take_more(loaded, array.nbytes, lambda: memory.allocate_slot(slot, array.nbytes))
        loaded.gpu.upload(self._call.slots[slot], address_of(array), array.nbytes)
        self._arrays[slot] = array

    def submit(self, number: int, parameters: list[int]) -> None:
        """Run a command buffer, wait for it, and copy the arrays that it wrote to the host."""
        buffers = self._executable.buffers
        PlacedProgram(self._streams.spaces, self._call, buffers, number, parameters, record=False).run()
        self._copy_written_to_host(number)

    def stepper(self, make: Callable[..., Stepper]) -> SteppedCall:
        """Return a stepper, which runs single commands of this call.

        ``make`` constructs it from executable, slots and memory.
        """
        from aotc.vmfb.devices.mixed.steps import PlacedSteps, SteppedCall  # only for debugging and measuring

        steps = PlacedSteps(self._executable, self._streams, self._call)
        return SteppedCall(make(steps, self._call.slots, self._call.scratch, steps), self._copy_written_to_host)

    def _copy_written_to_host(self, number: int) -> None:
        """Copy the arrays that command buffer ``number`` writes on GPUs to their host arrays."""
        for slot in self._arrays.keys() & self._executable.writes[number]:
            loaded, array = self._streams.gpu_of_slot(self._layout, slot), self._arrays[slot]
            if loaded is not None:
                loaded.gpu.make_context_current()
                loaded.gpu.download(address_of(array), self._call.slots[slot], array.nbytes)
        self._streams.wait()
        self._call.pending.clear()

    def load_scalar(self, slot: int, offset: int, dtype: str) -> int:
        """Return the integer at a byte offset of a slot."""
        return read_scalar(self._streams.spaces, self._call, slot, offset, dtype)

    def open_debug_block(self, slot: int, offset: int, size: int) -> None:
        """Do nothing: GPU memory has no guard pages."""

    def close(self) -> None:
        """Free the GPU memory of the call, and return its arenas and streams."""
        with self._held:
            self._streams.wait()
        self._pool.end_stepwise_allocation()
        for memory in self._memories.values():
            memory.release()
        for arena in (self._arena, self._scratch):
            if arena is not None:
                self._pool.return_arena(arena)
