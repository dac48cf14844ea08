"""Streams that calls take, one of each GPU at a time, and the working memory that goes with them.

A call has its streams for itself while the host is at it; what it has asked of the GPU may go on afterwards, and the
next call on these streams comes behind it. So calls that run at the same time share nothing: each has a pointer table,
graphs and working memory of its own. A thread gets the streams of its last call, another one some that are not at work,
as far as there are any. Working memory belongs to the streams, not to plans: plans of
many shapes use the same, one after the other, and what was recorded over it goes when it has to be larger.
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
from aotc.vmfb.errors import VmError
from aotc.vmfb.host.interruption import notice
from aotc.vmfb.host.locks import new_lock, new_recursive_lock
from aotc.vmfb.host.release import Release
from aotc.vmfb.limits import NOTICE_NANOSECONDS, STREAMS

Space = LoadedGpu | HostPart


class Recorded(Protocol):
    """What has graphs over working memory."""

    def forget(self) -> None:
        """Drop them."""


# Growth factor of a stream working memory that was too small. With it, shapes that grow step by step do not allocate
# new memory, and record all graphs again, in each call.
WORKSPACE_GROWTH = 1.25


class Workspace:
    """Memory of a GPU for the calls on one stream, one at a time; it goes back with the last reference to it."""

    def __init__(self, loaded: LoadedGpu) -> None:
        self.loaded = loaded
        self._held: list[tuple[int, int]] = []
        self._release = Release(_give_back, loaded, self._held)

    @property
    def address(self) -> int:
        """Return where it begins."""
        return self._held[0][0] if self._held else 0

    @property
    def size(self) -> int:
        """Return how many bytes it has."""
        return self._held[0][1] if self._held else 0

    def take(self, size: int) -> None:
        """Have at least ``size`` bytes, and no more where memory is limited; what it held is lost."""
        more = 0 if self.loaded.usage.limit else int(self.size * WORKSPACE_GROWTH)
        self.release()
        try:
            self._take(max(size, more))
        except OutOfGpuMemory:
            if more <= size:
                raise
            self._take(size)

    def _take(self, size: int) -> None:
        self._held.append((self.loaded.gpu.allocate(size), size))
        self.loaded.usage.count(size)

    def release(self) -> None:
        """Give it back."""
        _give_back(self.loaded, self._held)


def _give_back(loaded: LoadedGpu, held: list[tuple[int, int]]) -> None:
    while held:
        address, size = held.pop()
        loaded.gpu.free([address])
        loaded.usage.count(-size)


# Plans, one for each tuple of argument shapes, that have CUDA graphs on one stream; those of the least recently called
# plan are evicted. A graph of fifty kernels takes some 100 KB of driver memory.
RECORDED_PLANS = 64


class CallStreams:
    """A stream of each GPU that an executable is on, for one call at a time.

    Attributes
    ----------
    spaces : list of LoadedGpu or HostPart
        What each memory's kernels are on, by this stream.
    workspaces : list of Workspace or None
        By memory.
    moves : int
        How often the working memory has moved.
    user : int
        The thread of the last call.
    busy : bool
        Has the last call left work that nobody has waited for?
    last : weak reference to Recorded, or None
        What the last call ran.
    """

    def __init__(self, spaces: Sequence[Space], is_first: bool) -> None:
        self.spaces = [s if is_first or isinstance(s, HostPart) else s.on_another_stream() for s in spaces]
        self.gpus = [space.gpu for space in self.spaces if isinstance(space, LoadedGpu)]
        self.workspaces = [Workspace(s) if isinstance(s, LoadedGpu) else None for s in spaces]
        self.moves = self.user = 0
        self.busy = False
        self.last: ref[Recorded] | None = None
        self._recent: OrderedDict[ref[Recorded], None] = OrderedDict()  # plans that have graphs, by last use

    def loaded(self, layout: Slots, slot: int) -> LoadedGpu | None:
        """Return the GPU in whose memory a slot is, or None for the process's."""
        space = self.spaces[layout.home(slot)]
        return space if isinstance(space, LoadedGpu) else None

    def wait(self) -> None:
        """Wait until the GPUs are done with all that was asked of them on these streams."""
        for gpu in self.gpus:
            gpu.enter()
            gpu.wait()
        self.busy = False

    def abandon(self) -> None:
        """Wait until nothing is under way, of which nobody wants anything any more: loops end."""
        for gpu in self.gpus:
            with suppress(VmError):
                gpu.enter()
                gpu.end_loops()
        with suppress(VmError):
            self.wait()

    def note(self, call: Recorded) -> None:
        """Note that a plan is used; the graphs of the one that was not for the longest time go."""
        self.last = row = ref(call)
        self._recent[row] = None
        self._recent.move_to_end(row)
        while len(self._recent) > RECORDED_PLANS:
            _forget(self._recent.popitem(last=False)[0])

    def forget(self) -> None:
        """Drop all that was recorded over the working memory, which is elsewhere from now on."""
        self.moves += 1
        self.last = None
        while self._recent:
            _forget(self._recent.popitem()[0])

    def release(self) -> None:
        """Give the working memory back; the next call takes it again."""
        self.forget()
        for workspace in self.workspaces:
            if workspace is not None:
                workspace.release()


def _too_small(streams: CallStreams, sizes: Sequence[int]) -> list[tuple[Workspace, int]]:
    return [(w, size) for w, size in zip(streams.workspaces, sizes, strict=True) if w and size > w.size]


def _forget(row: ref[Recorded]) -> None:
    call = row()
    if call is not None:
        call.forget()


class StreamPool:
    """The streams of an executable: a few, made when calls run at the same time, and taken by last use."""

    def __init__(self, spaces: Sequence[Space]) -> None:
        self._spaces = spaces
        self._gpus = [space for space in spaces if isinstance(space, LoadedGpu)]
        self._lock = new_recursive_lock()
        self._idle: list[CallStreams] = []
        self._waiting: deque[Any] = deque()  # a closed lock for each call that waits
        self._users: list[int] = []  # threads that have some
        self._made = 0
        self._memory_lock = new_recursive_lock()  # who looks what is free takes it before another looks
        self.session_lock = new_recursive_lock()

    def take(self) -> CallStreams:
        """Return streams that nobody uses; where there are none and may be no more, wait.

        A signal handler that interrupts a call is not made to wait for it.
        """
        me = get_ident()
        try:
            streams = self._idle.pop()
        except IndexError:
            streams = self._made_or_next(me)
        else:
            if streams.busy and streams.user != me:
                self._idle.append(streams)
                streams = self._preferred(me)
        self._users.append(me)
        streams.user = me
        return streams

    def _preferred(self, me: int) -> CallStreams:
        """Return the streams that this thread used last, else some that are not at work, else any."""
        for streams in sorted(self._idle, key=lambda s: (s.user != me, s.busy)):
            if streams.user != me and streams.busy:
                break
            with suppress(ValueError):  # another thread has taken them
                self._idle.remove(streams)
                return streams
        return self._made_or_next(me)

    def _made_or_next(self, me: int) -> CallStreams:
        with self._lock:
            if self._made < STREAMS or me in self._users:
                made = CallStreams(self._spaces, is_first=not self._made)
                self._made += 1
                return made
        return self._next()

    def _next(self) -> CallStreams:
        """Wait until some come back."""
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
            notice()

    def give(self, streams: CallStreams) -> None:
        """Take streams back: whoever takes them next comes behind what was asked for on them."""
        me = get_ident()
        if me in self._users:  # else another thread gives them back
            self._users.remove(me)
        self._idle.append(streams)
        if self._waiting:
            with suppress(IndexError, RuntimeError):
                self._waiting.popleft().release()

    def trim(self) -> None:
        """Give back the working memory that no call uses."""
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
        """See to it that streams have so much working memory in each memory; what was recorded over less goes.

        Where memory is limited and other calls have it, wait for them, with none.

        Raises
        ------
        VmError
            If a call takes more than the limit by itself, or there is not so much.
        """
        if not _too_small(streams, sizes):
            return
        streams.forget()
        for loaded, size in zip(self._spaces, sizes, strict=True):
            if isinstance(loaded, LoadedGpu):
                self._check(loaded, size)
        while not self._reserved(streams, sizes):
            streams.release()
            notice()
            self._pause()

    def _reserved(self, streams: CallStreams, sizes: Sequence[int]) -> bool:
        """Take the working memory if it fits; what is kept for later calls alone goes for it."""
        with self._memory_lock:
            rows = _too_small(streams, sizes)
            if not all(self._fits(w.loaded, size - w.size) for w, size in rows):
                self._free_some()
                if not all(self._fits(w.loaded, size - w.size) for w, size in rows):
                    return False
            for workspace, size in rows:
                self._grow(workspace, size)
        return True

    def _grow(self, workspace: Workspace, size: int) -> None:
        try:
            workspace.take(size)
        except OutOfGpuMemory:
            self._free_some()
            workspace.take(size)

    def take_more(self, loaded: LoadedGpu, size: int, held: int, take: Callable[[], None]) -> None:
        """Let a call that takes memory bit by bit, and holds ``held`` bytes, take ``size`` more by ``take``.

        Raises
        ------
        VmError
            If the call takes more than the limit by itself.
        """
        self._check(loaded, size + held)
        while True:
            with self._memory_lock:
                if not self._fits(loaded, size):
                    self._free_some()
                if self._fits(loaded, size):
                    return take()
            notice()
            self._pause()

    def _fits(self, loaded: LoadedGpu, more: int) -> bool:
        return not loaded.usage.limit or loaded.working_bytes() + more <= loaded.usage.limit

    def _check(self, loaded: LoadedGpu, size: int) -> None:
        limit = loaded.usage.limit
        if limit and size > limit:
            what = f"this call needs {size:,} bytes of working memory on GPU {loaded.ordinal}"
            hint = "load it with a larger memory_limit, or give it less at a time"
            raise VmError("", what, expected=f"at most memory_limit, {limit:,} bytes", hint=hint)

    def _free_some(self) -> None:
        """Free what is kept for later calls alone."""
        self.trim()
        for loaded in self._gpus:
            loaded.trim()

    def _pause(self) -> None:
        """Wait until another call ends, a little while at most."""
        gate = new_lock()
        gate.acquire()
        self._waiting.append(gate)
        gate.acquire(timeout=NOTICE_NANOSECONDS / 1e9)
        with suppress(ValueError):
            self._waiting.remove(gate)
