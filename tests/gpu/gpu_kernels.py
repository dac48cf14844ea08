"""A kernel of the loop IR on the GPU of this machine, without a bundle around it."""

import ctypes

from aotc.kernels.cuda.compile import compile_kernel
from aotc.kernels.cuda.emit import block_threads
from aotc.kernels.limits import FLAT_THREADS
from aotc.vmfb.devices.driver import Gpu
from aotc.vmfb.devices.launch import Launch


def run(kernel, arrays, grid, target, dims=()):
    """Compile ``kernel`` for ``target`` and run it on ``arrays``, outputs last, which are overwritten."""
    gpu = Gpu(0)
    function = gpu.function(gpu.load(compile_kernel(kernel, target).data), kernel.name)
    places = [gpu.allocate(a.nbytes) for a in arrays]
    for place, a in zip(places, arrays):
        gpu.upload(place, a.ctypes.data, a.nbytes)
    values = (ctypes.c_int64 * (len(places) + len(dims) + 1))(*places, *dims, grid)
    start = ctypes.addressof(values)
    table = (ctypes.c_void_p * len(values))(*[start + 8 * n for n in range(len(values))])
    threads = block_threads(kernel)
    blocks = grid if threads else -(-grid // FLAT_THREADS)
    gpu.launch(function, Launch((blocks, 1, 1), threads or FLAT_THREADS), table)
    for place, a in list(zip(places, arrays))[len(kernel.inputs) :]:
        gpu.download(a.ctypes.data, place, a.nbytes)
    gpu.wait()
