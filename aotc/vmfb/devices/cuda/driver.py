"""The CUDA driver by ctypes: the calls that the CUDA device makes, and nothing else.

How libcuda is loaded and called is in :mod:`aotc.vmfb.devices.cuda.libcuda.library`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from functools import partial
from typing import Any

from aotc.vmfb.devices.cuda.launch import LaunchShape
from aotc.vmfb.devices.cuda.libcuda.graphs import CONDITIONS_SINCE, GraphStream, Recording
from aotc.vmfb.devices.cuda.libcuda.library import DRIVER, OutOfGpuMemory, attempt, call, handle_of, is_done, missing
from aotc.vmfb.devices.cuda.libcuda.loops import WORD_BYTES, Loops, load_decisions, watch
from aotc.vmfb.devices.cuda.stream_order import Mark
from aotc.vmfb.errors import VmError
from aotc.vmfb.host.release import Release

__all__ = ["Gpu", "OutOfGpuMemory", "call", "missing"]

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_NON_BLOCKING, _RELAXED = 1, 2
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE
_WORDS: list[int] = []  # free words of page-locked host memory that GPUs read
_WORDS_BYTES = 4096


def device_count() -> int:
    """Return how many GPUs there are."""
    found = c_int()
    call("cuDeviceGetCount", byref(found))
    return found.value


def version() -> tuple[int, int]:
    """Return the CUDA that the driver is for, e.g. (13, 0)."""
    found = c_int()
    call("cuDriverGetVersion", byref(found))
    return found.value // 1000, found.value % 1000 // 10


def capability(ordinal: int) -> tuple[int, int]:
    """Return the compute capability of a GPU, e.g. (9, 0)."""
    return _attribute(_MAJOR, ordinal), _attribute(_MINOR, ordinal)


def _attribute(number: int, ordinal: int) -> int:
    found = c_int()
    call("cuDeviceGetAttribute", byref(found), number, ordinal)
    return found.value


def memory_info() -> tuple[int, int]:
    """Return how many bytes of the current GPU are free, and how many it has."""
    free, total = c_size_t(), c_size_t()
    call("cuMemGetInfo_v2", byref(free), byref(total))
    return free.value, total.value


def page_locked(size: int) -> int:
    """Return the address of memory of the host that all GPUs copy from and to by themselves; it stays."""
    return handle_of("cuMemHostAlloc", size, _PORTABLE).value or 0


class PageLock:
    """A part of ``memory`` that all GPUs copy from and to by themselves for as long as this lives, which holds it."""

    def __init__(self, gpu: Gpu, memory: object, address: int, size: int) -> None:
        self._memory = memory
        gpu.enter()
        call("cuMemHostRegister_v2", address, size, _PORTABLE)
        self._release = Release(_unlock, gpu.context, address, os.getpid())


def _unlock(context: c_void_p, address: int, process: int) -> None:
    if os.getpid() == process:  # a forked child has no driver
        with suppress(VmError), _within(context):
            attempt("cuMemHostUnregister", address)


def ordinal_of(address: int) -> int:
    """Return the number of the GPU that has some memory."""
    found = c_int()
    call("cuPointerGetAttribute", byref(found), _ORDINAL, address)
    return found.value


def device_name(ordinal: int) -> str:
    """Return what the driver calls a GPU."""
    text = ctypes.create_string_buffer(100)
    call("cuDeviceGetName", text, 100, ordinal)
    return text.value.decode()


@contextmanager
def _within(context: c_void_p) -> Iterator[None]:
    """Make ``context`` the calling thread's for a while; what that thread does, or records, is not touched."""
    mode, found = c_int(_RELAXED), c_void_p()
    call("cuCtxPushCurrent_v2", context)
    try:
        call("cuThreadExchangeStreamCaptureMode", byref(mode))
        yield
        call("cuThreadExchangeStreamCaptureMode", byref(mode))
    finally:
        call("cuCtxPopCurrent_v2", byref(found))


class _Held:
    """What a GPU has to give back; by the process that took it, for a forked child has none of it.

    Finalizers call its methods, on any thread and at any moment: they raise nothing.
    """

    def __init__(self, ordinal: int) -> None:
        self.process = os.getpid()
        self.context = handle_of("cuDevicePrimaryCtxRetain", ordinal)  # kept: threads, and other libraries, are in it
        self.streams: list[c_void_p] = []
        self.marks: list[Mark] = []
        self.modules: list[c_void_p] = []
        self.blocks: set[int] = set()
        self.events: list[c_void_p] = []
        self.words: list[int] = []
        self.decisions: dict[str, c_void_p] = {}
        self.turning: set[int] = set()  # streams that have loops under way
        self.later: list[int] = []  # memory that goes when they have ended, for who frees some waits for all streams

    def free(self, blocks: Iterable[int], graphs: Iterable[Recording]) -> None:
        """Give memory and graphs back."""
        if self.turning:
            self.later.extend(blocks)
            blocks = ()
        if os.getpid() == self.process:
            with suppress(VmError), _within(self.context):
                for graph in graphs:
                    attempt("cuGraphExecDestroy", graph.ready)
                    attempt("cuGraphDestroy", graph.source)
                for address in blocks:
                    self.blocks.discard(address)
                    attempt("cuMemFree_v2", address)

    def word(self) -> int:
        """Return the address of a word of the host's, which the GPU reads; it is kept for another when this goes."""
        if not _WORDS:
            begin = page_locked(_WORDS_BYTES)
            _WORDS.extend(range(begin, begin + _WORDS_BYTES, WORD_BYTES))
        self.words.append(_WORDS.pop())
        return self.words[-1]

    def close(self) -> None:
        """Give everything back but the context."""
        _WORDS.extend(self.words)
        if os.getpid() == self.process:
            with suppress(VmError), _within(self.context):
                for stream in self.streams:
                    attempt("cuStreamSynchronize", stream)
                for mark in self.marks:
                    mark.end()
                self.free(list(self.blocks), ())
                for module in self.modules:
                    attempt("cuModuleUnload", module)
                for event in self.events:
                    attempt("cuEventDestroy_v2", event)
                for stream in self.streams:
                    attempt("cuStreamDestroy_v2", stream)


class Gpu(GraphStream):
    """A GPU's primary context with one stream; methods work on the calling thread's current context.

    What it took it gives back when the last reference to it goes; at the end of the process the driver does.

    Attributes
    ----------
    ordinal : int
        The GPU's number; several objects may share a GPU, each with a stream of its own.
    multiprocessors : int
        How many it has.
    mark : Mark
        The stream, for memory that it may be at work on.
    enter_quickly : callable
        What :meth:`enter` does; returns the driver's status.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._held = _Held(ordinal)
        self._idle: list[c_void_p] = []  # events that nobody uses
        self._release = Release(self._held.close)
        self.context = self._held.context
        self.enter_quickly: Callable[[], int] = partial(DRIVER.function("cuCtxSetCurrent"), self.context)
        self.enter()
        self.stream, self.mark = self._new_stream()
        self._first: Gpu | None = None  # whose end is that of the memory
        self._loops: Loops | None = None
        self.multiprocessors = _attribute(_MULTIPROCESSORS, ordinal)

    def _new_stream(self) -> tuple[c_void_p, Mark]:
        made = handle_of("cuStreamCreate", _NON_BLOCKING)
        self._held.streams.append(made)
        self._held.marks.append(Mark(made.value or 0))
        return made, self._held.marks[-1]

    def another(self) -> Gpu:
        """Return the same GPU, modules and memory with another stream; what it took goes back with all of them."""
        self.enter()
        other = copy(self)
        other._first, other._loops = self._first or self, None
        other.stream, other.mark = self._new_stream()
        return other

    def enter(self) -> None:
        """Make this GPU the calling thread's."""
        call("cuCtxSetCurrent", self.context)

    def load(self, image: Any) -> c_void_p:
        """Return the module of a cubin, or of PTX, which the driver compiles."""
        module = handle_of("cuModuleLoadData", image)
        self._held.modules.append(module)
        return module

    def function(self, module: c_void_p, symbol: str) -> c_void_p:
        """Return a kernel of a module."""
        return handle_of("cuModuleGetFunction", module, symbol.encode())

    def allocate(self, size: int) -> int:
        """Return the address of ``size`` bytes (at least one).

        Raises
        ------
        OutOfGpuMemory
            Says how much there is.
        """
        self.enter()
        found = c_uint64()
        try:
            call("cuMemAlloc_v2", byref(found), max(size, 1))
        except OutOfGpuMemory:
            free, total = memory_info()
            what, hint = f"GPU {self.ordinal} has no {size:,} bytes more", "drop arrays on the GPU, or module.trim()"
            raise OutOfGpuMemory("", what, f"{free:,} bytes free of {total:,}", hint=hint) from None
        self._held.blocks.add(found.value)
        return found.value

    def free(self, blocks: Iterable[int], graphs: Iterable[Any] = ()) -> None:
        """Give memory and graphs back, from any thread."""
        self._held.free(blocks, graphs)

    def upload(self, to: int, source: int, size: int) -> None:
        """Copy from the host; the host's memory may be changed when the stream has come so far."""
        if size:
            call("cuMemcpyHtoDAsync_v2", to, source, size, self.stream)

    def download(self, to: int, source: int, size: int) -> None:
        """Copy to the host; the bytes are there when the stream has come so far."""
        if size:
            call("cuMemcpyDtoHAsync_v2", to, source, size, self.stream)

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy on the GPU."""
        if size:
            call("cuMemcpyDtoDAsync_v2", to, source, size, self.stream)

    def copy_from(self, other: Gpu, to: int, source: int, size: int) -> None:
        """Copy from memory of ``other``, which may be the same GPU, on this one's stream."""
        if size and other.ordinal == self.ordinal:
            self.copy(to, source, size)
        elif size:
            call("cuMemcpyPeerAsync", to, self.context, source, other.context, size, self.stream)

    def let_reach(self, other: Gpu) -> None:
        """Let copies between two GPUs go without the host, where they can."""
        can = c_int()
        if other.ordinal != self.ordinal:
            call("cuDeviceCanAccessPeer", byref(can), self.ordinal, other.ordinal)
        if can.value:
            self.enter()
            attempt("cuCtxEnablePeerAccess", other.context, 0)  # fails if it is so already

    def take_event(self) -> c_void_p:
        """Return an event of nobody else's."""
        try:
            return self._idle.pop()
        except IndexError:
            self.enter()
            event = handle_of("cuEventCreate", _NO_TIMING)
            self._held.events.append(event)
            return event

    def give_events(self, events: Iterable[c_void_p]) -> None:
        """Take events back, from any thread."""
        self._idle.extend(events)

    def record(self, event: c_void_p) -> None:
        """Let an event come when the stream is done with all that it has by now."""
        call("cuEventRecord", event, self.stream)

    def wait_for(self, event: c_void_p) -> None:
        """Let the stream go on when an event of any GPU has come; the caller does not wait."""
        call("cuStreamWaitEvent", self.stream, event, 0)

    @property
    def handle(self) -> int:
        """Return the stream as other libraries know it."""
        return self.stream.value or 0

    def follow(self, stream: int) -> None:
        """Let the stream go on when another one, of any library, is done with all that it has by now."""
        self.link(self.handle, stream)

    def link(self, stream: int, other: int) -> None:
        """Let a stream, of any library, go on when another one is done with all that it has by now."""
        event = self.take_event()
        self.enter()
        call("cuEventRecord", event, other)
        call("cuStreamWaitEvent", stream, event, 0)
        self.give_events([event])  # who waits has read it: it may be recorded again

    def finish(self, event: c_void_p) -> None:
        """Wait until an event of this stream has come; if the call is to end meanwhile, its loops do."""
        if self.is_turning:
            self._watch("cuEventQuery", event)
        call("cuEventSynchronize", event)

    def let_share(self, function: c_void_p, size: int) -> None:
        """Let a block of a kernel have ``size`` bytes of dynamic shared memory."""
        if size:
            call("cuFuncSetAttribute", function, _DYNAMIC_SHARED, size)

    def launch(self, function: c_void_p, shape: LaunchShape, parameters: Any) -> None:
        """Launch a kernel; ``parameters`` is an array of pointers to them."""
        call("cuLaunchKernelEx", byref(shape.config(self.stream)), function, parameters, None)

    def wait(self) -> None:
        """Wait until the stream is done; if the call is to end meanwhile, its loops do."""
        if self.is_turning:
            self._watch("cuStreamQuery", self.stream)
            self._have_turned()
        call("cuStreamSynchronize", self.stream)

    # ------------------------------------------------------------ graphs

    def has_conditions(self) -> bool:
        """Can graphs have loops and branches?"""
        return version() >= CONDITIONS_SINCE

    @property
    def loops(self) -> Loops:
        """Return what the loops of this stream need."""
        if self._loops is None:
            self._held.decisions = self._held.decisions or load_decisions(self)
            self._loops = Loops(self, self._held.decisions, self._held.word())
        return self._loops

    # ------------------------------------------------------------ loops under way

    @property
    def is_turning(self) -> bool:
        """May the stream have loops under way?"""
        return self.stream.value in self._held.turning

    def note_loops(self) -> None:
        """Note that the graph to be run next has loops."""
        assert self.stream.value is not None
        self._held.turning.add(self.stream.value)

    def end_loops(self) -> None:
        """End the loops under way, and wait until the stream is done."""
        if self.is_turning:
            self.loops.end()
            self._have_turned()

    def _have_turned(self) -> None:
        self._held.turning.discard(self.handle)
        if not self._held.turning:
            blocks, self._held.later = self._held.later, []
            self._held.free(blocks, ())

    def _watch(self, name: str, handle: c_void_p) -> None:
        try:
            watch(partial(is_done, name, handle))
        except BaseException:
            self.end_loops()
            raise
