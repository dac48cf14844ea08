"""A copy in a graph of two branches, behind the kernel that writes what it copies: what does initcheck say of it?

``python copied_in_graph.py graph``; ``stream`` does the same one after the other, ``kernel`` copies by a kernel.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np

from aotc.vmfb.devices.cuda.driver import Gpu
from aotc.vmfb.devices.cuda.launch import LaunchShape
from aotc.vmfb.devices.cuda.libcuda.library import DRIVER

COUNT, THREADS = 1 << 16, 256
SHAPE = LaunchShape((COUNT // THREADS, 1, 1), THREADS)
PTX = b"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry fill(.param .u64 to)
{
    .reg .b64 %to, %at; .reg .b32 %i, %block, %thread; .reg .f32 %x;
    ld.param.u64 %to, [to];
    mov.u32 %block, %ctaid.x; mov.u32 %thread, %tid.x; mad.lo.u32 %i, %block, 256, %thread;
    cvt.rn.f32.u32 %x, %i; mul.wide.u32 %at, %i, 4; add.u64 %to, %to, %at; st.global.f32 [%to], %x;
    ret;
}
.visible .entry copy(.param .u64 to, .param .u64 from)
{
    .reg .b64 %to, %from, %at; .reg .b32 %i, %block, %thread; .reg .f32 %x;
    ld.param.u64 %to, [to]; ld.param.u64 %from, [from];
    mov.u32 %block, %ctaid.x; mov.u32 %thread, %tid.x; mad.lo.u32 %i, %block, 256, %thread;
    mul.wide.u32 %at, %i, 4; add.u64 %to, %to, %at; add.u64 %from, %from, %at;
    ld.global.f32 %x, [%from]; st.global.f32 [%to], %x;
    ret;
}
"""


class Sequence:
    """Work for the stream, in the place of a graph's."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def launch(self, _: tuple[int, ...], function: object, shape: LaunchShape, table: object) -> int:
        """Launch a kernel."""
        self._gpu.launch(function, shape, table)
        return 0

    def copy(self, _: tuple[int, ...], to: int, source: int, size: int) -> int:
        """Copy."""
        self._gpu.copy(to, source, size)
        return 0


def main(how: str) -> bool:
    """Fill one array, copy it, copy the copy; beside that an array of the host's there and back; is all there?"""
    DRIVER.load_library()
    gpu = Gpu(0)
    module = gpu.load_module(PTX + b"\0")
    fill, copy = gpu.kernel_handle(module, "fill"), gpu.kernel_handle(module, "copy")
    first, second, third, given, other = (gpu.allocate(4 * COUNT) for _ in range(5))
    host, tables = np.ones(COUNT, np.float32), []
    gpu.upload(given, host.ctypes.data, host.nbytes)
    work = Sequence(gpu) if how == "stream" else gpu.new_graph()

    def launch(after: tuple[int, ...], function: object, *addresses: int) -> tuple[int]:
        numbers = (ctypes.c_uint64 * len(addresses))(*addresses)
        places = [ctypes.addressof(numbers) + 8 * n for n in range(len(addresses))]
        tables.append((numbers, (ctypes.c_void_p * len(places))(*places)))
        return (work.launch(after, function, SHAPE, tables[-1][1]),)

    beside = (work.copy((), other, given, 4 * COUNT),)
    launch(beside, copy, given, other)
    filled = launch((), fill, first)
    copied = launch(filled, copy, second, first) if how == "kernel" else (work.copy(filled, second, first, 4 * COUNT),)
    launch(copied, copy, third, second)
    if how != "stream":
        gpu.run_graph(gpu.instantiate_graph(work))
    found = np.zeros(COUNT, np.float32)
    gpu.download(found.ctypes.data, third, found.nbytes)
    gpu.wait()
    return bool(np.array_equal(found, np.arange(COUNT)))


if __name__ == "__main__":
    print("right" if main(sys.argv[1]) else "wrong")
