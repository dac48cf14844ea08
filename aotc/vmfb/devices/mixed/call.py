"""A plan prepared for one set of streams: pointer table, offsets of arrays in working memory, and CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_void_p
from functools import partial
from typing import Any
from weakref import ref

import numpy as np

from aotc.vmfb.abi import ALIGNMENT, Slots
from aotc.vmfb.devices.cuda.array import CudaArray
from aotc.vmfb.devices.cuda.driver import Gpu
from aotc.vmfb.devices.cuda.graph_cache import AddressedPrograms, RecordedPrograms
from aotc.vmfb.devices.cuda.libcuda.library import OutOfGpuMemory
from aotc.vmfb.devices.cuda.loaded_kernels import LoadedGpu
from aotc.vmfb.devices.cuda.staging import download, page_lock_arena, upload
from aotc.vmfb.devices.cuda.streams import CallStreams
from aotc.vmfb.devices.early import EarlyResults
from aotc.vmfb.devices.mixed.early_results import Download, Downloads, LockedMarks
from aotc.vmfb.devices.mixed.program import CallContext, CallState, PlacedProgram, read_scalar
from aotc.vmfb.errors import CallError
from aotc.vmfb.host.interruption import raise_if_submission_stopped, runs_submission
from aotc.vmfb.memory.arena import Arena
from aotc.vmfb.memory.pointers import EMPTY, address_of
from aotc.vmfb.plan import Plan, check_assertions

Array = np.ndarray | CudaArray
_BLOCK = 256  # bytes: alignment of arrays in working memory, the same as of memory that the driver allocates


class PlacedCall:
    """A plan of a ``PlacedExecutable`` prepared for one set of streams.

    With ``marked`` its programs mark results, for calls whose results can be read before the call ends.

    Attributes
    ----------
    recorded : RecordedPrograms
        Recorded graphs, by the addresses of GPU arrays.
    me : weak reference
        A reference to this object, by which the streams identify it.
    """

    def __init__(self, executable: CallContext, streams: CallStreams, plan: Plan, marked: bool = False) -> None:
        self._executable, self._streams, self._plan = executable, streams, plan
        self.me = ref(self)
        layout = Slots(plan.arguments, len(plan.results), len(streams.spaces), plan.homes)
        self._call = CallState(layout)
        self._gpus = [streams.gpu_of_slot(layout, slot) for slot in range(layout.count)]  # by slot
        read: dict[LoadedGpu, list[int]] = {}
        for slot, reader in enumerate(self._gpus[: plan.arguments]):
            if reader is not None:
                read.setdefault(reader, []).append(slot)
        self._read_on = [*read.items()]  # by GPU: the arguments that it reads
        self._places = plan.slots_of_results()
        self._slots = [*range(plan.arguments), *self._places]  # of arguments, then of results
        self._written = frozenset().union(*(executable.writes[number] for number, _ in plan.submissions))
        self._assertions = plan.assertions_by_submission()
        writes = [executable.writes[number] for number, _ in plan.submissions]
        last = [max((n for n, w in enumerate(writes) if slot in w), default=-1) for slot in self._places]
        self._needed = [n + 1 if self._assertions[n + 1] else 0 for n in last]
        self._marks = LockedMarks(len(plan.results), streams.gpus[0]) if marked else None
        if self._marks is not None:
            self._call.slots[self._call.marks] = addressof(self._marks.table)
        rows = [*enumerate(zip(self._places, last))] if marked else []  # results with slots and last submissions
        self._read = partial(read_scalar, streams.spaces, self._call)
        self._sent: list[tuple[Gpu, c_void_p]] = []  # recorded after the uploads of host arguments
        self._parts: dict[tuple[bool, ...], tuple[dict[int, tuple[int, int]], list[int]]] = {}
        self._on_gpus = (False,) * len(self._slots)  # the key of a call with all arrays on GPUs
        self._laid: tuple[tuple[bool, ...], int] = (), -1  # key of what the table has of working memory
        make = partial(PlacedProgram, streams.spaces, self._call, executable.buffers)
        marks = [{result: slot for result, (slot, n) in rows if n == stage} for stage in range(len(plan.submissions))]
        submissions = [(*row, found) for row, found in zip(plan.submissions, marks)]
        self.recorded = RecordedPrograms(make, submissions, self._slots)
        for space, loaded in enumerate(streams.spaces):
            constants = loaded.constants if isinstance(loaded, LoadedGpu) else loaded.constants_address
            self._call.slots[layout.constants_slot(space)] = constants

    def run(self, arrays: Sequence[Array], results: Sequence[Array], early: EarlyResults | None = None) -> None:
        """Run the plan; see :meth:`aotc.vmfb.devices.mixed.executable.PlacedExecutable.replay`."""
        self._call.pending.clear()
        raise_if_submission_stopped()
        arena = downloads = None
        try:
            addresses, shared = self._write_addresses(arrays, results)
            arena = self._take_arena()
            if self._streams.last is not self.me:
                self._streams.mark_recently_used(self)
            programs = self.recorded.programs_at(addresses, addresses).programs
            self._upload(arrays)
            check_assertions(self._assertions[0], self._read)
            if early is not None:
                downloads = self._begin_early(early, results)
            for number, (program, after) in enumerate(zip(programs, self._assertions[1:])):
                program.run()
                check_assertions(after, self._read)
                if early is not None:
                    early.stage = number + 1
            raise_if_submission_stopped()
            if early is not None and downloads is not None:
                self._finish_early(early, downloads)
            else:
                fetched = self._download(results)
                # Only a waiting host can stop loops, and give up exchanges with ranks that are lost.
                watched = any(gpu.may_run_loops or gpu.ranks is not None for gpu in self._streams.gpus)
                self._finish(waits=shared or fetched or watched or runs_submission())
        except BaseException:  # GPUs may still access memory that is about to be freed
            if early is not None:
                early.freeze()  # loops that are stopped leave incomplete values
            self._streams.stop_loops_and_wait()
            if early is not None and downloads is not None:
                downloads.close(early.is_ready)
            self._give_events()
            raise
        if arena is not None:  # after a failed call a copy may still access it
            self._executable.arenas.return_arena(arena)

    def _finish(self, waits: bool) -> None:
        """Wait for the GPUs; without ``waits``, only until they no longer access host memory."""
        if waits:
            self._streams.wait()
        else:
            self._streams.busy = True
            for gpu, event in self._sent:
                gpu.synchronize_event(event)
            self._call.pending.wait_all()
        self._give_events()

    def _give_events(self) -> None:
        for gpu, event in self._sent:
            gpu.return_events([event])
        self._sent = []

    # ------------------------------------------------------------ early results

    def _begin_early(self, early: EarlyResults, results: Sequence[Array]) -> Downloads:
        """Let results be read from now on, each when it is marked; return the results that are copied to the host."""
        assert self._marks is not None
        self._marks.set_all(0)
        gpus = self._streams.gpus
        for gpu in gpus:
            gpu.has_ended_loops = False
        rows = {
            number: Download(loaded.gpu, self._call.slots[slot], x)
            for number, (slot, x) in enumerate(zip(self._places, results, strict=True))
            if (loaded := self._gpus[slot]) is not None and isinstance(x, np.ndarray)
        }
        downloads = Downloads(rows)
        is_stopped = lambda: any(gpu.has_ended_loops for gpu in gpus)
        early.begin(results, self._marks.table, self._needed, is_stopped, downloads.copy_result)
        return downloads

    def _finish_early(self, early: EarlyResults, downloads: Downloads) -> None:
        """Wait for each GPU, and copy the results that it has computed to the host."""
        assert self._marks is not None
        for gpu in self._streams.gpus:
            gpu.make_context_current()
            gpu.wait()
            downloads.copy_remaining(gpu)
        self._streams.busy = False
        self._give_events()
        self._marks.set_all(1)
        early.freeze()  # before the next call clears the marks

    def drop_graphs(self) -> None:
        """Drop the recorded graphs."""
        self.recorded.clear()

    # ------------------------------------------------------------ addresses

    def programs_at_addresses(self, key: tuple[Any, ...], addresses: tuple[int, ...]) -> AddressedPrograms:
        """Return recorded programs for a call whose arguments and results are on one GPU at these ``addresses``."""
        slots = self._call.slots
        for slot, address in zip(self._slots, addresses):
            slots[slot] = address
        self._assign_working_memory(self._on_gpus, ())
        if self._streams.last is not self.me:
            self._streams.mark_recently_used(self)
        return self.recorded.programs_at(key, addresses)

    def _write_addresses(self, arrays: Sequence[Array], results: Sequence[Array]) -> tuple[tuple[int, ...], bool]:
        """Write the addresses of arguments and results to the pointer table.

        Returns
        -------
        addresses : tuple of int
            Addresses of GPU arrays, 0 for other arrays.
        shared : bool
            True if other libraries may access some of the arrays.
        """
        rows: list[tuple[int, Any]] = [*zip(self._slots, (*arrays, *results), strict=True)]
        addresses, ours, shared = [], [], False
        slots, written = self._call.slots, self._written
        for slot, x in rows:
            loaded = self._gpus[slot]
            if loaded is None:
                slots[slot] = address_of(x if x.size else EMPTY)
            elif isinstance(x, CudaArray):
                buffer = x.buffer
                slots[slot] = buffer.address
                shared = shared or buffer.shared
                if slot in written:
                    buffer.order_write(loaded.gpu)
                else:
                    buffer.order_read(loaded.gpu)
                addresses.append(buffer.address)
                ours.append(False)
                continue
            addresses.append(0)
            ours.append(loaded is not None)
        self._assign_working_memory(tuple(ours), rows)
        return tuple(addresses), shared

    def _assign_working_memory(self, kinds: tuple[bool, ...], rows: Sequence[tuple[int, Any]]) -> None:
        """Assign working memory to arenas and to GPU copies of host arrays.

        Write the addresses to the pointer table.
        """
        if self._laid == (kinds, self._streams.moves):  # unchanged since the last call, and memory has not moved
            return
        parts = self._parts.get(kinds)
        if parts is None:
            parts = self._parts[kinds] = self._divide_working_memory(rows)
        places, sizes = parts
        try:
            self._executable.pool.reserve(self._streams, sizes)
        except OutOfGpuMemory as error:
            raise self._out_of_memory_error(rows) from error
        self._laid = kinds, self._streams.moves
        for slot, (space, offset) in places.items():
            workspace = self._streams.workspaces[space]
            assert workspace is not None
            self._call.slots[slot] = workspace.address + offset

    def _divide_working_memory(self, rows: Sequence[tuple[int, Any]]) -> tuple[dict[int, tuple[int, int]], list[int]]:
        """Return memory space and offset of each slot in working memory, and the bytes needed in each memory space."""
        layout, sizes = self._call.layout, [0] * len(self._streams.spaces)
        places: dict[int, tuple[int, int]] = {}
        arenas = zip(range(len(sizes)), (self._plan.arena, *self._plan.others), strict=True)
        wanted = [(layout.arena_slot(space), size) for space, size in arenas]
        wanted += [(slot, x.nbytes) for slot, x in rows if isinstance(x, np.ndarray)]
        for slot, size in wanted:
            space = layout.memory_space(slot)
            if self._gpus[slot] is not None and slot not in places:
                begin = -(-sizes[space] // _BLOCK) * _BLOCK
                places[slot], sizes[space] = (space, begin), begin + max(size, 1)
        return places, sizes

    def _out_of_memory_error(self, rows: Sequence[tuple[int, Any]]) -> CallError:
        """Return the error for a call that needs more memory than a GPU has."""
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
        """Allocate an arena and scratch memory on the host; None if the CPU runs no part of the plan."""
        layout, sizes = self._call.layout, (self._plan.arena, *self._plan.others)
        for space, (loaded, size) in enumerate(zip(self._streams.spaces, sizes, strict=True)):
            if not isinstance(loaded, LoadedGpu):
                bytes_ = -(-size // ALIGNMENT) * ALIGNMENT
                taken = self._executable.arenas.take_arena(bytes_ + loaded.scratch_bytes + ALIGNMENT)
                page_lock_arena(taken, size, self._streams.gpus[0])
                self._call.slots[layout.arena_slot(space)] = taken.address
                self._call.scratch.value = taken.address + bytes_
                return taken
        return None

    # ------------------------------------------------------------ copies

    def _upload(self, arrays: Sequence[Array]) -> None:
        """Copy the host arguments that GPUs read to working memory."""
        slots = self._call.slots
        for loaded, numbers in self._read_on:
            gpu, mine = loaded.gpu, [(n, x) for n in numbers if isinstance(x := arrays[n], np.ndarray)]
            if not mine:
                continue
            event = gpu.take_event()
            self._sent.append((gpu, event))
            gpu.make_context_current()
            for number, x in mine:
                upload(gpu, slots[number], address_of(x), x.nbytes)
            gpu.record_event(event)

    def _download(self, results: Sequence[Array]) -> bool:
        """Copy results from working memory to their host arrays; return True if there were any."""
        fetched = False
        for slot, x in zip(self._places, results, strict=True):
            loaded = self._gpus[slot]
            if loaded is not None and isinstance(x, np.ndarray):
                loaded.gpu.make_context_current()
                download(loaded.gpu, address_of(x), self._call.slots[slot], x.nbytes)
                fetched = True
        return fetched
