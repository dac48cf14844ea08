"""Pool of the streams of an executable's calls, one stream for each GPU, with the calls' working memory.

A call has exclusive use of its streams while the host works on it. Its GPU work may continue afterwards, and the next
call on these streams is ordered behind it. So concurrent calls share nothing: each has its own pointer table, graphs
and working memory. A thread gets the streams of its last call again, another thread idle ones if there are any. Working
memory belongs to the streams, not to plans: plans for many shapes use it in turn, and when it must grow, the graphs
recorded over it are dropped.
"""

from __future__ import annotations

from _thread import get_ident
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol
from weakref import ref

from aotc.vmfb.abi import Slots
from aotc.vmfb.devices.cuda.libcuda.library import OutOfGpuMemory
from aotc.vmfb.devices.cuda.loaded_kernels import LoadedGpu
from aotc.vmfb.devices.mixed.host_part import HostPart
from aotc.vmfb.errors import CallError
from aotc.vmfb.host.interruption import raise_if_interrupted
from aotc.vmfb.host.locks import new_lock, new_recursive_lock
from aotc.vmfb.host.release import Release
from aotc.vmfb.limits import NOTICE_NANOSECONDS, STREAMS

Space = LoadedGpu | HostPart


class Recorded(Protocol):
    """Interface of an object with graphs that use the working memory of streams."""

    def drop_graphs(self) -> None:
        """Drop all recorded graphs."""


# Growth factor of a stream working memory that was too small. With it, shapes that grow step by step do not allocate
# new memory, and record all graphs again, in each call.
WORKSPACE_GROWTH = 1.25


class Workspace:
    """GPU working memory of one stream, for one call at a time; freed with the last reference to it."""

    def __init__(self, loaded: LoadedGpu) -> None:
        self.loaded = loaded
        self._held: list[tuple[int, int]] = []
        self._release = Release(_free_workspace, loaded, self._held)

    @property
    def address(self) -> int:
        """Return the start address of the working memory; 0 if nothing is allocated."""
        return self._held[0][0] if self._held else 0

    @property
    def size(self) -> int:
        """Return the size of the working memory in bytes."""
        return self._held[0][1] if self._held else 0

    def replace_memory(self, size: int) -> None:
        """Allocate at least ``size`` bytes, exactly ``size`` under a memory limit; the old content is lost."""
        more = 0 if self.loaded.usage.limit else int(self.size * WORKSPACE_GROWTH)
        self.release()
        try:
            self._allocate_bytes(max(size, more))
        except OutOfGpuMemory:
            if more <= size:
                raise
            self._allocate_bytes(size)

    def _allocate_bytes(self, size: int) -> None:
        self._held.append((self.loaded.gpu.allocate(size), size))
        self.loaded.usage.add_bytes(size)

    def release(self) -> None:
        """Free the working memory."""
        _free_workspace(self.loaded, self._held)


def _free_workspace(loaded: LoadedGpu, blocks: list[tuple[int, int]]) -> None:
    while blocks:
        address, size = blocks.pop()
        loaded.gpu.free([address])
        loaded.usage.add_bytes(-size)


# Plans, one for each tuple of argument shapes, that have CUDA graphs on one stream; those of the least recently called
# plan are evicted. A graph of fifty kernels takes some 100 KB of driver memory.
RECORDED_PLANS = 64


class CallStreams:
    """One stream for each GPU of an executable, used by one call at a time.

    Attributes
    ----------
    spaces : list of LoadedGpu or HostPart
        The kernels of each memory space, on these streams.
    workspaces : list of Workspace or None
        By memory space; None for host memory.
    moves : int
        Number of times that the working memory has moved.
    user : int
        The thread of the last call.
    busy : bool
        True if the last call left work that the host has not waited for.
    last : weak reference to Recorded, or None
        The plan of the last call.
    """

    def __init__(self, spaces: Sequence[Space], is_first: bool) -> None:
        self.spaces = [s if is_first or isinstance(s, HostPart) else s.on_another_stream() for s in spaces]
        self.gpus = [space.gpu for space in self.spaces if isinstance(space, LoadedGpu)]
        self.workspaces = [Workspace(s) if isinstance(s, LoadedGpu) else None for s in spaces]
        self.moves = self.user = 0
        self.busy = False
        self.last: ref[Recorded] | None = None
        self._recent: OrderedDict[ref[Recorded], None] = OrderedDict()  # plans with graphs, least recently used first

    def gpu_of_slot(self, layout: Slots, slot: int) -> LoadedGpu | None:
        """Return the GPU whose memory contains slot ``slot``; None for host memory."""
        space = self.spaces[layout.memory_space(slot)]
        return space if isinstance(space, LoadedGpu) else None

    def wait(self) -> None:
        """Wait until the GPUs have completed all work on these streams."""
        for gpu in self.gpus:
            gpu.make_context_current()
            gpu.wait()
        self.busy = False

    def stop_loops_and_wait(self) -> None:
        """Stop all loops on the GPUs, and wait for the streams; the results of the call are incomplete."""
        for gpu in self.gpus:
            with suppress(CallError):
                gpu.make_context_current()
                gpu.stop_loops()
        with suppress(CallError):
            self.wait()

    def mark_recently_used(self, call: Recorded) -> None:
        """Mark a plan as the most recently used; if too many plans have graphs, drop the least recently used ones."""
        self.last = row = ref(call)
        self._recent[row] = None
        self._recent.move_to_end(row)
        while len(self._recent) > RECORDED_PLANS:
            _drop_graphs_of_plan(self._recent.popitem(last=False)[0])

    def drop_graphs(self) -> None:
        """Drop all graphs that use the working memory, because it moves."""
        self.moves += 1
        self.last = None
        while self._recent:
            _drop_graphs_of_plan(self._recent.popitem()[0])

    def release(self) -> None:
        """Free the working memory; the next call allocates it again."""
        self.drop_graphs()
        for workspace in self.workspaces:
            if workspace is not None:
                workspace.release()


def _too_small_workspaces(streams: CallStreams, sizes: Sequence[int]) -> list[tuple[Workspace, int]]:
    return [(w, size) for w, size in zip(streams.workspaces, sizes, strict=True) if w and size > w.size]


def _drop_graphs_of_plan(row: ref[Recorded]) -> None:
    call = row()
    if call is not None:
        call.drop_graphs()


class StreamPool:
    """Streams of an executable: created for concurrent calls, up to a limit, and reused by later calls."""

    def __init__(self, spaces: Sequence[Space]) -> None:
        self._spaces = spaces
        self._gpus = [space for space in spaces if isinstance(space, LoadedGpu)]
        self._lock = new_recursive_lock()
        self._idle: list[CallStreams] = []
        self._waiting: deque[Any] = deque()  # a locked lock for each waiting call
        self._users: list[int] = []  # threads that hold streams
        self._made = 0
        self._memory_lock = new_recursive_lock()  # held from the check of free memory to the allocation
        self.session_lock = new_recursive_lock()

    def take_streams(self) -> CallStreams:
        """Take unused streams for a call; wait if the limit is reached and none is unused.

        A signal handler that interrupts a call gets new streams instead: waiting for that call would deadlock.
        """
        me = get_ident()
        try:
            streams = self._idle.pop()
        except IndexError:
            streams = self._wait_for_streams(me)
        else:
            if streams.busy and streams.user != me:
                self._idle.append(streams)
                streams = self._choose_unused_streams(me)
        self._users.append(me)
        streams.user = me
        return streams

    def _choose_unused_streams(self, me: int) -> CallStreams:
        """Return the streams that this thread used last, else idle ones, else new ones, else any unused ones."""
        for streams in sorted(self._idle, key=lambda s: (s.user != me, s.busy)):
            if streams.user != me and streams.busy:
                break
            with suppress(ValueError):  # another thread took them
                self._idle.remove(streams)
                return streams
        return self._wait_for_streams(me)

    def _wait_for_streams(self, me: int) -> CallStreams:
        """Wait for streams that another call returns; create new ones if that call is interrupted by this one."""
        with self._lock:
            if self._made < STREAMS or me in self._users:
                made = CallStreams(self._spaces, is_first=not self._made)
                self._made += 1
                return made
        return self._next_returned_streams()

    def _next_returned_streams(self) -> CallStreams:
        """Wait until a call returns streams, and take them."""
        while True:
            gate = new_lock()
            gate.acquire()
            self._waiting.append(gate)
            try:
                return self._idle.pop()
            except IndexError:
                gate.acquire(timeout=NOTICE_NANOSECONDS / 1e9)
            finally:
                with suppress(ValueError):
                    self._waiting.remove(gate)
            raise_if_interrupted()

    def return_streams(self, streams: CallStreams) -> None:
        """Return streams to the pool; the next user's work is ordered behind theirs."""
        me = get_ident()
        if me in self._users:  # else another thread returns them
            self._users.remove(me)
        self._idle.append(streams)
        if self._waiting:
            with suppress(IndexError, RuntimeError):
                self._waiting.popleft().release()

    def trim(self) -> None:
        """Free the working memory of unused streams."""
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._idle.pop())
        for streams in taken:
            streams.release()
        for streams in reversed(taken):
            self._idle.append(streams)

    # ------------------------------------------------------------ memory

    def reserve(self, streams: CallStreams, sizes: Sequence[int]) -> None:
        """Give streams at least ``sizes`` bytes of working memory in each memory space; growth drops recorded graphs.

        If a memory limit leaves no room, release the working memory of these streams and wait for other calls.

        Raises
        ------
        CallError
            If the call alone exceeds the limit, or the GPU has too little memory.
        """
        if not _too_small_workspaces(streams, sizes):
            return
        streams.drop_graphs()
        for loaded, size in zip(self._spaces, sizes, strict=True):
            if isinstance(loaded, LoadedGpu):
                self._check_memory_limit(loaded, size)
        while not self._try_to_reserve(streams, sizes):
            streams.release()
            raise_if_interrupted()
            self._wait_for_other_call()

    def _try_to_reserve(self, streams: CallStreams, sizes: Sequence[int]) -> bool:
        """Allocate the working memory of streams, after freeing cached memory if necessary.

        Return False if it does not fit.
        """
        with self._memory_lock:
            rows = _too_small_workspaces(streams, sizes)
            if not all(self._fits_memory_limit(w.loaded, size - w.size) for w, size in rows):
                self._free_cached_memory()
                if not all(self._fits_memory_limit(w.loaded, size - w.size) for w, size in rows):
                    return False
            for workspace, size in rows:
                self._grow_workspace(workspace, size)
        return True

    def _grow_workspace(self, workspace: Workspace, size: int) -> None:
        try:
            workspace.replace_memory(size)
        except OutOfGpuMemory:
            self._free_cached_memory()
            workspace.replace_memory(size)

    def allocate_more(self, loaded: LoadedGpu, size: int, held_bytes: int, take: Callable[[], None]) -> None:
        """Allocate ``size`` more bytes by ``take()`` for a call that already has ``held_bytes`` bytes.

        Raises
        ------
        CallError
            If the call alone exceeds the limit.
        """
        self._check_memory_limit(loaded, size + held_bytes)
        while True:
            with self._memory_lock:
                if not self._fits_memory_limit(loaded, size):
                    self._free_cached_memory()
                if self._fits_memory_limit(loaded, size):
                    return take()
            raise_if_interrupted()
            self._wait_for_other_call()

    def _fits_memory_limit(self, loaded: LoadedGpu, more: int) -> bool:
        return not loaded.usage.limit or loaded.working_bytes() + more <= loaded.usage.limit

    def _check_memory_limit(self, loaded: LoadedGpu, size: int) -> None:
        limit = loaded.usage.limit
        if limit and size > limit:
            what = f"this call needs {size:,} bytes of working memory on GPU {loaded.ordinal}"
            hint = "load it with a larger memory_limit, or pass smaller arrays"
            raise CallError("", what, expected=f"at most memory_limit, {limit:,} bytes", hint=hint)

    def _free_cached_memory(self) -> None:
        """Free cached memory: unused streams' working memory, and memory of freed arrays."""
        self.trim()
        for loaded in self._gpus:
            loaded.trim()

    def _wait_for_other_call(self) -> None:
        """Wait until another call ends, at most a few milliseconds, and check for interruption."""
        gate = new_lock()
        gate.acquire()
        self._waiting.append(gate)
        gate.acquire(timeout=NOTICE_NANOSECONDS / 1e9)
        with suppress(ValueError):
            self._waiting.remove(gate)
