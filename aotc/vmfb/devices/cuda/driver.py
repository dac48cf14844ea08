"""The CUDA driver through ctypes: memory, modules, streams and events of a GPU.

:mod:`aotc.vmfb.devices.cuda.libcuda.library` loads libcuda and calls its functions.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from functools import partial

from aotc.vmfb.devices.cuda.launch import LaunchShape
from aotc.vmfb.devices.cuda.libcuda.graphs import CONDITIONS_SINCE, GraphStream, Recording
from aotc.vmfb.devices.cuda.libcuda.library import DRIVER, OutOfGpuMemory, call, handle_of, is_done, missing, try_driver
from aotc.vmfb.devices.cuda.libcuda.loops import WORD_BYTES, Loops, do_nothing, load_decisions, watch
from aotc.vmfb.devices.cuda.stream_order import Mark
from aotc.vmfb.errors import CallError, RankLost
from aotc.vmfb.host.release import Release
from aotc.vmfb.ranks.gpu_calls import GpuCall, RankWatch

__all__ = ["Gpu", "OutOfGpuMemory", "call", "missing"]

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_NON_BLOCKING, _RELAXED = 1, 2
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CAPTURE_OF_THREAD = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE
_WORDS: list[int] = []  # free words of page-locked host memory that GPUs read
_WORDS_BYTES = 4096


def device_count() -> int:
    """Return the number of GPUs."""
    found = c_int()
    call("cuDeviceGetCount", byref(found))
    return found.value


def cuda_version() -> tuple[int, int]:
    """Return the CUDA version that the driver supports, such as (13, 0)."""
    found = c_int()
    call("cuDriverGetVersion", byref(found))
    return found.value // 1000, found.value % 1000 // 10


def compute_capability(ordinal: int) -> tuple[int, int]:
    """Return the compute capability of a GPU, such as (9, 0)."""
    return _device_attribute(_MAJOR, ordinal), _device_attribute(_MINOR, ordinal)


def _device_attribute(number: int, ordinal: int) -> int:
    found = c_int()
    call("cuDeviceGetAttribute", byref(found), number, ordinal)
    return found.value


def memory_info() -> tuple[int, int]:
    """Return the free bytes and the total bytes of the current GPU's memory."""
    free, total = c_size_t(), c_size_t()
    call("cuMemGetInfo_v2", byref(free), byref(total))
    return free.value, total.value


def allocate_page_locked(size: int) -> int:
    """Allocate page-locked host memory, which GPUs access directly; return its address. It is never freed."""
    return handle_of("cuMemHostAlloc", size, _PORTABLE).value or 0


class PageLock:
    """Page-lock of a range of host memory, for direct GPU access; freeing this object unlocks the range.

    The object keeps ``memory`` alive.
    """

    def __init__(self, gpu: Gpu, memory: object, address: int, size: int) -> None:
        self._memory = memory
        gpu.make_context_current()
        call("cuMemHostRegister_v2", address, size, _PORTABLE)
        self._release = Release(_end_page_lock, gpu.context, address, os.getpid())


def _end_page_lock(context: c_void_p, address: int, process: int) -> None:
    if os.getpid() == process:  # a forked child has no driver
        with suppress(CallError), _current_context(context):
            try_driver("cuMemHostUnregister", address)


def ordinal_of(address: int) -> int:
    """Return the number of the GPU whose memory contains an address."""
    found = c_int()
    call("cuPointerGetAttribute", byref(found), _ORDINAL, address)
    return found.value


def device_name(ordinal: int) -> str:
    """Return the driver's name for a GPU."""
    text = ctypes.create_string_buffer(100)
    call("cuDeviceGetName", text, 100, ordinal)
    return text.value.decode()


@contextmanager
def _current_context(context: c_void_p) -> Iterator[None]:
    """Make ``context`` the calling thread's current context for the block.

    The capture mode is relaxed, so that the block does not disturb a recording.
    """
    mode, found = c_int(_RELAXED), c_void_p()
    call("cuCtxPushCurrent_v2", context)
    try:
        call("cuThreadExchangeStreamCaptureMode", byref(mode))
        yield
        call("cuThreadExchangeStreamCaptureMode", byref(mode))
    finally:
        call("cuCtxPopCurrent_v2", byref(found))


def _destroy_graph(graph: Recording) -> None:
    try_driver("cuGraphExecDestroy", graph.ready)
    try_driver("cuGraphDestroy", graph.source)


class _Resources:
    """Memory, graphs, events and modules of a GPU, released only by the process that created them.

    Finalizers call its methods, on any thread and at any time, so they must not raise.
    """

    def __init__(self, ordinal: int) -> None:
        self.process = os.getpid()
        self.context = handle_of("cuDevicePrimaryCtxRetain", ordinal)  # never released: others use it too
        self.streams: list[c_void_p] = []
        self.marks: list[Mark] = []
        self.modules: list[c_void_p] = []
        self.blocks: set[int] = set()
        self.events: list[c_void_p] = []
        self.words: list[int] = []
        self.decisions: dict[str, c_void_p] = {}
        self.turning: set[int] = set()  # streams with running loops
        self.exchanging: dict[int, Recording] = {}  # graphs with collectives, by handle
        self.destroyed: set[int] = set()  # graphs of ``exchanging`` that were destroyed before their owner asked for it
        self.later: list[int] = []  # memory to free after all loops have ended, because a free waits for all streams

    def free(self, blocks: Iterable[int], graphs: Iterable[Recording]) -> None:
        """Free memory blocks at these addresses, and destroy graphs."""
        if self.turning:
            self.later.extend(blocks)
            blocks = ()
        if os.getpid() == self.process:
            with suppress(CallError), _current_context(self.context):
                for graph in graphs:
                    self._destroy(graph)
                for address in blocks:
                    self.blocks.discard(address)
                    try_driver("cuMemFree_v2", address)

    def _destroy(self, graph: Recording) -> None:
        """Destroy a graph for its owner, unless :meth:`destroy_exchanging` has done so.

        It takes no lock, because finalizers interrupt other code. Only the code that removes a graph from
        ``exchanging`` destroys the graph.
        """
        key = graph.ready.value or 0
        if self.exchanging.pop(key, None) is None and key in self.destroyed:
            self.destroyed.discard(key)
            return
        _destroy_graph(graph)

    def destroy_exchanging(self) -> None:
        """Destroy all graphs that contain collectives; they must not be launched again."""
        if os.getpid() != self.process:
            return
        with suppress(CallError), _current_context(self.context):
            for key in list(self.exchanging):
                self.destroyed.add(key)
                graph = self.exchanging.pop(key, None)
                if graph is None:
                    self.destroyed.discard(key)
                else:
                    _destroy_graph(graph)

    def allocate_host_word(self) -> int:
        """Return the address of a host word that the GPU can read; words are reused after :meth:`close`."""
        if not _WORDS:
            begin = allocate_page_locked(_WORDS_BYTES)
            _WORDS.extend(range(begin, begin + _WORDS_BYTES, WORD_BYTES))
        self.words.append(_WORDS.pop())
        return self.words[-1]

    def close(self) -> None:
        """Release all resources except the context."""
        _WORDS.extend(self.words)
        if os.getpid() == self.process:
            with suppress(CallError), _current_context(self.context):
                for stream in self.streams:
                    try_driver("cuStreamSynchronize", stream)
                for mark in self.marks:
                    mark.mark_destroyed()
                self.free(list(self.blocks), ())
                for module in self.modules:
                    try_driver("cuModuleUnload", module)
                for event in self.events:
                    try_driver("cuEventDestroy_v2", event)
                for stream in self.streams:
                    try_driver("cuStreamDestroy_v2", stream)


class Gpu(GraphStream):
    """A GPU's primary context with one stream; methods use the calling thread's current context.

    Resources are released with the last reference; at process exit the driver releases them.

    Attributes
    ----------
    ordinal : int
        The number of the GPU; several objects may share a GPU, each with its own stream.
    multiprocessors : int
        The number of multiprocessors.
    mark : Mark
        Identity of the stream in the access records of GPU memory.
    try_make_context_current : callable
        The operation of :meth:`make_context_current`; returns the driver's status.
    ranks : RankWatch or None
        Check for lost ranks, polled while the host waits for collectives on the stream.
    has_ended_loops : bool
        True if loops were stopped; later work of the stream then computed on incomplete values.
    """

    has_ended_loops = False
    ranks: RankWatch | None = None

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._held = _Resources(ordinal)
        self._idle: list[c_void_p] = []  # unused events
        self._release = Release(self._held.close)
        self.context = self._held.context
        set_context = DRIVER.driver_function("cuCtxSetCurrent")
        self.try_make_context_current: Callable[[], int] = partial(set_context, self.context)
        self.make_context_current()
        self.stream, self.mark = self._new_stream()
        self._first: Gpu | None = None  # keeps the owner of the memory alive
        self._loops: Loops | None = None
        self._capturing: c_void_p | None = None
        self.multiprocessors = _device_attribute(_MULTIPROCESSORS, ordinal)

    def _new_stream(self) -> tuple[c_void_p, Mark]:
        made = handle_of("cuStreamCreate", _NON_BLOCKING)
        self._held.streams.append(made)
        self._held.marks.append(Mark(made.value or 0))
        return made, self._held.marks[-1]

    def with_new_stream(self) -> Gpu:
        """Return a handle of the same GPU, context and modules with a stream of its own."""
        self.make_context_current()
        other = copy(self)
        other._first, other._loops, other._capturing = self._first or self, None, None
        other.stream, other.mark = self._new_stream()
        return other

    def make_context_current(self) -> None:
        """Make this GPU's context current in the calling thread."""
        call("cuCtxSetCurrent", self.context)

    def load_module(self, image: bytes | memoryview) -> c_void_p:
        """Load a module from a cubin, or from PTX, which the driver compiles."""
        module = handle_of("cuModuleLoadData", image)
        self._held.modules.append(module)
        return module

    def kernel_handle(self, module: c_void_p, symbol: str) -> c_void_p:
        """Return the handle of kernel ``symbol`` of a module."""
        return handle_of("cuModuleGetFunction", module, symbol.encode())

    def allocate(self, size: int) -> int:
        """Allocate ``size`` bytes (at least one) and return the address.

        Raises
        ------
        OutOfGpuMemory
            If there is not enough free memory; the message has the amount.
        """
        self.make_context_current()
        found = c_uint64()
        try:
            call("cuMemAlloc_v2", byref(found), max(size, 1))
        except OutOfGpuMemory:
            free, total = memory_info()
            what, hint = f"GPU {self.ordinal} has no {size:,} bytes more", "drop arrays on the GPU, or module.trim()"
            raise OutOfGpuMemory("", what, f"{free:,} bytes free of {total:,}", hint=hint) from None
        self._held.blocks.add(found.value)
        return found.value

    def free(self, blocks: Iterable[int], graphs: Iterable[Recording] = ()) -> None:
        """Free memory blocks, given by address, and destroy graphs; callable from any thread."""
        self._held.free(blocks, graphs)

    def upload(self, to: int, source: int, size: int) -> None:
        """Copy from the host on the stream, asynchronously; the source must not change until the copy is complete."""
        if size:
            call("cuMemcpyHtoDAsync_v2", to, source, size, self.stream)

    def download(self, to: int, source: int, size: int) -> None:
        """Copy to the host on the stream, asynchronously; the bytes are valid when the copy is complete."""
        if size:
            call("cuMemcpyDtoHAsync_v2", to, source, size, self.stream)

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy on the GPU, asynchronously, on this object's stream."""
        if size:
            call("cuMemcpyDtoDAsync_v2", to, source, size, self.stream)

    def signal(self, address: int) -> None:
        """Store 1 in a word of page-locked host memory when the stream has completed all its current work."""
        self.set_word(address, 1, self.handle)

    def set_word(self, address: int, value: int, stream: int) -> None:
        """Store a word of 32 bits when ``stream`` has completed all its current work."""
        call("cuMemsetD32Async", address, value, 1, stream)

    def set_zeros(self, address: int, size: int, stream: int) -> None:
        """Store ``size`` bytes of zeros, asynchronously, on ``stream``."""
        call("cuMemsetD8Async", address, 0, size, stream)

    def copy_on(self, stream: int, to: int, source: int, size: int) -> None:
        """Copy on the GPU, asynchronously, on ``stream``."""
        call("cuMemcpyDtoDAsync_v2", to, source, size, stream)

    def copy_from(self, other: Gpu, to: int, source: int, size: int) -> None:
        """Copy from memory of the GPU ``other``, possibly the same one, on this GPU's stream."""
        if size and other.ordinal == self.ordinal:
            self.copy(to, source, size)
        elif size:
            call("cuMemcpyPeerAsync", to, self.context, source, other.context, size, self.stream)

    def enable_peer_access(self, other: Gpu) -> None:
        """Enable direct (peer) copies to memory of ``other`` if the hardware supports them."""
        can = c_int()
        if other.ordinal != self.ordinal:
            call("cuDeviceCanAccessPeer", byref(can), self.ordinal, other.ordinal)
        if can.value:
            self.make_context_current()
            try_driver("cuCtxEnablePeerAccess", other.context, 0)  # fails if already enabled

    def take_event(self) -> c_void_p:
        """Return an unused event, or create one."""
        try:
            return self._idle.pop()
        except IndexError:
            self.make_context_current()
            event = handle_of("cuEventCreate", _NO_TIMING)
            self._held.events.append(event)
            return event

    def return_events(self, events: Iterable[c_void_p]) -> None:
        """Return unused events for reuse; callable from any thread."""
        self._idle.extend(events)

    def record_event(self, event: c_void_p) -> None:
        """Record an event on the stream: it occurs when the stream has completed all its current work."""
        call("cuEventRecord", event, self.stream)

    def wait_for_event(self, event: c_void_p) -> None:
        """Make the stream wait for an event of any GPU; the host does not wait."""
        call("cuStreamWaitEvent", self.stream, event, 0)

    @property
    def handle(self) -> int:
        """The stream's handle for other libraries."""
        return self.stream.value or 0

    def wait_for_stream(self, stream: int) -> None:
        """Make this stream wait for the current work of another stream, also of another library."""
        self.make_stream_wait(self.handle, stream)

    def make_stream_wait(self, stream: int, other: int) -> None:
        """Make ``stream``, of any library, wait for the current work of stream ``other``."""
        event = self.take_event()
        self.make_context_current()
        call("cuEventRecord", event, other)
        call("cuStreamWaitEvent", stream, event, 0)
        self.return_events([event])  # the wait has captured it: it may be recorded again

    def synchronize_event(self, event: c_void_p) -> None:
        """Wait on the host for an event of this stream; if the call is cancelled, stop the stream's loops and raise."""
        if self.may_run_loops or self.ranks is not None:
            self._poll_until_done("cuEventQuery", event)
        call("cuEventSynchronize", event)
        if self.ranks is not None:
            self.ranks.settle()

    def allow_dynamic_shared_memory(self, function: c_void_p, size: int) -> None:
        """Allow blocks of a kernel to use ``size`` bytes of dynamic shared memory."""
        if size:
            call("cuFuncSetAttribute", function, _DYNAMIC_SHARED, size)

    def launch(self, function: c_void_p, shape: LaunchShape, parameters: ctypes.Array[c_void_p]) -> None:
        """Launch a kernel on the stream; ``parameters`` is an array of pointers to the kernel's parameters."""
        call("cuLaunchKernelEx", byref(shape.config(self.stream)), function, parameters, None)

    def wait(self) -> None:
        """Wait on the host for the stream; if the call is cancelled, stop the stream's loops and raise."""
        if self.may_run_loops or self.ranks is not None:
            self._poll_until_done("cuStreamQuery", self.stream)
            self._mark_loops_ended()
        call("cuStreamSynchronize", self.stream)
        if self.ranks is not None:
            self.ranks.settle()

    # ------------------------------------------------------------ collectives

    def collective(self, call_on: GpuCall, addresses: Sequence[int]) -> None:
        """Enqueue a collective on the stream, by calling ``call_on`` with the addresses of its arrays."""
        call_on(self, self.handle, addresses)

    @contextmanager
    def capture_graph(self) -> Iterator[tuple[int, c_void_p]]:
        """Capture the work that the block enqueues in a graph, instead of running it.

        Yield a stream, and the handle of the graph that contains the work after the block; the caller destroys the
        graph.
        """
        if self._capturing is None:
            self._capturing = handle_of("cuStreamCreate", _NON_BLOCKING)
            self._held.streams.append(self._capturing)
        graph = c_void_p()
        call("cuStreamBeginCapture_v2", self._capturing, _CAPTURE_OF_THREAD)
        try:
            yield self._capturing.value or 0, graph
        except BaseException:
            try_driver("cuStreamEndCapture", self._capturing, byref(graph))
            if graph.value:
                try_driver("cuGraphDestroy", graph)
            raise
        call("cuStreamEndCapture", self._capturing, byref(graph))

    def register_collective_graph(self, graph: Recording) -> None:
        """Register a graph with collectives, which must be destroyed before their communicators."""
        self._held.exchanging[graph.ready.value or 0] = graph

    def destroy_collective_graphs(self) -> None:
        """Destroy all graphs with collectives, because ranks are lost or the module is closed."""
        self._held.destroy_exchanging()

    # ------------------------------------------------------------ graphs

    def has_conditions(self) -> bool:
        """Return True if the driver supports conditional nodes: loops and branches inside of graphs."""
        return cuda_version() >= CONDITIONS_SINCE

    @property
    def loops(self) -> Loops:
        """Return the stop flag and the decision kernels for loops on this stream; create them on first use."""
        if self._loops is None:
            self._held.decisions = self._held.decisions or load_decisions(self)
            self._loops = Loops(self, self._held.decisions, self._held.allocate_host_word())
        return self._loops

    # ------------------------------------------------------------ running loops

    @property
    def may_run_loops(self) -> bool:
        """Return True if a loop on the GPU may be running on this stream."""
        return self.stream.value in self._held.turning

    def expect_loops(self) -> None:
        """Record that the graph to launch next contains loops."""
        assert self.stream.value is not None
        self._held.turning.add(self.stream.value)

    def stop_loops(self) -> None:
        """Stop the loops that run on the GPU for this stream, and wait for the stream."""
        if self.may_run_loops:
            self.has_ended_loops = True
            self.loops.stop_loops()
            self._mark_loops_ended()

    def _mark_loops_ended(self) -> None:
        self._held.turning.discard(self.handle)
        if not self._held.turning:
            blocks, self._held.later = self._held.later, []
            self._held.free(blocks, ())

    def _poll_until_done(self, name: str, handle: c_void_p) -> None:
        """Poll on the host until an event or the stream is complete; ``name`` is the driver's query function."""
        check = self.ranks.check if self.ranks is not None else do_nothing
        try:
            watch(partial(is_done, name, handle), check)
        except RankLost:
            raise
        except BaseException:
            self.stop_loops()
            raise
