"""The CUDA driver by ctypes: the calls that the CUDA device makes, and nothing else.

A machine without it gets a reason from :func:`missing`, not an exception.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from ctypes import POINTER, byref, c_int, c_size_t, c_uint64, c_void_p
from functools import partial
from typing import Any
from weakref import finalize

from aotc.vmfb.devices.gpu.driver_library import DRIVER, call, handle
from aotc.vmfb.devices.gpu.graph_nodes import CopyNode, KernelNode, Recording
from aotc.vmfb.devices.gpu.stream_order import Mark
from aotc.vmfb.devices.launch import LaunchShape
from aotc.vmfb.errors import VmError

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_NON_BLOCKING, _THREAD_LOCAL, _RELAXED = 1, 1, 2
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE


def missing() -> str:
    """Return why this machine cannot use CUDA, or an empty string."""
    return DRIVER.load()


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
    return handle("cuMemHostAlloc", size, _PORTABLE).value or 0


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
        self.context = handle("cuDevicePrimaryCtxRetain", ordinal)  # kept: threads, and other libraries, are in it
        self.streams: list[c_void_p] = []
        self.marks: list[Mark] = []
        self.modules: list[c_void_p] = []
        self.blocks: set[int] = set()
        self.events: list[c_void_p] = []

    def free(self, blocks: Iterable[int], graphs: Iterable[Recording]) -> None:
        """Give memory and graphs back."""
        if os.getpid() == self.process:
            with suppress(VmError), _within(self.context):
                for graph in graphs:
                    _try("cuGraphExecDestroy", graph.ready)
                    _try("cuGraphDestroy", graph.source)
                for address in blocks:
                    self.blocks.discard(address)
                    _try("cuMemFree_v2", address)

    def close(self) -> None:
        """Give everything back but the context."""
        if os.getpid() == self.process:
            with suppress(VmError), _within(self.context):
                for stream in self.streams:
                    _try("cuStreamSynchronize", stream)
                for mark in self.marks:
                    mark.end()
                self.free(list(self.blocks), ())
                for module in self.modules:
                    _try("cuModuleUnload", module)
                for event in self.events:
                    _try("cuEventDestroy_v2", event)
                for stream in self.streams:
                    _try("cuStreamDestroy_v2", stream)


def _try(name: str, *arguments: Any) -> None:
    with suppress(VmError):
        call(name, *arguments)


class Gpu:
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
        finalize(self, self._held.close).atexit = False
        self._context = self._held.context
        self.enter_quickly: Callable[[], int] = partial(DRIVER.function("cuCtxSetCurrent"), self._context)
        self.enter()
        self.stream, self.mark = self._new_stream()
        self._first: Gpu | None = None  # whose end is that of the memory
        self.multiprocessors = _attribute(_MULTIPROCESSORS, ordinal)

    def _new_stream(self) -> tuple[c_void_p, Mark]:
        made = handle("cuStreamCreate", _NON_BLOCKING)
        self._held.streams.append(made)
        self._held.marks.append(Mark(made.value or 0))
        return made, self._held.marks[-1]

    def another(self) -> Gpu:
        """Return the same GPU, modules and memory with another stream; what it took goes back with all of them."""
        self.enter()
        other = copy(self)
        other._first = self._first or self
        other.stream, other.mark = self._new_stream()
        return other

    def enter(self) -> None:
        """Make this GPU the calling thread's."""
        call("cuCtxSetCurrent", self._context)

    def load(self, image: Any) -> c_void_p:
        """Return the module of a cubin, or of PTX, which the driver compiles."""
        module = handle("cuModuleLoadData", image)
        self._held.modules.append(module)
        return module

    def function(self, module: c_void_p, symbol: str) -> c_void_p:
        """Return a kernel of a module."""
        return handle("cuModuleGetFunction", module, symbol.encode())

    def allocate(self, size: int) -> int:
        """Return the address of ``size`` bytes (at least one)."""
        self.enter()
        found = c_uint64()
        call("cuMemAlloc_v2", byref(found), max(size, 1))
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
            call("cuMemcpyPeerAsync", to, self._context, source, other._context, size, self.stream)

    def let_reach(self, other: Gpu) -> None:
        """Let copies between two GPUs go without the host, where they can."""
        can = c_int()
        if other.ordinal != self.ordinal:
            call("cuDeviceCanAccessPeer", byref(can), self.ordinal, other.ordinal)
        if can.value:
            self.enter()
            _try("cuCtxEnablePeerAccess", other._context, 0)  # fails if it is so already

    def take_event(self) -> c_void_p:
        """Return an event of nobody else's."""
        try:
            return self._idle.pop()
        except IndexError:
            self.enter()
            event = handle("cuEventCreate", _NO_TIMING)
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
        """Wait until an event has come."""
        call("cuEventSynchronize", event)

    def let_share(self, function: c_void_p, size: int) -> None:
        """Let a block of a kernel have ``size`` bytes of dynamic shared memory."""
        if size:
            call("cuFuncSetAttribute", function, _DYNAMIC_SHARED, size)

    def launch(self, function: c_void_p, shape: LaunchShape, parameters: Any) -> None:
        """LaunchShape a kernel; ``parameters`` is an array of pointers to them."""
        call("cuLaunchKernelEx", byref(shape.config(self.stream)), function, parameters, None)

    def wait(self) -> None:
        """Wait until the stream is done."""
        call("cuStreamSynchronize", self.stream)

    def begin_capture(self) -> None:
        """Record what the calling thread puts on the stream instead of running it."""
        self.mark.hold()  # an event of another thread would become a part of what is recorded
        try:
            call("cuStreamBeginCapture_v2", self.stream, _THREAD_LOCAL)
        except VmError:
            self.mark.release()
            raise

    def last_node(self) -> c_void_p:
        """Return what was recorded last."""
        state, number, graph, nodes, count = c_int(), c_uint64(), c_void_p(), POINTER(c_void_p)(), c_size_t()
        outs = [byref(x) for x in (state, number, graph, nodes, count)]
        call("cuStreamGetCaptureInfo_v2", self.stream, *outs)
        return c_void_p(nodes[0])

    def end_capture(self) -> Recording:
        """Return the recorded graph, ready to run."""
        graph = c_void_p()
        try:
            call("cuStreamEndCapture", self.stream, byref(graph))
        finally:
            self.mark.release()
        try:
            return Recording(handle("cuGraphInstantiateWithFlags", graph, 0), graph)
        except VmError:
            call("cuGraphDestroy", graph)
            raise

    def run_graph(self, graph: Recording) -> None:
        """Run a graph on the stream."""
        call("cuGraphLaunch", graph.ready, self.stream)

    def prepared(self, graph: Recording) -> Callable[[], int]:
        """Return what runs a graph on the stream, and returns the driver's status."""
        return partial(DRIVER.function("cuGraphLaunch"), graph.ready, self.stream)

    def kernel_setter(self, graph: Recording, node: c_void_p, launch: KernelNode) -> Callable[[], int]:
        """Return what has later runs of a graph launch a kernel, at ``node``, with the parameters of that moment."""
        return partial(DRIVER.function("cuGraphExecKernelNodeSetParams_v2"), graph.ready, node, launch.described)

    def copy_setter(self, graph: Recording, node: c_void_p, copy: CopyNode) -> Callable[[], int]:
        """Return what has later runs of a graph copy, at ``node``, between the places of that moment."""
        function = DRIVER.function("cuGraphExecMemcpyNodeSetParams")
        return partial(function, graph.ready, node, copy.described, self._context)
