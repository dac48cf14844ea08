"""Calls on the CPU whose host program is interpreted, because its control flow depends on data."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from aotc.vmfb.abi import Slots
from aotc.vmfb.memory.arena import Arena, ArenaPool
from aotc.vmfb.memory.guard_pages import inaccessible_copy, make_accessible, make_all_accessible, make_inaccessible
from aotc.vmfb.memory.pointers import EMPTY, PointerTable, address_of, read_scalar

if TYPE_CHECKING:
    from aotc.vmfb.profile.trace import StepExecutable, Stepper

    class SessionExecutable(StepExecutable, Protocol):
        """Interface: the part of a :class:`~aotc.vmfb.devices.cpu.device.CpuExecutable` that a session uses."""

        constants_bytes: int

        @property
        def arenas(self) -> ArenaPool:
            """The pool from which calls allocate memory."""

        def run_buffer(
            self, number: int, slots: PointerTable, parameters: Sequence[int], scratch: ctypes.c_void_p
        ) -> None:
            """Run command buffer ``number`` and wait."""


class HostMemory:
    """Access to host memory for tracers and profilers: see :class:`aotc.vmfb.profile.trace.StepMemory`."""

    def read(self, slot: int, address: int, size: int) -> bytes:
        """Read ``size`` bytes at an address in host memory."""
        return ctypes.string_at(address, size)

    def write(self, slot: int, address: int, data: bytes) -> None:
        """Write bytes at an address in host memory."""
        ctypes.memmove(address, data, len(data))

    def devices_of(self, slot: int) -> tuple[str, ...]:
        """Return ``("cpu",)``, without a device name: all CPU devices of a model share the host's memory."""
        return ("cpu",)


class CpuSession:
    """One call of a function whose host program is interpreted on the CPU."""

    def __init__(self, executable: SessionExecutable, layout: Slots, constants: int, scratch_bytes: int) -> None:
        self._executable = executable
        self._slots = (ctypes.c_int64 * layout.count)()
        self._slots[layout.constants] = constants
        self._arena_slot = layout.arena
        self._fenced: dict[int, np.ndarray] = {}  # by slot: memory of which only the current blocks are accessible
        self._arena: Arena | None = None
        self._arena_bytes = 0
        self._pool = executable.arenas
        self._pool.begin_stepwise_allocation()
        self._scratch_arena: Arena | None = None
        try:
            self._scratch_arena = self._pool.take_further_arena(scratch_bytes, 0) if scratch_bytes else None
        except BaseException:
            self._pool.end_stepwise_allocation()
            raise
        self._scratch = ctypes.c_void_p(self._scratch_arena.address if self._scratch_arena else None)

    def allocate_arena(self, size: int) -> None:
        """Allocate an arena of ``size`` bytes; the content of an earlier arena of this call is copied."""
        mine = [a.size for a in (self._arena, self._scratch_arena) if a is not None]
        found = self._pool.take_further_arena(size, sum(mine))
        if self._arena is not None:
            if self._fenced:
                make_all_accessible(self._fenced.pop(self._arena_slot, None))
            ctypes.memmove(found.address, self._arena.address, min(size, self._arena_bytes))
            self._pool.return_arena(self._arena)
        self._arena, self._arena_bytes = found, size
        self._slots[self._arena_slot] = found.address

    def bind_array(self, slot: int, array: np.ndarray) -> None:
        """Bind an argument or a result to its slot in the pointer table."""
        self._slots[slot] = address_of(array if array.size else EMPTY)

    def stepper(self, make: Callable[..., Stepper]) -> Stepper:
        """Return a stepper, which runs single commands of this call.

        ``make`` constructs it from executable, slots and memory.
        """
        return make(self._executable, self._slots, self._scratch, HostMemory())

    def submit(self, number: int, parameters: list[int]) -> None:
        """Run a command buffer and wait for it."""
        self._executable.run_buffer(number, self._slots, parameters, self._scratch)

    def load_scalar(self, slot: int, offset: int, dtype: str) -> int:
        """Return the integer at a byte offset of a slot."""
        return read_scalar(self._slots, slot, offset, dtype)

    def open_debug_block(self, slot: int, offset: int, size: int) -> None:
        """Make a block of the arena or the constants accessible; memory outside of such blocks stays protected."""
        constant = slot != self._arena_slot
        memory = self._fenced.get(slot)
        if memory is None and constant:  # a copy for this call: others start and end meanwhile
            memory = inaccessible_copy(self._slots[slot], self._executable.constants_bytes)
            self._slots[slot] = memory.ctypes.data
        elif memory is None:
            assert self._arena is not None
            memory = make_inaccessible(self._arena.memory)
        self._fenced[slot] = memory
        make_accessible(memory, offset, size, not constant)

    def close(self) -> None:
        """Return the arenas of the call to the pool."""
        self._pool.end_stepwise_allocation()
        for arena in (self._arena, self._scratch_arena):
            if arena is not None:
                self._pool.return_arena(arena)
