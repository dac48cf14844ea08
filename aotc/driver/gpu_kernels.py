"""Run single kernels on the first GPU, without a host program, to compare them with other code."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from aotc.ir.loop.ir import Kernel
from aotc.kernels.numba_front.trial import TrialArguments
from aotc.vmfb.devices.cuda.driver import Gpu
from aotc.vmfb.devices.cuda.launch import launch_of
from aotc.vmfb.devices.cuda.tensor_map import encode_tensor_map


class GpuKernels:
    """Launcher of single kernels of a bundle on the first GPU.

    Parameters
    ----------
    where : str
        The bundle, for messages.
    rows : sequence of mapping
        Manifest entries of the kernels.
    code : sequence of bytes-like
        GPU images of the kernels.
    """

    def __init__(self, where: str, rows: Sequence[Mapping[str, Any]], code: Sequence[bytes | memoryview]) -> None:
        """Associate the kernels ``rows`` of a manifest with their code; ``where`` names them in errors."""
        self._where = where
        self._rows = {row["name"]: row for row in rows}
        self._images = dict(zip(self._rows, code, strict=True))
        self._gpu = Gpu(0)

    def run_own(self, kernel: Kernel, arguments: TrialArguments) -> None:
        """Run the bundle's kernel on ``arguments``; the outputs are overwritten."""
        row = self._rows[kernel.name]
        self._launch(bytes(self._images[kernel.name]), row["symbol"], row, kernel, arguments)

    def run(self, image: bytes, symbol: str, kernel: Kernel, arguments: TrialArguments) -> None:
        """Run another image on ``arguments``, as the bundle launches its kernel; the outputs are overwritten."""
        self._launch(image, symbol, self._rows[kernel.name], kernel, arguments)

    def _launch(
        self, image: bytes, symbol: str, row: Mapping[str, Any], kernel: Kernel, arguments: TrialArguments
    ) -> None:
        """Copy arguments to the GPU, launch the kernel ``symbol`` of ``image``, and copy the outputs back."""
        gpu, launch = self._gpu, row.get("launch", {})
        gpu.make_context_current()
        function = gpu.kernel_handle(gpu.load_module(image), symbol)
        gpu.allow_dynamic_shared_memory(function, launch.get("shared", 0))
        places = [gpu.allocate(max(a.nbytes, 1)) for a in arguments.arrays]
        for place, array in zip(places, arguments.arrays, strict=True):
            gpu.upload(place, array.ctypes.data, array.nbytes)
        dims, items = arguments.dims, arguments.grid
        shape = launch_of(self._where, row, dims, items, gpu.multiprocessors)
        maps = [encode_tensor_map(self._where, m, places[m["buffer"]], dims) for m in launch.get("maps", ())]
        values = (ctypes.c_int64 * (len(places) + len(dims) + 1))(*places, *dims, items)
        start = ctypes.addressof(values)
        pointers = [*map(ctypes.addressof, maps), *(start + 8 * n for n in range(len(values)))]
        gpu.launch(function, shape, (ctypes.c_void_p * len(pointers))(*pointers))
        outputs = list(zip(places, arguments.arrays, strict=True))[len(kernel.inputs) :]
        for place, array in outputs:
            gpu.download(array.ctypes.data, place, array.nbytes)
        gpu.wait()
        gpu.free(places)
