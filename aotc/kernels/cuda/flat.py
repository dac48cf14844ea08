"""How large the blocks of threads are whose threads run an item each."""

from __future__ import annotations

from aotc.ir.dims import product
from aotc.ir.loop_ir import Kernel
from aotc.kernels.limits import FLAT_THREADS, WRITING_ITEMS, WRITING_SHARE, WRITING_THREADS
from aotc.vmfb.dtypes import size_of


def flat_threads(kernel: Kernel) -> int:
    """Return the threads of a block of a kernel without loops over threads."""
    read, written = (sum(product(b.shape) * size_of(b.dtype) for b in side) for side in (kernel.inputs, kernel.outputs))
    if not (isinstance(kernel.grid, int) and isinstance(read, int) and isinstance(written, int)):
        return FLAT_THREADS
    return WRITING_THREADS if kernel.grid >= WRITING_ITEMS and written >= WRITING_SHARE * read else FLAT_THREADS
