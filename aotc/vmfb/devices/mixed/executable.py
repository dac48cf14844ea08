"""Executables with GPU memory: a variant on one GPU, or on the CPU and several GPUs.

A call reserves streams (:mod:`aotc.vmfb.devices.cuda.streams`) with working memory for its arena and for copies of
NumPy arguments and results. GPU work is recorded as CUDA graphs over these addresses. Arguments in GPU memory are read
in place, and results that stay there are written in place; such addresses get graphs of their own from the second call
on. Concurrent calls use different streams. The memory of a call is released at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from aotc.vmfb.abi import COPY, Node, Slots
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.commands import all_commands
from aotc.vmfb.devices.cuda import driver as cuda_driver
from aotc.vmfb.devices.cuda.loaded_kernels import LoadedGpu
from aotc.vmfb.devices.cuda.streams import CallStreams, Space, StreamPool
from aotc.vmfb.devices.early import EarlyResults
from aotc.vmfb.devices.mixed.call import Array, PlacedCall
from aotc.vmfb.devices.mixed.host_part import HostPart
from aotc.vmfb.devices.mixed.session import PlacedSession
from aotc.vmfb.devices.mixed.spaces import Spaces
from aotc.vmfb.errors import CallError
from aotc.vmfb.manifest import signatures_and_programs
from aotc.vmfb.memory.arena import ARENAS, ArenaPool
from aotc.vmfb.memory.mapped_file import check_files_before, mapped_file_check
from aotc.vmfb.plan import Plan
from aotc.vmfb.profile.debug_texts import DebugText, bundle_origin, command_locs, kernel_texts
from aotc.vmfb.verify.buffers import load_command_buffers

if TYPE_CHECKING:
    from aotc.vmfb.call_limits import Limits


def slots_written(nodes: Sequence[Node], kernels: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """Return the slots that the commands of nodes write."""
    slots: set[int] = set()
    for command in all_commands(nodes):
        inputs = 1 if command.kind == COPY else kernels[command.kernel]["inputs"]
        slots.update(slot for slot, _ in command.places[inputs:])
    return frozenset(slots)


class PlacedExecutable:
    """A loaded variant that uses GPU memory: of one GPU, or host memory and several GPUs.

    Parameters
    ----------
    bundle : OpenedBundle
    variant : dict
        The variant's entry in the manifest.
    spaces : sequence of LoadedGpu or HostPart
        The loaded kernels of each memory.
    known : Spaces, optional
        The memories of the manifest, if there are several.

    Raises
    ------
    BundleError
        If a command buffer is invalid.
    """

    limits: Limits | None = None  # of the module's calls

    def __init__(
        self,
        bundle: OpenedBundle,
        variant: dict[str, Any],
        spaces: Sequence[Space],
        memory_spaces: Spaces | None = None,
    ) -> None:
        self.where = bundle.where
        self.spaces, self.known = spaces, memory_spaces
        self._bundle, self._variant = bundle, variant
        self.buffers = load_command_buffers(bundle, variant)
        if memory_spaces is not None:
            memory_spaces.check(signatures_and_programs(bundle.manifest, variant), self.buffers)
        self.gpus = [space for space in spaces if isinstance(space, LoadedGpu)]
        self.host = next((space for space in spaces if isinstance(space, HostPart)), None)
        self._mapped = () if self.host is None else self.host.mapped
        self.constant_sizes = tuple([space.constants_bytes for space in spaces])
        self.constants_bytes = sum(self.constant_sizes)
        self.writes = [slots_written(nodes, variant["kernels"]) for nodes in self.buffers.nodes]
        self.pool = StreamPool(spaces)

    @property
    def gpu(self) -> cuda_driver.Gpu:
        """Return the GPU of the variant's first GPU memory space."""
        return self.gpus[0].gpu

    @property
    def arenas(self) -> ArenaPool:
        """Return the pool from which calls allocate host memory."""
        return ARENAS if self.host is None else self.host.arenas

    def layout(self, entry: Mapping[str, Any]) -> Slots:
        """Return the layout of the pointer table of a function with this signature."""
        if self.known is not None:
            return self.known.layout(entry)
        return Slots(len(entry["arguments"]), len(entry["results"]))

    def gpu_of_slot(self, layout: Slots, slot: int) -> LoadedGpu | None:
        """Return the GPU whose memory contains a slot, or None for host memory."""
        space = self.spaces[layout.memory_space(slot)]
        return space if isinstance(space, LoadedGpu) else None

    @property
    def is_one_gpu(self) -> bool:
        """Return True if the memory of a single GPU is the variant's only memory space."""
        return len(self.spaces) == len(self.gpus) == 1

    def replay(self, plan: Plan) -> Callable[[Sequence[Array], Sequence[Array]], None]:
        """Return a function that runs ``plan`` on argument and result arrays, and checks the plan's assertions.

        An array may be a :class:`CudaArray` on the GPU of its slot.
        """
        return check_files_before(PlacedPlan(self, plan).run, self._mapped)

    @property
    def has_early_results(self) -> bool:
        """Return True: each device of a call completes its results independently."""
        return True

    def early_replay(self, plan: Plan) -> Callable[[Sequence[Array], Sequence[Array], EarlyResults], None]:
        """Return the function of :meth:`replay` for calls whose results can be read before the call ends."""
        run, check = PlacedPlan(self, plan, marked=True).run, mapped_file_check(self._mapped)

        def checked(arrays: Sequence[Array], results: Sequence[Array], early: EarlyResults) -> None:
            check()
            run(arrays, results, early)

        return checked

    def session(self, layout: Slots) -> PlacedSession:
        """Start a call with a pointer table of this layout."""
        mapped_file_check(self._mapped)()
        return PlacedSession(self, layout)

    @contextmanager
    def streams(self) -> Iterator[CallStreams]:
        """Take streams for the block; at its end all GPU work on them has completed.

        With a memory limit, only one call that allocates step by step runs at a time; two could wait for each other.
        """
        limited = any(loaded.usage.limit for loaded in self.gpus)
        with self.pool.session_lock if limited else nullcontext():
            streams = self.pool.take_streams()
            try:
                yield streams
            except BaseException:
                streams.stop_loops_and_wait()
                raise
            else:
                streams.wait()
            finally:
                self.pool.return_streams(streams)

    def kernel_texts(self) -> list[DebugText] | None:
        """Return the debug information of each kernel, or None if the bundle has none."""
        return kernel_texts(self._bundle, self._variant)

    def command_locs(self, number: int) -> dict[int, str]:
        """Return the locations of the commands of buffer ``number`` that differ from their kernel's own."""
        return command_locs(self._bundle, self._variant, number, self.buffers.nodes[number])

    def origin(self) -> dict[str, str]:
        """Return the compiler version and the program digest of the bundle, which must have debug information."""
        return bundle_origin(self._bundle)

    def out_of_memory(self, plan: Plan, own: Sequence[int], arrays: Sequence[tuple[int, str]]) -> CallError:
        """Return the error for a call of ``plan`` that needs more memory than a GPU has.

        ``own`` are the GPU memory spaces.
        """
        from aotc.vmfb.devices.mixed.out_of_memory import out_of_memory_error  # only for this error

        return out_of_memory_error(self._bundle, self._variant, plan, own, arrays)

    def stats(self) -> dict[str, Any]:
        """Return GPUs, kernels and memory in bytes, for ``module.stats()``."""
        names = [cuda_driver.device_name(loaded.ordinal) for loaded in self.gpus]
        return {
            "target": self._variant["target"],
            "device": ", ".join(dict.fromkeys(names)),
            **({"threads": self.host.threads, "slots": self.host.stats()["slots"]} if self.host else {}),
            "kernels": len(self._variant["kernels"]),
            "command_buffers": len(self.buffers.nodes),
            "arena_peak": self._variant.get("arena_peak"),
            "constants_bytes": self.constants_bytes,
            "device_bytes": sum(loaded.usage.bytes for loaded in self.gpus),
            "memory": self._memory(),
        }

    def _memory(self) -> dict[str, dict[str, int]]:
        """Return current and peak bytes of each device; devices of the model that share a GPU have one entry."""
        found = {"cpu": self.arenas.stats()} if self.host else {}
        for loaded in self.gpus:
            row = found.setdefault(f"cuda:{loaded.ordinal}", {"in_use": 0, "high_water": 0})
            row["in_use"] += loaded.usage.bytes
            row["high_water"] += loaded.usage.most_bytes
            if loaded.usage.limit:
                row["limit"] = row.get("limit", 0) + loaded.usage.limit
        return found

    def use_devices(self, names: Sequence[str]) -> None:
        """Let calls use the cores of these logical CPU devices."""
        if self.host is not None:
            self.host.use_devices(names)

    def limit_memory(self, limit: int) -> None:
        """Limit the working memory of all concurrent calls together to ``limit`` bytes in each memory space."""
        if self.host is not None:
            self.host.limit_memory(limit)
        for loaded in self.gpus:
            loaded.usage.limit = limit

    def trim(self) -> int:
        """Free unused working memory and cached memory of freed arrays; return the number of freed bytes."""
        before = sum(loaded.usage.bytes for loaded in self.gpus)
        self.pool.trim()
        freed = before - sum(loaded.usage.bytes for loaded in self.gpus)
        return freed + sum(loaded.trim() for loaded in self.gpus) + (self.host.trim() if self.host else 0)


class PlacedPlan:
    """A plan that runs on any unused streams; :class:`PlacedCall` prepares it for each set of streams."""

    def __init__(self, executable: PlacedExecutable, plan: Plan, marked: bool = False) -> None:
        self._executable, self._plan, self._marked = executable, plan, marked
        self._calls: dict[int, PlacedCall] = {}  # by id of the streams, which live as long as the executable

    def on(self, streams: CallStreams) -> PlacedCall:
        """Return the plan prepared for these streams; prepare it on first use."""
        call = self._calls.get(id(streams))
        if call is None:
            call = self._calls[id(streams)] = PlacedCall(self._executable, streams, self._plan, self._marked)
        return call

    def run(self, arrays: Sequence[Array], results: Sequence[Array], early: EarlyResults | None = None) -> None:
        """Run the plan on unused streams; see :meth:`PlacedExecutable.replay`."""
        streams = self._executable.pool.take_streams()
        try:
            self.on(streams).run(arrays, results, early)
        finally:
            self._executable.pool.return_streams(streams)
