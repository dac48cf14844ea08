"""A GPU made of host memory: the CUDA device runs on it, kernels run as their loop IR's Python."""

import ctypes
import itertools
import math
import re
import sys
import threading
from collections import deque
from functools import partial
from typing import ClassVar
from weakref import WeakSet, WeakValueDictionary

import numpy as np
from support.simulated_host import LOCKED, PageLock, page_locked

from aotc.ir.dims.symbols import evaluate
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.run import run_kernel
from aotc.vmfb.abi import MAP_BYTES
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices.cuda import array as cuda_array
from aotc.vmfb.devices.cuda import driver as cuda_driver
from aotc.vmfb.devices.cuda import tensor_map
from aotc.vmfb.devices.cuda.stream_order import Mark
from aotc.vmfb.devices.mixed import early_results
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.host.interruption import Watch


def array_at(address, dtype, shape):
    """Return an array over memory of the simulated GPU."""
    count = int(np.prod(shape)) if shape else 1
    kind = to_numpy(dtype)
    raw = (ctypes.c_uint8 * (count * kind.itemsize)).from_address(address)
    return np.frombuffer(raw, kind, count).reshape(shape)


class Event:
    """How far a stream is to be: ``mark`` counts what it was given."""

    def __init__(self):
        self.gpu, self.mark = None, 0


class SimulatedGpu:
    """The methods of :class:`aotc.vmfb.devices.cuda.driver.Gpu`; ``log`` counts what was asked of it.

    What a stream is given it does later: ``LATE``, not before somebody waits, ``EARLY``, at once, or by chance. So what
    uses memory that a copy has not written yet, or writes what a copy has not read yet, computes something else. A
    kernel that touches memory of another GPU, or the host's, fails.
    """

    LATE, EARLY = "late", "early"
    multiprocessors = 4
    ranks = None
    may_run_loops = has_ended_loops = False  # its loops end in the thread that waits
    conditions: ClassVar[bool] = True
    texts: ClassVar[dict] = {}
    order: ClassVar[object] = LATE  # or a random.Random
    every: ClassVar[WeakSet] = WeakSet()
    adding: ClassVar = threading.Lock()
    lefts: ClassVar = [deque()]  # memory, and work on it, of those that went before it was done
    streams: ClassVar[WeakValueDictionary] = WeakValueDictionary()  # by handle
    locks: ClassVar = [threading.RLock()]  # streams are given work by one thread while another waits for them
    captures: ClassVar = itertools.count()  # of all GPUs
    parsing: ClassVar = threading.RLock()  # Python 3.11 parses in one thread at a time
    thread: ClassVar = threading.local()  # whose ``here`` is the number of the GPU that its calls are for

    def __init__(self, ordinal):
        self.ordinal = ordinal
        self.memory, self.log = {}, []
        self.lock, self.left = self.locks[ordinal % len(self.locks)], self.lefts[ordinal % len(self.locks)]
        self.exchanging, self.captured = [], {}
        self.queue, self.given, self.done = deque(), 0, 0
        self.events = 0  # that somebody has
        self.acting = False
        with self.adding:  # a new set: another thread may iterate over the old one
            SimulatedGpu.every = self.every | WeakSet([self])
        self.handle = id(self)
        self.streams[self.handle] = self
        self.mark = Mark(self.handle)
        self.make_context_current()

    def __del__(self, is_finalizing=sys.is_finalizing):
        """What it was given is done before anything else; not now, for the collector may have come at any moment.

        At the end of the interpreter modules may be gone, and ``sys`` with them.
        """
        if not is_finalizing():
            if self.queue:
                self.left.append((self.memory, list(self.queue)))
            self.mark.mark_destroyed()

    def _do_what_is_left(self):
        while self.left:
            _, actions = self.left.popleft()
            for action in actions:
                action()

    def with_new_stream(self):
        other = SimulatedGpu(self.ordinal)
        other.memory, other.first, other.log, other.ranks = self.memory, self, self.log, self.ranks
        other.exchanging = self.exchanging
        return other

    def _do(self, what, action):
        self.log.append(what)
        self._is_entered()
        self._give(action)

    def _give(self, action):
        with self.lock:
            self.queue.append(action)
            self.given += 1
        if self.order == self.EARLY:
            self._reach(self.given)
        elif self.order != self.LATE:
            for gpu in sorted(self.every, key=id):
                gpu._reach(min(gpu.given, gpu.done + self.order.randrange(3)))

    def _reach(self, mark):
        """Do what is left up to ``mark``."""
        with self.lock:
            if self.acting:  # in an action the collector found an old module, whose memory is freed
                return
            self._do_what_is_left()
            while self.done < mark:
                action = self.queue.popleft()
                self.done += 1
                self.acting = True
                try:
                    action()
                finally:
                    self.acting = False

    def _holds(self, address, size):
        """Are these bytes of this GPU's memory?"""
        with self.lock:
            blocks = [b for gpu in self.every if gpu.ordinal == self.ordinal for b in gpu.memory.items()]
        return any(start <= address and address + size <= start + len(block) for start, block in blocks)

    def make_context_current(self):
        self.thread.here = self.ordinal

    def try_make_context_current(self):
        self.make_context_current()
        return 0

    def _is_entered(self):
        assert self.thread.here == self.ordinal

    def wait(self):
        self._reach(self.given)
        if self.ranks is not None:
            self.ranks.settle()

    def take_event(self):
        self.make_context_current()
        self.events += 1
        return Event()

    def return_events(self, events):
        self.events -= len(events)

    def record_event(self, event):
        self._is_entered()
        self.log.append("record")
        event.gpu, event.mark = self, self.given

    def wait_for_event(self, event):
        self._do("wait_for", partial(event.gpu._reach, event.mark))

    def wait_for_stream(self, stream):
        """Wait for what another stream has been given by now; 1 is the one of which all others take care."""
        self.make_context_current()
        others = [self.streams[stream]] if stream > 1 else [g for g in list(self.every) if g is not self]
        marks = [(gpu, gpu.given) for gpu in others]
        self._do("follow", lambda: [gpu._reach(mark) for gpu, mark in marks])

    def make_stream_wait(self, stream, other):
        """Another library's stream waits; the one of which all others take care, at once."""
        if stream > 1:
            self.streams[stream].wait_for_stream(other)
        else:
            self.streams[other].wait()

    def synchronize_event(self, event):
        self.log.append("finish")
        event.gpu._reach(event.mark)

    def enable_peer_access(self, other):
        self.log.append("enable_peer_access")

    def load_module(self, image):
        assert image.startswith((b"\x7fELF", b"//\n// Generated by NVIDIA NVVM"))
        return image

    def kernel_handle(self, module, symbol):
        assert symbol.encode() in module
        # The loops are the meaning. Bundles of earlier versions spell the tiling differently.
        text = re.sub(r', tiling: "[^"]*"', "", self.texts[symbol])
        with self.parsing:
            return parse_kernel(text), text

    def allocate(self, size):
        self.make_context_current()
        block = np.full(max(size, 1) + 64, 0xA5, np.uint8)
        with self.lock:
            self.memory[block.ctypes.data] = block
        return block.ctypes.data

    def free(self, blocks, graphs=()):
        marks = [(gpu, gpu.given) for gpu in list(self.every) if gpu.queue and gpu.left is self.left]
        with self.lock:
            held = [self.memory.pop(address) for address in blocks]
            if held and marks:  # the driver waits; here the memory stays until then, for a finalizer may have called
                self.left.append((held, [lambda: [gpu._reach(mark) for gpu, mark in marks]]))
        for graph in graphs:
            graph.clear()

    def _move(self, what, to, source, size):
        if size:
            self._do(what, lambda: ctypes.memmove(to, source, size))

    def upload(self, to, source, size):
        assert self._holds(to, size)
        self._move("upload", to, source, size)

    def download(self, to, source, size):
        assert self._holds(source, size)
        self._move("download", to, source, size)

    def copy(self, to, source, size):
        self._do("copy", self.copying(to, source, size))

    def signal(self, address):
        self._do("signal", self.signalling(address))

    def set_word(self, address, value, stream):
        assert self._holds(address, 4)
        word = ctypes.c_uint32.from_address(address)
        self.enqueue(stream, "set_word", lambda: setattr(word, "value", value))

    def set_zeros(self, address, size, stream):
        assert self._holds(address, size)
        self.enqueue(stream, "set_zeros", lambda: ctypes.memset(address, 0, size))

    def copy_on(self, stream, to, source, size):
        self.enqueue(stream, "copy_on", self.copying(to, source, size))

    def enqueue(self, stream, what, action):
        """Give an action to a stream, or to what is captured."""
        if stream == self.handle:
            self._do(what, action)
        else:
            self.captured[stream].append(action)

    def collective(self, call_on, addresses):
        call_on(self, self.handle, addresses)

    def register_collective_graph(self, graph):
        self.exchanging.append(graph)

    def destroy_collective_graphs(self):
        self.log.append("destroy_collective_graphs")
        for graph in self.exchanging:
            graph.clear()

    def signalling(self, address):
        """Return what stores a word in page-locked memory of the host."""
        assert any(block.ctypes.data <= address <= block.ctypes.data + len(block) - 4 for block in LOCKED)
        word = ctypes.c_uint32.from_address(address)
        return lambda: setattr(word, "value", 1)

    def copying(self, to, source, size):
        """Return what copies on the GPU."""
        assert self._holds(to, size)
        assert self._holds(source, size)
        return lambda: ctypes.memmove(to, source, size)

    def copy_from(self, other, to, source, size):
        assert self._holds(to, size)
        assert other._holds(source, size)
        self._move("copy_from", to, source, size)

    def allow_dynamic_shared_memory(self, function, size):
        pass

    def launch(self, function, shape, table):
        self._do("launch", self.launching(function, shape, table))

    def launching(self, function, shape, table):
        """Return what runs a kernel."""
        kernel, text = function
        parameters = len(kernel.inputs) + len(kernel.outputs) + len(kernel.dims) + 1  # after the tensor maps
        values = [ctypes.c_int64.from_address(p).value for p in table[len(table) - parameters :]]
        buffers = (*kernel.inputs, *kernel.outputs)
        dims = dict(zip(kernel.dims, values[len(buffers) : -1], strict=True))
        assert values[-1] == evaluate(kernel.grid, dims)
        assert 0 < values[-1] <= math.prod(shape.blocks) * shape.threads
        shapes = [tuple(int(evaluate(d, dims)) for d in b.shape) for b in buffers]
        arrays = [array_at(a, b.dtype, s) for a, b, s in zip(values, buffers, shapes)]
        assert all(self._holds(a, x.nbytes) for a, x in zip(values, arrays))
        return lambda: self._run(text, arrays, dims)

    def _run(self, text, arrays, dims):
        with self.parsing:
            run_kernel(text, arrays, dims)

    def has_conditions(self):
        return self.conditions

    def new_graph(self):
        return SimulatedGraph(self)

    def instantiate_graph(self, graph):
        return [graph.nodes]

    def destroy_graph(self, graph):
        graph.is_dropped = True

    def kernel_setter(self, graph, node, function, shape, table):
        def change():
            self.log.append("set_kernel")
            graph[0][node] = graph[0][node][0], self.launching(function, shape, table)
            return 0

        return change

    def copy_setter(self, graph, node, copy):
        def change():
            self.log.append("set_copy")
            action = self.copying(copy.target.device, copy.source.device, copy.extent[0])
            graph[0][node] = graph[0][node][0], action
            return 0

        return change

    def graph_launcher(self, graph):
        def run():
            self.run_graph(graph)
            return 0

        return run

    def run_graph(self, graph):
        nodes = list(graph[0])  # one that is changed or destroyed while it runs goes on as it is until it is done
        self._do("graph", lambda: run_nodes(nodes))

    def expect_loops(self):
        self.log.append("loops")

    def stop_loops(self):
        pass


class SimulatedGraph:
    """The methods of :class:`aotc.vmfb.devices.cuda.libcuda.graphs.GraphMaker`; a node is its number here."""

    def __init__(self, gpu):
        self.gpu, self.nodes, self.is_dropped = gpu, [], False

    def _add(self, after, what, action):
        assert not self.is_dropped
        assert all(0 <= node < len(self.nodes) for node in after)
        self.gpu.log.append(what)
        self.nodes.append((frozenset(after), action))
        return len(self.nodes) - 1

    def launch(self, after, function, shape, table):
        return self._add(after, "launch", self.gpu.launching(function, shape, table))

    def copy(self, after, to, source, size):
        return self._add(after, "copy", self.gpu.copying(to, source, size))

    def signal(self, after, address):
        return self._add(after, "signal", self.gpu.signalling(address))

    def add_join(self, after):
        return self._add(after, "join", lambda: None)

    def collective(self, after, call_on, addresses):
        """One node for all that is enqueued on a stream that captures, in order."""
        stream = -1 - next(self.gpu.captures)
        actions = self.gpu.captured[stream] = []
        call_on(self.gpu, stream, addresses)
        return self._add(after, "collective", lambda: [action() for action in actions])

    def create_condition(self):
        return [0]

    def add_loop_condition(self, after, handle, flag):
        assert self.gpu._holds(flag, 1)
        return self._add(
            after, "continue_while", lambda: handle.__setitem__(0, ctypes.c_uint8.from_address(flag).value != 0)
        )

    def add_branch_choice(self, after, handle, number, count):
        def choose():
            handle[0] = min(ctypes.c_uint32.from_address(number).value, count - 1)

        assert self.gpu._holds(number, 4)
        return self._add(after, "chosen", choose)

    def add_loop(self, after, handle):
        body = SimulatedGraph(self.gpu)
        inside = body.nodes  # not the graph, for who has nodes is not to have the GPU

        def iteration():
            watch = Watch()
            while handle[0]:
                watch.raise_pending_exception()
                run_nodes(inside)

        return self._add(after, "loop", iteration), body

    def add_branches(self, after, handle, count):
        bodies = [SimulatedGraph(self.gpu) for _ in range(count)]
        insides = [body.nodes for body in bodies]

        def run():
            run_nodes(insides[handle[0]])

        return self._add(after, "switch", run), bodies


def run_nodes(nodes):
    """Run nodes in an order that their edges allow: whichever can, the last or the first that can."""
    order = SimulatedGpu.order
    left, done = set(range(len(nodes))), set()
    while left:
        free = sorted(n for n in left if nodes[n][0] <= done)
        late, early = SimulatedGpu.LATE, SimulatedGpu.EARLY
        found = free[-1] if order == late else free[0] if order == early else order.choice(free)
        nodes[found][1]()
        left.discard(found)
        done.add(found)


def ordinal_of(address):
    """The number of the simulated GPU that has some memory."""
    return next(gpu.ordinal for gpu in list(SimulatedGpu.every) if gpu._holds(address, 1))


def locked_by_a_gpu(size):
    """The address of page-locked memory, which is allocated by a thread that has entered a GPU."""
    assert hasattr(SimulatedGpu.thread, "here")
    return page_locked(size)


def install(monkeypatch, data, capability=(9, 0), count=1, order=SimulatedGpu.LATE, driver=(13, 0), ranks=False):
    """Put ``count`` simulated GPUs in the driver's place for the bundle ``data``; each is one rank's if ``ranks``."""
    manifest = open_bundle(data).manifest
    texts = {}
    for variant in manifest["variants"]:
        for kernel in variant["kernels"]:
            if "symbol" in kernel:
                texts[kernel["symbol"]] = manifest["debug"]["kernels"][f"{variant['target']}/{kernel['name']}"]["text"]
    monkeypatch.setattr(SimulatedGpu, "texts", texts)
    monkeypatch.setattr(SimulatedGpu, "order", order)
    if ranks:  # they wait for each other, and none touches the GPU of another
        monkeypatch.setattr(SimulatedGpu, "locks", [threading.RLock() for _ in range(count)])
        monkeypatch.setattr(SimulatedGpu, "lefts", [deque() for _ in range(count)])
    monkeypatch.setattr(cuda_driver, "Gpu", SimulatedGpu)
    monkeypatch.setattr(cuda_array, "_KEEPERS", {})
    monkeypatch.setattr(early_results, "_IDLE", {})
    monkeypatch.setattr(cuda_driver, "ordinal_of", ordinal_of)
    monkeypatch.setattr(cuda_driver, "allocate_page_locked", locked_by_a_gpu)
    monkeypatch.setattr(cuda_driver, "PageLock", PageLock)
    monkeypatch.setattr(tensor_map, "encode_tensor_map", lambda *_: ctypes.create_string_buffer(MAP_BYTES))
    monkeypatch.setattr(tensor_map, "retarget_tensor_map", lambda *_: None)
    monkeypatch.setattr(cuda_driver, "missing", lambda: "")
    monkeypatch.setattr(cuda_driver, "device_count", lambda: count)
    monkeypatch.setattr(cuda_driver, "device_name", lambda ordinal: "a simulated GPU")
    monkeypatch.setattr(cuda_driver, "compute_capability", lambda ordinal: capability)
    monkeypatch.setattr(cuda_driver, "cuda_version", lambda: driver)
