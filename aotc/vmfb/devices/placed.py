"""Executables whose memory is not the process's alone: a variant on a GPU, or on the CPU and several GPUs.

A plan (one tuple of shapes) gets memory for its arena, and for arguments and results that come from and go to NumPy,
the first time it runs; what runs on a GPU is recorded as CUDA graphs over those addresses. An argument that is in the
GPU's memory is read where it is, and a result that is to stay there is made where it stays: for such addresses there
are graphs of their own from the second call on. Calls ask their work of the GPUs one after the other; one that was
submitted lets the next begin before it waits for its own end. What a call holds goes at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np

from aotc.vmfb.abi import ALIGNMENT, COPY, Node, Slots
from aotc.vmfb.arena import ARENAS, Arena, ArenaPool
from aotc.vmfb.bundle import Bundle
from aotc.vmfb.commands import all_commands
from aotc.vmfb.device import Plan, judge
from aotc.vmfb.devices import driver as cuda_driver
from aotc.vmfb.devices.buffers import DebugText, kernel_texts, load_buffers, origin
from aotc.vmfb.devices.cuda_array import CudaArray
from aotc.vmfb.devices.cuda_program import CudaMemory
from aotc.vmfb.devices.host_part import HostPart
from aotc.vmfb.devices.loaded_gpu import LoadedGpu
from aotc.vmfb.devices.placed_program import CallState, PlacedProgram, read_scalar
from aotc.vmfb.devices.placed_session import PlacedSession
from aotc.vmfb.devices.spaces import Spaces
from aotc.vmfb.errors import VmError
from aotc.vmfb.limits import RECORDED_ADDRESSES
from aotc.vmfb.pointers import EMPTY, address_of
from aotc.vmfb.process.interruption import end_if_stopped, is_submitted
from aotc.vmfb.process.locks import new_recursive_lock

Space = LoadedGpu | HostPart
Array = np.ndarray | CudaArray
Marks = list[tuple[cuda_driver.Gpu, Any]]  # events that come when GPUs are done


def slots_written(nodes: Sequence[Node], kernels: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """Return the slots that some command writes."""
    slots: set[int] = set()
    for command in all_commands(nodes):
        inputs = 1 if command.kind == COPY else kernels[command.kernel]["inputs"]
        slots.update(slot for slot, _ in command.places[inputs:])
    return frozenset(slots)


class PlacedExecutable:
    """A variant in several memories, or in one that is a GPU's.

    Parameters
    ----------
    bundle : Bundle
    variant : dict
        Its entry in the manifest.
    spaces : sequence of LoadedGpu or HostPart
        What each memory's kernels are on.
    known : Spaces, optional
        What the manifest says of them, if they are several.

    Raises
    ------
    BundleError
        If a command buffer is damaged.
    """

    def __init__(
        self, bundle: Bundle, variant: dict[str, Any], spaces: Sequence[Space], known: Spaces | None = None
    ) -> None:
        self.lock = new_recursive_lock()
        self.where = bundle.where
        self.spaces, self.known = spaces, known
        self._bundle, self._variant = bundle, variant
        self.buffers = load_buffers(bundle, variant)
        if known is not None:
            known.check(bundle.manifest["functions"], variant["functions"], self.buffers)
        self.gpus = [space for space in spaces if isinstance(space, LoadedGpu)]
        for loaded in self.gpus:
            loaded.lock = self.lock
        self.host = next((space for space in spaces if isinstance(space, HostPart)), None)
        self.constant_sizes = tuple([space.constants_bytes for space in spaces])
        self.constants_bytes = sum(self.constant_sizes)
        self.writes = [slots_written(nodes, variant["kernels"]) for nodes in self.buffers.nodes]
        self._calls: WeakSet[PlacedCall] = WeakSet()  # of plans, which hold them, and they this object

    @property
    def gpu(self) -> cuda_driver.Gpu:
        """Return the first GPU."""
        return self.gpus[0].gpu

    @property
    def arenas(self) -> ArenaPool:
        """Return where calls take the process's memory from."""
        return ARENAS if self.host is None else self.host.arenas

    def layout(self, entry: Mapping[str, Any]) -> Slots:
        """Return the pointer table of a function with this signature."""
        if self.known is not None:
            return self.known.layout(entry)
        return Slots(len(entry["arguments"]), len(entry["results"]))

    def loaded(self, layout: Slots, slot: int) -> LoadedGpu | None:
        """Return the GPU in whose memory a slot is, or None for the process's."""
        space = self.spaces[layout.home(slot)]
        return space if isinstance(space, LoadedGpu) else None

    def replay(self, plan: Plan) -> Callable[[Sequence[Array], Sequence[Array]], None]:
        """Return the function that runs ``plan`` on argument and result arrays, and judges what it computed.

        An array may be a :class:`CudaArray` on the GPU in whose memory it belongs.
        """
        call = PlacedCall(self, plan)
        self._calls.add(call)
        return call.run

    def session(self, layout: Slots) -> PlacedSession:
        """Begin a call with a pointer table of this layout."""
        return PlacedSession(self, layout)

    @contextmanager
    def streams(self) -> Iterator[None]:
        """Have the executable for oneself; afterwards nothing that was asked of GPUs is under way."""
        with self.lock:
            try:
                yield
            except BaseException:
                with suppress(VmError):
                    self.wait()
                raise
            self.wait()

    def wait(self) -> None:
        """Wait until the GPUs are done with all that was asked of them."""
        for loaded in self.gpus:
            loaded.gpu.enter()
            loaded.gpu.wait()

    def mark(self, marks: Marks) -> None:
        """Add, for each GPU, an event that comes when it is done with all that was asked of it by now."""
        for loaded in self.gpus:
            event = loaded.gpu.take_event()
            loaded.gpu.enter()
            loaded.gpu.record(event)
            marks.append((loaded.gpu, event))

    def kernel_texts(self) -> list[DebugText] | None:
        """Return what debug information says of each kernel; None without it."""
        return kernel_texts(self._bundle, self._variant)

    def origin(self) -> dict[str, str]:
        """Return the compiler of the bundle, and the digest of the program; it needs debug information."""
        return origin(self._bundle)

    def stats(self) -> dict[str, Any]:
        """Return the GPUs, kernels and memory (bytes)."""
        names = [cuda_driver.device_name(loaded.ordinal) for loaded in self.gpus]
        return {
            "target": self._variant["target"],
            "device": ", ".join(dict.fromkeys(names)),
            **({"threads": self.host.threads, "slots": self.host.stats()["slots"]} if self.host else {}),
            "kernels": len(self._variant["kernels"]),
            "command_buffers": len(self.buffers.nodes),
            "arena_peak": self._variant.get("arena_peak"),
            "constants_bytes": self.constants_bytes,
            "device_bytes": sum(loaded.bytes for loaded in self.gpus),
            "memory": self._memory(),
        }

    def _memory(self) -> dict[str, dict[str, int]]:
        """Return the bytes in use of each device, and the most that ever were; devices of the model may share a GPU."""
        found = {"cpu": self.arenas.stats()} if self.host else {}
        for loaded in self.gpus:
            row = found.setdefault(f"cuda:{loaded.ordinal}", {"in_use": 0, "high_water": 0})
            row["in_use"] += loaded.bytes
            row["high_water"] += loaded.most_bytes
            if loaded.limit:
                row["limit"] = row.get("limit", 0) + loaded.limit
        return found

    def use_devices(self, names: Sequence[str]) -> None:
        """Let calls have the cores that these logical devices have."""
        if self.host is not None:
            self.host.use_devices(names)

    def limit_memory(self, limit: int) -> None:
        """Let calls take ``limit`` bytes of working memory in each memory at most, all that run at a time together."""
        if self.host is not None:
            self.host.limit_memory(limit)
        for loaded in self.gpus:
            loaded.limit = limit

    def make_room(self, loaded: LoadedGpu, size: int, held: int, call: PlacedCall | None) -> None:
        """See to it that a call that holds ``held`` bytes of a GPU can take ``size`` more, if they are limited.

        What is kept for later calls goes, of this plan's own (``call``) what it holds excepted; who holds the lock has
        nobody beside him who takes memory.

        Raises
        ------
        VmError
            If the call takes more than the limit by itself.
        """
        if not loaded.limit or loaded.working_bytes() + size <= loaded.limit:
            return
        if held + size > loaded.limit:
            what = f"this call needs {held + size:,} bytes of working memory on GPU {loaded.ordinal}"
            hint = "load it with a larger memory_limit, or give it less at a time"
            raise VmError("", what, expected=f"at most memory_limit, {loaded.limit:,} bytes", hint=hint)
        self.wait()
        loaded.trim()
        for other in list(self._calls):
            if other is not call and loaded.working_bytes() + size > loaded.limit:
                other.release()

    def trim(self) -> int:
        """Free the memory of all plans, and of arrays that are gone; return how many bytes that were."""
        with self.lock:
            self.wait()
            before = sum(loaded.bytes for loaded in self.gpus)
            for call in list(self._calls):
                call.release()
            freed = before - sum(loaded.bytes for loaded in self.gpus)
            return freed + sum(loaded.trim() for loaded in self.gpus) + (self.host.trim() if self.host else 0)


def _finish(marks: Marks) -> None:
    """Wait for all, whatever one of them says."""
    for gpu, event in marks:
        with suppress(VmError):
            gpu.finish(event)


class PlacedCall:
    """A plan in memory: its pointer table, and programs for each tuple of addresses that are not its own."""

    def __init__(self, executable: PlacedExecutable, plan: Plan) -> None:
        self._executable, self._plan = executable, plan
        layout = Slots(plan.arguments, len(plan.results), len(executable.spaces), plan.homes)
        self._call = CallState(layout)
        self._gpus = [executable.loaded(layout, slot) for slot in range(layout.count)]  # by slot
        self._memories = {
            loaded: CudaMemory(loaded, self._call.slots) for loaded in dict.fromkeys(self._gpus) if loaded is not None
        }
        self._places = plan.slots_of_results()
        self._judged = plan.judged_after()
        self._read = partial(read_scalar, executable.spaces, self._call)
        self._programs: dict[tuple[int, ...], list[PlacedProgram] | None] = {}  # None: the addresses came once
        self._under_way: list[None] = []  # an entry for each call
        for space, loaded in enumerate(executable.spaces):
            constants = loaded.constants if isinstance(loaded, LoadedGpu) else loaded.constants_address
            self._call.slots[layout.constants_of(space)] = constants

    def run(self, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        """Run the plan; see :meth:`PlacedExecutable.replay`."""
        marks: Marks = []
        self._under_way.append(None)
        try:
            with self._executable.lock:  # what is submitted next may ask its own while this waits, in order
                try:
                    arena = self._enqueue(arrays, results, marks)
                except BaseException:  # what goes with it may be read or written by GPUs
                    with suppress(VmError):
                        self._executable.wait()
                    raise
            for gpu, event in marks:
                gpu.finish(event)
        except BaseException:  # of a signal's handler, between two
            _finish(marks)
            raise
        finally:
            self._under_way.pop()
            for gpu, event in marks:
                gpu.give_events([event])
        if arena is not None:  # else a copy of a call that failed may still be under way to it
            self._executable.arenas.give(arena)

    def _enqueue(self, arrays: Sequence[Array], results: Sequence[Array], marks: Marks) -> Arena | None:
        """Ask all of the GPUs, and compute what is the CPU's; return the memory that it works in."""
        if len(self._under_way) == 1:
            self._call.pending.clear()
        end_if_stopped()
        rows = [*enumerate(arrays), *zip(self._places, results, strict=True)]
        for loaded in self._memories:
            if loaded.limit:
                self._make_room(loaded, rows)
        arena = self._take_arenas()
        addresses = tuple([self._bind(slot, x) for slot, x in rows])
        programs = self._programs_of(addresses if any(addresses) else ())
        self._upload(arrays)
        judge(self._judged[0], self._read)
        for program, after in zip(programs, self._judged[1:]):
            program.run()
            judge(after, self._read)
        if is_submitted() and not self._comes_home(results):
            self._executable.mark(marks)
        else:  # a call alone waits for streams: two calls of the driver fewer
            end_if_stopped()
            self._download(results)
            self._executable.wait()
        return arena

    def _comes_home(self, results: Sequence[Array]) -> bool:
        """Is there a result that the next call would write over before it is copied to the process?"""
        homes = zip(self._places, results, strict=True)
        return any(self._gpus[slot] is not None and isinstance(x, np.ndarray) for slot, x in homes)

    def _make_room(self, loaded: LoadedGpu, rows: Sequence[tuple[int, Array]]) -> None:
        """Make room for all that this call takes of a GPU: its arena, and arrays that come from and go to NumPy."""
        wanted = {slot: x.nbytes for slot, x in rows if self._gpus[slot] is loaded and isinstance(x, np.ndarray)}
        for space, size in enumerate((self._plan.arena, *self._plan.others)):
            if self._executable.spaces[space] is loaded:
                wanted[self._call.layout.arena_of(space)] = size
        memory, all_of_it = self._memories[loaded], sum(wanted.values())
        more = sum(size for slot, size in wanted.items() if not memory.has(slot))
        if memory.held_bytes() + more > all_of_it and loaded.working_bytes() + more > loaded.limit:
            self._executable.wait()
            self.release()  # it has what this call does not want: where arrays on GPUs are now
            more = all_of_it
        self._executable.make_room(loaded, more, memory.held_bytes(), self)

    def _bind(self, slot: int, x: Array) -> int:
        """Put an array in the table; return its address if it is on a GPU."""
        loaded = self._gpus[slot]
        if loaded is None:
            self._call.slots[slot] = address_of(x if x.size else EMPTY)  # type: ignore[union-attr, arg-type]
        elif isinstance(x, CudaArray):
            self._call.slots[slot] = x.address
            if x.buffer.stream is not None:
                loaded.gpu.follow(x.buffer.stream)
            return x.address
        else:
            self._memories[loaded].take(slot, x.nbytes)
        return 0

    def _take_arenas(self) -> Arena | None:
        """Take the arena of each memory; return the process's, with scratch memory behind it."""
        layout, sizes = self._call.layout, (self._plan.arena, *self._plan.others)
        taken = None
        for space, (loaded, size) in enumerate(zip(self._executable.spaces, sizes, strict=True)):
            slot = layout.arena_of(space)
            if isinstance(loaded, LoadedGpu):
                loaded.gpu.enter()
                self._memories[loaded].take(slot, size)
            else:
                bytes_ = -(-size // ALIGNMENT) * ALIGNMENT
                taken = self._executable.arenas.take(bytes_ + loaded.scratch_bytes + ALIGNMENT)
                self._call.slots[slot] = taken.address
                self._call.scratch.value = taken.address + bytes_
        return taken

    def _programs_of(self, addresses: tuple[int, ...]) -> list[PlacedProgram]:
        """Return the programs for ``addresses`` of arrays on GPUs; they are recorded when these come again."""
        found = self._programs.get(addresses)
        if found is None:
            again = not addresses or addresses in self._programs
            executable = self._executable
            make = partial(PlacedProgram, executable.spaces, self._call, executable.buffers, record=again)
            found = [make(number=n, parameters=values) for n, values in self._plan.submissions]
            self._programs[addresses] = found if again else None
            foreign = [key for key in self._programs if key]
            for key in foreign[:-RECORDED_ADDRESSES]:
                del self._programs[key]
        return found

    def _upload(self, arrays: Sequence[Array]) -> None:
        for slot, x in enumerate(arrays):
            loaded = self._gpus[slot]
            if loaded is not None and isinstance(x, np.ndarray):
                loaded.gpu.enter()
                loaded.gpu.upload(self._call.slots[slot], address_of(x), x.nbytes)

    def _download(self, results: Sequence[Array]) -> None:
        for slot, x in zip(self._places, results, strict=True):
            loaded = self._gpus[slot]
            if loaded is not None and isinstance(x, np.ndarray):
                loaded.gpu.enter()
                loaded.gpu.download(address_of(x), self._call.slots[slot], x.nbytes)

    def release(self) -> None:
        """Give the memory back; the next call takes it again."""
        self._programs.clear()
        for memory in self._memories.values():
            memory.release()
