"""A GPU made of host memory: the CUDA device runs on it, kernels run as their loop IR's Python."""

import ctypes
from typing import ClassVar

import numpy as np

from aotc.ir.dims_symbols import evaluate
from aotc.ir.loop_parser import parse_kernel
from aotc.ir.loop_run import run_kernel
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices import driver as cuda_driver
from aotc.vmfb.dtypes import to_numpy


def array_at(address, dtype, shape):
    """Return an array over memory of the simulated GPU."""
    count = int(np.prod(shape)) if shape else 1
    kind = to_numpy(dtype)
    raw = (ctypes.c_uint8 * (count * kind.itemsize)).from_address(address)
    return np.frombuffer(raw, kind, count).reshape(shape)


class SimulatedGpu:
    """The methods of :class:`aotc.vmfb.devices.driver.Gpu`; ``log`` counts what was asked of it."""

    texts: ClassVar[dict] = {}

    def __init__(self, ordinal):
        self.memory, self.captured, self.log = {}, None, []

    def _do(self, what, action):
        self.log.append(what)
        if self.captured is None:
            action()
        else:
            self.captured.append(action)

    def enter(self):
        pass

    def wait(self):
        assert self.captured is None

    def load(self, image):
        assert image[:4] == b"\x7fELF"
        return image

    def function(self, module, symbol):
        assert symbol.encode() in module
        return parse_kernel(self.texts[symbol]), self.texts[symbol]

    def allocate(self, size):
        assert self.captured is None
        block = np.full(max(size, 1) + 64, 0xA5, np.uint8)
        self.memory[block.ctypes.data] = block
        return block.ctypes.data

    def free(self, blocks, graphs=()):
        for address in blocks:
            del self.memory[address]
        for graph in graphs:
            graph.clear()

    def upload(self, to, source, size):
        self._do("upload", lambda: ctypes.memmove(to, source, size))

    def download(self, to, source, size):
        self._do("download", lambda: ctypes.memmove(to, source, size))

    def copy(self, to, source, size):
        self._do("copy", lambda: ctypes.memmove(to, source, size))

    def launch(self, function, blocks, threads, table):
        kernel, text = function
        values = [ctypes.c_int64.from_address(p).value for p in table]
        buffers = (*kernel.inputs, *kernel.outputs)
        dims = dict(zip(kernel.dims, values[len(buffers) : -1], strict=True))
        assert values[-1] == evaluate(kernel.grid, dims)
        assert 0 < values[-1] <= blocks * threads

        def run():
            shapes = [tuple(int(evaluate(d, dims)) for d in b.shape) for b in buffers]
            arrays = [array_at(a, b.dtype, s) for a, b, s in zip(values, buffers, shapes)]
            run_kernel(text, arrays, dims)

        self._do("launch", run)

    def begin_capture(self):
        assert self.captured is None
        self.captured = []

    def end_capture(self):
        graph, self.captured = self.captured, None
        return graph

    def run_graph(self, graph):
        self.log.append("graph")
        for action in graph:
            action()


def install(monkeypatch, data, capability=(9, 0)):
    """Put the simulated GPU in the driver's place for the bundle ``data``."""
    manifest = open_bundle(data).manifest
    texts = {}
    for variant in manifest["variants"]:
        for kernel in variant["kernels"]:
            if "symbol" in kernel:
                texts[kernel["symbol"]] = manifest["debug"]["kernels"][f"{variant['target']}/{kernel['name']}"]["text"]
    monkeypatch.setattr(SimulatedGpu, "texts", texts)
    monkeypatch.setattr(cuda_driver, "Gpu", SimulatedGpu)
    monkeypatch.setattr(cuda_driver, "missing", lambda: "")
    monkeypatch.setattr(cuda_driver, "device_count", lambda: 1)
    monkeypatch.setattr(cuda_driver, "device_name", lambda ordinal: "a simulated GPU")
    monkeypatch.setattr(cuda_driver, "capability", lambda ordinal: capability)
