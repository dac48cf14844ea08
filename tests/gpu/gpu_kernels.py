"""Kernels on the GPU of this machine, without a bundle around them."""

import ctypes

import numpy as np
from gpu.poisoned import NAN_BYTE

from aotc.kernels.cuda.compile import compile_kernel
from aotc.kernels.cuda.emit import block_threads
from aotc.kernels.cuda.flat import block_threads_of_flat_kernel
from aotc.vmfb.devices.cuda.driver import Gpu
from aotc.vmfb.devices.cuda.launch import LaunchShape, launch_of
from aotc.vmfb.devices.cuda.tensor_map import encode_tensor_map

GUARD = 4096  # bytes on both sides of an array: NaN, which nobody may write


def run(kernel, arrays, grid, target, dims=()):
    """Compile ``kernel`` for ``target`` and run it on ``arrays``, outputs last, which are overwritten."""
    gpu = Gpu(0)
    function = gpu.kernel_handle(gpu.load_module(compile_kernel(kernel, target).data), kernel.name)
    places = [gpu.allocate(a.nbytes) for a in arrays]
    for place, a in zip(places, arrays):
        gpu.upload(place, a.ctypes.data, a.nbytes)
    values = (ctypes.c_int64 * (len(places) + len(dims) + 1))(*places, *dims, grid)
    start = ctypes.addressof(values)
    table = (ctypes.c_void_p * len(values))(*[start + 8 * n for n in range(len(values))])
    together = block_threads(kernel)
    threads = together or block_threads_of_flat_kernel(kernel)
    blocks = grid if together else -(-grid // threads)
    gpu.launch(function, LaunchShape((blocks, 1, 1), threads), table)
    for place, a in list(zip(places, arrays))[len(kernel.inputs) :]:
        gpu.download(a.ctypes.data, place, a.nbytes)
    gpu.wait()


class Loaded:
    """A kernel of an image on the GPU, launched as an entry of the manifest says.

    Parameters
    ----------
    image : Image
    name : str
        The kernel's.
    entry : dict
        Its ``threads`` and ``launch``.
    arrays : sequence of numpy.ndarray
        What its pointers are to.
    dims : sequence of int
        Of this launch.
    """

    def __init__(self, image, name, entry, arrays, dims=()):
        self.gpu, self.arrays = Gpu(0), arrays
        self.function = self.gpu.kernel_handle(self.gpu.load_module(image.data), name)
        self.gpu.allow_dynamic_shared_memory(self.function, entry["launch"]["shared"])
        self.places = [self._put_between_nans(a) for a in arrays]
        self.shape = launch_of("a test", {"name": name, **entry}, dims, 1, self.gpu.multiprocessors)
        self.maps = [encode_tensor_map("a test", m, self.places[m["buffer"]], dims) for m in entry["launch"]["maps"]]
        self.values = (ctypes.c_int64 * (len(arrays) + len(dims) + 1))(*self.places, *dims, 1)
        start = ctypes.addressof(self.values)
        places = [*map(ctypes.addressof, self.maps), *(start + 8 * n for n in range(len(self.values)))]
        self.table = (ctypes.c_void_p * len(places))(*places)

    def _put_between_nans(self, array):
        whole = np.full(array.nbytes + 2 * GUARD, NAN_BYTE, np.uint8)
        whole[GUARD : GUARD + array.nbytes] = array.reshape(-1).view(np.uint8)
        base = self.gpu.allocate(whole.nbytes)
        self.gpu.upload(base, whole.ctypes.data, whole.nbytes)
        self.gpu.wait()
        return base + GUARD

    def launch(self):
        """Launch it once."""
        self.gpu.launch(self.function, self.shape, self.table)

    def result(self, number):
        """Return an array, and the bytes after it."""
        made = self.arrays[number]
        whole = np.zeros(made.nbytes + GUARD, np.uint8)
        self.gpu.download(whole.ctypes.data, self.places[number], whole.nbytes)
        self.gpu.wait()
        return whole[: made.nbytes].view(made.dtype).reshape(made.shape), whole[made.nbytes :]

    def fill(self, number, byte):
        """Set all bytes of an array, and those after it."""
        whole = np.full(self.arrays[number].nbytes + GUARD, byte, np.uint8)
        self.gpu.upload(self.places[number], whole.ctypes.data, whole.nbytes)
        self.gpu.wait()
