"""Executables whose memory is not the process's alone: a variant on a GPU, or on the CPU and several GPUs.

A call takes streams (:mod:`aotc.vmfb.devices.cuda.streams`), whose working memory has its arena, and the arguments and
results that come from and go to NumPy; what runs on a GPU is recorded as CUDA graphs over those addresses. An argument
that is in the GPU's memory is read where it is, and a result that is to stay there is made where it stays: for such
addresses there are graphs of their own from the second call on. Calls at the same time are on different streams. What a
call holds goes at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from aotc.vmfb.abi import COPY, Node, Slots
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.commands import all_commands
from aotc.vmfb.device import Plan
from aotc.vmfb.devices.buffers import load_buffers
from aotc.vmfb.devices.cuda import driver as cuda_driver
from aotc.vmfb.devices.cuda.loaded_kernels import LoadedGpu
from aotc.vmfb.devices.cuda.streams import CallStreams, Space, StreamPool
from aotc.vmfb.devices.early import EarlyResults
from aotc.vmfb.devices.mixed.call import Array, PlacedCall
from aotc.vmfb.devices.mixed.host_part import HostPart
from aotc.vmfb.devices.mixed.session import PlacedSession
from aotc.vmfb.devices.mixed.spaces import Spaces
from aotc.vmfb.errors import VmError
from aotc.vmfb.host.mapped_file import check_of, checked_first
from aotc.vmfb.manifest import programs_of
from aotc.vmfb.memory.arena import ARENAS, ArenaPool
from aotc.vmfb.profile.debug_texts import DebugText, kernel_texts, origin


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
    bundle : OpenedBundle
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
        self, bundle: OpenedBundle, variant: dict[str, Any], spaces: Sequence[Space], known: Spaces | None = None
    ) -> None:
        self.where = bundle.where
        self.spaces, self.known = spaces, known
        self._bundle, self._variant = bundle, variant
        self.buffers = load_buffers(bundle, variant)
        if known is not None:
            known.check(programs_of(bundle.manifest, variant), self.buffers)
        self.gpus = [space for space in spaces if isinstance(space, LoadedGpu)]
        self.host = next((space for space in spaces if isinstance(space, HostPart)), None)
        self._mapped = () if self.host is None else self.host.mapped
        self.constant_sizes = tuple([space.constants_bytes for space in spaces])
        self.constants_bytes = sum(self.constant_sizes)
        self.writes = [slots_written(nodes, variant["kernels"]) for nodes in self.buffers.nodes]
        self.pool = StreamPool(spaces)

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

    @property
    def is_one_gpu(self) -> bool:
        """Is a single GPU's memory all that it works on?"""
        return len(self.spaces) == len(self.gpus) == 1

    def replay(self, plan: Plan) -> Callable[[Sequence[Array], Sequence[Array]], None]:
        """Return the function that runs ``plan`` on argument and result arrays, and judges what it computed.

        An array may be a :class:`CudaArray` on the GPU in whose memory it belongs.
        """
        return checked_first(PlacedPlan(self, plan).run, self._mapped)

    @property
    def has_early_results(self) -> bool:
        """Return True if results of the CPU can be read while GPUs work."""
        return self.host is not None

    def early_replay(self, plan: Plan) -> Callable[[Sequence[Array], Sequence[Array], EarlyResults], None]:
        """Return the function of :meth:`replay` for calls whose results are read while they go on."""
        run, check = PlacedPlan(self, plan).run, check_of(self._mapped)

        def checked(arrays: Sequence[Array], results: Sequence[Array], early: EarlyResults) -> None:
            check()
            run(arrays, results, early)

        return checked

    def session(self, layout: Slots) -> PlacedSession:
        """Begin a call with a pointer table of this layout."""
        check_of(self._mapped)()
        return PlacedSession(self, layout)

    @contextmanager
    def streams(self) -> Iterator[CallStreams]:
        """Have streams for oneself; afterwards nothing that was asked of GPUs on them is under way.

        Of calls that take memory bit by bit one runs at a time where memory is limited, so that no two wait for each
        other.
        """
        limited = any(loaded.usage.limit for loaded in self.gpus)
        with self.pool.session_lock if limited else nullcontext():
            streams = self.pool.take()
            try:
                yield streams
            except BaseException:
                streams.abandon()
                raise
            else:
                streams.wait()
            finally:
                self.pool.give(streams)

    def kernel_texts(self) -> list[DebugText] | None:
        """Return what debug information says of each kernel; None without it."""
        return kernel_texts(self._bundle, self._variant)

    def origin(self) -> dict[str, str]:
        """Return the compiler of the bundle, and the digest of the program; it needs debug information."""
        return origin(self._bundle)

    def out_of_memory(self, plan: Plan, own: Sequence[int], arrays: Sequence[tuple[int, str]]) -> VmError:
        """Return the error of a call of ``plan`` with ``arrays``, for which GPUs, of memories ``own``, have no room."""
        from aotc.vmfb.api.out_of_memory import report  # for whoever is told

        return report(self._bundle, self._variant, plan, own, arrays)

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
            "device_bytes": sum(loaded.usage.bytes for loaded in self.gpus),
            "memory": self._memory(),
        }

    def _memory(self) -> dict[str, dict[str, int]]:
        """Return the bytes in use of each device, and the most that ever were; devices of the model may share a GPU."""
        found = {"cpu": self.arenas.stats()} if self.host else {}
        for loaded in self.gpus:
            row = found.setdefault(f"cuda:{loaded.ordinal}", {"in_use": 0, "high_water": 0})
            row["in_use"] += loaded.usage.bytes
            row["high_water"] += loaded.usage.most_bytes
            if loaded.usage.limit:
                row["limit"] = row.get("limit", 0) + loaded.usage.limit
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
            loaded.usage.limit = limit

    def trim(self) -> int:
        """Free the working memory of streams, and of arrays that are gone; return how many bytes that were."""
        before = sum(loaded.usage.bytes for loaded in self.gpus)
        self.pool.trim()
        freed = before - sum(loaded.usage.bytes for loaded in self.gpus)
        return freed + sum(loaded.trim() for loaded in self.gpus) + (self.host.trim() if self.host else 0)


class PlacedPlan:
    """A plan, on whichever streams are free."""

    def __init__(self, executable: PlacedExecutable, plan: Plan) -> None:
        self._executable, self._plan = executable, plan
        self._calls: dict[int, PlacedCall] = {}  # by the streams' identity, which live as long as the executable

    def on(self, streams: CallStreams) -> PlacedCall:
        """Return the plan on streams."""
        call = self._calls.get(id(streams))
        if call is None:
            call = self._calls[id(streams)] = PlacedCall(self._executable, streams, self._plan)
        return call

    def run(self, arrays: Sequence[Array], results: Sequence[Array], early: EarlyResults | None = None) -> None:
        """Run the plan; see :meth:`PlacedExecutable.replay`."""
        streams = self._executable.pool.take()
        try:
            self.on(streams).run(arrays, results, early)
        finally:
            self._executable.pool.give(streams)
