"""Block sizes of flat kernels, in which each thread runs its own item of the grid."""

from __future__ import annotations

from collections.abc import Set

from aotc.ir.dims.algebra import product
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.access import loads_and_indices, statement_scalars
from aotc.ir.loop.ir import Buffer, Kernel, Let, Load, walk
from aotc.vmfb.dtypes import size_of

# Threads of a block, one item of the grid each. Several warps hide each other's latency, and a small grid still covers
# all multiprocessors.
FLAT_THREADS = 128


# Threads of a block of a large grid that mostly writes, one item each. Blocks that only write end soon, and smaller
# blocks end faster than multiprocessors can start new ones. An H200: writes of 64 and 256 MB by vectors take 15.9 and
# 58.5 us, with blocks of 128 threads 20.8 and 80.2; copies take the same time.
WRITING_THREADS = 256
# Threads of a block of a large grid that reads at random positions within rows, one item each. The items of a row then
# run on one multiprocessor, whose first-level cache loads the row once. An H200: ``take_along_axis`` of 4096 x 4096 f32
# takes 55 us, with blocks of 128 threads 85 us.
GATHERING_THREADS = 1024
# Items from which a grid counts as large: each multiprocessor then has several blocks of it.
WRITING_ITEMS = 1 << 18
# Ratio of bytes written to bytes read, from which a kernel counts as one that mostly writes. Below it loads dominate:
# they take longer than the start of a block.
WRITING_SHARE = 4


def block_threads_of_flat_kernel(kernel: Kernel) -> int:
    """Return the number of threads of a block for a kernel without loops over threads."""
    read, written = (sum(product(b.shape) * size_of(b.dtype) for b in side) for side in (kernel.inputs, kernel.outputs))
    if not (isinstance(kernel.grid, int) and isinstance(read, int) and isinstance(written, int)):
        return FLAT_THREADS
    if kernel.grid < WRITING_ITEMS:
        return FLAT_THREADS
    if _gathers_from_rows(kernel):
        return GATHERING_THREADS
    return WRITING_THREADS if written >= WRITING_SHARE * read else FLAT_THREADS


def _gathers_from_rows(kernel: Kernel) -> bool:
    """Return True if neighbouring items read random positions of the same row, which fits the L1 cache."""
    statements = list(walk(kernel.body))
    named = {s.var.name for s in statements if isinstance(s, Let)}
    loads = (
        x
        for s in statements
        for x in loads_and_indices(statement_scalars(s))
        if isinstance(x, Load) and len(x.index) > 1
    )
    return any(_is_random_row_access(load, named) and _fits_l1_cache(load.buffer) for load in loads)


def _is_random_row_access(load: Load, named: Set[str]) -> bool:
    """Return True if only the last index depends on a value that the kernel has loaded or computed (``named``)."""
    *rows, last = ({s.name for s in symbols(i)} & named for i in load.index)
    return bool(last) and not any(rows)


# Bytes of a row up to which blocks have GATHERING_THREADS. The first-level cache of a multiprocessor has at least 128
# KiB, of which a block may use half. Not measured beyond 16 KiB.
GATHERED_ROW = 64 << 10


def _fits_l1_cache(buffer: Buffer) -> bool:
    row = buffer.shape[-1]
    return isinstance(row, int) and FLAT_THREADS <= row <= GATHERED_ROW // size_of(buffer.dtype)
