"""A plan on streams: its pointer table, where its arrays lie in the working memory, and its graphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from aotc.vmfb.abi import ALIGNMENT, Slots
from aotc.vmfb.arena import Arena
from aotc.vmfb.device import Plan, judge
from aotc.vmfb.devices.cuda_array import CudaArray
from aotc.vmfb.devices.driver import OutOfGpuMemory
from aotc.vmfb.devices.loaded_gpu import LoadedGpu
from aotc.vmfb.devices.placed_program import CallState, PlacedProgram, read_scalar
from aotc.vmfb.devices.staging import download, locked, upload
from aotc.vmfb.devices.streams import CallStreams
from aotc.vmfb.errors import VmError
from aotc.vmfb.limits import RECORDED_ADDRESSES
from aotc.vmfb.pointers import EMPTY, address_of
from aotc.vmfb.process.interruption import end_if_stopped

Array = np.ndarray | CudaArray
_BLOCK = 256  # bytes: each array begins where the driver's own memory might


class PlacedCall:
    """A plan on streams of a ``PlacedExecutable``."""

    def __init__(self, executable: Any, streams: CallStreams, plan: Plan) -> None:
        self._executable, self._streams, self._plan = executable, streams, plan
        layout = Slots(plan.arguments, len(plan.results), len(streams.spaces), plan.homes)
        self._call = CallState(layout)
        self._gpus = [streams.loaded(layout, slot) for slot in range(layout.count)]  # by slot
        self._places = plan.slots_of_results()
        self._judged = plan.judged_after()
        self._read = partial(read_scalar, streams.spaces, self._call)
        self._parts: dict[tuple[bool, ...], tuple[dict[int, tuple[int, int]], list[int]]] = {}
        self._laid: tuple[tuple[bool, ...], int] = (), -1  # what is in the table of what is in working memory
        self._programs: dict[tuple[int, ...], list[PlacedProgram] | None] = {}  # None: the addresses came once
        for space, loaded in enumerate(streams.spaces):
            constants = loaded.constants if isinstance(loaded, LoadedGpu) else loaded.constants_address
            self._call.slots[layout.constants_of(space)] = constants

    def run(self, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        """Run the plan; see :meth:`aotc.vmfb.devices.placed.PlacedExecutable.replay`."""
        self._call.pending.clear()
        end_if_stopped()
        arena = None
        try:
            addresses = self._bind(arrays, results)
            arena = self._take_arena()
            programs = self._programs_of(addresses)
            self._upload(arrays)
            judge(self._judged[0], self._read)
            for program, after in zip(programs, self._judged[1:]):
                program.run()
                judge(after, self._read)
            end_if_stopped()
            self._download(results)
            self._streams.wait()
        except BaseException:  # what goes with it may be read or written by GPUs
            self._streams.abandon()
            raise
        if arena is not None:  # else a copy of a call that failed may still be under way to it
            self._executable.arenas.give(arena)

    def forget(self) -> None:
        """Drop the graphs."""
        self._programs.clear()

    # ------------------------------------------------------------ where arrays are

    def _bind(self, arrays: Sequence[Array], results: Sequence[Array]) -> tuple[int, ...]:
        """Put all arrays in the table; return the addresses of those on GPUs, 0 for others."""
        rows: list[tuple[int, Any]] = [*enumerate(arrays), *zip(self._places, results, strict=True)]
        addresses, ours = [], []
        slots = self._call.slots
        for slot, x in rows:
            loaded = self._gpus[slot]
            if loaded is None:
                slots[slot] = address_of(x if x.size else EMPTY)
            elif isinstance(x, CudaArray):
                buffer = x.buffer
                slots[slot] = buffer.address
                if buffer.stream is not None:
                    loaded.gpu.follow(buffer.stream)
                addresses.append(buffer.address)
                ours.append(False)
                continue
            addresses.append(0)
            ours.append(loaded is not None)
        kinds = tuple(ours)
        parts = self._parts.get(kinds)
        if parts is None:
            parts = self._parts[kinds] = self._divided(rows)
        places, sizes = parts
        try:
            self._executable.pool.reserve(self._streams, sizes)
        except OutOfGpuMemory as error:
            raise self._report(rows) from error
        if self._laid == (kinds, self._streams.moves):
            return tuple(addresses)
        self._laid = kinds, self._streams.moves
        for slot, (space, offset) in places.items():
            workspace = self._streams.workspaces[space]
            assert workspace is not None
            slots[slot] = workspace.address + offset
        return tuple(addresses)

    def _divided(self, rows: Sequence[tuple[int, Any]]) -> tuple[dict[int, tuple[int, int]], list[int]]:
        """Return, of each slot in working memory, which memory and where there; and how much of each is needed."""
        layout, sizes = self._call.layout, [0] * len(self._streams.spaces)
        places: dict[int, tuple[int, int]] = {}
        arenas = zip(range(len(sizes)), (self._plan.arena, *self._plan.others), strict=True)
        wanted = [(layout.arena_of(space), size) for space, size in arenas]
        wanted += [(slot, x.nbytes) for slot, x in rows if isinstance(x, np.ndarray)]
        for slot, size in wanted:
            space = layout.home(slot)
            if self._gpus[slot] is not None and slot not in places:
                begin = -(-sizes[space] // _BLOCK) * _BLOCK
                places[slot], sizes[space] = (space, begin), begin + max(size, 1)
        return places, sizes

    def _report(self, rows: Sequence[tuple[int, Any]]) -> VmError:
        """Return the error for a call that a GPU has no memory for."""
        plan = self._plan
        names = [f"argument {n}" for n in range(plan.arguments)] + [f"result {n}" for n in range(len(plan.results))]
        arrays = [
            (x.nbytes, f"{name}, {x.dtype}{list(x.shape)}")
            for name, (slot, x) in zip(names, rows)
            if self._gpus[slot] is not None
        ]
        own = [space for space, loaded in enumerate(self._streams.spaces) if isinstance(loaded, LoadedGpu)]
        return self._executable.out_of_memory(plan, own, arrays)

    def _take_arena(self) -> Arena | None:
        """Return an arena of the process's memory, with scratch memory behind it, if the CPU takes part."""
        layout, sizes = self._call.layout, (self._plan.arena, *self._plan.others)
        for space, (loaded, size) in enumerate(zip(self._streams.spaces, sizes, strict=True)):
            if not isinstance(loaded, LoadedGpu):
                bytes_ = -(-size // ALIGNMENT) * ALIGNMENT
                taken = self._executable.arenas.take(bytes_ + loaded.scratch_bytes + ALIGNMENT)
                locked(taken, size, self._streams.gpus[0])
                self._call.slots[layout.arena_of(space)] = taken.address
                self._call.scratch.value = taken.address + bytes_
                return taken
        return None

    # ------------------------------------------------------------ what runs

    def _programs_of(self, addresses: tuple[int, ...]) -> list[PlacedProgram]:
        """Return the programs for ``addresses`` of arrays on GPUs; they are recorded when these come again."""
        self._streams.note(self)
        found = self._programs.get(addresses)
        if found is None:
            again = not any(addresses) or addresses in self._programs
            make = partial(PlacedProgram, self._streams.spaces, self._call, self._executable.buffers, record=again)
            found = [make(number=n, parameters=values) for n, values in self._plan.submissions]
            self._programs[addresses] = found if again else None
            foreign = [key for key in self._programs if any(key)]
            for key in foreign[:-RECORDED_ADDRESSES]:
                del self._programs[key]
        return found

    def _upload(self, arrays: Sequence[Array]) -> None:
        for slot, x in enumerate(arrays):
            loaded = self._gpus[slot]
            if loaded is not None and isinstance(x, np.ndarray):
                loaded.gpu.enter()
                upload(loaded.gpu, self._call.slots[slot], address_of(x), x.nbytes)

    def _download(self, results: Sequence[Array]) -> None:
        for slot, x in zip(self._places, results, strict=True):
            loaded = self._gpus[slot]
            if loaded is not None and isinstance(x, np.ndarray):
                loaded.gpu.enter()
                download(loaded.gpu, address_of(x), self._call.slots[slot], x.nbytes)
