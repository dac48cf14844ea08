"""A GPU made of host memory: the CUDA device runs on it, kernels run as their loop IR's Python."""

import ctypes
import math
import sys
import threading
from collections import deque
from functools import partial
from typing import ClassVar
from weakref import WeakSet, WeakValueDictionary

import numpy as np

from aotc.ir.dims_symbols import evaluate
from aotc.ir.loop_parser import parse_kernel
from aotc.ir.loop_run import run_kernel
from aotc.vmfb.abi import MAP_BYTES
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices import cuda_array, tensor_map
from aotc.vmfb.devices import driver as cuda_driver
from aotc.vmfb.devices.gpu.stream_order import Mark
from aotc.vmfb.dtypes import to_numpy


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
    """The methods of :class:`aotc.vmfb.devices.driver.Gpu`; ``log`` counts what was asked of it.

    What a stream is given it does later: ``LATE``, not before somebody waits, ``EARLY``, at once, or by chance. So what
    uses memory that a copy has not written yet, or writes what a copy has not read yet, computes something else. A
    kernel that touches memory of another GPU, or the host's, fails.
    """

    LATE, EARLY = "late", "early"
    multiprocessors = 4
    texts: ClassVar[dict] = {}
    order: ClassVar[object] = LATE  # or a random.Random
    every: ClassVar[WeakSet] = WeakSet()
    streams: ClassVar[WeakValueDictionary] = WeakValueDictionary()  # by handle
    lock: ClassVar = threading.RLock()  # streams are given work by one thread while another waits for them
    thread: ClassVar = threading.local()  # whose ``here`` is the number of the GPU that its calls are for

    def __init__(self, ordinal):
        self.ordinal = ordinal
        self.memory, self.captured, self.recorder, self.log = {}, None, None, []
        self.queue, self.given, self.done = deque(), 0, 0
        self.events = 0  # that somebody has
        self.acting = False
        self.every.add(self)
        self.handle = id(self)
        self.streams[self.handle] = self
        self.mark = Mark(self.handle)
        self.enter()

    def __del__(self):
        """What it was given is done before it goes."""
        if not sys.is_finalizing():
            self._reach(self.given)
            self.mark.end()

    def another(self):
        other = SimulatedGpu(self.ordinal)
        other.memory, other.first, other.log = self.memory, self, self.log
        return other

    def _do(self, what, action):
        self.log.append(what)
        self._is_entered()
        if self.captured is None:
            self._give(action)
        else:
            self.captured.append(action)

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

    def enter(self):
        self.thread.here = self.ordinal

    def enter_quickly(self):
        self.enter()
        return 0

    def _is_entered(self):
        assert self.thread.here == self.ordinal

    def wait(self):
        assert self.captured is None
        self._reach(self.given)

    def take_event(self):
        self.enter()
        self.events += 1
        return Event()

    def give_events(self, events):
        self.events -= len(events)

    def record(self, event):
        assert self.captured is None
        self._is_entered()
        self.log.append("record")
        event.gpu, event.mark = self, self.given

    def wait_for(self, event):
        self._do("wait_for", partial(event.gpu._reach, event.mark))

    def follow(self, stream):
        """Wait for what another stream has been given by now; 1 is the one of which all others take care."""
        self.enter()
        others = [self.streams[stream]] if stream > 1 else [g for g in list(self.every) if g is not self]
        assert all(gpu.captured is None for gpu in others)  # what they are given does not belong to a recording
        marks = [(gpu, gpu.given) for gpu in others]
        self._do("follow", lambda: [gpu._reach(mark) for gpu, mark in marks])

    def link(self, stream, other):
        """Another library's stream waits; the one of which all others take care, at once."""
        if stream > 1:
            self.streams[stream].follow(other)
        else:
            self.streams[other].wait()

    def finish(self, event):
        self.log.append("finish")
        event.gpu._reach(event.mark)

    def let_reach(self, other):
        self.log.append("let_reach")

    def load(self, image):
        assert image.startswith((b"\x7fELF", b"//\n// Generated by NVIDIA NVVM"))
        return image

    def function(self, module, symbol):
        assert symbol.encode() in module
        return parse_kernel(self.texts[symbol]), self.texts[symbol]

    def allocate(self, size):
        assert self.recorder != threading.get_ident()  # another thread may record
        self.enter()
        block = np.full(max(size, 1) + 64, 0xA5, np.uint8)
        with self.lock:
            self.memory[block.ctypes.data] = block
        return block.ctypes.data

    def free(self, blocks, graphs=()):
        for gpu in list(self.every) if blocks else ():  # as the driver does
            gpu._reach(gpu.given)
        with self.lock:
            for address in blocks:
                del self.memory[address]
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
        assert self._holds(to, size)
        assert self._holds(source, size)
        self._move("copy", to, source, size)

    def copy_from(self, other, to, source, size):
        assert self._holds(to, size)
        assert other._holds(source, size)
        self._move("copy_from", to, source, size)

    def let_share(self, function, size):
        pass

    def launch(self, function, shape, table):
        self._do("launch", self._kernel(function, shape, table))

    def _kernel(self, function, shape, table):
        """What a launch does later, with the parameters of now."""
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
        return lambda: run_kernel(text, arrays, dims)

    def begin_capture(self):
        self.mark.hold()
        assert self.captured is None
        self._is_entered()
        self.captured, self.recorder = [], threading.get_ident()

    def end_capture(self):
        graph, self.captured, self.recorder = self.captured, None, None
        self.mark.release()
        return graph

    def last_node(self):
        return len(self.captured) - 1

    def kernel_setter(self, graph, node, launch):
        def change():
            self.log.append("set_kernel")
            graph[node] = self._kernel(launch.function, launch.shape, launch.table)
            return 0

        return change

    def copy_setter(self, graph, node, copy):
        def change():
            self.log.append("set_copy")
            assert self._holds(copy.to, copy.size)
            assert self._holds(copy.source, copy.size)
            graph[node] = partial(ctypes.memmove, copy.to, copy.source, copy.size)
            return 0

        return change

    def prepared(self, graph):
        def run():
            self.run_graph(graph)
            return 0

        return run

    def run_graph(self, graph):
        actions = list(graph)  # one that is destroyed while it runs goes when it is done
        self._do("graph", lambda: [action() for action in actions])


LOCKED = []  # buffers of the host: the process keeps them


def page_locked(size):
    """The address of memory of the host."""
    LOCKED.append(np.full(size, 0x5A, np.uint8))
    return LOCKED[-1].ctypes.data


def ordinal_of(address):
    """The number of the simulated GPU that has some memory."""
    return next(gpu.ordinal for gpu in list(SimulatedGpu.every) if gpu._holds(address, 1))


def install(monkeypatch, data, capability=(9, 0), count=1, order=SimulatedGpu.LATE, driver=(13, 0)):
    """Put ``count`` simulated GPUs in the driver's place for the bundle ``data``."""
    manifest = open_bundle(data).manifest
    texts = {}
    for variant in manifest["variants"]:
        for kernel in variant["kernels"]:
            if "symbol" in kernel:
                texts[kernel["symbol"]] = manifest["debug"]["kernels"][f"{variant['target']}/{kernel['name']}"]["text"]
    monkeypatch.setattr(SimulatedGpu, "texts", texts)
    monkeypatch.setattr(SimulatedGpu, "order", order)
    monkeypatch.setattr(cuda_driver, "Gpu", SimulatedGpu)
    monkeypatch.setattr(cuda_array, "_KEEPERS", {})
    monkeypatch.setattr(cuda_driver, "ordinal_of", ordinal_of)
    monkeypatch.setattr(cuda_driver, "page_locked", page_locked)
    monkeypatch.setattr(tensor_map, "encode_map", lambda *_: ctypes.create_string_buffer(MAP_BYTES))
    monkeypatch.setattr(cuda_driver, "missing", lambda: "")
    monkeypatch.setattr(cuda_driver, "device_count", lambda: count)
    monkeypatch.setattr(cuda_driver, "device_name", lambda ordinal: "a simulated GPU")
    monkeypatch.setattr(cuda_driver, "capability", lambda ordinal: capability)
    monkeypatch.setattr(cuda_driver, "version", lambda: driver)
